"""Reading Hugging Face's rope settings: ``rope_scaling`` (transformers 4) and ``rope_parameters`` (transformers 5).

Where transformers warns or guesses, this module raises ValueError: an unknown type or key, a missing key, a base of
None. The other direction is each rule's ``to_hf``.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from posjax._checks import check, check_choice, shown
from posjax.rotary.dynamic import DynamicNTK
from posjax.rotary.longrope import LongRoPE
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
# Keys that do not affect the frequencies of text.
_IGNORED = ("mrope_section", "mrope_interleaved", "llama_4_scaling_beta", "max_position_embeddings", "finetuned")
_SHARED = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
# Default bases other than 10,000, of model types whose configuration may omit the base (transformers 5.23).
_DEFAULT_BASE = {
    "apertus": 12e6,
    "bitnet": 5e5,
    "csm": 5e5,
    "cwm": 1e6,
    "emu3": 1e6,
    "ernie4_5": 5e5,
    "ernie4_5_moe": 5e5,
    "flex_olmo": 5e5,
    "gpt_oss": 1.5e5,
    "lfm2": 1e6,
    "lfm2_moe": 1e6,
    "llama4_text": 5e5,
    "longcat_flash": 1e7,
    "minimax": 1e6,
    "mixtral": 1e6,
    "olmo3": 5e5,
    "phimoe": 1e6,
    "qwen2_vl_text": 1e6,
    "qwen2_5_vl_text": 1e6,
    "qwen3_vl_text": 5e5,
    "smollm3": 2e6,
}

# Models that write DeepSeek's mscales but use only their ratio, on cos and sin.
_NO_SOFTMAX_SCALE = ("ministral3",)

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

    Returns a rule whose ``head_dim`` is set if the configuration has it. Where layer types differ (Gemma 3,
    ModernBERT, nested ``rope_parameters``) returns ``{layer_type: rule}``, with None for a layer type without rope.

    Precedence: the first that is found wins. Base and partial rotary factor: inner dictionary, outer configuration, the
    model type's default, 10,000 and 1. Original length: for a flat dictionary the outer
    ``original_max_position_embeddings`` (Phi-3), then the inner one, then ``max_position_embeddings``; for a nested
    dictionary only the last two. A missing longrope factor, or a yarn factor of None, is ``max_position_embeddings``
    divided by the original length.

    Raises ValueError for an unknown type or key, a missing key, a base of None, a factor below 1, lists of the wrong
    length, and every other value that the rule rejects; the message starts with the layer type if there is one.
    """
    config = config if isinstance(config, Mapping) else _as_mapping(config)
    if "rope_type" in config or ("type" in config and "model_type" not in config):
        return _rule(config, {})
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    check(isinstance(parameters, Mapping), f"rope parameters must be a dictionary, found {shown(parameters)}")
    check(
        bool(parameters) or "text_config" not in config or "rope_theta" in config,
        "config has no rope settings of its own: pass config['text_config'], or config.text_config of an object",
    )
    layers = parameters if _is_nested(parameters) else _two_bases(config)
    if layers is None:
        return _rule(_with_outer_original(parameters, config), config)
    return {name: None if inner is None else _named_rule(name, inner, config) for name, inner in layers.items()}


def _as_mapping(config: Any) -> Config:
    wanted = "config must be a dictionary, or an object with to_dict() such as transformers' PretrainedConfig"
    check(hasattr(config, "to_dict") and not isinstance(config, type), f"{wanted}, found {type(config).__name__}")
    found = config.to_dict()
    check(isinstance(found, Mapping), f"{wanted}, found {type(config).__name__} whose to_dict() gives {found!r}")
    return found


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


def _two_bases(config: Config) -> Config | None:
    """Settings by layer type of transformers 4 models that have a second base, for sliding layers, in the config."""
    model = config.get("model_type", "")
    scaling = config.get("rope_scaling") or {}
    if config.get("rope_parameters"):
        return None
    if "rope_local_base_freq" in config or model == "gemma3_text":
        full = {**scaling, "rope_theta": config.get("rope_theta", 1e6)}
        return {"full_attention": full, "sliding_attention": {"rope_theta": config.get("rope_local_base_freq", 1e4)}}
    if "local_rope_theta" in config or model in ("modernbert", "modernbert-decoder"):
        full = {**scaling, "rope_theta": config.get("global_rope_theta", 1.6e5)}
        sliding = {**scaling, "rope_theta": config.get("local_rope_theta", 1e4)}
        return {"full_attention": full, "sliding_attention": sliding}
    return None


def _with_outer_original(parameters: Config, config: Config) -> Config:
    """Phi-3 writes the original length into the outer configuration, which wins over the inner one."""
    original = config.get("original_max_position_embeddings")
    if original is None or _rope_type(parameters, config) not in ("yarn", "longrope", "llama3"):
        return parameters
    return {**parameters, "original_max_position_embeddings": original}


