"""The declaration of a family of released models, and shared helpers."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from posjax import masks, rotary
from posjax._checks import check, check_choice, describe
from posjax._slots import is_custom_class
from posjax.nn.config import DecoderConfig, check_size
from posjax.nn.huggingface.views import View
from posjax.nn.specs import Norm
from posjax.rotary import FrequencyRule, Plain, Rotary
from posjax.scheme import Layers, Scheme

Values = Mapping[str, Any]
FULL, SLIDING = "full_attention", "sliding_attention"

GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu", "gelu": "geglu-exact"}
"""Activations of gated MLPs by their names in ``config.json``."""
PLAIN = {"gelu": "gelu-exact", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "relu": "relu"}
PLAIN |= {"relu2": "relu-squared"}
"""Activations of plain MLPs."""


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of released models: how its ``config.json`` and its tensors map to a ``Decoder``.

    Args:
        model_type: of ``config.json``.
        architecture: the class of transformers that writes and reads these models.
        keys: keys of ``config.json`` that are fields of ``DecoderConfig``.
        read: computes the other fields from the values of ``config.json``; without ``embedding_scale`` among them
            embeddings are not scaled.
        write: computes the other keys from a ``DecoderConfig``.
        tensors: for every parameter of a ``Decoder`` its view of a tensor. Parameters of blocks are named as in
            ``"block/attention/q"``, and the names of their tensors contain ``{layer}``.
        defaults: values of transformers for keys that ``config.json`` may leave out.
        fixed: options that ``Decoder`` does not have, each with the value, or a tuple of values, that is supported.
        prefix: of the tensors' names, which some releases leave out.
        renamed: other names that some files use for tensors.
        inside: parts of tensors' names, each with the name in the memory of transformers, and in files written from it.
        ignored: names of tensors that are not parameters, such as buffers; for tensors of a layer the end of the name.
        aliases: other names of keys, each with the key that transformers reads it as.
        norm: the norms; their eps comes from ``config.json``.
        eps: the key of that eps; empty if ``config.json`` has none, and ``norm`` says it.
        activation: the key of the activation; empty if ``config.json`` has none that can be chosen.
        activations: the activations by their names under that key.
        constants: tensors of every layer that hold one number, the same in all models of the family.
        by_layer: the fields, of ``config.BY_LAYER``, that may differ from layer to layer.
    """

    model_type: str
    architecture: str
    keys: Mapping[str, str]
    read: Callable[[Values], dict[str, Any]]
    write: Callable[[DecoderConfig], dict[str, Any]]
    tensors: Callable[[DecoderConfig], dict[str, View]]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prefix: str = "model."
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict, kw_only=True)
    inside: Mapping[str, str] = dataclasses.field(default_factory=dict, kw_only=True)
    ignored: Sequence[str] = ("rotary_emb.inv_freq",)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    norm: Norm = dataclasses.field(default_factory=Norm)
    eps: str = "rms_norm_eps"
    activation: str = "hidden_act"
    activations: Mapping[str, str] = dataclasses.field(default_factory=lambda: GATED)
    constants: Mapping[str, float] = dataclasses.field(default_factory=dict)
    by_layer: Sequence[str] = ()

    def read_basics(self, values: Values) -> dict[str, Any]:
        """The fields that all families read in the same way."""
        norm = dataclasses.replace(self.norm, eps=values[self.eps]) if self.eps else self.norm
        fields = {"norm": norm, "embedding_scale": 1.0}
        if self.activation:
            fields["activation"] = chosen(self.activation, values[self.activation], self.activations)
        return fields

    def write_basics(self, config: DecoderConfig) -> dict[str, Any]:
        """The inverse of ``read_basics``: its keys of ``config.json``."""
        activation = {self.activation: key_of(self.activations, config.activation)} if self.activation else {}
        return ({self.eps: config.norm.eps} if self.eps else {}) | activation


