"""Gemma: gains that are stored less one, scaled embeddings, from Gemma 2 on norms on both sides."""

from collections.abc import Callable
from typing import Any

from posjax._checks import check_positive
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
    default_sizes,
    llama_biases,
    llama_family,
    norms,
    projections,
    qkv_bias_value,
    rope_everywhere,
)
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

GEMMA_LIKE = (GEMMA2, GEMMA3, GEMMA, VAULTGEMMA)
