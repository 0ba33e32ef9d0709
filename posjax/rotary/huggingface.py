"""Reading Hugging Face's rope settings: ``rope_scaling`` (transformers 4) and ``rope_parameters`` (transformers 5).

What a configuration leaves out follows from its model type, by the table in ``model_types.py``. Where transformers
warns or guesses, this module raises ValueError: an unknown type or key, a missing key, a base of None. The other
direction is each rule's ``to_hf``.
"""

import dataclasses
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Protocol

from posjax._checks import check, check_choice, check_count, check_counts, check_number, check_positive, describe
from posjax.rotary.dynamic import DynamicNTK
from posjax.rotary.longrope import LongRoPE
from posjax.rotary.model_types import MODEL_TYPES, NO_ROTARY, UNREADABLE
from posjax.rotary.rules import FrequencyRule, Plain, Proportional
from posjax.rotary.scalings import Linear, Llama3, YaRN

_RULES: dict[str, type[FrequencyRule]] = {
    "default": Plain,
    "linear": Linear,
    "dynamic": DynamicNTK,
    "yarn": YaRN,
    "longrope": LongRoPE,
    "llama3": Llama3,
    "proportional": Proportional,
}
# Names of older releases. Multimodal rope gives text tokens the same id on every axis, which is plain rope.
_OLD_NAMES = {"su": "longrope", "mrope": "default"}
_REQUIRED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
# Keys that do not affect the frequencies of text, and one that transformers does not read.
_IGNORED = ("mrope_section", "mrope_interleaved", "llama_4_scaling_beta", "max_position_embeddings", "finetuned")
_IGNORED += ("interleaved", "attn_factor")
_SHARED = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_SHARES = ("partial_rotary_factor", "rotary_pct", "rotary_dim")
_BASES = ("rope_theta", "rotary_emb_base")
_LAYER_BASES = ("rope_local_base_freq", "rope_global_base_freq", "global_rope_theta", "local_rope_theta")
_LAYER_BASES += ("compress_rope_theta",)
_SETTINGS = ("rope_parameters", "rope_scaling")
_KEYS = (*_SETTINGS, *_BASES, *_LAYER_BASES, *_SHARES)
_UNKNOWN: dict[str, Any] = dict.fromkeys((*_BASES, *_SHARES))
"""The row of a model type that is not in the table: every key is read, and none has a default."""

Config = Mapping[str, Any]


class HasDict(Protocol):
    """A configuration object that gives a dictionary."""

    def to_dict(self) -> dict[str, Any]:
        """The dictionary that ``config.json`` holds."""


def from_hf(config: Config | HasDict) -> FrequencyRule | dict[str, FrequencyRule | None]:
    """The frequency rule of a Hugging Face model, from its configuration.

    config: a dictionary (``config.json``), or an object whose ``to_dict()`` gives one, such as transformers'
        ``PretrainedConfig``. A whole configuration, with ``rope_parameters`` (transformers 5) or ``rope_scaling`` and
        ``rope_theta`` (transformers 4); or only that inner dictionary, recognised by its ``rope_type`` or ``type``.

    Returns a rule whose ``head_dim`` is set if the configuration has it. Where layer types differ (Gemma 3, OLMo 3,
    ModernBERT, nested ``rope_parameters``) returns ``{layer_type: rule}``, with None for a layer type without rope.

    ``model_type`` decides what a missing key means: the base, the rotated share and the size of a head, the scaling,
    and which layer types a ``rope_scaling`` is for, as in transformers. The table is ``posjax/rotary/model_types.py``.
    Of a type that is not in it, and without a type, the configuration must say the base.

    Precedence: the first that is found wins. Base and partial rotary factor: inner dictionary, outer configuration, the
    model type's default. ``rope_scaling`` wins over ``rope_parameters``. Original length: for a flat dictionary the
    outer ``original_max_position_embeddings`` (Phi-3), then the inner one, then ``max_position_embeddings``; for a
    nested dictionary only the last two. A missing longrope factor, or a yarn factor of None, is
    ``max_position_embeddings`` divided by the original length. ``qk_rope_head_dim`` is the number of rotated channels.

    Raises ValueError for a model without rotary positions, an unknown model type that does not say its base, a setting
    that the model type does not read, an unknown rope type or key, a missing key, a base of None, a factor below 1,
    lists of the wrong length, and every other value that the rule rejects; the message starts with the layer type if
    there is one.
    """
    config = config if isinstance(config, Mapping) else _as_mapping(config)
    if "rope_type" in config or ("type" in config and "model_type" not in config):
        return _rule(config, {}, _UNKNOWN)
    for settings in (config.get(key) for key in _SETTINGS):
        check(
            not settings or isinstance(settings, Mapping),
            f"rope parameters must be a dictionary, found {describe(settings)}",
        )
    inner = config.get("rope_scaling") or config.get("rope_parameters") or {}
    row = _row(config, inner)
    if _is_nested(inner) or _is_nested(row.get("rope_parameters", {})):
        layers = _layers(config, row)
        model_rule = {
            name: None if one is None else _named_rule(name, one, config, row) for name, one in layers.items()
        }
        rules = [rule for rule in model_rule.values() if rule is not None]
    else:
        model_rule = _rule(_with_outer_original(inner or row.get("rope_parameters", {}), config), config, row)
        rules = [model_rule]
    _check_read(config, row, rules)
    return model_rule