def sizes_of(config: DecoderConfig) -> dict[str, int]:
    """The sizes of axes, by their names in the patterns of views, for the config of a layer."""
    return {
        "vocab": config.vocab_size,
        "embed": config.model_dim,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "each": config.num_heads // config.num_kv_heads,
        "size": config.head_dim,
        "half": config.head_dim // 2,
        "mlp": config.mlp_dim,
        "experts": 0 if config.experts is None else config.experts.count,
        "shared": 0 if config.experts is None else config.experts.shared_dim or 0,
        "one": 1,
        "positions": getattr(config.layers.embedding, "rows", 0),
    }


def chosen(name: str, value: Any, table: Mapping[Any, Any]) -> Any:
    """``table[value]``. Raises ValueError for a value of ``config.json`` that is not in the table."""
    check_choice(f"config.json: {name}", value, tuple(table))
    return table[value]


def key_of(table: Mapping[str, str], value: str) -> str:
    """The first name in ``config.json`` for a value of ``DecoderConfig``; the value itself if there is none."""
    return next((key for key, meant in table.items() if meant == value), value)


def biases(**wanted: bool) -> tuple[str, ...]:
    """The names of the projections with a bias."""
    return tuple(name for name, has in wanted.items() if has)


# --- schemes ----------------------------------------------------------------------------------------------------------


def of_layers(schemes: Sequence[Scheme]) -> Scheme | Layers:
    """One scheme if all layers have the same, else the shortest period and how often it repeats."""
    if len(set(schemes)) == 1:
        return schemes[0]
    count = len(schemes)
    period = next(n for n in range(1, count + 1) if all(schemes[i] == schemes[i % n] for i in range(count)))
    repeats, rest = divmod(count, period)
    first = tuple(schemes[:period])
    return Layers(((first, repeats), *([(first[:rest], 1)] if rest else [])))


def layer_types(values: Values, period: Sequence[str] = (FULL,)) -> list[str]:
    """``layer_types`` of ``config.json``, or a repeated period if it has none."""
    count = values["num_hidden_layers"]
    types = values.get("layer_types") or [period[n % len(period)] for n in range(count)]
    check(len(types) == count, f"config.json: layer_types names {len(types)} layers of {count}")
    for kind in types:
        check_choice("config.json: layer_types", kind, (FULL, SLIDING))
    return types


def pattern_types(values: Values, default: int) -> list[str]:
    """``layer_types``, or without them a full layer after every ``sliding_window_pattern - 1`` layers with windows."""
    if values.get("layer_types"):
        return layer_types(values)
    name, pattern = "config.json: sliding_window_pattern", values.get("sliding_window_pattern", default)
    check(
        type(pattern) is int, f"{name} must be a whole number unless layer_types says more, found {describe(pattern)}"
    )
    check_size(name, "num_layers", pattern)
    return [SLIDING if (n + 1) % pattern else FULL for n in range(values["num_hidden_layers"])]


def rope_rule(values: Values) -> Any:
    """The frequency rule of all layers, or ``{layer_type: rule}``, as ``from_hf`` reads it, without a head size."""
    try:
        rules = rotary.from_hf(values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"config.json: rope_parameters: {error}") from None
    if isinstance(rules, FrequencyRule):
        return dataclasses.replace(rules, head_dim=None)
    return {kind: rule and dataclasses.replace(rule, head_dim=None) for kind, rule in rules.items()}


def window_size(values: Values) -> int:
    """``sliding_window`` of ``config.json``; raises ValueError unless it is a whole number above 0."""
    window = values.get("sliding_window")
    fits = type(window) is int and window > 0
    check(
        fits, f"config.json: sliding_window must be a whole number above 0 for sliding layers, found {describe(window)}"
    )
    return window


def rope_scheme(values: Values, rule: FrequencyRule | None, kind: str, pairing: str = "half", **slots: Any) -> Scheme:
    """A layer's scheme: RoPE if there is a rule, a window if the layer is a sliding one, and other slots."""
    features = None if rule is None else Rotary(rule, pairing=pairing)
    return Scheme(features=features, mask=masks.Window(window_size(values)) if kind == SLIDING else None, **slots)


