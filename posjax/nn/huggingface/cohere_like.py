"""Cohere and others with LayerNorm and Llama's separate projections."""

from collections.abc import Callable, Mapping
from typing import Any

from posjax.nn.config import DecoderConfig
from posjax.nn.huggingface.family import (
    FULL,
    PLAIN,
    SLIDING,
    Family,
    Values,
    biases,
    partial_rope_values,
    pattern_types,
    rope_rule,
    rope_schemes,
    rope_values,
    types_of,
    window_of,
)
from posjax.nn.huggingface.gpt_like import ALL_BIASES, LAYER_NORM, PLAIN_TANH, matrix, mlp, norm, output
from posjax.nn.huggingface.llama_like import (
    EMBEDDING,
    FINAL_NORM,
    KEYS,
    LAYER,
    default_sizes,
    llama_bias_values,
    llama_biases,
    norms,
    projections,
    qkv_bias_value,
    rope_everywhere,
    windowed,
)
from posjax.nn.huggingface.views import View
from posjax.nn.specs import Norm, Residual


def _family(
    name: str,
    architecture: str,
    read: Callable,
    write: Callable,
    tensors: Callable,
    defaults: Mapping[str, Any],
    **options: Any,
) -> Family:
    """A family with Llama's keys; the options are fields of ``Family``."""
    defaults = {"layer_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False} | defaults
    return Family(name, architecture, KEYS, read, write, tensors, defaults, **({"eps": "layer_norm_eps"} | options))


# --- Cohere -----------------------------------------------------------------------------------------------------------


def _cohere(values: Values) -> dict[str, Any]:
    return {
        "residual": Residual(parallel=True, shared_norm=True),
        "logit_scale": float(values["logit_scale"]),
        "biases": llama_biases(values)["biases"],
    }


def _cohere_values(config: DecoderConfig) -> dict[str, Any]:
    return {"logit_scale": config.logit_scale} | qkv_bias_value(config) | rope_values(config)


def _cohere_tensors(config: DecoderConfig) -> dict[str, View]:
    views = EMBEDDING | FINAL_NORM | norms(attention_norm="input_layernorm") | projections()
    for name, heads in (("q", "heads"), ("k", "kv_heads")):
        tensor = f"{LAYER}self_attn.{name}_norm.weight"
        views[f"block/attention/{name}_norm/gain"] = View(tensor, f"{heads} size -> {heads} size")
    return views


_COHERE_DEFAULTS = default_sizes(8192, 22528) | {"logit_scale": 0.0625, "tie_word_embeddings": True}


def _cohere_schemes(values: Values) -> Any:
    """RoPE in sliding layers, none in full layers."""
    rules = {SLIDING: rope_rule(values), FULL: None}
    return rope_schemes(values, pattern_types(values, 4), rules, pairing="interleaved")


COHERE2 = _family(
    "cohere2",
    "Cohere2ForCausalLM",
    lambda values: _cohere(values) | {"scheme": _cohere_schemes(values)},
    lambda config: _cohere_values(config) | {"sliding_window": window_of(config), "layer_types": types_of(config)},
    _cohere_tensors,
    _COHERE_DEFAULTS | {"sliding_window": 4096},
    fixed={"use_qk_norm": False},
    norm=Norm("layer"),
)

COHERE = _family(
    "cohere",
    "CohereForCausalLM",
    lambda values: (
        _cohere(values) | {"head_norms": values["use_qk_norm"], "scheme": rope_everywhere(values, "interleaved")}
    ),
    lambda config: _cohere_values(config) | {"use_qk_norm": config.head_norms},
    _cohere_tensors,
    _COHERE_DEFAULTS | {"use_qk_norm": False},
    norm=Norm("layer"),
)

# --- others -----------------------------------------------------------------------------------------------------------


_NORMS = (
    norm("block/attention_norm", f"{LAYER}input_layernorm")
    | norm("block/mlp_norm", f"{LAYER}post_attention_layernorm")
    | norm("norm", "model.norm")
)

STARCODER2 = _family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    lambda values: {"biases": ALL_BIASES if values["use_bias"] else (), "scheme": windowed(values)},
    lambda config: {"use_bias": "mlp" in config.biases, "sliding_window": window_of(config)} | rope_values(config),
    lambda config: EMBEDDING | _NORMS | projections() | mlp(LAYER, "mlp.c_fc", "mlp.c_proj"),
    default_sizes(4096, 12288, 2)
    | {"norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "use_bias": True},
    norm=LAYER_NORM,
    eps="norm_epsilon",
    activations=PLAIN_TANH,
)


def _stablelm(values: Values) -> dict[str, Any]:
    """Parallel branches share the norm before them; branches in turn have two."""
    parallel = values["use_parallel_residual"]
    return {
        "biases": biases(qkv=values["use_qkv_bias"]),
        "head_norms": values["qk_layernorm"],
        "residual": Residual(parallel=parallel, shared_norm=parallel),
        "scheme": rope_everywhere(values),
    }


def _stablelm_values(config: DecoderConfig) -> dict[str, Any]:
    return partial_rope_values(config) | {
        "qk_layernorm": config.head_norms,
        "use_parallel_residual": config.residual.parallel,
        "use_qkv_bias": "qkv" in config.biases,
    }


_LAYER_NORMS_OF_HEADS = {
    f"block/attention/{name}_norm/gain": View(
        f"{LAYER}self_attn.{name}_layernorm.norms.{{head}}.weight", "size -> size"
    )
    for name in "qk"
}


STABLELM = _family(
    "stablelm",
    "StableLmForCausalLM",
    _stablelm,
    _stablelm_values,
    lambda config: EMBEDDING | _NORMS | projections() | _LAYER_NORMS_OF_HEADS,
    default_sizes(4096, 6912, 32) | dict.fromkeys(("use_qkv_bias", "use_parallel_residual", "qk_layernorm"), False),
    norm=LAYER_NORM,
)


def _phi_tensors(config: DecoderConfig) -> dict[str, View]:
    views = EMBEDDING | projections() | output(LAYER, "self_attn.dense") | mlp(LAYER, "mlp.fc1", "mlp.fc2")
    views |= matrix("head", "lm_head", "vocab embed -> embed vocab", "vocab -> vocab")
    return views | norm("block/attention_norm", f"{LAYER}input_layernorm") | norm("norm", "model.final_layernorm")


PHI = _family(
    "phi",
    "PhiForCausalLM",
    lambda values: {
        "biases": (*ALL_BIASES, "head"),
        "residual": Residual(parallel=True, shared_norm=True),
        "scheme": rope_everywhere(values),
    },
    partial_rope_values,
    _phi_tensors,
    default_sizes(2048, 8192) | {"hidden_act": "gelu_new"},
    fixed={"qk_layernorm": False},
    norm=LAYER_NORM,
    activations=PLAIN,
)

NEMOTRON = _family(
    "nemotron",
    "NemotronForCausalLM",
    lambda values: llama_biases(values) | {"scheme": rope_everywhere(values)},
    lambda config: llama_bias_values(config) | partial_rope_values(config),
    lambda config: EMBEDDING | _NORMS | projections(),
    default_sizes(4096, 24576) | {"norm_eps": 1e-5, "hidden_act": "relu2"},
    norm=Norm("layer", bias=True, unit_offset=True),
    eps="norm_eps",
    activations=PLAIN,
)

COHERE_LIKE = (COHERE2, COHERE, STARCODER2, STABLELM, PHI, NEMOTRON)
