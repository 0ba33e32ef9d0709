"""Mixtures whose choice of experts is corrected by a number of each: GLM, dots, Solar, EXAONE, ERNIE and MiniMax."""

from typing import Any

from posjax._checks import check
from posjax.nn.config import DecoderConfig
from posjax.nn.huggingface.family import (
    FULL,
    SLIDING,
    Family,
    Values,
    biases,
    layer_types,
    partial_rope_values,
    pattern_types,
    rope_rule,
    rope_schemes,
    rope_values,
    types_of,
    window_of,
)
from posjax.nn.huggingface.llama_like import (
    KEYS,
    LAYER,
    LLAMA_DEFAULTS,
    default_sizes,
    llama_biases,
    qkv_bias_value,
    rope_everywhere,
)
from posjax.nn.huggingface.moe_like import (
    ONE_TWO_THREE,
    OWN_WIDTH,
    balance_value,
    dense_layers,
    experts_apart,
    first_dense,
    mixture,
    mixture_of,
    mixture_tensors,
    mixture_values,
    mlp_types,
    router,
    shared_mlp,
)
from posjax.nn.huggingface.olmo_like import norms_of_all_heads
from posjax.nn.huggingface.views import View
from posjax.nn.specs import Router
from posjax.norms import QKNorm

# --- DeepSeek's router ------------------------------------------------------------------------------------------------


def groups_router(values: Values) -> Router:
    """DeepSeek V3's router, which chooses within the best groups."""
    return Router(
        "sigmoid",
        normalized=values["norm_topk_prob"],
        correction=True,
        groups=values["n_group"],
        groups_kept=values["topk_group"],
        group_best=1 if values["n_group"] == 1 else 2,
        scale=float(values["routed_scaling_factor"]),
    )


