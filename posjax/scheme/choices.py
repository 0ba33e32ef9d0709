"""The choices of a scheme: one spec for each slot, whether they compose, their parameters, and how they may change."""

import dataclasses
import functools
import inspect
import operator
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
from jaxtyping import Array

from posjax import masks, rotary
from posjax._checks import check, describe
from posjax._slots import Features, check_registered
from posjax.absolute import Embedding
from posjax.bias import BiasSpec
from posjax.linear import GatedDelta, LinearLayer, Performer
from posjax.norms import HeadNorm, KeyNorm
from posjax.remap import Remap
from posjax.scales import Scale, YaRNTemperature
from posjax.scheme.registry import BASES, check_known, slot
from posjax.sinks import Sinks
from posjax.training_positions import EqualMean, PositionRule

_PLAIN = Features()


@dataclasses.dataclass(frozen=True)
class Choices:
    """The slots of a ``Scheme``, which describes them; None for an empty slot."""

    embedding: Embedding | None = None
    norm: HeadNorm | None = None
    features: Features | None = None
    scale: Scale | None = None
    bias: BiasSpec | None = None
    mask: masks.Mask | None = None
    remap: Remap | None = None
    sinks: Sinks | None = None
    linear: LinearLayer | None = None
    training_positions: PositionRule | None = None

    @property
    def feature_map_or_identity(self) -> Features:
        """The features; the plain projections if there are none."""
        return _PLAIN if self.features is None else self.features

    @property
    def copies(self) -> int:
        """How many heads of attention a query head makes."""
        return self.feature_map_or_identity.copies

    @property
    def reach(self) -> int | None:
        """How many positions the embedding encodes, from 0; None if it encodes all, and without an embedding."""
        return None if self.embedding is None else self.embedding.reach

    @property
    def reads_length(self) -> bool:
        """Whether the scheme depends on the current length (dynamic NTK, LongRoPE's switch)."""
        return self.feature_map_or_identity.reads_length

    @property
    def reads_tokens(self) -> bool:
        """Whether ``attend`` needs what ``prepare`` computes from the tokens (FoX, Inkling)."""
        return bool(self.token_readers)

    @property
    def token_readers(self) -> dict[str, BiasSpec | Sinks]:
        """The specs that read the tokens, by slot."""
        slots = {"bias": self.bias, "sinks": self.sinks}
        return {name: spec for name, spec in slots.items() if spec is not None and spec.reads_tokens}

    @property
    def gated(self) -> bool:
        """Whether the bias reads gates of the keys, which are summed along the sequence and cached (FoX)."""
        return self.bias is not None and self.bias.gated

    @property
    def rotates(self) -> bool:
        """Whether the features have frequencies, which ``extend`` may change."""
        return self.feature_map_or_identity.frequencies is not None

    @property
    def is_delta(self) -> bool:
        """Whether the layer is one of Gated DeltaNet, which has its own projections and reads no positions."""
        return isinstance(self.linear, GatedDelta)

    @property
    def shift_invariant(self) -> bool:
        """Whether shifting all positions by one constant changes nothing."""
        chosen = (self.embedding, self.features, self.scale, self.bias, self.mask, self.remap)
        # A shift rotates queries and keys, and random features then give another estimate of the same kernel.
        estimated = self.linear is not None and self.linear.random and self.rotates
        return not estimated and all(spec is None or spec.shift_invariant for spec in chosen)

    @property
    def kept_keys(self) -> tuple[int, int] | None:
        """``(first, recent)``: how many first and most recent keys a causal query can see; None if all.

        Also None for CoPE and PaTH, which need the keys in order: a ring buffer does not keep their order.
        """
        if self.bias is not None and self.bias.contextual:
            return None
        key_counts = [mask.kept_keys for mask in (self.mask, self._far_mask) if mask is not None]
        return next((bounds for bounds in key_counts if bounds is not None), None)

    @property
    def scheme_mask(self) -> masks.Mask | None:
        """The masks of the mask slot and the remap slot, combined by ``&``."""
        return all_of(self.mask, self._far_mask)

    @property
    def _far_mask(self) -> masks.Mask | None:
        return None if self.remap is None else self.remap.mask()

    def reads_positions(self, options: Mapping[str, Any]) -> bool:
        """Whether a call of ``attend`` with these options depends on positions."""
        chosen = (self.features, self.scale, self.bias, self.mask, self.remap)
        mask = options.get("mask")
        if options.get("causal", True) or any(spec is not None for spec in chosen):
            return True
        return mask is not None and masks.as_mask(mask).reads_positions


