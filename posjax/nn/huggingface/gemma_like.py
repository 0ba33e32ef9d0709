"""Gemma: gains that are stored less one, scaled embeddings, from Gemma 2 on norms on both sides."""

from collections.abc import Callable, Mapping
from typing import Any

from posjax._checks import check, check_positive, describe
from posjax.nn.config import DecoderConfig
from posjax.nn.huggingface.family import (
    FULL,
    GATED,
    SLIDING,
    Family,
    Values,
    biases,
    layer_types,
    layered_rope_values,
    pattern_types,
    rope_rule,
    rope_schemes,
    rope_values,
    types_of,
    window_of,
)
from posjax.nn.huggingface.llama_like import (
    EMBEDDING,
    FINAL_NORM,
    HEAD_NORMS,
    KEYS,
    LAYER,
    default_sizes,
    llama_biases,
    llama_family,
    norms,
    projections,
    qkv_bias_value,
    rope_everywhere,
)
from posjax.nn.huggingface.views import View
from posjax.nn.specs import Norm, Residual
from posjax.norms import QKNorm

_SANDWICH = norms(
    attention_norm="input_layernorm",
    attention_after="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_after="post_feedforward_layernorm",
)


def _gemma(values: Values) -> dict[str, Any]:
    check_positive("config.json: query_pre_attn_scalar", values["query_pre_attn_scalar"])
    return {
        "residual": Residual("both"),
        "embedding_scale": values["hidden_size"] ** 0.5,
        "query_scale": values["query_pre_attn_scalar"] ** -0.5,
        "attention_softcap": values["attn_logit_softcapping"],
        "logit_softcap": values["final_logit_softcapping"],
        "biases": biases(qkv=values.get("attention_bias"), output=values.get("attention_bias")),
    }


def _gemma_values(config: DecoderConfig) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _inverse_square(config),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
        "attention_bias": "qkv" in config.biases,
        "sliding_window": window_of(config),
        "layer_types": types_of(config),
    }


def _inverse_square(config: DecoderConfig) -> float:
    """``query_scale ** -2``, rounded if it is a whole number up to rounding errors."""
    scalar = config.head_dim if config.query_scale is None else config.query_scale**-2
    return round(scalar) if round(scalar) ** -0.5 == config.query_scale else scalar


def _gemma_family(
    name: str, architecture: str, read: Callable, write: Callable, more: dict, defaults: dict, **fixed: Any
) -> Family:
    return Family(
        name,
        architecture,
        KEYS,
        lambda values: _gemma(values) | read(values),
        lambda config: _gemma_values(config) | write(config),
        lambda config: EMBEDDING | FINAL_NORM | _SANDWICH | projections() | more,
        {"tie_word_embeddings": True, "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh"} | defaults,
        {"use_bidirectional_attention": (None, False)} | fixed,
        norm=Norm(unit_offset=True),
        activation="hidden_activation",
    )


_GEMMA2_DEFAULTS = default_sizes(8192, 9216, 4) | {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256.0,
    "sliding_window": 4096,
    "head_dim": 256,
}


GEMMA2 = _gemma_family(
    "gemma2",
    "Gemma2ForCausalLM",
    lambda values: {"scheme": rope_schemes(values, layer_types(values, (SLIDING, FULL)))},
    rope_values,
    {},
    _GEMMA2_DEFAULTS,
)

VAULTGEMMA = _gemma_family(
    "vaultgemma",
    "VaultGemmaForCausalLM",
    lambda values: {"residual": Residual(), "scheme": rope_schemes(values, layer_types(values, (SLIDING, FULL)))},
    rope_values,
    {},
    _GEMMA2_DEFAULTS,
)


def _gemma3_rope_values(config: DecoderConfig) -> dict[str, Any]:
    values = layered_rope_values(config)
    return values | {"rope_local_base_freq": values["rope_parameters"][SLIDING]["rope_theta"]}


GEMMA3 = _gemma_family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    lambda values: {
        "scheme": rope_schemes(
            values,
            pattern_types(values, 6),
            rope_rule(values),
            norm=QKNorm(eps=values["rms_norm_eps"], unit_offset=True),
        )
    },
    _gemma3_rope_values,
    HEAD_NORMS,
    default_sizes(131_072, 9216, 4)
    | {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "query_pre_attn_scalar": 256.0,
        "sliding_window": 4096,
        "head_dim": 256,
    },
    attn_logit_softcapping=None,  # transformers does not read this key
)

GEMMA = llama_family(
    "gemma",
    "GemmaForCausalLM",
    lambda values: {
        "biases": llama_biases(values)["biases"],
        "embedding_scale": values["hidden_size"] ** 0.5,
        "scheme": rope_everywhere(values),
    },
    lambda config: qkv_bias_value(config) | rope_values(config),
    defaults=default_sizes(8192, 24576, 16)
    | {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256},
    fixed={"use_bidirectional_attention": (None, False)},
    norm=Norm(unit_offset=True),
    activations=GATED | {"gelu": "geglu"},  # the first releases say gelu and mean its approximation
)


