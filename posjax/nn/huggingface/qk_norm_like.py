"""Apertus, and Hunyuan and nanochat, which norm queries and keys after their rotation."""

from typing import Any

from posjax._checks import check
from posjax.nn.config import DecoderConfig
from posjax.nn.huggingface.family import PLAIN, Values, rope_rule, rope_values
from posjax.nn.huggingface.llama_like import (
    EMBEDDING,
    FINAL_NORM,
    HEAD_NORMS,
    LAYER,
    default_sizes,
    llama_biases,
    llama_family,
    llama_tensors,
    norms,
    outputs,
    projections,
    qkv_bias_value,
    rope_everywhere,
)
from posjax.nn.huggingface.views import View
from posjax.nn.specs import XIELU_BETA, XIELU_EPS, Norm
from posjax.norms import QKNorm
from posjax.scheme import Scheme


def _rope_then_norm(values: Values, *, gain: bool) -> Scheme:
    """RoPE, then a norm of each head. Raises ValueError for a rule with a temperature, which the norm would remove."""
    factor = rope_rule(values).table_factor
    why = "queries and keys are normed after their rotation, which removes it; attention_factor 1.0 would work"
    check(factor == 1, f"config.json: rope_parameters have the attention factor {factor:g}, but {why}")
    return rope_everywhere(values, norm=QKNorm(gain=gain, eps=values["rms_norm_eps"], after_features=True))


def normed_last(values: Values, *, gain: bool) -> dict[str, Any]:
    """The fields of RoPE with a norm of each head after it; see ``_rope_then_norm``."""
    return {"biases": llama_biases(values)["biases"], "scheme": _rope_then_norm(values, gain=gain)}


# --- Hunyuan ----------------------------------------------------------------------------------------------------------

HUNYUAN_NORMS = {
    f"block/attention/learned/norm/{ours}": View(f"{LAYER}self_attn.{theirs}_layernorm.weight", "size -> size")
    for ours, theirs in (("q", "query"), ("k", "key"))
}

HUNYUAN = llama_family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    lambda values: normed_last(values, gain=True),
    lambda config: qkv_bias_value(config) | rope_values(config),
    default_sizes(2048, 11008) | {"rms_norm_eps": 1e-5},
    lambda config: llama_tensors(config) | HUNYUAN_NORMS,
)

# --- nanochat ---------------------------------------------------------------------------------------------------------


def _nanochat_tensors(config: DecoderConfig) -> dict[str, View]:
    """nanochat turns queries and keys the other way round, so the halves of their heads change places here."""
    views = EMBEDDING | projections() | outputs("self_attn.o_proj", "mlp.fc2")
    views["block/mlp/up"] = View(f"{LAYER}mlp.fc1.weight", "mlp embed -> embed mlp")
    for name, heads in (("q", "heads"), ("k", "kv_heads")):
        tensor, rows = f"{LAYER}self_attn.{name}_proj.", f"({heads} -2 half)"
        views[f"block/attention/{name}"] = View(f"{tensor}weight", f"{rows} embed -> embed {heads} (-2 half)")
        views[f"block/attention/{name}_bias"] = View(f"{tensor}bias", f"{rows} -> {heads} (-2 half)")
    return views


NANOCHAT = llama_family(
    "nanochat",
    "NanoChatForCausalLM",
    lambda values: (
        normed_last(values, gain=False) | {"embedding_norm": True, "logit_softcap": values["final_logit_softcapping"]}
    ),
    lambda config: qkv_bias_value(config) | {"final_logit_softcapping": config.logit_softcap} | rope_values(config),
    default_sizes(2048, 8192) | {"hidden_act": "relu2", "final_logit_softcapping": 15.0},
    _nanochat_tensors,
    norm=Norm(gain=False),
    activations=PLAIN,
)

# --- Apertus ----------------------------------------------------------------------------------------------------------

_XIELU = f"{LAYER}mlp.act_fn."


def _apertus_tensors(config: DecoderConfig) -> dict[str, View]:
    views = EMBEDDING | FINAL_NORM | projections() | HEAD_NORMS
    views |= norms(attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm")
    return views | {f"block/mlp/activation/{name}": View(_XIELU + name, "1 ->", 0) for name in ("alpha_p", "alpha_n")}


APERTUS = llama_family(
    "apertus",
    "ApertusForCausalLM",
    lambda values: {
        "biases": llama_biases(values)["biases"],
        "scheme": rope_everywhere(values, norm=QKNorm(eps=values["rms_norm_eps"])),
    },
    lambda config: qkv_bias_value(config) | rope_values(config),
    default_sizes(65536, 14336) | {"rms_norm_eps": 1e-5, "hidden_act": "xielu"},
    _apertus_tensors,
    activations={"xielu": "xielu"},
    constants={f"{_XIELU}beta": XIELU_BETA, f"{_XIELU}eps": XIELU_EPS},
)

QK_NORM_LIKE = (HUNYUAN, NANOCHAT, APERTUS)