def _as_mapping(config: Any) -> Config:
    wanted = "config must be a dictionary, or an object with to_dict() such as transformers' PretrainedConfig"
    check(hasattr(config, "to_dict") and not isinstance(config, type), f"{wanted}, found {type(config).__name__}")
    mapping = config.to_dict()
    check(
        isinstance(mapping, Mapping),
        f"{wanted}, found {type(config).__name__} whose to_dict() gives {describe(mapping)}",
    )
    return mapping


# --- what the model type implies --------------------------------------------------------------------------------------


def _row(config: Config, inner: Config) -> Config:
    """The row of the model type. Raises ValueError for a type without rope, and for one whose base nothing says."""
    for key in config:
        # A key that contains a known one, such as swa_rope_theta, is another key.
        known = any(other in str(key) for other in _KEYS)
        near = () if known else get_close_matches(str(key), _KEYS, n=1, cutoff=0.92)
        check(not near, f"unknown key {describe(key)}; did you mean {near[0] if near else None!r}?")
    name = str(config.get("model_type"))
    says_base = bool(inner) or any(config.get(key) is not None for key in (*_BASES, *_LAYER_BASES))
    check(
        name in MODEL_TYPES or says_base or not config.get("text_config"),
        "config has no rope settings of its own: pass config['text_config'], or config.text_config of an object",
    )
    check(name not in NO_ROTARY, f"model_type {name!r} has no rotary positions, so no frequency rule describes it")
    check(name not in UNREADABLE, f"model_type {name!r} has a rope that no frequency rule has: {UNREADABLE.get(name)}")
    if name not in MODEL_TYPES:
        return _unknown_row(config, inner)
    row = MODEL_TYPES[name]
    for key, (value, default) in row.get("switch", {}).items():
        setting = config.get(key, default)
        check(
            setting == value, f"{key} {describe(setting)}: {name!r} has no rotary positions then, only with {value!r}"
        )
    return row


def _unknown_row(config: Config, inner: Config) -> Config:
    """The row of a type that is not in the table, which must say its base itself."""
    for key, like in (("rope_local_base_freq", "gemma3_text"), ("local_rope_theta", "modernbert")):
        if key in config and not _is_nested(inner):
            return _UNKNOWN | {name: MODEL_TYPES[like][name] for name in ("bases", "scaled", "rope_parameters")}
    name = config.get("model_type")
    what = "config says nothing of rope" if name is None else f"model_type {describe(name)} is not known"
    says_base = any(key in one for one in (inner, config) for key in _BASES) or _is_nested(inner)
    check(
        says_base or (bool(inner) and name is None),
        f"{what}: give its base as rope_theta, or in rope_parameters, such as {{'rope_type': 'default', 'rope_theta': "
        "1e4}",
    )
    return _UNKNOWN


