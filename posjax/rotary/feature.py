"""Rotary position embedding as the feature slot of a scheme."""

from dataclasses import dataclass, field

from posjax._checks import check, check_choice, shown
from posjax._slots import Features
from posjax.rotary.rotation import PAIRINGS, apply_rotary
from posjax.rotary.rules import FrequencyRule, Plain
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
        check(
            isinstance(self.frequencies, FrequencyRule),
            f"frequencies must be a frequency rule such as Plain(), found {shown(self.frequencies)}",
        )
        check_choice("pairing", self.pairing, PAIRINGS)
        check_choice("precision", self.precision, ("exact", "hf"))

    def query_size(self, head_dim: int) -> int:
        """The width of the raw query projection of a head: all of it, which the rule must be able to rotate."""
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
