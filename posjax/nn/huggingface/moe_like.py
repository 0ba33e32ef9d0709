"""Families with mixtures of experts around Llama's blocks, with a tensor for every expert or for all of a layer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from posjax._checks import check, describe
from posjax.nn.config import DecoderConfig
from posjax.nn.huggingface.family import (
    FULL,
    SLIDING,
    Family,
    Values,
    biases,
    layer_types,
    layered_rope_values,
    of_layers,
    rope_rule,
    rope_scheme,
    rope_schemes,
    rope_values,
    types_of,
    window_of,
)
from posjax.nn.huggingface.llama_like import (
    EMBEDDING,
    FINAL_NORM,
    KEYS,
    LAYER,
    LLAMA_DEFAULTS,
    default_sizes,
    granite,
    granite_values,
    llama_biases,
    llama_tensors,
    norms,
    projections,
    qkv_bias_value,
    rope_everywhere,
    windowed,
)
from posjax.nn.huggingface.olmo_like import AFTER, norms_of_all_heads
from posjax.nn.huggingface.qk_norm_like import HUNYUAN_NORMS, normed_last
from posjax.nn.huggingface.views import View
from posjax.nn.specs import Experts, Norm, Residual, Router
from posjax.norms import QKNorm

# --- tensors ----------------------------------------------------------------------------------------------------------

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
ONE_TWO_THREE = ("w1", "w3", "w2")
"""Mixtral's names of gate, up and down."""
_PATTERNS = ("mlp embed -> embed mlp", "mlp embed -> embed mlp", "embed mlp -> mlp embed")


def experts_apart(block: str = "mlp.", names: Sequence[str] = GATE_UP_DOWN) -> dict[str, View]:
    """The views of experts with tensors of their own."""
    return {
        f"block/mlp/{ours}": View(f"{LAYER}{block}experts.{{expert}}.{name}.weight", pattern)
        for ours, name, pattern in zip(("gate", "up", "down"), names, _PATTERNS, strict=True)
    }


def router(name: str = "mlp.gate.weight", correction: str = "mlp.gate.e_score_correction_bias") -> dict[str, View]:
    """The views of the router."""
    return {
        "block/mlp/router": View(f"{LAYER}{name}", "experts embed -> embed experts"),
        "block/mlp/correction": View(f"{LAYER}{correction}", "experts -> experts"),
    }


def shared_mlp(block: str = "mlp.shared_experts.") -> dict[str, View]:
    """The views of the MLP that all tokens take."""
    return {
        f"block/mlp/shared/{ours}": View(f"{LAYER}{block}{name}.weight", pattern.replace("mlp", "shared"))
        for ours, name, pattern in zip(("gate", "up", "down"), GATE_UP_DOWN, _PATTERNS, strict=True)
    }


def experts_and_one() -> dict[str, View]:
    """The views of experts apart, their router, and one MLP with a gate that all tokens take (Qwen2)."""
    gate = View(f"{LAYER}mlp.shared_expert_gate.weight", "1 embed -> embed", 0)
    return experts_apart() | router() | shared_mlp("mlp.shared_expert.") | {"block/mlp/shared_gate": gate}


def mixture_tensors(
    mixture: Mapping[str, View], layer: Callable[[DecoderConfig], dict[str, View]] = llama_tensors
) -> Callable[[DecoderConfig], dict[str, View]]:
    """The views of a family: ``layer`` for layers with one MLP, and ``mixture`` in the others."""
    return lambda config: layer(config) | ({} if config.experts is None else mixture)


# --- config.json ------------------------------------------------------------------------------------------------------


def mixture(
    values: Values,
    count: str,
    *,
    per_token: str = "num_experts_per_tok",
    dense: Iterable[int] = (),
    dense_dim: str = "intermediate_size",
    **options: Any,
) -> dict[str, Any]:
    """The field ``experts``, from the keys of its numbers; ``dense_dim`` is read if there are dense layers."""
    layers = tuple(dense)
    for key in (count, per_token):
        check(values.get(key) is not None, f"config.json lacks {key!r}")
    return {
        "experts": Experts(
            values[count],
            values[per_token],
            dense=layers,
            dense_dim=values[dense_dim] if layers else None,
            balance=float(values.get("router_aux_loss_coef", 0)),
            **options,
        )
    }


