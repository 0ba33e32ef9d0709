"""Llama, and families whose blocks are Llama's or nearly so."""

from collections.abc import Callable
from typing import Any

from posjax import rotary, scales
from posjax._checks import check, check_choice, check_positive, describe
from posjax.nn.config import DecoderConfig
from posjax.nn.huggingface.family import (
    FULL,
    PLAIN,
    SLIDING,
    Family,
    Values,
    biases,
    layer_types,
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
from posjax.nn.specs import Experts, Residual, Router
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


def fused_gate_up(name: str = "mlp.gate_up_proj") -> dict[str, View]:
    """The views of gate and up in one tensor, the gate's rows first."""
    pattern = "(2 mlp) embed -> embed mlp"
    return {
        f"block/mlp/{ours}": View(f"{LAYER}{name}.weight", pattern, part) for part, ours in enumerate(("gate", "up"))
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


def qkv_bias_value(config: DecoderConfig) -> dict[str, bool]:
    """The key of families whose config has nothing of the MLP's biases."""
    return {"attention_bias": "qkv" in config.biases}


def rope_everywhere(values: Values, pairing: str = "half", **slots: Any) -> Scheme:
    """The same RoPE in all layers, without windows."""
    return rope_scheme(values, rope_rule(values), FULL, pairing, **slots)


def windowed(values: Values, **slots: Any) -> Scheme:
    """RoPE in all layers, and a window in all layers or in none.

    transformers does not read ``layer_types`` of these families.
    """
    kind = FULL if values.get("sliding_window") is None else SLIDING
    other = set(layer_types(values, (kind,))) - {kind}
    name = values["model_type"]
    why = "because of sliding_window; leave layer_types out"
    check(not other, f"config.json: layer_types has {', '.join(other)}, but all layers of {name} are {kind}, {why}")
    return rope_scheme(values, rope_rule(values), kind, **slots)


def llama_family(
    name: str,
    architecture: str,
    read: Callable,
    write: Callable,
    defaults: dict,
    tensors: Callable = llama_tensors,
    **options: Any,
) -> Family:
    """A family with Llama's keys and, by default, Llama's tensors; the options are fields of ``Family``."""
    return Family(name, architecture, KEYS, read, write, tensors, LLAMA_DEFAULTS | defaults, **options)


LLAMA = llama_family(
    "llama",
    "LlamaForCausalLM",
    lambda values: llama_biases(values) | {"scheme": rope_everywhere(values)},
    lambda config: llama_bias_values(config) | rope_values(config),
    defaults=default_sizes(2048, 11008),
)

MISTRAL = llama_family(
    "mistral",
    "MistralForCausalLM",
    lambda values: {"scheme": windowed(values)},
    lambda config: {"sliding_window": window_of(config)} | rope_values(config),
    defaults=default_sizes(131_072, 14336, 8) | {"sliding_window": 4096},
)


MINISTRAL = llama_family(
    "ministral",
    "MinistralForCausalLM",
    lambda values: {"scheme": rope_schemes(values, _ministral_types(values))},
    lambda config: {"sliding_window": window_of(config), "layer_types": types_of(config)} | rope_values(config),
    defaults=default_sizes(131_072, 14336, 8) | {"sliding_window": 4096},
)


def _ministral_types(values: Values) -> list[str]:
    return layer_types(values, (FULL if values["sliding_window"] is None else SLIDING,))


_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def ministral_scale(values: Values) -> scales.MinistralTemperature:
    """The growth of queries with their position; ``rope_parameters`` say how."""
    rope = values.get("rope_scaling") or values["rope_parameters"]
    keys = ("original_max_position_embeddings", "llama_4_scaling_beta")
    lacking = [key for key in keys if rope.get(key) is None]
    name = values["model_type"]
    check(not lacking, f"config.json: rope_parameters of {name} lack {lacking[0] if lacking else None!r}")
    return scales.MinistralTemperature(*(rope[key] for key in keys))


def ministral_rope_values(config: DecoderConfig) -> dict[str, Any]:
    """``rope_values`` with the inverse of ``ministral_scale``."""
    values, scale = rope_values(config), config.layers.schemes[0].scale
    wanted = "config.json of this family needs scales.MinistralTemperature"
    check(type(scale) is scales.MinistralTemperature, f"scheme: {wanted}, found scale {describe(scale)}")
    more = {"original_max_position_embeddings": scale.length, "llama_4_scaling_beta": scale.beta}
    return values | {"rope_parameters": values.get("rope_parameters", {}) | more}


MINISTRAL3 = llama_family(
    "ministral3",
    "Ministral3ForCausalLM",
    lambda values: {"scheme": windowed(values, scale=ministral_scale(values))},
    lambda config: {"sliding_window": window_of(config)} | ministral_rope_values(config),
    defaults=default_sizes(262_144, 14336, 8)
    | {"rms_norm_eps": 1e-5, "head_dim": 128, "rope_parameters": _MINISTRAL3_ROPE},
)

INTERNLM3 = llama_family(
    "internlm3",
    "LlamaForCausalLM",
    lambda values: llama_biases(values) | {"scheme": rope_everywhere(values)},
    lambda config: llama_bias_values(config) | rope_values(config),
    defaults=default_sizes(32768, 10240, 2) | {"rms_norm_eps": 1e-5, "head_dim": 128},
    aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
)

SEED_OSS = llama_family(
    "seed_oss",
    "SeedOssForCausalLM",
    lambda values: {
        "biases": biases(
            qkv=values["attention_bias"], output=values["attention_out_bias"], mlp=values.get("mlp_bias", False)
        ),
        "scheme": rope_everywhere(values),
    },
    lambda config: llama_bias_values(config) | {"attention_out_bias": "output" in config.biases} | rope_values(config),
    defaults=default_sizes(524_288, 27648, 8) | {"head_dim": 128, "attention_bias": True, "attention_out_bias": False},
)

ERNIE4_5 = llama_family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    lambda values: {
        "biases": biases(qkv=values["use_bias"], output=values["use_bias"], mlp=values["use_bias"]),
        "scheme": rope_everywhere(values, "interleaved"),
    },
    lambda config: {"use_bias": "mlp" in config.biases} | rope_values(config),
    defaults=default_sizes(131_072, 3072, 2)
    | {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "head_dim": 128, "use_bias": False},
)

HELIUM = llama_family(
    "helium",
    "HeliumForCausalLM",
    lambda values: {
        "biases": biases(qkv=values.get("attention_bias", False), mlp=values.get("mlp_bias", False)),
        "scheme": rope_everywhere(values, "interleaved"),
    },
    lambda config: llama_bias_values(config) | rope_values(config),
    defaults=default_sizes(4096, 7040, 20) | {"rms_norm_eps": 1e-8, "head_dim": 128},
)

CWM = llama_family(
    "cwm",
    "CwmForCausalLM",
    lambda values: {
        "biases": biases(mlp=values.get("mlp_bias", False)),
        "scheme": rope_schemes(values, layer_types(values, (FULL, SLIDING, SLIDING, SLIDING))),
    },
    lambda config: (
        {"mlp_bias": "mlp" in config.biases, "sliding_window": window_of(config), "layer_types": types_of(config)}
        | rope_values(config)
    ),
    defaults=default_sizes(131_072, 21504, 8) | {"rms_norm_eps": 1e-5, "head_dim": 128, "sliding_window": 8192},
)


ARCEE = llama_family(
    "arcee",
    "ArceeForCausalLM",
    lambda values: llama_biases(values) | {"scheme": rope_everywhere(values)},
    lambda config: llama_bias_values(config) | rope_values(config),
    defaults=default_sizes(4096, 18432) | {"rms_norm_eps": 1e-5, "hidden_act": "relu2"},
    activations=PLAIN,
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


QWEN2 = llama_family(
    "qwen2",
    "Qwen2ForCausalLM",
    lambda values: {"biases": ("qkv",), "scheme": rope_schemes(values, _qwen_types(values))},
    _qwen_values,
    defaults=default_sizes(32768, 22016, 32) | {"sliding_window": 4096, "max_window_layers": 28},
)

QWEN3 = llama_family(
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


SMOLLM3 = llama_family(
    "smollm3",
    "SmolLM3ForCausalLM",
    lambda values: llama_biases(values) | {"scheme": _smollm3_schemes(values)},
    lambda config: llama_bias_values(config) | rope_values(config) | _smollm3_values(config),
    defaults=default_sizes(32768, 11008, 4) | {"tie_word_embeddings": True, "no_rope_layer_interval": 4},
)


def _inverse(values: Values, key: str) -> float:
    check_positive(f"config.json: {key}", values[key])
    return 1.0 / values[key]


def granite(values: Values) -> dict[str, Any]:
    """Granite's biases and its four multipliers."""
    return llama_biases(values) | {
        "embedding_scale": float(values["embedding_multiplier"]),
        "query_scale": float(values["attention_multiplier"]),
        "residual": Residual(scale=float(values["residual_multiplier"])),
        "logit_scale": _inverse(values, "logits_scaling"),
    }


def granite_values(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of ``granite``, and the keys of the rule."""
    multipliers = {
        "embedding_multiplier": config.embedding_scale,
        "attention_multiplier": config.head_dim**-0.5 if config.query_scale is None else config.query_scale,
        "residual_multiplier": config.residual.scale,
        "logits_scaling": 1.0 / config.logit_scale,
    }
    return llama_bias_values(config) | rope_values(config) | multipliers


_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
_GRANITE_DEFAULTS = default_sizes(2048, 11008) | dict.fromkeys(_MULTIPLIERS, 1.0)

GRANITE = llama_family(
    "granite",
    "GraniteForCausalLM",
    lambda values: granite(values) | {"scheme": rope_everywhere(values)},
    granite_values,
    _GRANITE_DEFAULTS,
)


def _hyperclovax(values: Values) -> dict[str, Any]:
    """Granite's multipliers, but the logits are multiplied, and there may be norms on both sides."""
    size = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    norm = "both" if values["use_post_norm"] else "before"
    return granite({"attention_multiplier": max(size, 1) ** -0.5} | values) | {
        "residual": Residual(norm, scale=float(values["residual_multiplier"])),
        "logit_scale": float(values["logits_scaling"]),
        "scheme": rope_everywhere(values),
    }


HYPERCLOVAX = llama_family(
    "hyperclovax",
    "HyperCLOVAXForCausalLM",
    _hyperclovax,
    lambda config: (
        granite_values(config) | {"logits_scaling": config.logit_scale, "use_post_norm": config.residual.norm == "both"}
    ),
    {key: value for key, value in _GRANITE_DEFAULTS.items() if key != "attention_multiplier"} | {"use_post_norm": True},
    lambda config: llama_tensors(config) | norms(attention_after="post_norm1", mlp_after="post_norm2"),
)


def _attention_alone(values: Values) -> Scheme:
    """The scheme of a Granite 4 whose layers are all attention: RoPE, or no positions at all.

    Releases name such a layer "attention", transformers 5 names it "full_attention".
    """
    types = values.get("layer_types") or ["mamba"]  # the default of transformers
    others = [kind for kind in types if kind not in ("attention", FULL)]
    why = "only models whose layers are all attention can be read, such as Granite 4.0 Micro"
    check(not others, f"config.json: layer_types has {describe(others[0] if others else None)}; {why}")
    return rope_everywhere(values) if values.get("position_embedding_type") == "rope" else Scheme()


def _attention_alone_values(config: DecoderConfig) -> dict[str, Any]:
    rotates = "nope" if rule_of(config) is None else "rope"
    return {
        "layer_types": ["attention"] * config.num_layers,
        "num_local_experts": 0,
        "position_embedding_type": rotates,
    }


GRANITE_HYBRID = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    {key: field for key, field in KEYS.items() if field != "mlp_dim"} | {"shared_intermediate_size": "mlp_dim"},
    lambda values: granite(values) | {"scheme": _attention_alone(values)},
    lambda config: granite_values(config) | _attention_alone_values(config),
    lambda config: (
        llama_tensors(config)
        | outputs("self_attn.o_proj", "shared_mlp.output_linear")
        | fused_gate_up("shared_mlp.input_linear")
    ),
    LLAMA_DEFAULTS | _GRANITE_DEFAULTS | {"shared_intermediate_size": 1024},
    {"num_local_experts": 0},
    aliases={"layers_block_type": "layer_types"},
)


# --- others -----------------------------------------------------------------------------------------------------------

_QKV = "(heads+kv_heads+kv_heads size) embed -> embed {} size"
PHI3 = llama_family(
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
        | fused_gate_up()
    ),
    defaults=default_sizes(4096, 8192) | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
)


def _phi3_scheme(values: Values) -> Scheme:
    """Plain RoPE or LongRoPE, the only rules that transformers reads for this family."""
    scheme = windowed(values)
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
        "experts": Experts(
            values["num_local_experts"],
            values["num_experts_per_tok"],
            Router(bias=True),
            balance=float(values["router_aux_loss_coef"]),
        ),
        "biases": (*llama_biases(values)["biases"], "mlp"),
        "scheme": rope_schemes(values, layer_types(values, (SLIDING, FULL)), sinks=LearnedSinks()),
    },
    lambda config: (
        {
            "num_local_experts": config.experts and config.experts.count,
            "num_experts_per_tok": config.experts and config.experts.per_token,
            "router_aux_loss_coef": config.experts and config.experts.balance,
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
        "router_aux_loss_coef": 0.001,
        "attention_bias": True,
        "sliding_window": 128,
        "head_dim": 64,
        "tie_word_embeddings": False,
    },
    {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "hidden_act": "silu"},
    aliases={"num_experts": "num_local_experts"},
    activation="",
)

LLAMA_LIKE = (LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, GRANITE, PHI3, GPT_OSS, MINISTRAL, MINISTRAL3, INTERNLM3)
LLAMA_LIKE += (SEED_OSS, ERNIE4_5, HELIUM, CWM, GRANITE_HYBRID, ARCEE, HYPERCLOVAX)
