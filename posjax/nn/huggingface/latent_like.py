"""Families with multi-head latent attention: DeepSeek V2, and those that share its projections."""

import math
from collections.abc import Callable
from typing import Any

from posjax.nn.config import DecoderConfig
from posjax.nn.huggingface.family import Family, Values, rope_values
from posjax.nn.huggingface.llama_like import (
    KEYS,
    LAYER,
    LLAMA_DEFAULTS,
    default_sizes,
    llama_bias_values,
    llama_biases,
    llama_tensors,
    rope_everywhere,
)
from posjax.nn.huggingface.views import View
from posjax.nn.specs import Latent, Norm, Residual

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
    name: str, architecture: str, read: Callable, write: Callable, defaults: dict, **options: Any
) -> Family:
    """A family of these; ``read`` and ``write`` are for what is not in ``latent_fields`` and ``latent_values``."""
    return Family(
        name,
        architecture,
        KEYS,
        lambda values: latent_fields(values) | read(values),
        lambda config: latent_values(config) | write(config),
        latent_tensors,
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

LATENT_LIKE = (MINICPM3, YOUTU)