def mixture_of(config: DecoderConfig) -> Experts:
    """The mixture of a decoder. Raises ValueError if it has none."""
    check(config.experts is not None, "experts: this layout stores mixtures of experts, and the decoder has none")
    return config.experts


def mixture_values(
    config: DecoderConfig, count: str, per_token: str = "num_experts_per_tok", dense_dim: str = "intermediate_size"
) -> dict[str, Any]:
    """The inverse of ``mixture``."""
    spec = mixture_of(config)
    dense = {} if spec.dense_dim is None else {dense_dim: spec.dense_dim}
    return {count: spec.count, per_token: spec.per_token} | dense


def balance_value(config: DecoderConfig) -> dict[str, float]:
    """The key of the balance loss."""
    return {"router_aux_loss_coef": mixture_of(config).balance}


def dense_layers(values: Values) -> list[int]:
    """The layers with one MLP: those that ``mlp_layer_types`` says, or the first ``first_k_dense_replace``."""
    kinds = values.get("mlp_layer_types")
    if kinds is None:
        return list(range(values.get("first_k_dense_replace") or 0))
    return [n for n, kind in enumerate(kinds) if kind == "dense"]


def mlp_types(config: DecoderConfig) -> dict[str, list[str]]:
    """The key that names layers with one MLP and with a mixture."""
    dense = mixture_of(config).dense
    return {"mlp_layer_types": ["dense" if n in dense else "sparse" for n in range(config.num_layers)]}


def first_dense(config: DecoderConfig) -> int:
    """How many layers before the first mixture have one MLP; mixtures in between are no matter here."""
    dense = mixture_of(config).dense
    return next((n for n in range(config.num_layers) if n not in dense), config.num_layers)


WITHOUT_MLP = {key: field for key, field in KEYS.items() if field != "mlp_dim"}
OWN_WIDTH = WITHOUT_MLP | {"moe_intermediate_size": "mlp_dim"}
"""The keys of families that have another key for the width of an expert."""
_BALANCED = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.001}

MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    KEYS,
    lambda values: {"scheme": windowed(values)} | mixture(values, "num_local_experts"),
    lambda config: (
        {"sliding_window": window_of(config)}
        | mixture_values(config, "num_local_experts")
        | balance_value(config)
        | rope_values(config)
    ),
    mixture_tensors(
        experts_apart("block_sparse_moe.", ONE_TWO_THREE) | router("block_sparse_moe.gate.weight"),
    ),
    LLAMA_DEFAULTS
    | default_sizes(131_072, 14336, 8)
    | {"rms_norm_eps": 1e-5, "num_local_experts": 8, "sliding_window": None}
    | _BALANCED,
    aliases={"num_experts": "num_local_experts"},
    inside={".block_sparse_moe.": ".mlp."},
)

# --- Qwen -------------------------------------------------------------------------------------------------------------


def qwen_dense(values: Values) -> list[int]:
    """The layers with one MLP: those that are named, and all but every ``decoder_sparse_step``-th."""
    named, step = values.get("mlp_only_layers") or (), values["decoder_sparse_step"]
    return [n for n in range(values["num_hidden_layers"]) if n in named or (n + 1) % step]


def qwen_mixture(values: Values, count: str, **options: Any) -> dict[str, Any]:
    """The field ``experts`` of Qwen's mixtures, of which some layers may be dense."""
    chooses = Router(normalized=values["norm_topk_prob"])
    return mixture(values, count, dense=qwen_dense(values), router=chooses, **options)


def _qwen_values(config: DecoderConfig, count: str) -> dict[str, Any]:
    spec = mixture_of(config)
    dense = {"mlp_only_layers": list(spec.dense), "decoder_sparse_step": 1}
    return (
        mixture_values(config, count)
        | balance_value(config)
        | dense
        | {"norm_topk_prob": spec.router.normalized}
        | {"use_sliding_window": window_of(config) is not None, "sliding_window": window_of(config)}
        | rope_values(config)
    )


_QWEN_DEFAULTS = LLAMA_DEFAULTS | {
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
    "use_sliding_window": False,
    "router_aux_loss_coef": 0.001,
}


def _qwen2_types(values: Values) -> list[str]:
    """Every other layer below ``max_window_layers`` is a sliding one, if windows are used."""
    used, first = values["use_sliding_window"], values["max_window_layers"]
    count = values["num_hidden_layers"]
    return layer_types(values, [FULL if n % 2 or n >= first or not used else SLIDING for n in range(count)])


QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    OWN_WIDTH,
    lambda values: (
        {"biases": biases(qkv=values["qkv_bias"]), "scheme": rope_schemes(values, _qwen2_types(values))}
        | qwen_mixture(values, "num_experts", shared_dim=values["shared_expert_intermediate_size"], shared_gate=True)
    ),
    lambda config: (
        _qwen_values(config, "num_experts")
        | {"qkv_bias": "qkv" in config.biases, "layer_types": types_of(config)}
        | {"shared_expert_intermediate_size": mixture_of(config).shared_dim}
    ),
    mixture_tensors(experts_and_one()),
    _QWEN_DEFAULTS
    | default_sizes(32768, 5632, 16)
    | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts": 60}
    | {"num_experts_per_tok": 4, "qkv_bias": True, "sliding_window": 4096, "max_window_layers": 28},
)


def _qwen3_scheme(values: Values) -> Any:
    """All layers have the window, or none."""
    windows = values["use_sliding_window"] and values["sliding_window"] is not None
    kind, norm = SLIDING if windows else FULL, QKNorm(eps=values["rms_norm_eps"])
    return rope_scheme(values, rope_rule(values), kind, norm=norm)


QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    OWN_WIDTH,
    lambda values: (
        {"biases": llama_biases(values)["biases"], "scheme": _qwen3_scheme(values)}
        | qwen_mixture(values, "num_local_experts")
    ),
    lambda config: _qwen_values(config, "num_local_experts") | qkv_bias_value(config),
    mixture_tensors(experts_apart() | router()),
    _QWEN_DEFAULTS
    | default_sizes(32768, 6144, 4)
    | {"moe_intermediate_size": 768, "num_local_experts": 128, "num_experts_per_tok": 8, "sliding_window": 4096},
    aliases={"num_experts": "num_local_experts"},
)

MELLUM = Family(
    "mellum",
    "MellumForCausalLM",
    OWN_WIDTH,
    lambda values: (
        {
            "biases": llama_biases(values)["biases"],
            "scheme": rope_schemes(values, layer_types(values), norm=QKNorm(eps=values["rms_norm_eps"])),
        }
        | mixture(values, "num_experts", dense=dense_layers(values), router=Router(normalized=values["norm_topk_prob"]))
    ),
    lambda config: (
        qkv_bias_value(config)
        | {"layer_types": types_of(config)}
        | ({} if window_of(config) is None else {"sliding_window": window_of(config)})
        | mlp_types(config)
        | mixture_values(config, "num_experts")
        | balance_value(config)
        | {"norm_topk_prob": mixture_of(config).router.normalized}
        | layered_rope_values(config)
    ),
    mixture_tensors(experts_apart() | router()),
    LLAMA_DEFAULTS
    | default_sizes(131_072, 7168, 4)
    | {"head_dim": 128, "moe_intermediate_size": 896, "num_experts": 64, "num_experts_per_tok": 8}
    | {"norm_topk_prob": True, "router_aux_loss_coef": 0.001, "sliding_window": 1024},
    aliases={"num_local_experts": "num_experts"},
)

# --- OLMo -------------------------------------------------------------------------------------------------------------


def _olmo(values: Values) -> dict[str, Any]:
    return {
        "biases": llama_biases(values)["biases"],
        "projection_norm": True,
        "scheme": rope_everywhere(values),
    } | mixture(values, "num_experts", router=Router(normalized=values["norm_topk_prob"]))


def _olmo_values(config: DecoderConfig) -> dict[str, Any]:
    return (
        qkv_bias_value(config)
        | mixture_values(config, "num_experts")
        | balance_value(config)
        | {"norm_topk_prob": mixture_of(config).router.normalized}
        | rope_values(config)
    )


_OLMO_DEFAULTS = LLAMA_DEFAULTS | {"norm_topk_prob": False, "router_aux_loss_coef": 0.01}

OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    KEYS,
    lambda values: _olmo(values) | {"clip_qkv": values.get("clip_qkv")},
    lambda config: _olmo_values(config) | {"clip_qkv": config.clip_qkv},
    mixture_tensors(experts_apart() | router() | norms_of_all_heads()),
    _OLMO_DEFAULTS
    | default_sizes(4096, 2048, 16)
    | {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
    aliases={"num_local_experts": "num_experts"},
)

