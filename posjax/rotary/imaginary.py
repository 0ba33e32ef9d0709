"""RoPE++: the imaginary part of RoPE's complex score, in further heads (Liu et al., arXiv:2512.07525)."""

from dataclasses import dataclass, field
from typing import ClassVar

import jax.numpy as jnp

from posjax._checks import check, check_choice
from posjax._slots import Features
from posjax.rotary.rotation import PAIRINGS, apply_rotary
from posjax.rotary.rules import FrequencyRule, Plain, check_angles
from posjax.rotary.tables import RotaryTable


@dataclass(frozen=True)
class RoPEPP(Features):
    """RoPE++: each query head attends twice, by the real and by the imaginary part of the score (arXiv:2512.07525).

        2h:      Re sum_t q_t conj(k_t) exp(i (m - n) theta_t), which is RoPE
        2h + 1:  Im sum_t q_t conj(k_t) exp(i (m - n) theta_t), the queries turned back by a quarter

    with the planes of a head as complex numbers. Both read the same keys and values, so the cache is that of RoPE, and
    the output has twice as many heads. A model with as many query and key heads as before is the article's RoPE++EC,
    with an equal cache; with half as many of both, RoPE++EH: equal heads, half of the cache and of the projections.

    frequencies: the rule, which must rotate the whole head. pairing: see :func:`posjax.rotary.apply_rotary`.
    precision: see :func:`posjax.rotary_table`.
    """

    frequencies: FrequencyRule = field(default=Plain())
    pairing: str = "half"
    precision: str = "exact"

    copies: ClassVar[int] = 2

    def __post_init__(self):
        check_angles(self.frequencies, self.precision)
        check_choice("pairing", self.pairing, PAIRINGS)

    def query_size(self, head_dim: int) -> int:
        """``head_dim``. Raises ValueError if the rule leaves a part of the head as it is: it has no imaginary part."""
        width = self.frequencies.rotary_dim(head_dim)
        check(width == head_dim, f"RoPE++ needs a rule that rotates the whole head: {width} of {head_dim} rotate")
        return head_dim

    def query(self, params, q, positions, *, head_dim: int, length=None):
        """``R(p) q`` and ``R(p - a quarter) q`` of each head, ``[batch, length, 2 heads, size]``."""
        cos, sin = self._table(params, positions, head_dim, length)
        parts = [apply_rotary(q, RotaryTable(*each), pairing=self.pairing) for each in ((cos, sin), (sin, -cos))]
        return jnp.stack(parts, axis=3).reshape(*q.shape[:2], 2 * q.shape[2], q.shape[3])

    def key(self, params, k, positions, *, head_dim: int, length=None):
        """``R(p) k``, with the dtype of ``k``."""
        return apply_rotary(k, self._table(params, positions, head_dim, length), pairing=self.pairing)

    def _table(self, params, positions, head_dim: int, length) -> RotaryTable:
        self.query_size(head_dim)
        return self.frequencies.table(
            positions, head_dim=head_dim, length=length, params=params, precision=self.precision
        )
