"""The families of released models by ``model_type``, and a ``Decoder``'s config from and to ``config.json``."""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from posjax._checks import check, describe
from posjax.nn.config import BY_LAYER, DecoderConfig, check_size
from posjax.nn.huggingface import (
    cohere_like,
    corrected_moe,
    gated_like,
    gemma_like,
    gpt_like,
    latent_like,
    llama4,
    llama_like,
    moe_like,
    olmo_like,
    qk_norm_like,
    qwen_next_like,
)
from posjax.nn.huggingface.family import Family, check_same
from posjax.nn.huggingface.text_parts import text_values

_ALL = (
    *llama_like.LLAMA_LIKE,
    *gemma_like.GEMMA_LIKE,
    *olmo_like.OLMO_LIKE,
    *cohere_like.COHERE_LIKE,
    *qk_norm_like.QK_NORM_LIKE,
    *moe_like.MOE_LIKE,
    *corrected_moe.CORRECTED_MOE,
    llama4.LLAMA4_TEXT,
    *latent_like.LATENT_LIKE,
    *gated_like.GATED_LIKE,
    *qwen_next_like.QWEN_NEXT_LIKE,
    *gpt_like.GPT_LIKE,
)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ALL}
"""Families by ``model_type``. A decoder that fits several families is written as the first of them."""


_OTHER_NAMES = {"kimi_k2": "deepseek_v3"}
"""Types that releases have for models of another type; they are written as that type."""


def family_of(values: Mapping[str, Any]) -> Family:
    """The family of a ``config.json``.

    Raises ValueError for an unknown family and for quantised tensors.
    """
    check("model_type" in values, "config.json lacks model_type: it is not the configuration of a released model")
    name = values["model_type"]
    name = _OTHER_NAMES.get(name, name) if isinstance(name, str) else name
    quantised = values.get("quantization_config")
    check(
        name not in latent_like.INDEXED,
        f"config.json: the attention of {name!r} chooses keys by a learned index, which Decoder does not have",
    )
    listed = "nn.huggingface.FAMILIES and docs/released.md have those that can be read"
    check(
        isinstance(name, str) and name in FAMILIES,
        f"config.json: models with model_type {describe(name)} cannot be read; {listed}",
    )
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
    check(
        method in (None, "mxfp4"),
        f"the tensors are quantised by {describe(method)}; read the model before quantisation",
    )
    return FAMILIES[name]


def read_config(values: Mapping[str, Any]) -> DecoderConfig:
    """The ``DecoderConfig`` of a ``config.json``; of a model of more than text that of its text part.

    Raises:
        ValueError: for a family, an activation, a rope type or an option that ``Decoder`` does not have; for missing
            keys.
    """
    values = text_values(values)
    family = family_of(values)
    values = {**values, "model_type": family.model_type}
    values = {family.aliases[key]: values[key] for key in family.aliases if key in values} | values
    filled = {**family.defaults, **{key: value for key, value in values.items() if value is not None}}
    filled |= {key: None for key in (*family.defaults, *_ROPE) if key in values and values[key] is None}
    others = {key: wanted for key, wanted in _FIXED.items() if key not in family.defaults}
    for key, wanted in (others | dict(family.fixed)).items():
        fits = wanted if isinstance(wanted, tuple) else (wanted,)
        setting = values.get(key, fits[0])
        why = f"config.json: {key} {describe(setting)} is an option that Decoder does not have; {fits[0]!r} would work"
        check(setting in fits, why)
    lacking = [key for key, field in family.keys.items() if key not in filled and field in _NEEDED]
    check(not lacking, f"config.json lacks {lacking[0] if lacking else None!r}")
    _check_kinds(family, filled)
    fields = {field: filled[key] for key, field in family.keys.items() if filled.get(key) is not None}
    size = fields["model_dim"] // fields["num_heads"]
    check(
        "head_dim" in fields or filled.get("head_dim") in (None, size),
        f"config.json: head_dim must be {size} for {family.model_type}, found {describe(filled.get('head_dim'))}; "
        "leave it out",
    )
    return _config(fields | family.read_basics(filled) | family.read(filled))


_FIXED = {"is_causal": True, "per_layer_config": None, "transformers_weights": None}
"""Options that families without a default for them do not support, each with the only value that is accepted."""
_NEEDED = ("vocab_size", "model_dim", "num_layers", "num_heads")