FLEX_OLMO = Family(
    "flex_olmo",
    "FlexOlmoForCausalLM",
    KEYS,
    lambda values: _olmo(values) | {"residual": Residual("after")},
    _olmo_values,
    mixture_tensors(
        experts_apart() | router(),
        lambda config: EMBEDDING | FINAL_NORM | AFTER | projections() | norms_of_all_heads(),
    ),
    _OLMO_DEFAULTS | default_sizes(4096, 11008) | {"num_experts": 7, "num_experts_per_tok": 5},
    aliases={"num_local_experts": "num_experts"},
)

# --- Granite ----------------------------------------------------------------------------------------------------------


def _granite_tensors(config: DecoderConfig) -> dict[str, View]:
    """The experts of a layer are in one tensor, gate and up in another, the gate's rows first."""
    block = f"{LAYER}block_sparse_moe."
    views = llama_tensors(config) | router("block_sparse_moe.router.layer.weight")
    for part, name in enumerate(("gate", "up")):
        pattern = "experts (2 mlp) embed -> experts embed mlp"
        views[f"block/mlp/{name}"] = View(f"{block}input_linear.weight", pattern, part)
        pattern = "(2 shared) embed -> embed shared"
        views[f"block/mlp/shared/{name}"] = View(f"{LAYER}shared_mlp.input_linear.weight", pattern, part)
    views["block/mlp/down"] = View(f"{block}output_linear.weight", "experts embed mlp -> experts mlp embed")
    shared = View(f"{LAYER}shared_mlp.output_linear.weight", "embed shared -> shared embed")
    return views | {"block/mlp/shared/down": shared}


def _granite(values: Values) -> dict[str, Any]:
    shared = values.get("shared_intermediate_size") or None
    return (
        granite(values) | {"scheme": rope_everywhere(values)} | mixture(values, "num_local_experts", shared_dim=shared)
    )


def _granite_values(config: DecoderConfig) -> dict[str, Any]:
    """Granite's keys; a decoder without a shared MLP is written as a width of 0."""
    return (
        granite_values(config)
        | mixture_values(config, "num_local_experts")
        | balance_value(config)
        | {"shared_intermediate_size": mixture_of(config).shared_dim or 0}
    )


_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
_GRANITE_DEFAULTS = (
    LLAMA_DEFAULTS
    | default_sizes(2048, 11008)
    | dict.fromkeys(_MULTIPLIERS, 1.0)
    | {"num_local_experts": 8}
    | _BALANCED
)

_GRANITE_INSIDE = {
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
    ".block_sparse_moe.router.layer.weight": ".block_sparse_moe.router.weight",
}

GRANITE_MOE = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    KEYS,
    _granite,
    lambda config: {k: v for k, v in _granite_values(config).items() if k != "shared_intermediate_size"},
    _granite_tensors,
    _GRANITE_DEFAULTS,
    fixed={"shared_intermediate_size": 0},
    inside=_GRANITE_INSIDE,
)

GRANITE_MOE_SHARED = Family(
    "granitemoeshared",
    "GraniteMoeSharedForCausalLM",
    KEYS,
    _granite,
    _granite_values,
    _granite_tensors,
    _GRANITE_DEFAULTS | {"shared_intermediate_size": 0},
    inside=_GRANITE_INSIDE,
)

# --- Hunyuan ----------------------------------------------------------------------------------------------------------


def _same_in_all(values: Values, key: str) -> int:
    """A number that may be given for each layer. Raises ValueError for numbers that differ."""
    given = values[key]
    numbers = set(given) if isinstance(given, list | tuple) else {given}
    check(len(numbers) == 1, f"config.json: {key} must be one number for all layers, found {describe(given)}")
    return numbers.pop()