def _reads(row: Config, key: str) -> bool:
    """Whether a type reads a key of the outer configuration."""
    if row is _UNKNOWN or key in row.get("unread", ()):
        return row is _UNKNOWN
    if key in _SHARES:
        return key in row or (key == "partial_rotary_factor" and not any(other in row for other in _SHARES))
    if _is_nested(row.get("rope_parameters", {})):
        return key in row.get("bases", {}).values()
    return key == ("rotary_emb_base" if "rotary_emb_base" in row else "rope_theta")


def _check_read(config: Config, row: Config, rules: list[FrequencyRule]) -> None:
    """Raises ValueError for settings that other types read and this one does not, unless the rules have the same."""
    name = config.get("model_type")
    unread = "rope_parameters" in row.get("unread", ()) and any(config.get(key) for key in _SETTINGS)
    check(not unread, f"rope_parameters: transformers does not read them for {name!r}; leave them out")
    for group in ((*_BASES, *_LAYER_BASES), _SHARES):
        read = [key for key in group if _reads(row, key)]
        for key in (key for key in group if key not in read):
            value = config.get(key)
            effects = _effects(key, rules)
            check(
                value is None or value in effects,
                f"{key} {describe(value)}: transformers reads {(read or ['rope_parameters'])[0]} for {name}, which "
                f"gives {describe(effects)} here; write it there if that is intended",
            )
    for key, of_one in (("layer_rope_theta", "rope_theta"), ("partial_rotary_factors", "partial_rotary_factor")):
        values = config.get(key)
        known = (0, *_effects(of_one, rules))
        several = isinstance(values, list | tuple) and not all(value in known for value in values)
        check(not several, f"{key} {describe(values)}: layers that differ; give rope_parameters by layer type")


def _effects(key: str, rules: list[FrequencyRule]) -> list[float]:
    """What the rules have in place of a setting."""
    if key == "rotary_dim":
        return sorted({rule.rotary_dim() for rule in rules if rule.head_dim is not None})
    return sorted({rule.partial_rotary_factor if key in _SHARES else rule.base for rule in rules})


# --- settings by layer type -------------------------------------------------------------------------------------------


def _is_nested(parameters: Config) -> bool:
    """Whether the values are dictionaries by layer type (None: a layer type without rope)."""
    if not parameters or any(key in parameters for key in _SHARED):
        return False
    nested = [value is None or isinstance(value, Mapping) for value in parameters.values()]
    check(
        all(nested) or not any(isinstance(value, Mapping) for value in parameters.values()),
        "rope_parameters mixes layer types with settings: give one dictionary, or one dictionary per layer type",
    )
    return all(nested)


def _layers(config: Config, row: Config) -> dict[str, Config | None]:
    """The settings of every layer type. A ``rope_scaling`` for the whole model is for the type's scaled layers."""
    implied, bases, scaled = (row.get(key, {}) for key in ("rope_parameters", "bases", "scaled"))
    given, flat = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if _is_nested(flat):
        given = flat
        flat = {}
    name = str(config.get("model_type"))[:100]
    check(
        row is _UNKNOWN or _is_nested(implied),
        f"rope_parameters {describe(given)}: {name} has one rule for all layers; give only that rule",
    )
    wanted = f"{name} has separate rope_parameters for the layer types {', '.join(implied)}; give them by layer type"
    check(not given or _is_nested(given), f"rope_parameters {describe(given)}: {wanted}")
    check(not flat or bool(scaled), f"rope_scaling {describe(flat)}: {wanted}")
    settings = dict(given or implied)
    for layer, key in bases.items():
        base = config[key] if key in config else implied[layer]["rope_theta"]
        settings[layer] = {**implied[layer], "rope_theta": base, **(given.get(layer) or {})}
    for layer, more in scaled.items() if flat else ():
        settings[layer] = {
            **(settings.get(layer) or {}),
            **(more if _rope_type(flat, config) == "yarn" else {}),
            **flat,
        }
    return settings


# --- one rule ---------------------------------------------------------------------------------------------------------


def _with_outer_original(parameters: Config, config: Config) -> Config:
    """Phi-3 writes the original length into the outer configuration, which wins over the inner one."""
    original = config.get("original_max_position_embeddings")
    if original is None or _rope_type(parameters, config) not in ("yarn", "longrope", "llama3"):
        return parameters
    return {**parameters, "original_max_position_embeddings": original}