def rope_schemes(values: Values, types: Sequence[str], rules: Mapping | None = None, **slots: Any) -> Scheme | Layers:
    """Every layer's scheme, from one rule for all layers or a rule for each layer type."""
    rules = rules or rope_rule(values)
    rules = rules if isinstance(rules, Mapping) else dict.fromkeys((FULL, SLIDING), rules)
    return of_layers([rope_scheme(values, rules[kind], kind, **slots) for kind in types])


def types_of(config: DecoderConfig) -> list[str]:
    """The type of every layer: full or sliding."""
    return [FULL if scheme.mask is None else SLIDING for scheme in config.layers.schemes]


_WRITABLE = (
    "Released layouts can store RoPE with a rule that has to_hf (plain, linear, dynamic NTK, YaRN, LongRoPE, Llama 3), "
    "windows, norms of queries and keys, learned positions and ALiBi, but not CoCA and other maps of queries and keys"
)


def window_of(config: DecoderConfig) -> int | None:
    """The window of the sliding layers. Raises ValueError for a mask that is not a window."""
    layer_masks = {scheme.mask for scheme in config.layers.kinds} - {None}
    for mask in layer_masks:
        check(isinstance(mask, masks.Window), f"scheme: config.json cannot store mask {describe(mask)}, only a window")
    check(len(layer_masks) < 2, f"scheme: config.json has one window for all layers, found {describe(layer_masks)}")
    return next((mask.size for mask in layer_masks), None)


def rule_of(config: DecoderConfig, kind: str | None = None) -> FrequencyRule | None:
    """The frequency rule of the layers of type ``kind``, or of the first layer that rotates; None if none rotates."""
    pairs = zip(types_of(config), config.every_layer, strict=True)
    rotating = [layer for layer_type, layer in pairs if layer.scheme.rotates and kind in (None, layer_type)]
    wrong = [layer.scheme.features for layer in rotating if type(layer.scheme.features) is not Rotary]
    check(not wrong, f"scheme: config.json cannot store {describe(wrong[0]) if wrong else None}. {_WRITABLE}")
    return _with_size(rotating[0].scheme.features.frequencies, rotating[0]) if rotating else None


def _with_size(rule: FrequencyRule, config: DecoderConfig) -> FrequencyRule:
    """The rule with the head size, which some rules need to compute their base."""
    return rule if rule.head_dim is not None else dataclasses.replace(rule, head_dim=config.head_dim)


def rope_values(config: DecoderConfig) -> dict[str, Any]:
    """``rope_parameters``, ``max_position_embeddings`` and, for transformers 4, ``rope_theta`` of the rule."""
    rule = rule_of(config)
    if rule is None:
        return length_value(config)
    rope_parameters = rule.to_hf()
    return length_value(config) | {"rope_parameters": rope_parameters, "rope_theta": rope_parameters["rope_theta"]}


def layered_rope_values(config: DecoderConfig) -> dict[str, Any]:
    """``rope_values`` with one rule for each layer type (Gemma 3, OLMo 3); plain RoPE for a type without a rule."""
    rules = {kind: rule_of(config, kind) or Plain() for kind in (FULL, SLIDING)}
    rope_parameters = {kind: rule.to_hf() for kind, rule in rules.items()}
    older = {"rope_theta": rope_parameters[FULL]["rope_theta"]}
    return length_value(config) | {"rope_parameters": rope_parameters} | older


def partial_rope_values(config: DecoderConfig) -> dict[str, Any]:
    """``rope_values`` with the share of rotated channels, of which these families have a default of their own.

    transformers 5 reads it inside ``rope_parameters``, transformers 4 outside.
    """
    values, rule = rope_values(config), rule_of(config)
    if rule is None:
        return values
    share = {"partial_rotary_factor": rule.partial_rotary_factor}
    return values | share | {"rope_parameters": values["rope_parameters"] | share}


