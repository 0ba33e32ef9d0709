"""RoPE-mixed: every pair rotates with a learned mixture of the coordinates (rope-vit, arXiv:2403.13298)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from posjax._angles import as_real_positions
from posjax._checks import check, check_choice, check_count, check_even, params_of
from posjax._slots import Features
from posjax.rotary.coordinates import by_axis
from posjax.rotary.rotation import PAIRINGS, apply_rotary
from posjax.rotary.rules import check_number
from posjax.rotary.tables import RotaryTable, learned_angles


@dataclass(frozen=True)
class MixedRotary(Features):
    """phi(q) = R(p) q and psi(k) = R(p) k with angles sum_a p_a f_{h,a,t}, learned for each layer and key head h.

    Positions are coordinates of ``num_axes`` axes, real ones too, as :func:`posjax.rotary.coordinates.by_axis` takes
    them; plain positions are used on every axis. Query heads share the frequencies of their key head.

    Initially the pairs form one group per axis, and each head has one random rotation of the axes. The m pairs of group
    g have magnitudes base^(-t/m) along direction g of that rotation. For two axes these are base^(-4t/d) at
    orientations phi and phi + pi/2.

    num_axes: how many coordinates a position has, at least 2.
    base: the base of the initial magnitudes, above 1. pairing: see :func:`posjax.rotary.apply_rotary`.
    """

    num_axes: int = 2
    base: float = 10.0
    pairing: str = "interleaved"

    def __post_init__(self):
        check_count("num_axes", self.num_axes)
        check(self.num_axes > 1, f"num_axes must be at least 2, found {self.num_axes}")
        check_number("base", self.base)
        check(self.base > 1, f"base must be greater than 1, found {self.base!r}")
        check_choice("pairing", self.pairing, PAIRINGS)

    def init(self, key: Array, *, num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, Array]:
        """``{"frequencies": [kv_heads, axes, head_dim / 2]}``, float32 radians per unit of a coordinate."""
        pairs = self.query_size(head_dim) // 2
        groups = np.array_split(np.arange(pairs), self.num_axes)
        magnitude = np.concatenate([self.base ** -(np.arange(len(group)) / len(group)) for group in groups])
        direction = np.repeat(np.arange(self.num_axes), [len(group) for group in groups])
        frames = _rotations(key, num_kv_heads, self.num_axes)
        return {"frequencies": frames[:, :, direction] * magnitude.astype(np.float32)[None, None]}

    def query_size(self, head_dim: int) -> int:
        """``head_dim``, which must be even and hold a pair for every axis."""
        check_even("head_dim", head_dim)
        check(
            head_dim >= 2 * self.num_axes,
            f"{self.num_axes} axes need a head_dim of at least {2 * self.num_axes}: {head_dim}",
        )
        return head_dim

    def heads(self, params, which):
        """The frequencies of some key heads."""
        return {"frequencies": params["frequencies"][which]}

    def table(self, params, positions, *, head_dim: int) -> RotaryTable:
        """cos and sin, float32 ``[batch or 1, length, kv_heads, head_dim / 2]``."""
        shape = ("kv_heads", self.num_axes, self.query_size(head_dim) // 2)
        (frequencies,) = params_of(params, self, frequencies=shape)
        coordinates = [as_real_positions(axis) for axis in by_axis(positions, self.num_axes)]
        coordinates = coordinates * self.num_axes if len(coordinates) == 1 else coordinates
        heads, _, pairs = frequencies.shape
        angle = sum(learned_angles(axis, frequencies[:, a].ravel()) for a, axis in enumerate(coordinates))
        angle = angle.reshape(-1, angle.shape[-2], heads, pairs)
        return RotaryTable(jnp.cos(angle), jnp.sin(angle))

    def query(self, params, q, positions, *, head_dim: int, length=None):
        """``R(p) q``, with the dtype of ``q``."""
        return apply_rotary(q, self.table(params, positions, head_dim=head_dim), pairing=self.pairing)

    def key(self, params, k, positions, *, head_dim: int, length=None):
        """``R(p) k``, with the dtype of ``k``."""
        return self.query(params, k, positions, head_dim=head_dim)


def _rotations(key: Array, number: int, size: int) -> Float[Array, "number size size"]:
    """Uniform random rotations: QR of normal matrices, signs chosen so that the result is unique and det = 1."""
    q, r = jnp.linalg.qr(jax.random.normal(key, (number, size, size), jnp.float32))
    q = q * jnp.sign(jnp.diagonal(r, axis1=-2, axis2=-1))[:, None, :]
    return q.at[:, :, -1].multiply(jnp.linalg.det(q)[:, None])
