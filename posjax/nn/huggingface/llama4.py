"""Llama 4 (text): mixtures whose weights multiply their inputs, and layers that attend in chunks."""

from typing import Any

from posjax._checks import check, check_choice, describe
from posjax.masks import Chunked
from posjax.nn.config import DecoderConfig
from posjax.nn.huggingface.family import FULL, Family, Values, of_layers, rope_rule, rope_values
from posjax.nn.huggingface.llama_like import (
    EMBEDDING,
    FINAL_NORM,
    KEYS,
    LAYER,
    LLAMA_DEFAULTS,
    LLAMA_NORMS,
    default_sizes,
    llama_biases,
    projections,
)
from posjax.nn.huggingface.moe_like import (
    balance_value,
    mixture,
    mixture_of,
    mixture_values,
    router,
    shared_mlp,
)
from posjax.nn.huggingface.views import View
from posjax.nn.specs import Router
from posjax.norms import QKNorm
from posjax.rotary import Rotary
from posjax.scales import Llama4Temperature
from posjax.scheme import Scheme

_CHUNKED = "chunked_attention"


def _llama4_dense(values: Values) -> list[int]:
    """The layers with one MLP: those outside ``moe_layers``, or without it all but every n-th."""
    count, step = values["num_hidden_layers"], values["interleave_moe_layer_step"]
    sparse = values.get("moe_layers") or range(step - 1, count, step)
    return [n for n in range(count) if n not in sparse]


def _llama4_schemes(values: Values) -> Any:
    """Layers that rotate attend in chunks, the others to everything, with a temperature."""
    count, every = values["num_hidden_layers"], values["no_rope_layer_interval"]
    rotating = values.get("no_rope_layers") or [(n + 1) % every for n in range(count)]
    check(len(rotating) == count, f"config.json: no_rope_layers names {len(rotating)} layers of {count}")
    chunk = values["attention_chunk_size"]
    types = values.get("layer_types") or [_CHUNKED if rotates and chunk else FULL for rotates in rotating]
    check(len(types) == count, f"config.json: layer_types names {len(types)} layers of {count}")
    norm = QKNorm(gain=False, eps=values["rms_norm_eps"]) if values["use_qk_norm"] else None
    rotation = Rotary(rope_rule(values), pairing="interleaved")
    tuned = values["attn_temperature_tuning"]
    temperature = Llama4Temperature(values["floor_scale"], values["attn_scale"]) if tuned else None

    def of_layer(rotates, kind: str) -> Scheme:
        check_choice("config.json: layer_types", kind, (FULL, _CHUNKED))
        mask = Chunked(chunk) if kind == _CHUNKED else None
        return Scheme(norm=norm, features=rotation, mask=mask) if rotates else Scheme(scale=temperature, mask=mask)

    return of_layers(list(map(of_layer, rotating, types)))


def _llama4_values(config: DecoderConfig) -> dict[str, Any]:
    """The keys of the layers; what they cannot say is found when they are read again."""
    schemes, spec = config.layers.schemes, mixture_of(config)
    chunks = {scheme.mask.size for scheme in schemes if isinstance(scheme.mask, Chunked)}
    scales = {scheme.scale for scheme in schemes} - {None}
    keys = {
        "moe_layers": [n for n in range(config.num_layers) if n not in spec.dense],
        "no_rope_layers": [int(scheme.rotates) for scheme in schemes],
        "layer_types": [FULL if scheme.mask is None else _CHUNKED for scheme in schemes],
        "attention_chunk_size": max(chunks, default=None),
        "use_qk_norm": any(scheme.norm is not None for scheme in schemes),
        "attn_temperature_tuning": bool(scales),
        "attention_bias": "qkv" in config.biases,
    }
    for scale in scales:
        fits = type(scale) is Llama4Temperature
        check(fits, f"scheme: config.json of llama4_text cannot store scale {describe(scale)}")
        keys |= {"floor_scale": scale.floor_scale, "attn_scale": scale.attn_scale}
    experts = mixture_values(config, "num_local_experts", dense_dim="intermediate_size_mlp")
    return keys | experts | balance_value(config) | rope_values(config)


def _llama4_tensors(config: DecoderConfig) -> dict[str, View]:
    """The experts of a layer are in one tensor, with their inputs first."""
    views = EMBEDDING | FINAL_NORM | LLAMA_NORMS | projections(mlp="feed_forward.")
    if config.experts is None:
        return views
    experts = f"{LAYER}feed_forward.experts."
    for part, name in enumerate(("gate", "up")):
        pattern = "experts embed (2 mlp) -> experts embed mlp"
        views[f"block/mlp/{name}"] = View(f"{experts}gate_up_proj", pattern, part)
    views["block/mlp/down"] = View(f"{experts}down_proj", "experts mlp embed -> experts mlp embed")
    return views | router("feed_forward.router.weight") | shared_mlp("feed_forward.shared_expert.")


LLAMA4_TEXT = Family(
    "llama4_text",
    "Llama4ForCausalLM",
    KEYS,
    lambda values: (
        {"biases": llama_biases(values)["biases"], "scheme": _llama4_schemes(values)}
        | mixture(
            values,
            "num_local_experts",
            dense=_llama4_dense(values),
            dense_dim="intermediate_size_mlp",
            router=Router("sigmoid", normalized=False, on_input=True),
            shared_dim=values["intermediate_size"],
        )
    ),
    _llama4_values,
    _llama4_tensors,
    LLAMA_DEFAULTS
    | default_sizes(131_072, 8192, 8)
    | {"rms_norm_eps": 1e-5, "head_dim": 128, "intermediate_size_mlp": 16384, "num_local_experts": 16}
    | {"num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "router_aux_loss_coef": 0.001, "use_qk_norm": True}
    | {"no_rope_layer_interval": 4, "attention_chunk_size": 8192, "attn_temperature_tuning": True}
    | {"floor_scale": 8192, "attn_scale": 0.1},
)