def length_value(config: DecoderConfig) -> dict[str, int]:
    """``max_position_embeddings``: the trained length, or the length that the rule extends to.

    Where rules differ by layer type the rule of full layers counts, because windows need no extension.
    """
    rule = rule_of(config, FULL) or rule_of(config)
    length = config.trained_length
    if getattr(rule, "original_length", None) is not None:
        dynamic = rule.hf_type == "dynamic"
        length = rule.original_length if dynamic else reach(rule, config.trained_length)
    return {} if length is None else {"max_position_embeddings": length}


def reach(rule: FrequencyRule, stated: int | None) -> int:
    """The length that a rule with an original length extends to.

    The larger of the original length times the rule's factor and ``max_position_embeddings`` (`stated`). Llama 3's rule
    is used for less than its factor would allow (Llama 3.2: 32 times 8,192 for 131,072 tokens), so for this rule
    `stated` wins if it is above the original length.
    """
    stated = stated or 0
    if isinstance(rule, rotary.Llama3) and stated > rule.original_length:
        return stated
    return max(int(rule.original_length * (getattr(rule, "factor", None) or 1.0)), stated)


# --- comparing configs ------------------------------------------------------------------------------------------------

_NOT_COMPARED = ("compute_dtype", "remat", "scan_layers", "implementation", "placement", "trained_length")
"""Fields that may differ between equal models: how they are computed, and the length they were trained at."""


def check_same(family: Family, config: DecoderConfig, again: DecoderConfig) -> None:
    """Raises ValueError, with the field, unless a config and ``again``, read back from ``config.json``, are equal."""
    for field in dataclasses.fields(DecoderConfig):
        if field.name in _NOT_COMPARED:
            continue
        ours, theirs = (_comparable(field.name, c) for c in (config, again))
        ours_alone, wanted = _difference(ours, theirs)
        check(
            ours == theirs,
            f"{field.name}: the layout of {family.model_type} cannot store {ours_alone}, only {wanted}"
            f"{f'. {_WRITABLE}' if field.name == 'scheme' else ''}",
        )


def _comparable(name: str, config: DecoderConfig) -> Any:
    """A field of a config in a form that is equal for equal models."""
    value = getattr(config, name)
    if name == "query_scale":
        return {layer.head_dim**-0.5 if value is None else value for layer in config.every_layer}
    if isinstance(value, Scheme | Layers):
        return [_comparable_scheme(layer.scheme, layer) for layer in config.every_layer]
    return set(value) if name == "biases" else value


def _comparable_scheme(scheme: Scheme, config: DecoderConfig) -> Scheme:
    """The scheme without the head size in its rule, and with NTK-aware scaling as the equivalent plain rule."""
    rule = scheme.features.frequencies if type(scheme.features) is Rotary else None
    if rule is None or rule.head_dim not in (None, config.head_dim):
        return scheme
    rule = _with_size(rule, config)
    plain = rotary.from_hf(rule.to_hf()) if rule.hf_type == Plain.hf_type else rule
    rule = plain if _rotate_alike(rule, plain, config.head_dim) else rule
    features = dataclasses.replace(scheme.features, frequencies=dataclasses.replace(rule, head_dim=None))
    return scheme.replace(features=features)


def _rotate_alike(rule: FrequencyRule, other: FrequencyRule, size: int) -> bool:
    """Whether two rules of the library have the same numbers, up to rounding.

    False for classes from outside the library, which may do more than their frequencies.
    """
    factors, others = ((each.table_factor, each.softmax_scale) for each in (rule, other))
    if is_custom_class(type(rule)) or factors != others:
        return False
    return np.allclose(*(each.inverse_frequencies(size) for each in (rule, other)), rtol=1e-12, atol=0)


def _difference(ours: Any, theirs: Any) -> tuple[str, str]:
    """The difference in words: for schemes the slots that differ in the first layer that differs."""
    for pair in zip(ours, theirs, strict=True) if isinstance(ours, list) else ():
        slots = [slot.name for slot in dataclasses.fields(Scheme)]
        slots = [name for name in slots if getattr(pair[0], name) != getattr(pair[1], name)]
        if slots:
            one, other = (", ".join(f"{name} {describe(getattr(scheme, name))}" for name in slots) for scheme in pair)
            return one, other
    return describe(ours), describe(theirs)