# --- Gemma 4 ----------------------------------------------------------------------------------------------------------


def _gemma4_types(values: Values) -> list[str]:
    """transformers makes the last layer a full one, whatever config.json says."""
    return [*layer_types(values, (SLIDING,) * 5 + (FULL,))[:-1], FULL]


def _gemma4(values: Values) -> dict[str, Any]:
    """Layers of two kinds of heads. The full ones may have no projection for values."""
    embedded = values.get("hidden_size_per_layer_input", 256 if values["model_type"] == "gemma4_text" else 0)
    why = "config.json: hidden_size_per_layer_input must be 0, because Decoder has no embeddings for each layer"
    check(embedded == 0, f"{why}; found {describe(embedded)}")
    types = _gemma4_types(values)
    sizes = [_gemma4_sizes(values, n, kind) for n, kind in enumerate(types)]
    bias = values.get("attention_bias")
    return {
        "residual": Residual("both", learned_scale=True),
        "embedding_scale": values["hidden_size"] ** 0.5,
        "query_scale": 1.0,
        "logit_softcap": values["final_logit_softcapping"],
        "biases": biases(qkv=bias, output=bias),
        "head_dim": tuple(size["head_dim"] for size in sizes),
        "num_kv_heads": tuple(size["num_key_value_heads"] for size in sizes),
        "keys_as_values": tuple(values["attention_k_eq_v"] and kind == FULL for kind in types),
        "value_norm": True,
        "scheme": rope_schemes(values, types, rope_rule(values), norm=QKNorm(eps=values["rms_norm_eps"])),
    }


def _gemma4_sizes(values: Values, layer: int, kind: str) -> dict[str, int]:
    """The size and the number of a layer's heads.

    ``per_layer_config`` says them by the number of the layer, as transformers 5.24 writes them; older releases say them
    for all full layers, the number of heads only if their values are keys.
    """
    sizes = {key: values[key] for key in ("head_dim", "num_key_value_heads")}
    name, by_layer = "config.json: per_layer_config", values["per_layer_config"]
    if by_layer is not None:
        numbered = all(map(str.isdecimal, by_layer))
        check(numbered, f"{name} must have the numbers of layers as keys, found {describe(list(by_layer))}")
        found = next((more for number, more in by_layer.items() if int(number) == layer), {})
        fits = isinstance(found, Mapping) and found.keys() <= sizes.keys()
        check(fits, f"{name} may say {' and '.join(sizes)} of a layer, found {describe(found)}")
        return sizes | found
    if kind != FULL:
        return sizes
    sizes["head_dim"] = values["global_head_dim"]
    heads = values["num_global_key_value_heads"] if values["attention_k_eq_v"] else None
    return sizes if heads is None else sizes | {"num_key_value_heads": heads}


def _gemma4_values(config: DecoderConfig) -> dict[str, Any]:
    types, window = types_of(config), window_of(config)
    of_kind = dict(zip(types, config.every_layer, strict=True))
    full, local = of_kind[types[-1]], of_kind.get(SLIDING, config.of_layer(0))
    return {
        "num_key_value_heads": local.num_kv_heads,
        "num_global_key_value_heads": full.num_kv_heads if full.keys_as_values else None,
        "head_dim": local.head_dim,
        "global_head_dim": full.head_dim,
        "attention_k_eq_v": full.keys_as_values,
        "final_logit_softcapping": config.logit_softcap,
        "attention_bias": "qkv" in config.biases,
        "layer_types": types,
        **({} if window is None else {"sliding_window": window}),
        **layered_rope_values(config),
    }


def _gemma4_family(name: str, architecture: str, length: int, window: int, more: dict, **fixed: Any) -> Family:
    return Family(
        name,
        architecture,
        KEYS,
        _gemma4,
        lambda config: _gemma4_values(config) | more,
        lambda config: (
            EMBEDDING
            | FINAL_NORM
            | _SANDWICH
            | projections()
            | HEAD_NORMS
            | {"block/scale": View(f"{LAYER}layer_scalar", "one -> one")}
        ),
        default_sizes(length, 9216, 4)
        | {
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6,
            "hidden_activation": "gelu_pytorch_tanh",
            "final_logit_softcapping": None,
            "sliding_window": window,
            "head_dim": 256,
            "global_head_dim": 512,
            "num_global_key_value_heads": None,
            "attention_k_eq_v": False,
            "per_layer_config": None,
        },
        {"use_bidirectional_attention": (None, "vision"), "num_kv_shared_layers": 0} | fixed,
        activation="hidden_activation",
        by_layer=("head_dim", "num_kv_heads", "keys_as_values"),
    )


GEMMA4 = _gemma4_family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    131_072,
    512,
    {"hidden_size_per_layer_input": 0},
    enable_moe_block=False,
)
GEMMA4_UNIFIED = _gemma4_family("gemma4_unified_text", "Gemma4UnifiedForCausalLM", 262_144, 1024, {})

GEMMA_LIKE = (GEMMA2, GEMMA3, GEMMA, VAULTGEMMA, GEMMA4, GEMMA4_UNIFIED)
