"""OLMo and others with norms after attention and MLP; GLM, whose fourth version has such norms too."""

from typing import Any

from posjax.nn.config import DecoderConfig
from posjax.nn.huggingface.family import (
    FULL,
    SLIDING,
    Values,
    biases,
    layer_types,
    layered_rope_values,
    partial_rope_values,
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
    LAYER,
    default_sizes,
    fused_gate_up,
    llama_biases,
    llama_family,
    llama_tensors,
    norms,
    projections,
    qkv_bias_value,
    rope_everywhere,
)
from posjax.nn.huggingface.views import View
from posjax.nn.specs import Norm, Residual
from posjax.norms import QKNorm

AFTER = norms(attention_after="post_attention_layernorm", mlp_after="post_feedforward_layernorm")


def norms_of_all_heads() -> dict[str, View]:
    """The views of norms of queries and keys over all heads together."""
    return {
        f"block/attention/{name}_norm/gain": View(
            f"{LAYER}self_attn.{name}_norm.weight", f"({heads} size) -> {heads} size"
        )
        for name, heads in (("q", "heads"), ("k", "kv_heads"))
    }


def _olmo_tensors(config: DecoderConfig) -> dict[str, View]:
    """The views of OLMo 2 and 3."""
    return EMBEDDING | FINAL_NORM | AFTER | projections() | norms_of_all_heads()


def _olmo(values: Values) -> dict[str, Any]:
    return {"biases": llama_biases(values)["biases"], "residual": Residual("after"), "projection_norm": True}


OLMO2 = llama_family(
    "olmo2",
    "Olmo2ForCausalLM",
    lambda values: _olmo(values) | {"scheme": rope_everywhere(values)},
    lambda config: qkv_bias_value(config) | rope_values(config),
    default_sizes(2048, 11008) | {"rms_norm_eps": 1e-5},
    _olmo_tensors,
)

OLMO3 = llama_family(
    "olmo3",
    "Olmo3ForCausalLM",
    lambda values: _olmo(values) | {"scheme": rope_schemes(values, pattern_types(values, 4))},
    lambda config: (
        qkv_bias_value(config)
        | {"sliding_window": window_of(config), "layer_types": types_of(config)}
        | layered_rope_values(config)
    ),
    default_sizes(2048, 11008) | {"rms_norm_eps": 1e-5, "sliding_window": 4096},
    _olmo_tensors,
)


OLMO = llama_family(
    "olmo",
    "OlmoForCausalLM",
    lambda values: (
        {"biases": llama_biases(values)["biases"]}
        | {"clip_qkv": values.get("clip_qkv"), "scheme": rope_everywhere(values)}
    ),
    lambda config: qkv_bias_value(config) | {"clip_qkv": config.clip_qkv} | rope_values(config),
    default_sizes(2048, 11008),
    lambda config: EMBEDDING | projections(),
    norm=Norm("layer", eps=1e-5, gain=False),
    eps="",
)


def _exaone_types(values: Values) -> list[str]:
    """EXAONE's layer types: without a window all layers are full, else every fourth.

    Releases write the pattern as "LLLG", which transformers 5 cannot read; they have ``layer_types`` too.
    """
    return layer_types(values) if values["sliding_window"] is None else pattern_types(values, 4)


def _exaone(values: Values) -> dict[str, Any]:
    """Layers with windows rotate; full layers rotate only in models without windows."""
    rule = rope_rule(values)
    rules = {SLIDING: rule, FULL: rule if values["sliding_window"] is None else None}
    norm = QKNorm(eps=values["rms_norm_eps"])
    return {"residual": Residual("after"), "scheme": rope_schemes(values, _exaone_types(values), rules, norm=norm)}


EXAONE4 = llama_family(
    "exaone4",
    "Exaone4ForCausalLM",
    _exaone,
    lambda config: {"sliding_window": window_of(config), "layer_types": types_of(config)} | rope_values(config),
    default_sizes(2048, 16384, 32) | {"rms_norm_eps": 1e-5, "sliding_window": 4096},
    lambda config: EMBEDDING | FINAL_NORM | AFTER | projections() | HEAD_NORMS,
)

# --- GLM --------------------------------------------------------------------------------------------------------------

_GLM_NORMS = norms(
    attention_norm="input_layernorm",
    attention_after="post_self_attn_layernorm",
    mlp_norm="post_attention_layernorm",
    mlp_after="post_mlp_layernorm",
)
_GLM_DEFAULTS = default_sizes(131_072, 13696, 2) | {"rms_norm_eps": 1.5625e-7, "head_dim": 128, "attention_bias": True}


def _glm(values: Values) -> dict[str, Any]:
    """Half of the channels rotate, in pairs of neighbours."""
    return {"biases": biases(qkv=values["attention_bias"]), "scheme": rope_everywhere(values, "interleaved")}


def _glm_values(config: DecoderConfig) -> dict[str, Any]:
    return qkv_bias_value(config) | partial_rope_values(config)


GLM = llama_family(
    "glm",
    "GlmForCausalLM",
    _glm,
    _glm_values,
    _GLM_DEFAULTS,
    lambda config: llama_tensors(config) | fused_gate_up(),
)

GLM4 = llama_family(
    "glm4",
    "Glm4ForCausalLM",
    lambda values: _glm(values) | {"residual": Residual("both")},
    _glm_values,
    _GLM_DEFAULTS,
    lambda config: EMBEDDING | FINAL_NORM | _GLM_NORMS | projections() | fused_gate_up(),
)

OLMO_LIKE = (OLMO2, OLMO3, EXAONE4, GLM, GLM4, OLMO)
