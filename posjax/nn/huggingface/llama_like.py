"""Llama and similar families."""

from collections.abc import Callable
from typing import Any

from posjax import rotary
from posjax._checks import check, check_choice, check_positive
from posjax.nn.config import DecoderConfig
from posjax.nn.huggingface.family import (
    FULL,
    SLIDING,
    Family,
    Values,
    biases,
    layer_types,
    length_value,
    of_layers,
    rope_rule,
    rope_scheme,
    rope_schemes,
    rope_values,
    rule_of,
    types_of,
    window_of,
)
from posjax.nn.huggingface.views import View
from posjax.nn.specs import Experts, Norm, Residual
from posjax.norms import QKNorm
from posjax.scheme import Scheme
from posjax.sinks import LearnedSinks

KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "model_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "mlp_dim",
    "tie_word_embeddings": "tied_head",
    "max_position_embeddings": "trained_length",
}
LAYER = "model.layers.{layer}."
EMBEDDING = {
    "embed": View("model.embed_tokens.weight", "vocab embed -> vocab embed"),
    "head": View("lm_head.weight", "vocab embed -> embed vocab"),
}


def norms(**names: str) -> dict[str, View]:
    """The views of norms of a block by their names in files."""
    return {f"block/{ours}/gain": View(f"{LAYER}{theirs}.weight", "embed -> embed") for ours, theirs in names.items()}