def _config(fields: Mapping[str, Any]) -> DecoderConfig:
    try:
        return DecoderConfig(**fields)
    except ValueError as error:
        raise ValueError(f"config.json describes no valid decoder: {error}") from None


_KINDS: dict[type, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a whole number above 0", lambda value: type(value) is int and value > 0),
    float: ("a finite number", lambda value: type(value) in (int, float) and isfinite(value)),
    str: ("a name", lambda value: isinstance(value, str)),
    list: ("a list", lambda value: isinstance(value, list | tuple)),
    dict: ("an object", lambda value: isinstance(value, Mapping)),
}
"""The kinds of values in ``config.json``, in words and as a test."""
_KEYS = {
    **dict.fromkeys(("rope_parameters", "rope_scaling", "attn_config", "per_layer_config"), dict),
    **dict.fromkeys(("layer_types", "no_rope_layers", "mlp_layer_types", "mlp_only_layers", "moe_layers"), list),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window"), bool),
    **dict.fromkeys(("rope_theta", "partial_rotary_factor", "rope_local_base_freq", "max_window_layers"), float),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "clip_qkv"), float),
    "attention_multiplier": float,
    **dict.fromkeys(("num_kv_heads", "num_ln_in_parallel_attn", "num_global_key_value_heads"), int),
    "scale_depth": float,
}
"""Keys of several families whose kind does not follow from a default."""
_ROPE = ("rope_theta", "partial_rotary_factor", "rope_local_base_freq")
"""Keys of which from_hf decides whether they may be null."""
_MAY_BE_NONE = (
    *_ROPE,
    "sliding_window",
    "num_key_value_heads",
    "head_dim",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "clip_qkv",
    "per_layer_config",
    "num_global_key_value_heads",
    "q_lora_rank",
    "v_head_dim",
    "scale_depth",
    "dim_model_base",
    "n_group",
    "topk_group",
    "moe_layers",
    "no_rope_layers",
    "attention_chunk_size",
    "prefix_dense_intermediate_size",
    "n_shared_experts",
)
_BY_LAYER = ("num_experts", "moe_topk")
"""Keys of numbers that may be given for each layer."""
_FROM_ZERO = ("first_k_dense_replace", "num_shared_experts", "n_shared_experts", "moe_num_shared_experts")
_FROM_ZERO += ("shared_intermediate_size", "moe_layer_start_index", "moe_layer_end_index", "sliding_window")
"""Keys of numbers that may be 0, and one that may be -1."""


def _check_kinds(family: Family, given: Mapping[str, Any]) -> None:
    """Raises ValueError, with the key, for a value of the wrong kind, or a size beyond any machine."""
    kinds = {key: type(value) for key, value in family.defaults.items() if value is not None}
    for key, kind in (kinds | dict.fromkeys(family.keys, int) | {"tie_word_embeddings": bool} | _KEYS).items():
        if key in _BY_LAYER and isinstance(given.get(key), list | tuple):
            continue
        if key not in given or (given[key] is None and key in _MAY_BE_NONE):
            continue
        if key in _FROM_ZERO and type(given[key]) is int and -1 <= given[key] <= 0:
            continue
        words, fits = _KINDS[kind]
        check(fits(given[key]), f"config.json: {key} must be {words}, found {describe(given[key])}")
    for key, field in family.keys.items():
        if type(given.get(key)) is int:
            check_size(f"config.json: {key}", field, given[key])


def write_config(config: DecoderConfig, family: Family) -> dict[str, Any]:
    """The ``config.json`` of a decoder.

    Raises:
        ValueError: for a config that the layout cannot store, with the field.
    """
    for name in BY_LAYER:
        fits = name in family.by_layer or not isinstance(getattr(config, name), tuple)
        check(fits, f"{name}: the layout of {family.model_type} has one for all layers")
    values = {key: getattr(config, field) for key, field in family.keys.items() if getattr(config, field) is not None}
    values |= {"model_type": family.model_type, "architectures": [family.architecture]}
    values |= family.write_basics(config) | family.write(config)
    check_same(family, config, read_config(values))
    return values


def fitting_family(config: DecoderConfig) -> Family:
    """The first family whose layout can store a config.

    Raises:
        ValueError: if no layout can, with the reason for Llama's layout.
    """
    reasons = {}
    for family in FAMILIES.values():
        try:
            write_config(config, family)
        except (ValueError, AttributeError) as error:
            reasons[family.model_type] = error
            continue
        return family
    raise ValueError(f"no released layout can store this decoder; the reason for llama: {reasons['llama']}")
