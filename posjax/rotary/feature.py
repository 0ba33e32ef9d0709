"""Rotary position embedding as the feature slot of a scheme."""

from dataclasses import dataclass, field

from posjax._checks import check_choice
from posjax._slots import Features
from posjax.rotary.rotation import PAIRINGS, apply_rotary
from posjax.rotary.rules import FrequencyRule, Plain, check_angles
from posjax.rotary.tables import RotaryTable


@dataclass(frozen=True)
class Rotary(Features):
    """phi(q) = R(p_q) q and psi(k) = R(p_k) k, with the angles of a frequency rule.

    frequencies: the rule. pairing: see :func:`apply_rotary`. precision: see :func:`rotary_table`.
    """

    frequencies: FrequencyRule = field(default=Plain())
    pairing: str = "half"
    precision: str = "exact"

    def __post_init__(self):
        check_angles(self.frequencies, self.precision)
        check_choice("pairing", self.pairing, PAIRINGS)

    def query_size(self, head_dim: int) -> int:
        """``head_dim``, the width of the raw query projection of a head. Raises ValueError if the rule rejects it."""
        self.frequencies.rotary_dim(head_dim)
        return head_dim

    def table(self, params, positions, *, head_dim: int, length=None) -> RotaryTable:
        """The rule's table at these positions."""
        return self.frequencies.table(
            positions, head_dim=head_dim, length=length, params=params, precision=self.precision
        )

    def query(self, params, q, positions, *, head_dim: int, length=None):
        """``R(p) q``, with the dtype of ``q``."""
        table = self.table(params, positions, head_dim=head_dim, length=length)
        return apply_rotary(q, table, pairing=self.pairing)

    def key(self, params, k, positions, *, head_dim: int, length=None):
        """``R(p) k``, with the dtype of ``k``."""
        return self.query(params, k, positions, head_dim=head_dim, length=length)