def projections(attention: str = "self_attn.", mlp: str = "mlp.") -> dict[str, View]:
    """The views of separate projections, with their biases."""
    views = {}
    for ours, heads in (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads")):
        name = f"{LAYER}{attention}{ours}_proj."
        views[f"block/attention/{ours}"] = View(f"{name}weight", f"({heads} size) embed -> embed {heads} size")
        views[f"block/attention/{ours}_bias"] = View(f"{name}bias", f"({heads} size) -> {heads} size")
    for ours in ("gate", "up"):
        views[f"block/mlp/{ours}"] = View(f"{LAYER}{mlp}{ours}_proj.weight", "mlp embed -> embed mlp")
        views[f"block/mlp/{ours}_bias"] = View(f"{LAYER}{mlp}{ours}_proj.bias", "mlp -> mlp")
    return views | outputs(f"{attention}o_proj", f"{mlp}down_proj")


def outputs(attention: str, mlp: str) -> dict[str, View]:
    """The views of the projections back into the residual stream, with their biases."""
    return {
        "block/attention/o": View(f"{LAYER}{attention}.weight", "embed (heads size) -> heads size embed"),
        "block/attention/o_bias": View(f"{LAYER}{attention}.bias", "embed -> embed"),
        "block/mlp/down": View(f"{LAYER}{mlp}.weight", "embed mlp -> mlp embed"),
        "block/mlp/down_bias": View(f"{LAYER}{mlp}.bias", "embed -> embed"),
    }


LLAMA_NORMS = norms(attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")
FINAL_NORM = {"norm/gain": View("model.norm.weight", "embed -> embed")}
HEAD_NORMS = {
    f"block/attention/learned/norm/{name}": View(f"{LAYER}self_attn.{name}_norm.weight", "size -> size")
    for name in "qk"
}


def llama_tensors(config: DecoderConfig) -> dict[str, View]:
    """The views of Llama and of families with additional tensors."""
    return EMBEDDING | FINAL_NORM | LLAMA_NORMS | projections() | HEAD_NORMS


def default_sizes(length: int, width: int, kv_heads: int | None = None) -> dict[str, int | None]:
    """The defaults of transformers for sizes; ``kv_heads`` None means as many as query heads."""
    return {"max_position_embeddings": length, "intermediate_size": width, "num_key_value_heads": kv_heads}


LLAMA_DEFAULTS = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}


def llama_biases(values: Values) -> dict[str, Any]:
    """The biases of Llama's config, which has one key for queries, keys, values and output."""
    attention = values.get("attention_bias", False)
    return {"biases": biases(qkv=attention, output=attention, mlp=values.get("mlp_bias", False))}


def llama_bias_values(config: DecoderConfig) -> dict[str, bool]:
    """The inverse of ``llama_biases``: its keys of ``config.json``."""
    return {"attention_bias": "qkv" in config.biases, "mlp_bias": "mlp" in config.biases}


def _rope(values: Values) -> Scheme:
    return rope_scheme(values, rope_rule(values), FULL)


def _windowed(values: Values) -> Scheme:
    """A window in all layers or in no layer; transformers does not read ``layer_types`` of these families."""
    kind = FULL if values.get("sliding_window") is None else SLIDING
    other = set(layer_types(values, (kind,))) - {kind}
    name = values["model_type"]
    why = "because of sliding_window; leave layer_types out"
    check(not other, f"config.json: layer_types has {', '.join(other)}, but all layers of {name} are {kind}, {why}")
    return rope_scheme(values, rope_rule(values), kind)


def _family(
    name: str, architecture: str, read: Callable, write: Callable, defaults: dict, tensors: Callable = llama_tensors
) -> Family:
    """A family with Llama's keys and, by default, Llama's tensors."""
    return Family(name, architecture, KEYS, read, write, tensors, LLAMA_DEFAULTS | defaults)


LLAMA = _family(
    "llama",
    "LlamaForCausalLM",
    lambda values: llama_biases(values) | {"scheme": _rope(values)},
    lambda config: llama_bias_values(config) | rope_values(config),
    defaults=default_sizes(2048, 11008),
)

MISTRAL = _family(
    "mistral",
    "MistralForCausalLM",
    lambda values: {"scheme": _windowed(values)},
    lambda config: {"sliding_window": window_of(config)} | rope_values(config),
    defaults=default_sizes(131_072, 14336, 8) | {"sliding_window": 4096},
)


def _qwen_types(values: Values) -> list[str]:
    """Qwen's layer types: layers from ``max_window_layers`` on are sliding, if windows are used."""
    used = values.get("use_sliding_window") and values["sliding_window"] is not None
    first, count = values["max_window_layers"], values["num_hidden_layers"]
    types = layer_types(values, [SLIDING if used and n >= first else FULL for n in range(count)])
    check(used or SLIDING not in types, "config.json: layer_types has sliding layers, but use_sliding_window is off")
    return types


def _qwen_values(config: DecoderConfig) -> dict[str, Any]:
    window = window_of(config)
    windows = {"layer_types": types_of(config)} | ({} if window is None else {"sliding_window": window})
    return {"use_sliding_window": window is not None} | windows | rope_values(config)


QWEN2 = _family(
    "qwen2",
    "Qwen2ForCausalLM",
    lambda values: {"biases": ("qkv",), "scheme": rope_schemes(values, _qwen_types(values))},
    _qwen_values,
    defaults=default_sizes(32768, 22016, 32) | {"sliding_window": 4096, "max_window_layers": 28},
)

QWEN3 = _family(
    "qwen3",
    "Qwen3ForCausalLM",
    lambda values: (
        {"biases": llama_biases(values)["biases"]}
        | {"scheme": rope_schemes(values, _qwen_types(values), norm=QKNorm(eps=values["rms_norm_eps"]))}
    ),
    lambda config: {"attention_bias": "qkv" in config.biases} | _qwen_values(config),
    defaults=default_sizes(32768, 22016, 32) | {"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
)


def _smollm3_schemes(values: Values) -> Any:
    """Every layer's scheme: RoPE, except in every fourth layer or in layers with a 0 in ``no_rope_layers``.

    The layers without RoPE have the window, if there is one.
    """
    rule = rope_rule(values)
    count = values["num_hidden_layers"]
    every = values["no_rope_layer_interval"]
    rotating = values.get("no_rope_layers") or [(n + 1) % every for n in range(count)]
    check(len(rotating) >= count, f"config.json: no_rope_layers names {len(rotating)} layers of {count}")
    windows = values.get("use_sliding_window") and values.get("sliding_window") is not None
    types = layer_types(values, [SLIDING if windows and not rotates else FULL for rotates in rotating[:count]])
    pairs = zip(rotating, types, strict=False)
    return of_layers([rope_scheme(values, rule if rotates else None, kind) for rotates, kind in pairs])


def _smollm3_values(config: DecoderConfig) -> dict[str, Any]:
    window = window_of(config)
    windows = {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": types_of(config)}
    return windows | {"no_rope_layers": [int(scheme.rotates) for scheme in config.layers.schemes]}


SMOLLM3 = _family(
    "smollm3",
    "SmolLM3ForCausalLM",
    lambda values: llama_biases(values) | {"scheme": _smollm3_schemes(values)},
    lambda config: llama_bias_values(config) | rope_values(config) | _smollm3_values(config),
    defaults=default_sizes(32768, 11008, 4) | {"tie_word_embeddings": True, "no_rope_layer_interval": 4},
)


def _inverse(values: Values, key: str) -> float:
    check_positive(f"config.json: {key}", values[key])
    return 1.0 / values[key]


GRANITE = _family(
    "granite",
    "GraniteForCausalLM",
    lambda values: (
        llama_biases(values)
        | {
            "scheme": _rope(values),
            "embedding_scale": float(values["embedding_multiplier"]),
            "query_scale": float(values["attention_multiplier"]),
            "residual": Residual(scale=float(values["residual_multiplier"])),
            "logit_scale": _inverse(values, "logits_scaling"),
        }
    ),
    lambda config: (
        llama_bias_values(config)
        | rope_values(config)
        | {
            "embedding_multiplier": config.embedding_scale,
            "attention_multiplier": config.head_dim**-0.5 if config.query_scale is None else config.query_scale,
            "residual_multiplier": config.residual.scale,
            "logits_scaling": 1.0 / config.logit_scale,
        }
    ),
    defaults=default_sizes(2048, 11008)
    | {
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
)


# --- Gemma ------------------------------------------------------------------------------------------------------------

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


GEMMA2 = _gemma_family(
    "gemma2",
    "Gemma2ForCausalLM",
    lambda values: {"scheme": rope_schemes(values, layer_types(values, (SLIDING, FULL)))},
    rope_values,
    {},
    default_sizes(8192, 9216, 4)
    | {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 256.0,
        "sliding_window": 4096,
        "head_dim": 256,
    },
)


def _gemma3_rope_values(config: DecoderConfig) -> dict[str, Any]:
    rules = {kind: rule_of(config, kind) for kind in dict.fromkeys(types_of(config))}
    rules = {
        kind: rotary.Plain() if rule is None else rule for kind, rule in ({FULL: None, SLIDING: None} | rules).items()
    }
    rope_parameters = {kind: rule.to_hf() for kind, rule in rules.items()}
    older = {
        "rope_theta": rope_parameters[FULL]["rope_theta"],
        "rope_local_base_freq": rope_parameters[SLIDING]["rope_theta"],
    }
    return length_value(config) | {"rope_parameters": rope_parameters} | older


GEMMA3 = _gemma_family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    lambda values: {
        "scheme": rope_schemes(
            values,
            layer_types(values, (SLIDING,) * (values.get("sliding_window_pattern", 6) - 1) + (FULL,)),
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


# --- others -----------------------------------------------------------------------------------------------------------

OLMO2 = _family(
    "olmo2",
    "Olmo2ForCausalLM",
    lambda values: (
        {"biases": llama_biases(values)["biases"], "scheme": _rope(values)}
        | {"residual": Residual("after"), "projection_norm": True}
    ),
    lambda config: {"attention_bias": "qkv" in config.biases} | rope_values(config),
    tensors=lambda config: (
        EMBEDDING
        | FINAL_NORM
        | norms(attention_after="post_attention_layernorm", mlp_after="post_feedforward_layernorm")
        | projections()
        | {
            f"block/attention/{name}_norm/gain": View(
                f"{LAYER}self_attn.{name}_norm.weight", f"({heads} size) -> {heads} size"
            )
            for name, heads in (("q", "heads"), ("k", "kv_heads"))
        }
    ),
    defaults=default_sizes(2048, 11008) | {"rms_norm_eps": 1e-5},
)

_QKV = "(heads+kv_heads+kv_heads size) embed -> embed {} size"
PHI3 = _family(
    "phi3",
    "Phi3ForCausalLM",
    lambda values: {"scheme": _phi3_scheme(values)},
    lambda config: {"sliding_window": window_of(config)} | _phi3_rope_values(config),
    tensors=lambda config: (
        EMBEDDING
        | FINAL_NORM
        | LLAMA_NORMS
        | outputs("self_attn.o_proj", "mlp.down_proj")
        | {
            f"block/attention/{name}": View(f"{LAYER}self_attn.qkv_proj.weight", _QKV.format(heads), part)
            for part, (name, heads) in enumerate((("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads")))
        }
        | {
            f"block/mlp/{name}": View(f"{LAYER}mlp.gate_up_proj.weight", "(2 mlp) embed -> embed mlp", part)
            for part, name in enumerate(("gate", "up"))
        }
    ),
    defaults=default_sizes(4096, 8192) | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
)


def _phi3_scheme(values: Values) -> Scheme:
    """Plain RoPE or LongRoPE, the only rules that transformers reads for this family."""
    scheme = _windowed(values)
    rule = scheme.features.frequencies
    size = values["hidden_size"] // values["num_attention_heads"]
    check_choice("config.json: rope_type of phi3", rule.hf_type, (rotary.Plain.hf_type, rotary.LongRoPE.hf_type))
    wanted = rotary.Plain(partial_rotary_factor=rule.partial_rotary_factor).rotary_dim(size) // 2
    count = len(getattr(rule, "long_factor", range(wanted)))
    check(
        count == wanted,
        f"config.json: long_factor must have {wanted} numbers for phi3 with heads of {size} channels, found {count}",
    )
    return scheme


def _phi3_rope_values(config: DecoderConfig) -> dict[str, Any]:
    """Phi-3 reads the original length outside the rope parameters, and in transformers 4 also the rotated part."""
    values = rope_values(config)
    inner = values.get("rope_parameters", {})
    outer = ("original_max_position_embeddings", "partial_rotary_factor")
    return values | {key: inner[key] for key in outer if key in inner}


def _cohere_schemes(values: Values) -> Any:
    """RoPE in sliding layers, none in full layers."""
    types = layer_types(values, (SLIDING,) * (values.get("sliding_window_pattern", 4) - 1) + (FULL,))
    rules = {SLIDING: rope_rule(values), FULL: None}
    return rope_schemes(values, types, rules, pairing="interleaved")


COHERE2 = Family(
    "cohere2",
    "Cohere2ForCausalLM",
    KEYS,
    lambda values: {
        "residual": Residual(parallel=True, shared_norm=True),
        "logit_scale": float(values["logit_scale"]),
        "biases": llama_biases(values)["biases"],
        "scheme": _cohere_schemes(values),
    },
    lambda config: (
        {
            "logit_scale": config.logit_scale,
            "attention_bias": "qkv" in config.biases,
            "sliding_window": window_of(config),
            "layer_types": types_of(config),
        }
        | rope_values(config)
    ),
    lambda config: EMBEDDING | FINAL_NORM | norms(attention_norm="input_layernorm") | projections(),
    default_sizes(8192, 22528)
    | {
        "layer_norm_eps": 1e-5,
        "hidden_act": "silu",
        "logit_scale": 0.0625,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    {"use_qk_norm": False},
    norm=Norm("layer"),
    eps="layer_norm_eps",
)

_EXPERTS = f"{LAYER}mlp.experts."


def _gpt_oss_tensors(config: DecoderConfig) -> dict[str, View]:
    """The columns of ``gate_up_proj`` alternate between gate and up."""
    views = EMBEDDING | FINAL_NORM | LLAMA_NORMS | projections()
    views["block/attention/learned/sinks/sinks"] = View(f"{LAYER}self_attn.sinks", "heads -> heads")
    views["block/mlp/router"] = View(f"{LAYER}mlp.router.weight", "experts embed -> embed experts")
    views["block/mlp/router_bias"] = View(f"{LAYER}mlp.router.bias", "experts -> experts")
    for part, name in enumerate(("gate", "up")):
        pattern = "experts embed (mlp 2) -> experts embed mlp"
        views[f"block/mlp/{name}"] = View(f"{_EXPERTS}gate_up_proj", pattern, part)
        views[f"block/mlp/{name}_bias"] = View(f"{_EXPERTS}gate_up_proj_bias", "experts (mlp 2) -> experts mlp", part)
    views["block/mlp/down"] = View(f"{_EXPERTS}down_proj", "experts mlp embed -> experts mlp embed")
    views["block/mlp/down_bias"] = View(f"{_EXPERTS}down_proj_bias", "experts embed -> experts embed")
    return views


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    KEYS,
    lambda values: {
        "activation": "swiglu-clamped",
        "experts": Experts(values["num_local_experts"], values["num_experts_per_tok"]),
        "biases": (*llama_biases(values)["biases"], "mlp"),
        "scheme": rope_schemes(values, layer_types(values, (SLIDING, FULL)), sinks=LearnedSinks()),
    },
    lambda config: (
        {
            "num_local_experts": config.experts and config.experts.count,
            "num_experts_per_tok": config.experts and config.experts.per_token,
            "attention_bias": "qkv" in config.biases,
            "swiglu_limit": 7.0,
            "sliding_window": window_of(config),
            "layer_types": types_of(config),
        }
        | rope_values(config)
    ),
    _gpt_oss_tensors,
    default_sizes(131_072, 2880, 8)
    | {
        "rms_norm_eps": 1e-5,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "attention_bias": True,
        "sliding_window": 128,
        "head_dim": 64,
        "tie_word_embeddings": False,
    },
    {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "hidden_act": "silu"},
    aliases={"num_experts": "num_local_experts"},
    activation="",
)

LLAMA_LIKE = (LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, GRANITE, GEMMA2, GEMMA3, OLMO2, PHI3, COHERE2, GPT_OSS)
