"""Rotary position embedding as the feature slot of a scheme."""

from dataclasses import dataclass, field
from typing import ClassVar

from jaxtyping import Array, Float

from posjax._checks import check, check_choice
from posjax.positions import Positions
from posjax.rotary.rotation import PAIRINGS, apply_rotary
from posjax.rotary.rules import FrequencyRule, Length, Plain
from posjax.rotary.tables import rotary_table


@dataclass(frozen=True)
class Rotary:
    """phi(q) = R(p_q) q and psi(k) = R(p_k) k, with the angles of a frequency rule.

    frequencies: the rule. pairing: see :func:`apply_rotary`. precision: see :func:`rotary_table`.
    """

    frequencies: FrequencyRule = field(default=Plain())
    pairing: str = "half"
    precision: str = "exact"

    shift_invariant: ClassVar[bool] = True

    def __post_init__(self):
        check(
            isinstance(self.frequencies, FrequencyRule),
            f"frequencies must be a frequency rule such as Plain(), found {self.frequencies!r}",
        )
        check_choice("pairing", self.pairing, PAIRINGS)
        check_choice("precision", self.precision, ("exact", "hf"))

    @property
    def reads_length(self) -> bool:
        """Whether a call needs ``length``."""
        return self.frequencies.reads_length

    def query_size(self, head_dim: int) -> int:
        """The width of the raw query projection of a head: all of it, which the rule must be able to rotate."""
        self.frequencies.rotary_dim(head_dim)
        return head_dim

    def key_size(self, head_dim: int) -> int:
        """The width of the raw key projection of a head."""
        return head_dim

    def __call__(
        self,
        q: Float[Array, "batch queries heads size"],
        k: Float[Array, "batch keys kv_heads size"],
        *,
        q_positions: Positions,
        kv_positions: Positions,
        head_dim: int,
        length: Length | None = None,
    ) -> tuple[Float[Array, "batch queries heads size"], Float[Array, "batch keys kv_heads size"]]:
        """(phi, psi) of the raw projections, with the dtypes of q and k.

        ``length``, the current length, is required by rules that read it and ignored by the others.
        """
        check(
            length is not None or not self.reads_length,
            f"{type(self.frequencies).__name__} reads the current length: pass length=",
        )
        inverse_frequencies, factor = self.frequencies.frequencies(length, head_dim=head_dim)
        options = {"attention_factor": factor, "precision": self.precision}
        phi = apply_rotary(q, rotary_table(q_positions, inverse_frequencies, **options), pairing=self.pairing)
        psi = apply_rotary(k, rotary_table(kv_positions, inverse_frequencies, **options), pairing=self.pairing)
        return phi, psi