HUNYUAN_MOE = Family(
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM",
    KEYS,
    lambda values: (
        normed_last(values, gain=True)
        | mixture(
            dict(values) | {key: _same_in_all(values, key) for key in ("num_experts", "moe_topk")},
            "num_experts",
            per_token="moe_topk",
            shared_dim=values["intermediate_size"],
        )
    ),
    lambda config: qkv_bias_value(config) | mixture_values(config, "num_experts", "moe_topk") | rope_values(config),
    mixture_tensors(
        experts_apart() | router("mlp.gate.wg.weight") | shared_mlp("mlp.shared_mlp.") | HUNYUAN_NORMS,
    ),
    LLAMA_DEFAULTS | default_sizes(2048, 11008) | {"rms_norm_eps": 1e-5, "num_experts": 1, "moe_topk": 1},
    aliases={"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
)

# --- Cohere -----------------------------------------------------------------------------------------------------------


def _cohere_types(values: Values) -> list[str]:
    """The types of all layers; the first dense layers have a pattern of their own, and the others count from 0."""
    if values.get("layer_types"):
        return layer_types(values)
    first = values.get("first_k_dense_replace") or 0
    rest = values["num_hidden_layers"] - first
    parts = ((first, values["prefix_dense_sliding_window_pattern"]), (rest, values["sliding_window_pattern"]))
    return [SLIDING if (n + 1) % pattern else FULL for count, pattern in parts for n in range(count)]


def _cohere_schemes(values: Values) -> Any:
    """Full layers do not rotate, except dense ones if these have a pattern of one layer."""
    rule, types = rope_rule(values), _cohere_types(values)
    forced = dense_layers(values) if values["prefix_dense_sliding_window_pattern"] == 1 else ()
    rules = [rule if kind == SLIDING or n in forced else None for n, kind in enumerate(types)]
    return of_layers([rope_scheme(values, *each, "interleaved") for each in zip(rules, types, strict=True)])


def _cohere(values: Values) -> dict[str, Any]:
    """Cohere 2's blocks; the routed sum and the shared MLP are added or averaged."""
    shared = values["num_shared_experts"] * values["intermediate_size"] or None
    half = 0.5 if shared and values["shared_expert_combination_strategy"] == "average" else 1.0
    score = values["expert_selection_fn"]
    chooses = Router(score, normalized=score == "softmax" or values["norm_topk_prob"], scale=half)
    width = "prefix_dense_intermediate_size" if values.get("prefix_dense_intermediate_size") else "intermediate_size"
    options = {"router": chooses, "shared_dim": shared, "shared_scale": half}
    return {
        "residual": Residual(parallel=True, shared_norm=True),
        "logit_scale": float(values["logit_scale"]),
        "biases": llama_biases(values)["biases"],
        "scheme": _cohere_schemes(values),
    } | mixture(values, "num_experts", dense=dense_layers(values), dense_dim=width, **options)


def _cohere_values(config: DecoderConfig) -> dict[str, Any]:
    spec, dense = mixture_of(config), mixture_of(config).dense
    shared, width = spec.shared_dim or 0, config.mlp_dim
    check(shared % width == 0, f"experts.shared_dim: this layout stores a multiple of mlp_dim {width}, found {shared}")
    rotating = [config.layers.schemes[n].rotates for n in dense if config.layers.schemes[n].mask is None]
    return (
        mixture_values(config, "num_experts", dense_dim="prefix_dense_intermediate_size")
        | mlp_types(config)
        | {"layer_types": types_of(config), "sliding_window": window_of(config), "logit_scale": config.logit_scale}
        | {"prefix_dense_sliding_window_pattern": 1 if any(rotating) else 2, "num_shared_experts": shared // width}
        | {"shared_expert_combination_strategy": "average" if spec.shared_scale == 0.5 else "sum"}
        | {"expert_selection_fn": spec.router.score, "norm_topk_prob": spec.router.normalized}
        | qkv_bias_value(config)
        | rope_values(config)
    )


COHERE2_MOE = Family(
    "cohere2_moe",
    "Cohere2MoeForCausalLM",
    KEYS,
    _cohere,
    _cohere_values,
    mixture_tensors(
        experts_apart() | router() | shared_mlp(),
        lambda config: EMBEDDING | FINAL_NORM | norms(attention_norm="input_layernorm") | projections(),
    ),
    default_sizes(8192, 22528)
    | {"layer_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True, "logit_scale": 0.0625}
    | {"num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 0, "norm_topk_prob": True}
    | {"shared_expert_combination_strategy": "average", "expert_selection_fn": "softmax", "sliding_window": 4096}
    | {"sliding_window_pattern": 4, "prefix_dense_sliding_window_pattern": 1, "head_dim": 128, "rope_theta": 1e4},
    {"rms_norm_eps": None},
    norm=Norm("layer"),
    eps="layer_norm_eps",
)

MOE_LIKE = (
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    MELLUM,
    OLMOE,
    FLEX_OLMO,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    HUNYUAN_MOE,
    COHERE2_MOE,
)
