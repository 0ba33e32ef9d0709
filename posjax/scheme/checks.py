"""Which slots of a scheme compose, and the reasons why other slots do not compose."""

from typing import Any

import jax

from posjax import linear, masks, norms, rotary, scales, training_positions
from posjax._checks import check, shown
from posjax._slots import check_registered
from posjax.scheme.choices import Choices
from posjax.scheme.slots import PROTOCOLS, EmbeddingSlot, lacking


def check_slots(scheme: Choices) -> None:
    """Raises ValueError, naming the slot, for a spec that lacks a method or an attribute of the slot's protocol."""
    for name in PROTOCOLS:
        spec = getattr(scheme, name)
        if spec is not None:
            _check_spec(name, spec)


def _check_spec(name: str, spec: Any) -> None:
    expected = f"{name}: expected one of the specs of this slot or None, found {shown(spec)}"
    check(not isinstance(spec, type), f"{expected}; write {getattr(spec, '__name__', '')}(...)")
    check(not isinstance(spec, str), f"{expected}; to give its name, write scheme(..., {name}={{'name': {spec!r}}})")
    missing = lacking(name, spec)
    check(not missing, f"{expected}, which has no {', '.join(missing)}")


def check_composition(scheme: Choices) -> None:
    """Raises ValueError, with the reason, for slots that do not compose."""
    _check_mask(scheme.mask)
    _check_hashable(scheme)
    _check_temperature(scheme)
    _check_norm(scheme)
    if scheme.bias is not None and scheme.bias.contextual:
        _check_contextual(scheme)
    if scheme.training_positions is not None:
        _check_positions(scheme)
    if scheme.remap is not None:
        scheme.remap.check(scheme.features)
    if scheme.linear is not None:
        _check_linear(scheme)


def _check_mask(mask) -> None:
    fits = mask is None or isinstance(mask, masks.Mask)
    check(fits, f"mask: expected a posjax.masks mask or None, found {shown(mask)}")
    check_registered(mask)
    traced = masks.traced_sizes(mask)
    check(
        not traced,
        f"mask: {', '.join(traced)} is an array, but caches and plans read the masks of a scheme before anything runs: "
        "use a Python int, or pass the mask to attend(mask=)",
    )
    check(
        mask is None or not jax.tree.leaves(mask),
        "mask: a scheme holds position masks only; pass masks with arrays, such as Segments, to attend(mask=)"
        + _static_sizes(mask),
    )


def _static_sizes(mask) -> str:
    """A hint for the message if the sizes of a mask are pytree leaves but not arrays."""
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(mask)):
        return ""
    return "; mark sizes as static with dataclasses.field(metadata={'static': True})"


def _check_hashable(scheme: Choices) -> None:
    for name, spec in vars(scheme).items():
        try:
            hash(spec)
        except TypeError as error:
            why = f"{type(spec).__name__} is not hashable ({error}): it must be a frozen dataclass without arrays"
            raise ValueError(f"{name}: {why}") from None


def _check_temperature(scheme: Choices) -> None:
    has_temperature = isinstance(scheme.maps.frequencies, rotary.YaRN | rotary.DynamicYaRN)
    check(
        not (has_temperature and isinstance(scheme.scale, scales.YaRNTemperature)),
        "scale: YaRN's frequencies have its temperature already; leave YaRNTemperature out, or use NTKByParts",
    )


def _check_norm(scheme: Choices) -> None:
    check(
        scheme.norm is None or scheme.features is None or scheme.features.widths == (1.0, 1.0),
        "norm does not compose with CoCA: the size of its half-width key t is the strength of each plane, which a "
        "norm would remove; leave norm out",
    )


def _check_contextual(scheme: Choices) -> None:
    check(
        scheme.features is None,
        "features do not compose with CoPE, which reads the raw query projections; leave one out",
    )


def _check_positions(scheme: Choices) -> None:
    longest, table = (getattr(spec, "max_length", None) for spec in (scheme.training_positions, scheme.embedding))
    drawn = f"training_positions: ids below {longest}"
    fits = longest is None or table is None or longest <= scheme.embedding.reach
    check(fits, f"{drawn} are drawn, but the learned embedding is shorter; make it longer")
    check(
        longest is None or scheme.features is None or not scheme.features.decays or longest <= 10_000,
        f"{drawn} may make a tile of xPos longer than its decay allows; stay below 10,000",
    )
    real = isinstance(scheme.training_positions, training_positions.EqualMean)
    check(
        not real or scheme.features is not None or scheme.embedding is not None,
        "training_positions: equal-mean coordinates are read by features and embeddings, and this scheme has neither",
    )


def _check_linear(scheme: Choices) -> None:
    for name in ("scale", "bias", "mask", "remap", "sinks"):
        check(
            getattr(scheme, name) is None,
            f"{name} does not compose with linear attention, which has no logits to change; leave {name} out",
        )
    _check_kernel(scheme)


def _check_kernel(scheme: Choices) -> None:
    check(
        not (isinstance(scheme.norm, norms.KeyNorm) and isinstance(scheme.linear, linear.Performer)),
        "norm: KeyNorm removes the norms that Performer's features depend on; leave one out",
    )
    check(
        not scheme.reads_length,
        "frequencies: the state of linear attention cannot follow a rule that reads the length; use a fixed one",
    )
    check(
        scheme.linear.of_inner_product or not scheme.rotates or scheme.features.frequencies.table_factor == 1,
        "features: an elementwise kernel rotates only the numerator, which YaRN's factor of the tables would scale; "
        "use NTKByParts",
    )
    check(
        scheme.features is None or type(scheme.features) is rotary.Rotary,
        f"features: linear attention rotates its numerator with Rotary only, found {shown(scheme.features)}",
    )


def check_direction(scheme: Choices, causal: bool) -> None:
    """Raises ValueError if bidirectional attention uses a method for causal attention.

    The message names the slot, and the option that makes the method two-sided if there is one.
    """
    if causal:
        return
    for name in ("features", "bias", "remap"):
        spec = getattr(scheme, name)
        found = None if spec is None else spec.one_sided
        kind = type(spec).__name__
        remedy = f"use {kind}({found}) when every token sees both sides" if found and "=" in found else found
        check(found is None, f"{name}: {kind} is for causal attention; {remedy or 'use another method'}")


def check_reach(embedding: EmbeddingSlot | None, name: str, tokens: int) -> None:
    """Raises ValueError for rows of more tokens than a learned embedding has positions; beyond them it gives NaN."""
    reach = getattr(embedding, "reach", tokens)
    check(
        tokens <= reach,
        f"{name}: rows of {tokens} tokens, but the scheme's embedding has {reach} positions; use rows of at most "
        f"{reach}, or an embedding of a larger max_length",
    )