C = TypeVar("C", bound=Choices)

SLOT_NAMES = ("frequencies", *(field.name for field in dataclasses.fields(Choices)))
"""The slots that ``replace`` and ``extend`` accept."""


def all_of(*parts: masks.Mask | None) -> masks.Mask | None:
    """The ``&`` of all masks that are not None; None if all are None."""
    given_masks = [part for part in parts if part is not None]
    return None if not given_masks else functools.reduce(operator.and_, given_masks)


def check_slots(scheme: Choices) -> None:
    """Raises ValueError, naming the slot, for anything but a spec of the slot."""
    for name, base in BASES.items():
        spec = getattr(scheme, name, None)
        if spec is not None:
            _check_spec(name, spec, base)


def _check_spec(name: str, spec: Any, base: type) -> None:
    expected = f"{name}: expected a posjax {base.__name__} or None, found {describe(spec)}"
    check(not isinstance(spec, type), f"{expected}; write {getattr(spec, '__name__', '')}(...)")
    check(not isinstance(spec, str), f"{expected}; to give its name, write scheme(..., {name}={{'name': {spec!r}}})")
    check(isinstance(spec, base), f"{expected}; a class of your own is derived from {base.__name__}")


def check_composition(scheme: Choices) -> None:
    """Raises ValueError, with the reason, for slots that do not compose."""
    _check_mask(scheme.mask)
    _check_hashable(scheme)
    _check_temperature(scheme)
    _check_norm(scheme)
    if scheme.bias is not None and scheme.bias.contextual:
        _check_contextual(scheme)
    for name in scheme.token_readers if scheme.copies > 1 else ():
        check(False, f"{name}: what reads the tokens does not compose with RoPE++, which adds heads; leave one out")
    if scheme.training_positions is not None:
        _check_positions(scheme)
    if scheme.remap is not None:
        scheme.remap.check(scheme.features)
    if scheme.linear is not None:
        _check_linear(scheme)


def _check_mask(mask) -> None:
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
    rule = scheme.feature_map_or_identity.frequencies
    has_temperature = isinstance(getattr(rule, "rule", None) or rule, rotary.YaRN | rotary.DynamicYaRN)
    check(
        not (has_temperature and isinstance(scheme.scale, YaRNTemperature)),
        "scale: YaRN's frequencies have its temperature already; leave YaRNTemperature out, or use NTKByParts",
    )


def _check_norm(scheme: Choices) -> None:
    check(
        scheme.norm is None or scheme.features is None or scheme.features.widths == (1.0, 1.0),
        "norm does not compose with CoCA: the size of its half-width key t is the strength of each plane, which a "
        "norm would remove; leave norm out",
    )
    if scheme.norm is not None and scheme.norm.after_features:
        _check_late_norm(scheme)


def _check_late_norm(scheme: Choices) -> None:
    """A norm after the features must not remove what they add to the sizes of queries and keys."""
    check(
        scheme.features is None or type(scheme.features) is rotary.Rotary,
        f"norm: after_features=True needs rotary.Rotary or no features, found {describe(scheme.features)}",
    )
    rule = scheme.feature_map_or_identity.frequencies
    check(
        rule is None or rule.table_factor == 1,
        f"norm: after the rotation it removes the temperature of {type(rule).__name__}; use a rule without one, such "
        "as NTKByParts, with scale=YaRNTemperature",
    )
    check(scheme.linear is None, "norm: after_features=True does not compose with linear attention; leave it out")


def _check_contextual(scheme: Choices) -> None:
    check(
        scheme.features is None,
        f"features do not compose with {type(scheme.bias).__name__}, which reads the query projections themselves; "
        "leave one out",
    )


