"""Families with multi-head latent attention: DeepSeek V2, and those that share its projections."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from posjax.nn.config import DecoderConfig
from posjax.nn.huggingface.corrected_moe import groups_router, groups_values, shared_value, shared_width
from posjax.nn.huggingface.family import Family, Values, chosen, key_of, rope_values
from posjax.nn.huggingface.llama_like import (
    KEYS,
    LAYER,
    LLAMA_DEFAULTS,
    default_sizes,
    llama_bias_values,
    llama_biases,
    llama_tensors,
    ministral_rope_values,
    ministral_scale,
    rope_everywhere,
)
from posjax.nn.huggingface.moe_like import (
    OWN_WIDTH,
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
from posjax.nn.huggingface.views import View
from posjax.nn.specs import Latent, Norm, Residual, Router
from posjax.rotary.model_types import MODEL_TYPES

INDEXED = ("deepseek_v32", "deepseek_v4", "glm_moe_dsa", "glm5_next", "glm5_next_text", "axk2", "dots3_note")
INDEXED += ("dots3_note_text", "hy_v4", "hy_v4_vl", "hy_v4_vl_text", "minimax_m3_vl", "minimax_m3_vl_text")
INDEXED += ("mistral_large4", "qwen4_exp", "qwen4_exp_text")
"""The types of models whose attention chooses keys by an index that is learned beside it."""

_SIZES = {
    "kv_lora_rank": "rank",
    "qk_rope_head_dim": "rotated",
    "qk_nope_head_dim": "unrotated",
    "v_head_dim": "value",
    "q_lora_rank": "query_rank",
}
"""Keys of ``config.json`` that are fields of ``Latent``."""
_EPS = 1e-6
"""Of the norms of latents in transformers, whatever ``rms_norm_eps`` is."""


def latent_fields(values: Values) -> dict[str, Any]:
    """The fields of a config that all these families read in the same way.

    transformers replaces a ``head_dim`` of the file by the number of rotated channels.
    """
    sizes = {field: values[key] for key, field in _SIZES.items()}
    return {"latent": Latent(**sizes, norm=Norm(eps=_EPS)), "head_dim": None, **llama_biases(values)}


def latent_values(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of ``latent_fields``: its keys of ``config.json``, and those of the rotation."""
    sizes = {key: getattr(config.latent, field) for key, field in _SIZES.items()}
    return sizes | llama_bias_values(config) | rope_values(config)


def latent_tensors(config: DecoderConfig) -> dict[str, View]:
    """The views of Llama's blocks with latent attention."""
    attention, name = "block/attention/", f"{LAYER}self_attn."
    q, source = ("q_proj", "embed") if config.latent.query_rank is None else ("q_b_proj", "query_rank")
    views = llama_tensors(config)
    for part, (ours, size) in enumerate((("q", "unrotated"), ("q_rotated", "rotated"))):
        pattern = f"(heads unrotated+rotated) {source} -> {source} heads {size}"
        views[f"{attention}{ours}"] = View(f"{name}{q}.weight", pattern, part)
    for part, (ours, size) in enumerate((("k", "unrotated"), ("v", "value"))):
        pattern = f"(heads unrotated+value) rank -> rank heads {size}"
        views[f"{attention}{ours}"] = View(f"{name}kv_b_proj.weight", pattern, part)
    for part, (ours, size) in enumerate((("latent", "rank"), ("k_rotated", "rotated"))):
        both = f"{name}kv_a_proj_with_mqa."
        views[f"{attention}{ours}"] = View(f"{both}weight", f"rank+rotated embed -> embed {size}", part)
        views[f"{attention}{ours}_bias"] = View(f"{both}bias", f"rank+rotated -> {size}", part)
    return views | {
        f"{attention}query_latent": View(f"{name}q_a_proj.weight", "query_rank embed -> embed query_rank"),
        f"{attention}query_latent_bias": View(f"{name}q_a_proj.bias", "query_rank -> query_rank"),
        f"{attention}query_norm/gain": View(f"{name}q_a_layernorm.weight", "query_rank -> query_rank"),
        f"{attention}latent_norm/gain": View(f"{name}kv_a_layernorm.weight", "rank -> rank"),
        f"{attention}o": View(f"{name}o_proj.weight", "embed (heads value) -> heads value embed"),
    }


def latent_family(
    name: str,
    architecture: str,
    read: Callable,
    write: Callable,
    defaults: dict,
    keys: Mapping[str, str] = KEYS,
    tensors: Callable = latent_tensors,
    **options: Any,
) -> Family:
    """A family of these; ``read`` and ``write`` are for what is not in ``latent_fields`` and ``latent_values``."""
    return Family(
        name,
        architecture,
        keys,
        lambda values: latent_fields(values) | read(values),
        lambda config: latent_values(config) | write(config),
        tensors,
        LLAMA_DEFAULTS | defaults,
        **options,
    )


