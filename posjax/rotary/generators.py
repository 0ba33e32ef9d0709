"""The general solution of relative rotation: R_x = exp(sum_a x_a B_a) for commuting skew-symmetric generators B_a.

R_i^T R_j depends only on j - i if and only if the B_a commute. Then one orthogonal P turns all of them into plane
rotations, B_a = P Lambda_a P^T. With omega_t the vector of the frequencies of plane t, one for each axis,

    R_x = P diag_t(R(<x, omega_t>)) P^T,    q^T R_i^T R_j k = (P^T q)^T exp(sum_a (j - i)_a Lambda_a) (P^T k)

In softmax attention the projections of q and k can absorb P (kexue.fm 9403). So RoPE with frequencies mixed over the
axes is the general case, and axial RoPE is the case where every omega_t lies on an axis. The projections cannot absorb
P if something other than a rotation is applied between them and R: a query or key norm with a factor per channel, or
the activation of linear attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from posjax._angles import as_real_positions, exact, real_angles
from posjax._checks import check, check_even
from posjax._numbers import widened
from posjax._slots import Features
from posjax.rotary.coordinates import by_axis
from posjax.rotary.rotation import apply_rotary
from posjax.rotary.tables import RotaryTable

Matrices = Float[np.ndarray, "axes d d"]


def _as_generators(generators: Sequence[Float[np.ndarray, "d d"]] | Matrices) -> Matrices:
    """float64 ``[axes, d, d]``; raises ValueError unless they are real, square, even and skew-symmetric."""
    matrices = np.asarray(generators, np.float64)
    square = matrices.ndim == 3 and len(matrices) and matrices.shape[1] == matrices.shape[2]
    check(square, f"generators must be square matrices [axes, d, d], found shape {matrices.shape}")
    check_even("the size of the generators", matrices.shape[1])
    check(bool(np.isfinite(matrices).all()), "generators must be finite")
    symmetric = np.abs(matrices + matrices.swapaxes(1, 2)).max()
    check(
        symmetric <= 1e-9 * np.abs(matrices).max(), f"generators must be skew-symmetric, |B + B^T| is {symmetric:.3g}"
    )
    return matrices


def _commutator(matrices: Matrices) -> tuple[float, tuple[int, int]]:
    """The largest |AB - BA| / (|A| |B|) (Frobenius norms) of all pairs, and that pair."""

    def size(pair: tuple[int, int]) -> float:
        a, b = matrices[pair[0]], matrices[pair[1]]
        scale = np.linalg.norm(a) * np.linalg.norm(b)
        return float(np.linalg.norm(a @ b - b @ a) / scale) if scale else 0.0

    return max(((size(pair), pair) for pair in combinations(range(len(matrices)), 2)), default=(0.0, (0, 0)))


def commute(generators: Sequence[Float[np.ndarray, "d d"]] | Matrices, tolerance: float = 1e-9) -> bool:
    """Whether exp(sum_a x_a B_a) is a relative position encoding: |AB - BA| <= tolerance |A| |B| for every pair.

    generators: real skew-symmetric matrices ``[axes, d, d]``, d even. Frobenius norms, float64 on the host.
    Raises ValueError for matrices that are not skew-symmetric. (kexue.fm 8397 and 9403)
    """
    check(tolerance >= 0, f"tolerance must be at least 0, found {tolerance}")
    return _commutator(_as_generators(generators))[0] <= tolerance


def decompose(
    generators: Sequence[Float[np.ndarray, "d d"]] | Matrices, tolerance: float = 1e-9
) -> tuple[Float[np.ndarray, "d d"], Float[np.ndarray, "axes half"]]:
    """(P, omega), float64 on the host, with B_a = P Lambda_a P^T and Lambda_a the rotations at frequencies omega_a.

    P is orthogonal; plane t is spanned by its columns t and t + d/2 (``pairing="half"``), and omega ``[axes, d/2]`` are
    radians per position. Planes without rotation have frequency 0.

    Raises ValueError for matrices that are not skew-symmetric and for generators that do not commute (such as
    quaternion units), with the size of the commutator.
    """
    check(tolerance >= 0, f"tolerance must be at least 0, found {tolerance}")
    matrices = _as_generators(generators)
    size, (a, b) = _commutator(matrices)
    check(
        size <= tolerance,
        f"generators {a} and {b} do not commute, |AB - BA| = {size:.3g} |A| |B|: "
        "exp(sum_a x_a B_a) would not depend only on differences of positions",
    )
    basis = _planes(matrices)
    half = matrices.shape[1] // 2
    u = basis[:, :half]
    w = basis[:, half:]
    omega = np.einsum("dt,ade,et->at", w, matrices, u)
    error = np.abs(basis @ _rotators(omega) @ basis.T - matrices).max(axis=(1, 2))
    loose = error > 1e-6 * np.abs(matrices).max(axis=(1, 2))
    check(not loose.any(), f"generators do not commute well enough to share planes: the error is {error.max():.3g}")
    return basis, omega


def _planes(matrices: Matrices) -> Float[np.ndarray, "d d"]:
    """Common invariant planes, from one random mixture C of the generators, which separates all their eigenspaces.

    -i C is Hermitian; v = (u - i w) / sqrt(2) at an eigenvalue > 0 spans a plane with C u = value * w. The other
    columns span the common kernel.
    """
    scale = np.abs(matrices).max(axis=(1, 2), keepdims=True)
    weights = np.random.default_rng(0).uniform(1, 2, len(matrices))
    values, vectors = np.linalg.eigh(-1j * np.tensordot(weights, matrices / np.where(scale > 0, scale, 1), 1))
    vectors = np.sqrt(2) * vectors[:, values > 1e-9 * max(values.max(), 1e-300)]
    basis = np.concatenate([vectors.real, -vectors.imag], axis=1)
    d, planes = vectors.shape
    kernel = np.linalg.qr(basis, mode="complete")[0][:, 2 * planes :]
    rest = (d - 2 * planes) // 2
    return np.concatenate([basis[:, :planes], kernel[:, :rest], basis[:, planes:], kernel[:, rest:]], axis=1)


def _rotators(omega: Float[np.ndarray, "axes half"]) -> Matrices:
    """Lambda_a: the generators of plane rotations at frequencies omega_a, in the "half" pairing."""
    diagonal = omega[..., None] * np.eye(omega.shape[-1])
    zero = np.zeros_like(diagonal)
    return np.block([[zero, -diagonal], [diagonal, zero]])


@dataclass(frozen=True)
class GeneralRotary(Features):
    """phi(q) = exp(sum_a p_a B_a) q for given commuting generators, up to P, which cancels in every score.

    generators: ``[axes, d, d]``, d the size of a head, as an array or nested tuples; the same for every head. Positions
        are coordinates as :func:`posjax.rotary.coordinates.by_axis` takes them; whole ones have exact angles.

    Features are diag_t(R(<p, omega_t>)) P^T q, without the common factor P. Raises ValueError like :func:`decompose`.
    """

    generators: tuple[tuple[tuple[float, ...], ...], ...]
    basis: Float[np.ndarray, "d d"] = field(init=False, compare=False, repr=False)
    omega: Float[np.ndarray, "axes half"] = field(init=False, compare=False, repr=False)

    def __post_init__(self):
        matrices = _as_generators(self.generators)
        nested = tuple(tuple(map(tuple, matrix)) for matrix in matrices.tolist())
        basis, omega = decompose(matrices)
        for name, value in (("generators", nested), ("basis", basis), ("omega", omega)):
            object.__setattr__(self, name, value)

    @property
    def num_axes(self) -> int:
        """Number of axes."""
        return len(self.omega)

    def query_size(self, head_dim: int) -> int:
        """``head_dim``, which must be the size of the generators."""
        check(head_dim == len(self.basis), f"head_dim={head_dim} but the generators have size {len(self.basis)}")
        return head_dim

    def table(self, positions) -> RotaryTable:
        """cos and sin of ``<p, omega_t>``, float32 ``[length, d/2]`` or ``[batch, length, d/2]``."""
        coordinates = [as_real_positions(axis) for axis in by_axis(positions, self.num_axes)]
        coordinates = coordinates * self.num_axes if len(coordinates) == 1 else coordinates
        angle = sum(real_angles(axis, exact(row)) for axis, row in zip(coordinates, self.omega, strict=True))
        return RotaryTable(jnp.cos(angle), jnp.sin(angle))

    def query(self, params, q, positions, *, head_dim: int, length=None):
        """``diag_t(R(<p, omega_t>)) P^T q``, with the dtype of ``q``; the product with P in full precision."""
        self.query_size(head_dim)
        wide = widened(q)
        projected = jnp.matmul(wide, self.basis.astype(wide.dtype), precision="highest")
        return apply_rotary(projected, self.table(positions)).astype(q.dtype)

    def key(self, params, k, positions, *, head_dim: int, length=None):
        """``diag_t(R(<p, omega_t>)) P^T k``, computed as in ``query``."""
        return self.query(params, k, positions, head_dim=head_dim)
