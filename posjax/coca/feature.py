"""CoCA's features of queries and keys, and their spec for the feature slot of a scheme."""

import dataclasses
from typing import ClassVar, Literal

import jax
from jaxtyping import Array, Float

from posjax._checks import check, check_choice, check_even, check_rank, describe
from posjax._slots import Features
from posjax.coca.planes import QUERY, feature, key, split
from posjax.rotary import FrequencyRule, Plain, Proportional, RotaryTable
from posjax.rotary.rotation import PAIRINGS, check_table
from posjax.rotary.rules import check_angles

VARIANTS = ("strict", "tied", "slack", "relative")

Variant = Literal["strict", "tied", "slack", "relative"]
Pairing = Literal["half", "interleaved"]


def features(
    q: Float[Array, "batch length heads size"],
    t: Float[Array, "batch kv_length kv_heads half"],
    table: RotaryTable,
    *,
    kv_table: RotaryTable | None = None,
    variant: Variant,
    pairing: Pairing = "half",
) -> tuple[Float[Array, "batch length heads d"], Float[Array, "batch kv_length kv_heads d"]]:
    """Features whose inner product is the CoCA score: ``score(m, n) = phi_m . psi_n``, before ``1 / sqrt(d)``.

    Args:
        q: queries before rotation, ``d`` wide; ``d / 2`` wide for ``"tied"``, one number per plane.
        t: the key projection, ``d / 2`` wide, raw or already through ``half_width``. May have fewer heads (GQA).
        table: rotation at the positions of the queries, for all ``d / 2`` planes.
        kv_table: rotation at the positions of the keys; ``table`` if absent.
        variant: ``"strict"``, ``"tied"``, ``"slack"`` or ``"relative"``.
        pairing: which channels of ``q`` form a plane, ``(j, j + d/2)`` for ``"half"`` or ``(2j, 2j + 1)`` for
            ``"interleaved"``. It affects only ``q``: ``t`` and the features are indexed by plane.

    Returns:
        ``(phi, psi)``, each ``d`` wide (the first components of all planes, then the second), in the dtypes of ``q``
        and ``t``.

    Raises:
        ValueError: for an unknown variant or pairing, for widths that do not fit each other, and for a partial rotary
            table: a plane without rotation has no score.
    """
    phi = query_feature(q, table, variant=variant, pairing=pairing)
    psi = key_feature(t, table if kv_table is None else kv_table)
    check(
        phi.shape[-1] == psi.shape[-1],
        f"t must be {phi.shape[-1] // 2} wide, half of a head, found shape {tuple(t.shape)} with q {tuple(q.shape)}",
    )
    return phi, psi


def query_feature(
    q: Float[Array, "batch length heads size"], table: RotaryTable, *, variant: Variant, pairing: Pairing = "half"
) -> Float[Array, "batch length heads d"]:
    """``phi`` of ``features``, in the dtype of ``q``."""
    check_choice("variant", variant, VARIANTS)
    check_choice("pairing", pairing, PAIRINGS)
    check_rank("q", q, 4, "[batch, length, heads, size]")
    one_component = variant == "tied"
    if not one_component:
        check_even("the last axis of q", q.shape[-1])
    planes = q.shape[-1] // (1 if one_component else 2)
    return feature(QUERY[variant], None if one_component else pairing, *_rotation("q", q, planes, table), q)


def key_feature(t: Float[Array, "batch length heads half"], table: RotaryTable) -> Float[Array, "batch length heads d"]:
    """``psi = relu(t) (cos, sin)`` of ``features``, the same for every variant, in the dtype of ``t``."""
    check_rank("t", t, 4, "[batch, length, heads, size / 2]")
    return feature(key, None, *_rotation("t", t, t.shape[-1], table), t)


def half_width(t: Float[Array, "*b half"]) -> Float[Array, "*b half"]:
    """``relu(t)``: the non-negative key of each plane, which a cache holds. Applying it twice changes nothing."""
    return jax.nn.relu(t)


