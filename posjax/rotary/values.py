"""VO-RoPE: relative position in the values (kexue.fm 10862)."""

from dataclasses import dataclass

import jax.numpy as jnp

from posjax._checks import check_choice
from posjax.rotary.feature import Rotary
from posjax.rotary.rotation import apply_rotary
from posjax.rotary.tables import RotaryTable


@dataclass(frozen=True)
class ValueRotary(Rotary):
    """Rotates values at their positions and rotates outputs back at the position of the query:

        o_i = R_i^T sum_j a_ij R_j v_j = sum_j a_ij R_{j-i} v_j

    targets: ``"vo"``: queries and keys are not rotated; ``"qkvo"``: they are rotated, as in RoPE. The article's 1B
        models have losses of 2.712 (RoPE), 2.719 (qkvo), 2.770 (vo) and 2.795 (no position).

    Pairs and frequencies are those for the size of the values, which may differ from that of the keys. A rule's
    attention factor is for logits: it is not applied to values. A cache holds rotated values.
    """

    targets: str = "vo"

    def __post_init__(self):
        super().__post_init__()
        check_choice("targets", self.targets, ("vo", "qkvo"))

    def query(self, params, q, positions, *, head_dim: int, length=None):
        """``q`` for the targets ``"vo"``, otherwise ``R(p) q``."""
        if self.targets == "vo":
            return q
        return super().query(params, q, positions, head_dim=head_dim, length=length)

    def value(self, params, v, positions, *, head_dim: int, length=None):
        """``R(p) v``, with the dtype of ``v``."""
        return apply_rotary(v, self._unit_table(params, v, positions, length), pairing=self.pairing)

    def output(self, params, out, positions, *, head_dim: int, length=None):
        """``R(p)^T out``, with the dtype of ``out``; ``positions`` are those of the queries."""
        cos, sin = self._unit_table(params, out, positions, length)
        return apply_rotary(out, RotaryTable(cos, -sin), pairing=self.pairing)

    def _unit_table(self, params, x, positions, length) -> RotaryTable:
        """The rule's table for the size of ``x``, without its attention factor."""
        cos, sin = self.table(params, positions, head_dim=x.shape[-1], length=length)
        factor = jnp.sqrt(cos * cos + sin * sin)
        return RotaryTable(cos / factor, sin / factor)