def _check_positions(scheme: Choices) -> None:
    longest, table = scheme.training_positions.reach, scheme.reach
    drawn = f"training_positions: ids below {longest}"
    fits = longest is None or table is None or longest <= table
    check(fits, f"{drawn} are drawn, but the learned embedding is shorter; make it longer")
    check(
        longest is None or scheme.features is None or not scheme.features.decays or longest <= 10_000,
        f"{drawn} may make a tile of xPos longer than its decay allows; stay below 10,000",
    )
    real = isinstance(scheme.training_positions, EqualMean)
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
    if scheme.is_delta:
        _check_delta(scheme)
    else:
        _check_kernel(scheme)


def _check_delta(scheme: Choices) -> None:
    for name in ("norm", "features"):
        check(
            getattr(scheme, name) is None,
            f"{name} does not compose with Gated DeltaNet, which norms its own queries and keys and reads no "
            f"positions; leave {name} out",
        )


def _check_kernel(scheme: Choices) -> None:
    check(
        not (isinstance(scheme.norm, KeyNorm) and isinstance(scheme.linear, Performer)),
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
        f"features: linear attention rotates its numerator with Rotary only, found {describe(scheme.features)}",
    )


def check_direction(scheme: Choices, causal: bool) -> None:
    """Raises ValueError if bidirectional attention uses a method for causal attention.

    The message names the slot, and the option that makes the method two-sided if there is one.
    """
    if causal:
        return
    for name in ("features", "bias", "remap", "linear"):
        spec = getattr(scheme, name)
        one_sided = None if spec is None else spec.one_sided
        kind = type(spec).__name__
        remedy = (
            f"use {kind}({one_sided}) when every token sees both sides" if one_sided and "=" in one_sided else one_sided
        )
        check(one_sided is None, f"{name}: {kind} is for causal attention; {remedy or 'use another method'}")


def check_reach(reach: int | None, name: str, tokens: int) -> None:
    """Raises ValueError for rows of more tokens than the ``reach`` of a scheme; beyond it an embedding gives NaN."""
    check(
        reach is None or tokens <= reach,
        f"{name}: rows of {tokens} tokens, but the scheme's embedding has {reach} positions; use rows of at most "
        f"{reach}, or an embedding of a larger max_length",
    )


LEARNING = ("norm", "scale", "bias", "features", "sinks", "linear")
"""The slots with parameters in the layers; the parameters of the embedding belong to the model."""


def init_slots(choices: Choices, key: Array, sizes: Mapping[str, int | None], *, shared: bool) -> dict[str, dict]:
    """The parameters that all layers share, or those of one layer, ``{slot: {name: array}}``.

    Raises:
        ValueError: for a spec that reads the tokens if ``model_dim`` is None.
    """
    names = [name for name in LEARNING if _is_shared(choices, name) == shared]
    readers = [type(spec).__name__ for name, spec in choices.token_readers.items() if name in names]
    check(
        sizes["model_dim"] is not None or not readers,
        f"model_dim: {' and '.join(readers)} reads the tokens, so their width is needed",
    )
    keys = dict(zip(LEARNING, jax.random.split(key, len(LEARNING)), strict=True))
    of_logits = sizes | {"num_heads": sizes["num_heads"] * choices.copies}
    given = {name: of_logits if name in ("scale", "bias", "sinks") else sizes for name in names}
    made = {name: init_spec(getattr(choices, name), keys[name], given[name]) for name in names}
    return {name: params for name, params in made.items() if params}


def init_spec(spec: Any, key: Array, sizes: Mapping[str, int | None]) -> dict[str, Array]:
    """A spec's parameters; its ``init`` gets the sizes that are in its signature."""
    if spec is None:
        return {}
    return spec.init(key, **{name: sizes[name] for name in inspect.signature(spec.init).parameters if name in sizes})


def _is_shared(choices: Choices, slot_name: str) -> bool:
    return slot_name == "bias" and choices.bias is not None and choices.bias.shared_across_layers