def merge_projection(weights: Float[Array, "*b size"], pairing: Pairing = "half") -> Float[Array, "*b half"]:
    """Half-width projection of ``t`` from one of full width: the mean over the two channels of each plane.

    The released code projects ``d`` channels and computes ``relu((first half + second half) / 2)``. Averaging the
    weights and biases first is the same function with half the parameters.

    Args:
        weights: kernel ``[model, heads, d]`` or bias ``[heads, d]``; the last axis is one head.
        pairing: ``"half"`` for the released checkpoints.
    """
    check_choice("pairing", pairing, PAIRINGS)
    check_even("the last axis of weights", weights.shape[-1])
    first, second = split(weights, pairing)
    return (first + second) / 2


def _rotation(name: str, x: Array, planes: int, table: RotaryTable) -> tuple[Array, Array]:
    """Cosines and sines ``[batch or 1, length, planes]``."""
    check_table(table)
    *batch, length, width = table.cos.shape
    check(
        width == planes,
        f"the table rotates {width} planes and {name} has {planes}: CoCA scores rotated planes only, so the table "
        "must cover the whole head (no partial rotation); t, and the q of 'tied', are half as wide as a head",
    )
    rows, tokens = x.shape[:2]
    fits = length == tokens and batch in ([], [1], [rows])
    check(fits, f"table of shape {table.cos.shape} does not fit {name}, with {tokens} tokens in {rows} rows")
    return tuple(part.reshape(-1, length, width) for part in table)


@dataclasses.dataclass(frozen=True)
class Coca(Features):
    """CoCA as the feature slot of a scheme, with the angles of any frequency rule.

    Args:
        variant: ``"strict"``, ``"tied"``, ``"slack"`` or ``"relative"``; see the table of ``posjax.coca``.
        frequencies: the rule. It must rotate the whole head. Its attention factor (YaRN) multiplies both tables, as in
            RoPE; its ``softmax_scale`` is applied by the caller that scales the logits.
        pairing: which channels of the query form a plane.
        precision: see ``posjax.rotary_table``.
    """

    variant: Variant
    frequencies: FrequencyRule = dataclasses.field(default=Plain())
    pairing: Pairing = "half"
    precision: str = "exact"

    cached: ClassVar[str] = "half-width"

    def __post_init__(self):
        check_choice("variant", self.variant, VARIANTS)
        check_angles(self.frequencies, self.precision)
        check_choice("pairing", self.pairing, PAIRINGS)
        if not isinstance(self.frequencies, Proportional):
            share = self.frequencies.partial_rotary_factor
            check(share == 1, f"CoCA needs a rule that rotates the whole head, partial_rotary_factor is {share}")

    @property
    def shift_invariant(self) -> bool:
        """Whether shifting all positions changes nothing: not for slack, which has a term in ``m + n``."""
        return self.variant != "slack" and self.frequencies.shift_invariant

    def query_size(self, head_dim: int) -> int:
        """Width of the raw query projection of a head: ``head_dim``, or half of it for ``"tied"``."""
        return self.key_size(head_dim) if self.variant == "tied" else head_dim

    def key_size(self, head_dim: int) -> int:
        """Width of ``t``: half of ``head_dim``.

        Raises:
            ValueError: if ``head_dim`` is odd, or the rule rotates only a part of it.
        """
        rotated = self.frequencies.rotary_dim(head_dim)
        check(
            rotated == head_dim,
            f"CoCA needs a rule that rotates the whole head of {head_dim}, "
            f"{describe(self.frequencies)} rotates {rotated}",
        )
        return head_dim // 2

    @property
    def widths(self) -> tuple[float, float]:
        """The key projection is half as wide as a head, and so is the query's for ``"tied"``."""
        return (0.5 if self.variant == "tied" else 1.0), 0.5

    def compact(self, k):
        """``half_width(t)``."""
        return half_width(k)

    def query(self, params, q, positions, *, head_dim: int, length=None):
        """``phi`` of the raw query projection; see ``query_feature``."""
        return query_feature(
            q, self._table(params, positions, head_dim, length), variant=self.variant, pairing=self.pairing
        )

    def key(self, params, k, positions, *, head_dim: int, length=None):
        """``psi`` of ``t``, before or after ``half_width``; see ``key_feature``."""
        return key_feature(k, self._table(params, positions, head_dim, length))

    def _table(self, params, positions, head_dim: int, length) -> RotaryTable:
        self.key_size(head_dim)
        return self.frequencies.table(
            positions, head_dim=head_dim, length=length, params=params, precision=self.precision
        )