def _latent_sizes(rank: int, rotated: int, unrotated: int, value: int | None, query_rank: int | None) -> dict[str, Any]:
    """The defaults of transformers for the sizes of a latent."""
    return dict(zip(_SIZES, (rank, rotated, unrotated, value, query_rank), strict=True))


# --- MiniCPM3 ---------------------------------------------------------------------------------------------------------


def _minicpm3(values: Values) -> dict[str, Any]:
    """Embeddings, residuals and logits are scaled; null means that the last two are not."""
    width, layers = values["hidden_size"], values["num_hidden_layers"]
    depth, base, value = values["scale_depth"], values["dim_model_base"], values["v_head_dim"]
    value = width // values["num_attention_heads"] if value is None else value
    return latent_fields(values | {"v_head_dim": value}) | {
        "embedding_scale": float(values["scale_emb"]),
        "residual": Residual(scale=1.0 if depth is None else depth / math.sqrt(layers)),
        "logit_scale": 1.0 if base is None else base / width,
        "scheme": rope_everywhere(values),
    }


def _minicpm3_values(config: DecoderConfig) -> dict[str, Any]:
    root, scale = math.sqrt(config.num_layers), config.residual.scale
    depth = scale * root
    # The first of the numbers that give the same scale again: 1.4 rather than 1.4000000000000001.
    near = (round(depth, 12), depth, math.nextafter(depth, math.inf), math.nextafter(depth, 0))
    return latent_values(config) | {
        "scale_emb": config.embedding_scale,
        "scale_depth": next((each for each in near if each / root == scale), depth),
        "dim_model_base": max(1, round(config.logit_scale * config.model_dim)),
    }