def replaced(scheme: C, changes: Mapping[str, Any]) -> C:
    """The scheme with some slots replaced, the frequency rule last; see ``Scheme.replace``.

    Raises:
        ValueError: for an unknown slot, name or option, or a frequency rule for a scheme without rotation.
    """
    for name in changes:
        check_known("slot", name, SLOT_NAMES)
    changes = dict(changes)
    rule = changes.pop("frequencies", None)
    made = {name: _resolved(scheme, name, value) for name, value in changes.items()}
    changed = dataclasses.replace(scheme, **made)
    if rule is None:
        return changed
    check(changed.rotates, "frequencies: this scheme rotates nothing, so it has no frequencies")
    features = _with_rule(changed.features, _resolved(changed, "frequencies", rule))
    return dataclasses.replace(changed, features=features)


def _resolved(scheme, slot_name: str, value):
    """A spec from ``{"name": ...}``; a frequency rule keeps the options that it does not change."""
    how = f"{slot_name}: found {describe(value)}; to give its name, write {slot_name}={{'name': {describe(value)}}}"
    check(not isinstance(value, str), how)
    if not isinstance(value, Mapping):
        return value
    options = dict(value)
    check("name" in options, f"{slot_name}: expected a spec or {{'name': ...}}, found {describe(value)}")
    if slot_name == "frequencies" and isinstance(options.get("rule"), Mapping):
        options["rule"] = _resolved(scheme, slot_name, options["rule"])  # it sets what another rule would inherit
    elif slot_name == "frequencies":
        options = _inherited(scheme.features.frequencies, options["name"]) | options
    return slot(slot_name, options.pop("name"), **options)


def _inherited(before: rotary.FrequencyRule, name: str) -> dict[str, Any]:
    """The options that a frequency rule by name inherits from ``before``, the rule that it replaces."""
    check(
        before.partial_rotary_factor == 1 or isinstance(before, rotary.Proportional) == (name == "proportional"),
        f"frequencies: {name!r} would not rotate the pairs that {describe(before)} does, because the share of "
        "p-RoPE differs from that of partial rotary; pass the rule itself if that is intended",
    )
    return {key: getattr(before, key) for key in ("base", "head_dim", "partial_rotary_factor")}


def _with_rule(features, rule):
    """The features with another rule; M-RoPE and RoPE-Tie keep their axes and replace their inner rule."""
    before = features.frequencies
    if (
        isinstance(before, rotary.MRoPE | rotary.RoPETie)
        and isinstance(rule, rotary.FrequencyRule)
        and rule.num_axes == 1
    ):
        defaults = {name: getattr(type(before), name) for name in ("base", "head_dim", "partial_rotary_factor")}
        rule = dataclasses.replace(before, rule=rule, **defaults)
    return dataclasses.replace(features, frequencies=rule)


def check_same_parameters(before: Choices, after: Choices) -> None:
    """Raises ValueError, naming the slot, unless two schemes have parameters and projections of the same shapes."""
    features = (scheme.features for scheme in (before, after) if scheme.features is not None)
    sizes = (size for size in (spec.own_head_dim for spec in features) if size is not None)
    head_dim = next(sizes, 64)
    for name in ("embedding", *LEARNING):
        _check_slot(name, getattr(before, name), getattr(after, name), head_dim)
    maps = before.feature_map_or_identity, after.feature_map_or_identity
    check(
        len({(each.widths, each.copies) for each in maps}) == 1,
        f"features: {describe(after.features)} needs other projections than {describe(before.features)}; "
        "train it instead",
    )


def _check_slot(name: str, before, after, head_dim: int) -> None:
    if before == after:
        return
    has, needs = _shapes(before, head_dim), _shapes(after, head_dim)
    why = f"{name}: {describe(after)} needs parameters {needs}, but the model has {has}; train it instead"
    check(has == needs, why)


def _shapes(spec, head_dim: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a spec's parameters for a head of this size; the other sizes are arbitrary."""
    sizes = {"num_heads": 8, "num_kv_heads": 8, "head_dim": head_dim, "model_dim": 64}
    return jax.tree.map(lambda leaf: leaf.shape, jax.eval_shape(lambda: init_spec(spec, jax.random.key(0), sizes)))