def groups_values(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of ``groups_router``."""
    chooses = mixture_of(config).router
    return {
        "norm_topk_prob": chooses.normalized,
        "n_group": chooses.groups,
        "topk_group": chooses.groups_kept,
        "routed_scaling_factor": chooses.scale,
    }


def shared_width(values: Values, count: str) -> int | None:
    """The width of the MLP that all tokens take: some experts' widths together."""
    return (values.get(count) or 0) * values["moe_intermediate_size"] or None


def shared_value(config: DecoderConfig, count: str) -> dict[str, int]:
    """The inverse of ``shared_width``. Raises ValueError for a width that is not that of some experts."""
    width, each = mixture_of(config).shared_dim or 0, config.mlp_dim
    check(width % each == 0, f"experts.shared_dim: this layout stores a multiple of mlp_dim {each}, found {width}")
    return {count: width // each}


_GROUPS_DEFAULTS = LLAMA_DEFAULTS | {"norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1}
_GROUPS_DEFAULTS |= {"topk_group": 1, "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_routed_experts": 128}
_GROUPS_DEFAULTS |= {"n_shared_experts": 1}
_GROUPS_TENSORS = mixture_tensors(experts_apart() | router() | shared_mlp())


def _groups(values: Values, count: str = "n_routed_experts", shared: str = "n_shared_experts", **options: Any):
    width = shared_width(values, shared)
    return mixture(values, count, router=groups_router(values), shared_dim=width, **options)


def _groups_values(config: DecoderConfig, count: str = "n_routed_experts", shared: str = "n_shared_experts"):
    return mixture_values(config, count) | groups_values(config) | shared_value(config, shared)


def _first_layers(values: Values) -> range:
    return range(values["first_k_dense_replace"])


def _glm4(values: Values) -> dict[str, Any]:
    norm = QKNorm(eps=values["rms_norm_eps"]) if values["use_qk_norm"] else None
    return {
        "biases": biases(qkv=values["attention_bias"]),
        "scheme": rope_everywhere(values, norm=norm),
    } | _groups(values, dense=_first_layers(values))


GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    OWN_WIDTH,
    _glm4,
    lambda config: (
        qkv_bias_value(config)
        | {"use_qk_norm": config.layers.schemes[0].norm is not None, "first_k_dense_replace": first_dense(config)}
        | _groups_values(config)
        | balance_value(config)  # that of GLM-4.5V
        | partial_rope_values(config)
    ),
    _GROUPS_TENSORS,
    _GROUPS_DEFAULTS
    | default_sizes(131_072, 10944, 8)
    | {"rms_norm_eps": 1e-5, "attention_bias": False, "use_qk_norm": False, "first_k_dense_replace": 1},
    aliases={"num_local_experts": "n_routed_experts"},
    predicts_more=True,
)

SOLAR_OPEN = Family(
    "solar_open",
    "SolarOpenForCausalLM",
    OWN_WIDTH,
    lambda values: (
        {"biases": biases(qkv=values["attention_bias"]), "scheme": rope_everywhere(values)} | _groups(values)
    ),
    lambda config: qkv_bias_value(config) | _groups_values(config) | rope_values(config),
    _GROUPS_TENSORS,
    _GROUPS_DEFAULTS
    | {"max_position_embeddings": 131_072, "num_key_value_heads": 8}
    | {"rms_norm_eps": 1e-5, "attention_bias": False, "moe_intermediate_size": 1280, "head_dim": 128},
    aliases={"num_local_experts": "n_routed_experts"},
)


def _dots_types(values: Values) -> list[str]:
    """Layers from ``max_window_layers`` on have the window, if there is one."""
    first = values["max_window_layers"] if values["sliding_window"] is not None else values["num_hidden_layers"]
    return layer_types(values, [SLIDING if n >= first else FULL for n in range(values["num_hidden_layers"])])


DOTS1 = Family(
    "dots1",
    "Dots1ForCausalLM",
    OWN_WIDTH,
    lambda values: (
        {"biases": llama_biases(values)["biases"]}
        | {"scheme": rope_schemes(values, _dots_types(values), norm=QKNorm(eps=values["rms_norm_eps"]))}
        | _groups(values, dense=_first_layers(values))
    ),
    lambda config: (
        qkv_bias_value(config)
        | {"layer_types": types_of(config), "first_k_dense_replace": first_dense(config)}
        | ({} if window_of(config) is None else {"sliding_window": window_of(config)})
        | _groups_values(config)
        | rope_values(config)
    ),
    _GROUPS_TENSORS,
    {key: value for key, value in _GROUPS_DEFAULTS.items() if key not in ("n_routed_experts", "num_experts_per_tok")}
    | default_sizes(2048, 10944, 32)
    | {"norm_topk_prob": False, "first_k_dense_replace": 0, "sliding_window": 4096, "max_window_layers": 62}
    | {"n_shared_experts": 0},
    aliases={"num_local_experts": "n_routed_experts"},
)


def _exaone(values: Values) -> dict[str, Any]:
    """Layers with windows rotate; full layers rotate only in models without windows."""
    rule, windows = rope_rule(values), values["sliding_window"] is not None
    types = pattern_types(values, 4) if windows else layer_types(values)
    norm = QKNorm(eps=values["rms_norm_eps"])
    return {
        "scheme": rope_schemes(values, types, {SLIDING: rule, FULL: None if windows else rule}, norm=norm)
    } | _groups(values, "num_experts", "num_shared_experts", dense=dense_layers(values))


EXAONE_MOE = Family(
    "exaone_moe",
    "ExaoneMoeForCausalLM",
    OWN_WIDTH,
    _exaone,
    lambda config: (
        {"sliding_window": window_of(config), "layer_types": types_of(config)}
        | mlp_types(config)
        | _groups_values(config, "num_experts", "num_shared_experts")
        | rope_values(config)
    ),
    mixture_tensors(experts_apart() | router(correction="mlp.e_score_correction_bias") | shared_mlp()),
    {key: value for key, value in _GROUPS_DEFAULTS.items() if not key.startswith("n_")}
    | default_sizes(2048, 16384, 32)
    | {"rms_norm_eps": 1e-5, "sliding_window": 4096, "first_k_dense_replace": 1, "moe_intermediate_size": 1024}
    | {"num_experts": 64, "num_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 1},
    inside={".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias"},
)


def _hy_scheme(values: Values) -> Any:
    return rope_everywhere(values, norm=QKNorm(eps=values["rms_norm_eps"]))


def _hy(values: Values) -> dict[str, Any]:
    """One layer with one MLP comes first, unless ``mlp_layer_types`` says otherwise."""
    chooses = Router("sigmoid", correction=True, scale=float(values["router_scaling_factor"]))
    dense = dense_layers({"first_k_dense_replace": 1} | dict(values))
    width = shared_width(values, "num_shared_experts")
    return {"biases": llama_biases(values)["biases"], "scheme": _hy_scheme(values)} | mixture(
        values, "num_experts", router=chooses, shared_dim=width, dense=dense
    )


HY_V3 = Family(
    "hy_v3",
    "HYV3ForCausalLM",
    OWN_WIDTH,
    _hy,
    lambda config: (
        qkv_bias_value(config)
        | mlp_types(config)
        | mixture_values(config, "num_experts")
        | {"router_scaling_factor": mixture_of(config).router.scale}
        | shared_value(config, "num_shared_experts")
        | rope_values(config)
    ),
    mixture_tensors(
        experts_apart() | router("mlp.router.gate.weight", "mlp.expert_bias") | shared_mlp("mlp.shared_mlp."),
    ),
    LLAMA_DEFAULTS
    | default_sizes(131_072, 13312, 8)
    | {"rms_norm_eps": 1e-5, "head_dim": 128, "moe_intermediate_size": 1536, "num_experts": 192}
    | {"num_experts_per_tok": 8, "num_shared_experts": 1, "router_scaling_factor": 2.826},
    {"mlp_bias": False},
    aliases={"num_local_experts": "num_experts"},
    inside={
        ".mlp.router.gate.": ".mlp.gate.",
        ".mlp.expert_bias": ".mlp.e_score_correction_bias",
        ".mlp.shared_mlp.": ".mlp.shared_experts.",
    },
)


def _ernie_dense(values: Values) -> list[int]:
    """The layers outside the range of mixtures, and all but every ``moe_layer_interval``-th inside."""
    count, end = values["num_hidden_layers"], values["moe_layer_end_index"]
    inside = range(values["moe_layer_start_index"], (count - 1 if end == -1 else end) + 1)
    return [n for n in range(count) if n not in inside or (n + 1) % values["moe_layer_interval"]]


def _ernie(values: Values) -> dict[str, Any]:
    chooses = Router(correction=True, least_sum=float(values["moe_norm_min"]))
    keys = {"per_token": "moe_k", "dense": _ernie_dense(values)}
    shared = shared_width(values, "moe_num_shared_experts")
    return {"scheme": rope_everywhere(values, "interleaved")} | mixture(
        values, "moe_num_experts", **keys, router=chooses, shared_dim=shared
    )


def _ernie_values(config: DecoderConfig) -> dict[str, Any]:
    """Mixtures from the first to the last in equal steps; other mixtures are found when this is read again."""
    sparse = [n for n in range(config.num_layers) if n not in mixture_of(config).dense]
    step = sparse[1] - sparse[0] if len(sparse) > 1 else 1
    return (
        {"moe_layer_start_index": sparse[0], "moe_layer_end_index": sparse[-1], "moe_layer_interval": step}
        | {"moe_norm_min": mixture_of(config).router.least_sum}
        | mixture_values(config, "moe_num_experts", "moe_k")
        | balance_value(config)
        | shared_value(config, "moe_num_shared_experts")
        | rope_values(config)
    )


_ERNIE_ROUTER = router() | {
    "block/mlp/correction": View(f"{LAYER}mlp.moe_statics.e_score_correction_bias", "1 experts -> experts", 0)
}
ERNIE4_5_MOE = Family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    OWN_WIDTH,
    _ernie,
    _ernie_values,
    mixture_tensors(experts_apart() | _ERNIE_ROUTER | shared_mlp()),
    LLAMA_DEFAULTS
    | default_sizes(131_072, 12288, 4)
    | {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "moe_intermediate_size": 1536, "moe_k": 6}
    | {"moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1}
    | {"moe_layer_interval": 1, "moe_norm_min": 1e-12, "router_aux_loss_coef": 0.001},
    {"use_bias": False},
    inside={".mlp.moe_statics.": ".mlp.gate.moe_statics."},
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
)


def _minimax(values: Values) -> dict[str, Any]:
    """Releases say how many channels rotate, transformers which share."""
    if values.get("rotary_dim") and values.get("partial_rotary_factor") is None:
        values = dict(values) | {"partial_rotary_factor": values["rotary_dim"] / values["head_dim"]}
    chooses = Router("sigmoid", correction=True)
    return {"projection_norm": True, "scheme": rope_everywhere(values)} | mixture(
        values, "num_local_experts", router=chooses
    )


_MINIMAX_ROUTER = router("block_sparse_moe.gate.weight", "block_sparse_moe.e_score_correction_bias")
MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    KEYS,
    _minimax,
    lambda config: mixture_values(config, "num_local_experts") | balance_value(config) | partial_rope_values(config),
    mixture_tensors(
        experts_apart("block_sparse_moe.", ONE_TWO_THREE) | _MINIMAX_ROUTER | norms_of_all_heads(),
    ),
    LLAMA_DEFAULTS
    | default_sizes(196_608, 1536, 8)
    | {"head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001},
    aliases={"num_experts": "num_local_experts"},
    inside={".block_sparse_moe.": ".mlp."},
)

CORRECTED_MOE = (GLM4_MOE, SOLAR_OPEN, DOTS1, EXAONE_MOE, HY_V3, ERNIE4_5_MOE, MINIMAX_M2)