def _named_rule(name: str, parameters: Config, config: Config, row: Config) -> FrequencyRule:
    """The rule of one layer type; an error names the layer type."""
    try:
        return _rule(parameters, config, row, name)
    except ValueError as error:
        raise ValueError(f"{str(name)[:100]}: {error}") from None


def _rope_type(parameters: Config, config: Config) -> str:
    """The current name of the type; Phi-3 once called longrope "yarn"."""
    name = parameters.get("rope_type", parameters.get("type", "default"))
    if name == "yarn" and config.get("model_type") in ("phi3", "phi4_multimodal") and "long_factor" in parameters:
        return "longrope"
    name = _OLD_NAMES.get(str(name), name)
    check_choice("rope_type", name, tuple(_RULES))
    return name


def _without_alpha(parameters: Config, config: Config, size: int | None) -> Config:
    """Hunyuan's "dynamic" with an ``alpha``, which does not depend on the length: plain RoPE of a larger base.

    The base is ``rope_theta * alpha^(d / (d - 2))``. transformers reads no other key beside it.
    """
    alpha = parameters.get("alpha")
    dynamic = parameters.get("rope_type", parameters.get("type")) == "dynamic"
    if not alpha or not dynamic or not str(config.get("model_type")).startswith("hunyuan"):
        return parameters
    check_positive("alpha", alpha)
    check(size is not None and size > 2, f"alpha needs the size of a head, above 2; found head_dim {describe(size)}")
    base = parameters.get("rope_theta", config.get("rope_theta", 10_000.0))
    check_positive("rope_theta", base)
    return {"rope_type": "default", "rope_theta": base * alpha ** (size / (size - 2))}


def _rule(parameters: Config, config: Config, row: Config, layer: str | None = None) -> FrequencyRule:
    """The rule of one flat dictionary."""
    size = _head_dim(config, row, layer)
    parameters = _without_alpha(parameters, config, size)
    name = _rope_type(parameters, config)
    cls = _RULES[name]
    options = _options(name, cls, parameters, config)
    width = _rotated_channels(config, row)
    share = _share(parameters, config, row, size)
    check_number("partial_rotary_factor", share)
    if width:
        check_count("qk_rope_head_dim", width)
        _check_same_width(width, share, size, config)
        size, share = width, 1.0
    partial = cls is Proportional or row is _UNKNOWN or any(key in row for key in _SHARES)
    model = config.get("model_type")
    check(
        partial or share == 1,
        f"partial_rotary_factor must be 1 for {model}, which rotates whole heads; found {describe(share)}",
    )
    rule = cls(base=_base(parameters, config, row, layer), head_dim=size, partial_rotary_factor=share, **options)
    return rule if row is _UNKNOWN or "scales_softmax" in row else _without_softmax_scale(rule)


def _options(name: str, cls: type[FrequencyRule], parameters: Config, config: Config) -> dict[str, Any]:
    """The fields of a rule besides base, head size and share."""
    known = (*_SHARED, *cls.hf_keys.values(), *_IGNORED)
    for key in parameters:
        check_choice(f"rope_type {name!r}: key", key, known)
    given = {key: value for key, value in parameters.items() if value is not None}
    if name in ("dynamic", "yarn", "longrope", "llama3"):
        given["original_max_position_embeddings"] = _original_length(name, given, config)
    if "factor" in cls.hf_keys.values() and "factor" not in given and (name == "longrope" or "factor" in parameters):
        given |= _implied_factor(given, config)
    for key in _REQUIRED.get(name, ()):
        check(key in given, f"rope_type {name!r} needs the key {key!r}, found {describe(sorted(parameters))}")
    return {field: given[key] for field, key in cls.hf_keys.items() if key in given}


def _without_softmax_scale(rule: FrequencyRule) -> FrequencyRule:
    """The rule with DeepSeek's mscales used only as their ratio, on cos and sin, and not on the logits."""
    if rule.softmax_scale == 1:
        return rule
    return dataclasses.replace(rule, attention_factor=rule.table_factor, mscale=None, mscale_all_dim=None)