def _named_rule(name: str, parameters: Config, config: Config) -> FrequencyRule:
    """The rule of one layer type; an error names the layer type."""
    try:
        return _rule(parameters, config, name)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _rope_type(parameters: Config, config: Config) -> str:
    """The current name of the type; Phi-3 once called longrope "yarn"."""
    name = parameters.get("rope_type", parameters.get("type", "default"))
    if name == "yarn" and config.get("model_type") in ("phi3", "phi4_multimodal") and "long_factor" in parameters:
        return "longrope"
    name = _OLD_NAMES.get(str(name), name)
    check_choice("rope_type", name, tuple(_RULES))
    return name


def _rule(parameters: Config, config: Config, layer_type: str | None = None) -> FrequencyRule:
    """The rule of one flat dictionary."""
    name = _rope_type(parameters, config)
    cls = _RULES[name]
    known = (*_SHARED, *cls.hf_keys.values(), *_IGNORED)
    for key in parameters:
        check_choice(f"rope_type {name!r}: key", key, known)
    given = {key: value for key, value in parameters.items() if value is not None}
    if name in ("dynamic", "yarn", "longrope", "llama3"):
        given["original_max_position_embeddings"] = _original_length(name, given, config)
    if "factor" in cls.hf_keys.values() and "factor" not in given and (name == "longrope" or "factor" in parameters):
        given |= _implied_factor(given, config)
    for key in _REQUIRED.get(name, ()):
        check(key in given, f"rope_type {name!r} needs the key {key!r}, found {sorted(parameters)}")
    options = {field: given[key] for field, key in cls.hf_keys.items() if key in given}
    rule = cls(
        base=_base(parameters, config),
        partial_rotary_factor=_partial_rotary_factor(given, config),
        head_dim=_head_dim(config, layer_type),
        **options,
    )
    return without_softmax_scale(rule) if config.get("model_type") in _NO_SOFTMAX_SCALE else rule


def without_softmax_scale(rule: FrequencyRule) -> FrequencyRule:
    """The rule with DeepSeek's mscales used only as their ratio, on cos and sin, and not on the logits."""
    if rule.softmax_scale == 1:
        return rule
    return dataclasses.replace(rule, attention_factor=rule.table_factor, mscale=None, mscale_all_dim=None)


def _original_length(name: str, given: Config, config: Config) -> int:
    """The training length: the inner value, else ``max_position_embeddings``; for dynamic the two must agree."""
    inner, outer = given.get("original_max_position_embeddings"), config.get("max_position_embeddings")
    found = outer if inner is None else inner
    check(
        found is not None,
        f"rope_type {name!r} needs 'original_max_position_embeddings', or max_position_embeddings in the config",
    )
    check(
        name != "dynamic" or outer in (None, found),
        f"rope_type 'dynamic': original_max_position_embeddings {found} contradicts max_position_embeddings {outer}",
    )
    return found


def _implied_factor(given: Config, config: Config) -> Config:
    """``{"factor": new / original}`` from the two lengths; ``{}`` if one of them is unknown."""
    new, original = config.get("max_position_embeddings"), given.get("original_max_position_embeddings")
    if new is None or original is None:
        return {}
    return {"factor": new / original}


def _base(parameters: Config, config: Config) -> float:
    """The base, from the first place that has it; a None there is an error."""
    for source, key in ((parameters, "rope_theta"), (config, "rope_theta"), (config, "rotary_emb_base")):
        if key in source:
            check(source[key] is not None, f"{key} is None: give the base, such as 10000.0")
            return source[key]
    return _DEFAULT_BASE.get(config.get("model_type"), 10_000.0)


def _partial_rotary_factor(given: Config, config: Config) -> float:
    """The rotated share of a head, from the first place that has it."""
    for source, key in ((given, "partial_rotary_factor"), (config, "partial_rotary_factor"), (config, "rotary_pct")):
        if source.get(key) is not None:
            return source[key]
    if config.get("rotary_dim") is not None:
        head_dim = _head_dim(config, None)
        check(head_dim is not None, "rotary_dim needs the head size: give n_embd and n_head")
        return config["rotary_dim"] / head_dim
    return 0.25 if config.get("model_type") == "gpt_neox" else 1.0


def _head_dim(config: Config, layer_type: str | None) -> int | None:
    """The size that rope uses: the rotary part of a latent-attention head, else the head's, else model size / heads."""
    if config.get("per_layer_config"):
        return None
    if layer_type == "full_attention" and config.get("global_head_dim") is not None:
        return config["global_head_dim"]
    for key in ("qk_rope_head_dim", "head_dim"):
        if config.get(key):
            return config[key]
    for size, heads in (("hidden_size", "num_attention_heads"), ("n_embd", "n_head")):
        if config.get(size) and config.get(heads):
            return config[size] // config[heads]
    return None
