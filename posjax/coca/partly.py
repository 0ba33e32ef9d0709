"""CoCA's collinear constraint (Zhu et al., arXiv 2309.08646) in chosen planes of a head, RoPE in the others.

Plane ``j`` has the frequency ``theta_j``, the query ``q_j = (x_j, y_j)`` and the key ``k_j = (a_j, b_j)``, at an angle
``Theta_j`` from key to query. The score ``sum_j s_j(m - n)`` has the terms of strict CoCA for the planes
``first <= j < last`` and those of RoPE for the others:

    RoPE:  s_j(r) = |q_j| |k_j| cos(r theta_j + Theta_j)
    CoCA:  s_j(r) = t_j (x_j^2 + y_j^2) cos(r theta_j),    t_j = relu((a_j + b_j) / 2)

RoPE's terms may first rise with distance (``diagnostics.rotary_anomaly``) and CoCA's never do: this scheme measures in
which planes that rise matters. Without planes of CoCA the scheme is ``rope``. With all of them it is ``coca-strict``,
with ``t`` from a key of full width, as in the released code. At initialisation that ``t`` is ``sqrt(2)`` times smaller
than a ``t`` from its own projection, and so is the score.
"""

import dataclasses
from collections.abc import Callable
from numbers import Integral
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from posjax._checks import check, check_float, describe
from posjax._numbers import align_ranks, at_least_float32
from posjax.coca.feature import half_width
from posjax.coca.planes import join, split
from posjax.rotary import Rotary


@dataclasses.dataclass(frozen=True)
class PartlyCollinear(Rotary):
    """RoPE of queries and keys that are ``(x^2 + y^2, 0)`` and ``(t, 0)`` in CoCA's planes.

    Projections are as wide as a head, and a cache holds rotated keys.

    Args:
        frequencies: the rule. Channels that it does not rotate belong to no plane.
        pairing: which channels form a plane; see ``rotary.apply_rotary``.
        precision: see ``posjax.rotary_table``.
        planes: ``(first, last)``: CoCA is used in the planes ``first <= j < last``. Plane 0 rotates fastest.

    Raises:
        ValueError: for planes that are not two whole numbers in order, or that a head does not have, once its size is
            known.
    """

    planes: tuple[int, int] = dataclasses.field(kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        check(
            _are_bounds(self.planes),
            f"planes must be (first, last), whole numbers with 0 <= first <= last, found {describe(self.planes)}",
        )
        if self.own_head_dim is not None:
            self.query_size(self.own_head_dim)

    def query_size(self, head_dim: int) -> int:
        """``head_dim``; raises ValueError unless the rule rotates all of ``planes`` in such a head."""
        count = self.frequencies.rotary_dim(head_dim) // 2
        check(
            self.planes[1] <= count,
            f"planes must not end after {count}, the number that {describe(self.frequencies)} rotates in a head of "
            f"{head_dim}, found {self.planes}",
        )
        return head_dim

    def query(self, params, q, positions, *, head_dim: int, length=None):
        """``R(p)`` of ``collinear_query(q)``, with the dtype of ``q``."""
        wide = self.collinear_query(q, head_dim=head_dim)
        return super().query(params, wide, positions, head_dim=head_dim, length=length).astype(q.dtype)

    def key(self, params, k, positions, *, head_dim: int, length=None):
        """``R(p)`` of ``collinear_key(k)``, with the dtype of ``k``."""
        wide = self.collinear_key(k, head_dim=head_dim)
        # Not super().key, which calls self.query.
        return super().query(params, wide, positions, head_dim=head_dim, length=length).astype(k.dtype)

    def collinear_query(self, q: Float[Array, "*b size"], *, head_dim: int) -> Float[Array, "*b size"]:
        """The query before rotation: ``(x^2 + y^2, 0)`` in CoCA's planes. At least float32."""
        return self._replaced("q", q, head_dim, lambda x, y: x * x + y * y)

    def collinear_key(self, k: Float[Array, "*b size"], *, head_dim: int) -> Float[Array, "*b size"]:
        """The key before rotation: ``(t, 0)`` in CoCA's planes. At least float32."""
        return self._replaced("k", k, head_dim, lambda a, b: half_width((a + b) / 2))

    def _replaced(self, name: str, raw: Array, head_dim: int, strength: Callable[[Array, Array], Array]) -> Array:
        """The projection with ``(strength(x, y), 0)`` in place of ``(x, y)`` in CoCA's planes."""
        check_float(name, raw)
        fits = raw.shape[-1] == self.query_size(head_dim)
        check(fits, f"{name} must be as wide as a head of {head_dim}, found shape {tuple(raw.shape)}")
        wide = raw.astype(at_least_float32(raw.dtype))
        width = self.frequencies.rotary_dim(head_dim)
        first, second = split(wide[..., :width], self.pairing)
        chosen = align_ranks(self._chosen(width // 2), first)[0]
        planes = jnp.where(chosen, strength(first, second), first), jnp.where(chosen, 0, second)
        return jnp.concatenate([join(*planes, self.pairing), wide[..., width:]], axis=-1)

    def _chosen(self, count: int) -> Bool[np.ndarray, "planes"]:
        """Which of ``count`` planes are CoCA's."""
        first, last = self.planes
        return (first <= np.arange(count)) & (np.arange(count) < last)


def _are_bounds(planes: Any) -> bool:
    """Whether ``planes`` are two whole numbers, at least 0 and in order."""
    pair = isinstance(planes, tuple) and len(planes) == 2
    whole = pair and all(isinstance(plane, Integral) and not isinstance(plane, bool) for plane in planes)
    return whole and 0 <= planes[0] <= planes[1]