MINICPM3 = Family(
    "minicpm3",
    "MiniCPM3ForCausalLM",
    KEYS,
    _minicpm3,
    _minicpm3_values,
    latent_tensors,
    LLAMA_DEFAULTS
    | default_sizes(32768, 6400, 40)
    | _latent_sizes(256, 32, 64, None, 768)
    | {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    | {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256},
)

# --- DeepSeek's projections and Llama's blocks ------------------------------------------------------------------------


def _pairing(values: Values) -> str:
    return "interleaved" if values["rope_interleave"] else "half"


def _pairing_value(config: DecoderConfig) -> dict[str, bool]:
    features = [scheme.features for scheme in config.layers.kinds if scheme.rotates]
    return {"rope_interleave": any(each.pairing == "interleaved" for each in features)}


YOUTU = latent_family(
    "youtu",
    "YoutuForCausalLM",
    lambda values: {"scheme": rope_everywhere(values, _pairing(values))},
    _pairing_value,
    default_sizes(131_072, 6144, 16)
    | _latent_sizes(512, 64, 128, 128, 1536)
    | {"tie_word_embeddings": True, "rope_interleave": True},
)

# --- mixtures of experts ----------------------------------------------------------------------------------------------

_MIXTURE = mixture_tensors(experts_apart() | router() | shared_mlp(), latent_tensors)
_MIXTURE_DEFAULTS = {"norm_topk_prob": True, "n_group": 1, "topk_group": 1, "rope_interleave": True}
_MIXTURE_DEFAULTS |= {"routed_scaling_factor": 1.0, "n_shared_experts": 1}


def _mixture(values: Values, chooses: Router) -> dict[str, Any]:
    """The experts, and the dense layers before them."""
    shared, dense = shared_width(values, "n_shared_experts"), dense_layers(values)
    return mixture(values, "n_routed_experts", dense=dense, router=chooses, shared_dim=shared)


def _mixture_values(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of ``_mixture``, without the layers that predict further tokens."""
    return (
        mixture_values(config, "n_routed_experts")
        | groups_values(config)
        | shared_value(config, "n_shared_experts")
        | {"first_k_dense_replace": first_dense(config), "num_nextn_predict_layers": 0}
    )


_GREEDY = {"greedy": False, "group_limited_greedy": True}
"""The ways of DeepSeek V2 to choose experts, and whether only those of the best groups are chosen."""


def _deepseek_v2(values: Values) -> dict[str, Any]:
    """A softmax over all experts, whose weights are not normalised."""
    grouped = chosen("topk_method", values["topk_method"], _GREEDY)
    groups = {"groups": values["n_group"], "groups_kept": values["topk_group"]} if grouped else {}
    chooses = Router(normalized=False, scale=float(values["routed_scaling_factor"]), **groups)
    return {"scheme": rope_everywhere(values, "interleaved")} | _mixture(values, chooses)


def _deepseek_v2_values(config: DecoderConfig) -> dict[str, Any]:
    grouped = mixture_of(config).router.groups > 1
    return _mixture_values(config) | {"topk_method": key_of(_GREEDY, grouped)}


DEEPSEEK_V2 = latent_family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    _deepseek_v2,
    _deepseek_v2_values,
    default_sizes(2048, 11008)
    | _latent_sizes(512, 64, 128, 128, 1536)
    | {"n_shared_experts": 2, "n_routed_experts": 64, "moe_intermediate_size": 1407, "first_k_dense_replace": 0}
    | {"routed_scaling_factor": 1.0, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    OWN_WIDTH,
    _MIXTURE,
    fixed={"norm_topk_prob": False, "mlp_bias": False, "scoring_func": "softmax", "moe_layer_freq": 1},
    aliases={"num_experts": "n_routed_experts"},
)


def _deepseek_v3(values: Values) -> dict[str, Any]:
    return {"scheme": rope_everywhere(values, _pairing(values))} | _mixture(values, groups_router(values))


_DEEPSEEK_V3_DEFAULTS = (
    _MIXTURE_DEFAULTS
    | default_sizes(4096, 18432, 128)
    | _latent_sizes(512, 64, 128, 128, 1536)
    | {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3}
    | {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}
)
DEEPSEEK_V3 = latent_family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _deepseek_v3,
    lambda config: _mixture_values(config) | _pairing_value(config),
    _DEEPSEEK_V3_DEFAULTS,
    OWN_WIDTH,
    _MIXTURE,
    fixed={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    predicts_more=True,
)

SARVAM_MLA = latent_family(
    "sarvam_mla",
    "DeepseekV3ForCausalLM",
    _deepseek_v3,
    lambda config: _mixture_values(config) | _pairing_value(config),
    _DEEPSEEK_V3_DEFAULTS
    | default_sizes(4096, 16384)
    | {"q_lora_rank": None, "n_routed_experts": 128, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    OWN_WIDTH,
    _MIXTURE,
    aliases=DEEPSEEK_V3.aliases | {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
)

GLM4_MOE_LITE = latent_family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    lambda values: _deepseek_v3({"first_k_dense_replace": 1} | values),
    lambda config: _mixture_values(config) | mlp_types(config) | _pairing_value(config),
    _MIXTURE_DEFAULTS
    | default_sizes(202_752, 10240, 20)
    | _latent_sizes(512, 64, 192, 256, 768)
    | {"rms_norm_eps": 1e-5, "n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536}
    | {"routed_scaling_factor": 1.8},
    OWN_WIDTH,
    _MIXTURE,
    aliases={"num_local_experts": "n_routed_experts"},
    predicts_more=True,
)


_TOGETHER = {
    f"block/mlp/{name}": View(f"{LAYER}mlp.experts.gate_up_proj", "experts (2 mlp) embed -> experts embed mlp", part)
    for part, name in enumerate(("gate", "up"))
}
_TOGETHER |= {"block/mlp/down": View(f"{LAYER}mlp.experts.down_proj", "experts embed mlp -> experts mlp embed")}
"""The experts of a layer in two tensors, the rows of the gate first."""


def _mistral4(values: Values) -> dict[str, Any]:
    """A softmax over all experts, whose best groups are chosen as in DeepSeek V3; queries grow with their position."""
    chooses = dataclasses.replace(groups_router(values), score="softmax", correction=False)
    return {"scheme": rope_everywhere(values, _pairing(values), scale=ministral_scale(values))} | _mixture(
        values, chooses
    )


def _mistral4_values(config: DecoderConfig) -> dict[str, Any]:
    """transformers takes the rotated share of ``head_dim``, which is here the whole size of a key."""
    values = ministral_rope_values(config) | _mixture_values(config) | _pairing_value(config)
    return values | {"head_dim": config.latent.size}


MISTRAL4 = latent_family(
    "mistral4",
    "Mistral4ForCausalLM",
    _mistral4,
    _mistral4_values,
    _MIXTURE_DEFAULTS
    | default_sizes(1_048_576, 12288, 32)
    | _latent_sizes(256, 64, 64, 128, 1024)
    | {"n_routed_experts": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 2048, "first_k_dense_replace": 0}
    | {"rope_parameters": MODEL_TYPES["mistral4"]["rope_parameters"]},
    OWN_WIDTH,
    mixture_tensors(_TOGETHER | router() | shared_mlp(), latent_tensors),
    aliases={"num_local_experts": "n_routed_experts"},
)

LATENT_LIKE = (MINICPM3, YOUTU, DEEPSEEK_V3, DEEPSEEK_V2, GLM4_MOE_LITE, SARVAM_MLA, MISTRAL4)
