"""Attention with an output gate of its own projection: Trinity (AFMoE)."""

from typing import Any

from posjax.nn.config import DecoderConfig
from posjax.nn.huggingface.corrected_moe import shared_value, shared_width
from posjax.nn.huggingface.family import (
    FULL,
    SLIDING,
    Family,
    Values,
    biases,
    layer_types,
    of_layers,
    rope_rule,
    rope_scheme,
    rope_values,
    types_of,
    window_of,
)
from posjax.nn.huggingface.llama_like import (
    EMBEDDING,
    FINAL_NORM,
    HEAD_NORMS,
    LAYER,
    LLAMA_DEFAULTS,
    default_sizes,
    norms,
    projections,
    qkv_bias_value,
)
from posjax.nn.huggingface.moe_like import (
    OWN_WIDTH,
    experts_apart,
    first_dense,
    mixture,
    mixture_of,
    mixture_tensors,
    mixture_values,
    router,
    shared_mlp,
)
from posjax.nn.huggingface.views import View
from posjax.nn.specs import Residual, Router
from posjax.norms import QKNorm
from posjax.scheme import Scheme

_NORMS = norms(
    attention_norm="input_layernorm",
    attention_after="post_attention_layernorm",
    mlp_norm="pre_mlp_layernorm",
    mlp_after="post_mlp_layernorm",
)
_GATE = {
    "block/attention/gate/weight": View(f"{LAYER}self_attn.gate_proj.weight", "(heads size) embed -> embed heads size")
}


def _afmoe(values: Values) -> dict[str, Any]:
    """Layers with windows rotate, full ones do not."""
    interval = values.get("global_attn_every_n_layers") or 4
    types = layer_types(values, [*[SLIDING] * (interval - 1), FULL])
    norm, has = QKNorm(eps=values["rms_norm_eps"]), values.get("attention_bias", False)
    schemes = {FULL: Scheme(norm=norm)}
    if SLIDING in types:
        schemes[SLIDING] = rope_scheme(values, rope_rule(values), SLIDING, norm=norm)
    return {
        "residual": Residual("both"),
        "biases": biases(qkv=has, output=has),
        "attention_gate": "elementwise",
        "embedding_scale": values["hidden_size"] ** 0.5 if values["mup_enabled"] else 1.0,
        "scheme": of_layers([schemes[kind] for kind in types]),
    } | mixture(
        values,
        "num_experts",
        dense=range(values["num_dense_layers"]),
        router=Router("sigmoid", correction=True, scale=float(values["route_scale"])),
        shared_dim=shared_width(values, "num_shared_experts"),
    )


def _afmoe_values(config: DecoderConfig) -> dict[str, Any]:
    return (
        {"layer_types": types_of(config), "sliding_window": window_of(config)}
        | {"mup_enabled": config.embedding_scale != 1, "num_dense_layers": first_dense(config)}
        | {"route_scale": mixture_of(config).router.scale}
        | mixture_values(config, "num_experts")
        | shared_value(config, "num_shared_experts")
        | qkv_bias_value(config)
        | rope_values(config)
    )


AFMOE = Family(
    "afmoe",
    "AfmoeForCausalLM",
    OWN_WIDTH,
    _afmoe,
    _afmoe_values,
    mixture_tensors(
        experts_apart() | router("mlp.router.gate.weight", "mlp.expert_bias") | shared_mlp(),
        lambda config: EMBEDDING | FINAL_NORM | _NORMS | projections() | HEAD_NORMS | _GATE,
    ),
    LLAMA_DEFAULTS
    | default_sizes(16384, 6144)
    | {"rms_norm_eps": 1e-5, "head_dim": 128, "moe_intermediate_size": 1408, "num_dense_layers": 1}
    | {"num_experts": 64, "num_experts_per_tok": 6, "num_shared_experts": 2, "route_scale": 1.0}
    | {"sliding_window": 1024, "mup_enabled": False, "global_attn_every_n_layers": 4},
)

GATED_LIKE = (AFMOE,)