def _original_length(name: str, given: Config, config: Config) -> int:
    """The training length: the inner value, else ``max_position_embeddings``; for dynamic the two must agree."""
    inner, outer = given.get("original_max_position_embeddings"), config.get("max_position_embeddings")
    length = outer if inner is None else inner
    check(
        length is not None,
        f"rope_type {name!r} needs 'original_max_position_embeddings', or max_position_embeddings in the config",
    )
    check(
        name != "dynamic" or outer in (None, length),
        f"rope_type 'dynamic': original_max_position_embeddings {describe(length)} contradicts max_position_embeddings "
        f"{describe(outer)}",
    )
    return length


def _implied_factor(given: Config, config: Config) -> Config:
    """``{"factor": new / original}`` from the two lengths; ``{}`` if one of them is unknown."""
    new, original = config.get("max_position_embeddings"), given.get("original_max_position_embeddings")
    if new is None or original is None:
        return {}
    check_counts(max_position_embeddings=new, original_max_position_embeddings=original)
    return {"factor": new / original}


def _base(parameters: Config, config: Config, row: Config, layer: str | None) -> float:
    """The base, from the first place that has it; a None there is an error."""
    for source, keys in ((parameters, ("rope_theta",)), (config, [key for key in _BASES if _reads(row, key)])):
        for key in keys:
            if key in source:
                check(source[key] is not None, f"{key} is None: give the base, such as 10000.0")
                return source[key]
    implied = config.get("model_type") is None if row is _UNKNOWN else layer is None
    check(implied, "rope_theta is missing: give the base, which the model type does not imply here")
    return next((row[key] for key in _BASES if row.get(key)), 10_000.0)


def _share(parameters: Config, config: Config, row: Config, size: int | None) -> float:
    """The rotated share of a head, from the first place that has it; None is an error unless it is 1 by default."""
    default = next((row[key] for key in _SHARES if row.get(key) is not None), 1.0)
    outer = tuple(key for key in _SHARES if _reads(row, key))
    for source, keys in ((parameters, ("partial_rotary_factor",)), (config, outer), (row, ("rotary_dim",))):
        for key in keys:
            if source.get(key) is not None:
                return _share_of(source[key], size) if key == "rotary_dim" else source[key]
            check(key not in source or default == 1, f"{key} is None: give the value, such as {default}")
    return default


def _share_of(width: int, size: int | None) -> float:
    """The share of a number of channels."""
    check(size is not None, "rotary_dim needs the head size: give n_embd and n_head")
    whole = isinstance(width, int) and not isinstance(width, bool)
    check(whole and 0 < width <= size, f"rotary_dim must be a whole number from 1 to {size}, found {describe(width)}")
    return width / size


def _rotated_channels(config: Config, row: Config) -> int | None:
    """The rotated channels of a latent-attention head, whose other channels have no position."""
    key = "qk_rope_head_dim"
    return (config.get(key) or row.get(key)) if row is _UNKNOWN or key in row else None


def _check_same_width(width: int, share: float, size: int | None, config: Config) -> None:
    """Raises ValueError unless a share of the whole latent-attention head is its number of rotated channels."""
    rest = config.get("qk_nope_head_dim")
    whole = size if rest is None else rest + width
    check(
        share == 1 or whole in (None, width) or int(whole * share) == width,
        f"partial_rotary_factor {describe(share)} of {describe(whole)} channels contradicts "
        f"qk_rope_head_dim {describe(width)}",
    )


def _head_dim(config: Config, row: Config, layer: str | None) -> int | None:
    """The size of a head: written, or the model type's, else model size / heads. None if nothing says it."""
    if config.get("per_layer_config") and row is _UNKNOWN:
        return None
    names = row.get("names", {})
    if layer == "full_attention" and (head_dim := config.get("global_head_dim") or row.get("global_head_dim")):
        return head_dim
    key = names.get("head_dim", "head_dim")
    if head_dim := config.get(key) or config.get("head_dim"):
        return head_dim
    if key not in config and key in row:
        check(row[key] is not None, f"{key} is missing: give the size of a head")
        return row[key]
    named = (names.get("hidden_size", "hidden_size"), names.get("num_attention_heads", "num_attention_heads"))
    for size, heads in (named, ("hidden_size", "num_attention_heads"), ("n_embd", "n_head")):
        if config.get(size) and config.get(heads):
            check_counts(**{size: config[size], heads: config[heads]})
            return config[size] // config[heads]
    return None
