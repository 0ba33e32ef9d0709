"""Layers of Gated DeltaNet beside attention: Qwen3.5 and Qwen3-Next, dense and with experts, and Lara."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posjax._checks import check, check_choice, check_count
from posjax.linear import GatedDelta
from posjax.nn.config import DecoderConfig
from posjax.nn.huggingface.family import (
    FULL,
    SLIDING,
    Family,
    Values,
    biases,
    of_layers,
    partial_rope_values,
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
    KEYS,
    LAYER,
    LLAMA_DEFAULTS,
    LLAMA_NORMS,
    default_sizes,
    llama_tensors,
    projections,
    qkv_bias_value,
    rope_everywhere,
)
from posjax.nn.huggingface.moe_like import (
    OWN_WIDTH,
    balance_value,
    experts_and_one,
    mixture,
    mixture_of,
    mixture_tensors,
    mixture_values,
    qwen_mixture,
    router,
    shared_mlp,
)
from posjax.nn.huggingface.views import View
from posjax.nn.specs import Norm, Router
from posjax.norms import QKNorm
from posjax.scheme import Layers, Scheme

LINEAR = "linear_attention"
_DELTA = {
    "linear_num_value_heads": "num_heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
    "linear_num_key_heads": "num_key_heads",
    "linear_conv_kernel_dim": "convolution",
}
"""Keys of ``config.json``, with the fields of ``GatedDelta``."""


def _types(values: Values) -> list[str]:
    """The type of every layer; without ``layer_types`` every fourth is full, or as ``full_attention_interval`` says."""
    interval = values.get("full_attention_interval", 4)
    check_count("config.json: full_attention_interval", interval)
    return mixed_types(values, [*[LINEAR] * (interval - 1), FULL], (FULL, LINEAR))


def mixed_types(values: Values, period: Sequence[str], kinds: Sequence[str]) -> list[str]:
    """``layer_types`` of ``config.json``, or a repeated period if it has none.

    Raises ValueError for a wrong number of layers, and for a type that is not among ``kinds``.
    """
    count = values["num_hidden_layers"]
    types = values.get("layer_types") or [period[n % len(period)] for n in range(count)]
    check(len(types) == count, f"config.json: layer_types names {len(types)} layers of {count}")
    for kind in types:
        check_choice("config.json: layer_types", kind, kinds)
    return types


def _schemes(values: Values) -> Scheme | Layers:
    full = rope_everywhere(values, norm=QKNorm(eps=values["rms_norm_eps"], unit_offset=True))
    return mixed_layers(values, _types(values), {FULL: full})


def mixed_layers(values: Values, types: Sequence[str], others: Mapping[str, Scheme]) -> Scheme | Layers:
    """The schemes of all layers: Gated DeltaNet, or those of the other types."""
    if LINEAR not in types:
        return of_layers([others[kind] for kind in types])
    for key in _DELTA:
        check_count(f"config.json: {key}", values[key])
    try:
        delta = GatedDelta(**{field: values[key] for key, field in _DELTA.items()})
    except ValueError as error:
        raise ValueError(f"config.json: layers of linear attention: {error}") from None
    schemes = {**others, LINEAR: Scheme(linear=delta)}
    return of_layers([schemes[kind] for kind in types])


def mixed_values(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of ``mixed_layers``: the type of every layer, and the sizes of Gated DeltaNet."""
    specs = {scheme.linear for scheme in config.layers.kinds if scheme.is_delta}
    check(len(specs) < 2, "scheme: config.json has one size for all layers of Gated DeltaNet")
    pairs = zip(types_of(config), config.layers.schemes, strict=True)
    types = [LINEAR if scheme.is_delta else kind for kind, scheme in pairs]
    return {"layer_types": types} | {key: getattr(spec, field) for spec in specs for key, field in _DELTA.items()}


def _values(config: DecoderConfig) -> dict[str, Any]:
    return mixed_values(config) | qkv_bias_value(config) | partial_rope_values(config)


def _gated_queries() -> dict[str, View]:
    """The views of a head's query and its gate, one behind the other in one tensor."""
    names = {"q": 0, "gate/weight": 1}
    weights, pattern = f"{LAYER}self_attn.q_proj.weight", "(heads 2 size) embed -> embed heads size"
    views = {f"block/attention/{name}": View(weights, pattern, part) for name, part in names.items()}
    added, pattern = f"{LAYER}self_attn.q_proj.bias", "(heads 2 size) -> heads size"
    names = {"q_bias": 0, "gate/bias": 1}
    return views | {f"block/attention/{name}": View(added, pattern, part) for name, part in names.items()}


_KEYS, _VALUES = "delta_keys*key_size", "delta_heads*value_size"
_QKV = f"{_KEYS}+{_KEYS}+{_VALUES}"
_INTO = {"q": "delta_keys key_size", "k": "delta_keys key_size", "v": "delta_heads value_size"}
_DELTA_LAYER = f"{LAYER}linear_attn."


def _delta_views(projected: dict[str, View]) -> dict[str, View]:
    """The views of a layer of Gated DeltaNet, from those of its projections."""
    kernel = f"{_DELTA_LAYER}conv1d.weight"
    kernels = {
        f"{name}_convolution": View(kernel, f"{_QKV} 1 convolution -> convolution {axes}", part)
        for part, (name, axes) in enumerate(_INTO.items())
    }
    rest = {
        "decay_bias": View(f"{_DELTA_LAYER}dt_bias", "delta_heads -> delta_heads"),
        "decay_log": View(f"{_DELTA_LAYER}A_log", "delta_heads -> delta_heads"),
        "norm/gain": View(f"{_DELTA_LAYER}norm.weight", "value_size -> value_size"),
        "o": View(f"{_DELTA_LAYER}out_proj.weight", "embed (delta_heads value_size) -> delta_heads value_size embed"),
    }
    return {f"block/delta/{name}": view for name, view in (projected | kernels | rest).items()}


def _separate_projections() -> dict[str, View]:
    """Qwen3.5: queries, keys and values in one tensor, all else apart."""
    qkv = f"{_DELTA_LAYER}in_proj_qkv.weight"
    one = "delta_heads embed -> embed delta_heads"
    return {
        name: View(qkv, f"{_QKV} embed -> embed {axes}", part) for part, (name, axes) in enumerate(_INTO.items())
    } | {
        "gate": View(
            f"{_DELTA_LAYER}in_proj_z.weight", "(delta_heads value_size) embed -> embed delta_heads value_size"
        ),
        "rate": View(f"{_DELTA_LAYER}in_proj_b.weight", one),
        "decay": View(f"{_DELTA_LAYER}in_proj_a.weight", one),
    }


def _grouped_projections() -> dict[str, View]:
    """Qwen3-Next: one tensor has, by heads of keys, a query, a key, values and gates; another rates and decays."""
    rows = "key_size+key_size+delta_each*value_size+delta_each*value_size"
    qkvz, values = f"(delta_keys {rows}) embed -> embed", "(delta_keys delta_each) value_size"
    into = {"q": "delta_keys key_size", "k": "delta_keys key_size", "v": values, "gate": values}
    both = "(delta_keys 2 delta_each) embed -> embed (delta_keys delta_each)"
    return {
        name: View(f"{_DELTA_LAYER}in_proj_qkvz.weight", f"{qkvz} {axes}", part)
        for part, (name, axes) in enumerate(into.items())
    } | {name: View(f"{_DELTA_LAYER}in_proj_ba.weight", both, part) for part, name in enumerate(("rate", "decay"))}


def _layer_views(projected: dict[str, View]) -> Callable[[DecoderConfig], dict[str, View]]:
    views = EMBEDDING | FINAL_NORM | LLAMA_NORMS | projections() | HEAD_NORMS
    views |= _gated_queries() | _delta_views(projected)
    return lambda config: views


def _read(values: Values) -> dict[str, Any]:
    has = values.get("attention_bias", False)
    return {
        "biases": biases(qkv=has, output=has, gate=has),
        "attention_gate": "elementwise",
        "scheme": _schemes(values),
    }


_DEFAULTS = LLAMA_DEFAULTS | {
    "head_dim": 256,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_conv_kernel_dim": 4,
}


def _family(name: str, architecture: str, keys: dict, read: Callable, write: Callable, tensors: Callable, **more):
    """A family; ``more`` are defaults of its config."""
    return Family(
        name,
        architecture,
        keys,
        lambda values: _read(values) | read(values),
        lambda config: _values(config) | write(config),
        tensors,
        _DEFAULTS | more,
        norm=Norm(unit_offset=True),
        activations={"silu": "swiglu"},  # of the convolution too
        ignored=("rotary_emb.inv_freq", "mtp.*"),  # the heads that predict further tokens
    )


QWEN3_5 = _family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    KEYS,
    lambda values: {},
    lambda config: {},
    _layer_views(_separate_projections()),
    **default_sizes(32768, 12288, 4),
)


def _shared(values: Values) -> dict[str, Any]:
    """The options of a mixture with one gated MLP that all tokens take."""
    return {"shared_dim": values["shared_expert_intermediate_size"], "shared_gate": True}


def _mixture_values(config: DecoderConfig) -> dict[str, Any]:
    width = {"shared_expert_intermediate_size": mixture_of(config).shared_dim}
    return mixture_values(config, "num_experts") | balance_value(config) | width


_MIXTURE = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "router_aux_loss_coef": 0.001}

QWEN3_5_MOE = _family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    OWN_WIDTH,
    lambda values: mixture(values, "num_experts", **_shared(values)),
    _mixture_values,
    mixture_tensors(experts_and_one(), _layer_views(_separate_projections())),
    **default_sizes(32768, None, 2) | _MIXTURE | {"num_experts": 256, "num_experts_per_tok": 8},
)

QWEN3_NEXT = _family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    OWN_WIDTH,
    lambda values: qwen_mixture(values, "num_experts", **_shared(values)),
    lambda config: (
        _mixture_values(config)
        | {"mlp_only_layers": list(mixture_of(config).dense), "decoder_sparse_step": 1}
        | {"norm_topk_prob": mixture_of(config).router.normalized}
    ),
    mixture_tensors(experts_and_one(), _layer_views(_grouped_projections())),
    **default_sizes(32768, 5632, 2) | _MIXTURE | {"num_experts": 512, "num_experts_per_tok": 10},
    decoder_sparse_step=1,
    norm_topk_prob=True,
)

# --- Lara -------------------------------------------------------------------------------------------------------------

_LARA_PERIOD = (LINEAR, SLIDING, LINEAR, FULL, SLIDING)


def _lara(values: Values) -> dict[str, Any]:
    """Layers with windows rotate, full ones do not."""
    norm, has = QKNorm(eps=values["rms_norm_eps"]), values.get("attention_bias", False)
    sliding = rope_scheme(values, rope_rule(values), SLIDING, norm=norm)
    types = mixed_types(values, _LARA_PERIOD, (FULL, SLIDING, LINEAR))
    return {
        "biases": biases(qkv=has, output=has),
        "scheme": mixed_layers(values, types, {FULL: Scheme(norm=norm), SLIDING: sliding}),
    } | mixture(
        values,
        "num_experts",
        router=Router(normalized=values["norm_topk_prob"]),
        shared_dim=values["shared_expert_intermediate_size"],
    )


def _lara_values(config: DecoderConfig) -> dict[str, Any]:
    return (
        mixed_values(config)
        | _mixture_values(config)
        | qkv_bias_value(config)
        | {"norm_topk_prob": mixture_of(config).router.normalized, "sliding_window": window_of(config)}
        | rope_values(config)
    )


def _lara_views() -> dict[str, View]:
    """All projections are in one tensor."""
    rows = f"{_QKV}+{_VALUES}+delta_heads+delta_heads"
    heads = "delta_heads"
    into = _INTO | {"gate": _INTO["v"], "rate": heads, "decay": heads}
    projected = {
        name: View(f"{_DELTA_LAYER}in_proj.weight", f"{rows} embed -> embed {axes}", part)
        for part, (name, axes) in enumerate(into.items())
    }
    norm = {"block/delta/norm/gain": View(f"{_DELTA_LAYER}out_norm.weight", "value_size -> value_size")}
    return llama_tensors(None) | _delta_views(projected) | norm


def _stacked_experts() -> dict[str, View]:
    """All experts of a layer in two tensors, in the first the rows of the gate before those of up."""
    both, pattern = f"{LAYER}mlp.experts.gate_up_proj", "experts (2 mlp) embed -> experts embed mlp"
    views = {f"block/mlp/{name}": View(both, pattern, part) for part, name in enumerate(("gate", "up"))}
    return views | {"block/mlp/down": View(f"{LAYER}mlp.experts.down_proj", "experts embed mlp -> experts mlp embed")}


LARA_MINI = Family(
    "lara_mini",
    "LaraMiniForCausalLM",
    OWN_WIDTH,
    _lara,
    _lara_values,
    mixture_tensors(_stacked_experts() | router() | shared_mlp("mlp.shared_expert."), lambda config: _lara_views()),
    _DEFAULTS
    | default_sizes(131_072, None, 4)
    | _MIXTURE
    | {"tie_word_embeddings": True, "head_dim": 128, "linear_num_value_heads": 16, "linear_num_key_heads": 8}
    | {"num_experts": 128, "num_experts_per_tok": 4, "norm_topk_prob": True, "sliding_window": 512},
    activations={"silu": "swiglu"},
)

QWEN_NEXT_LIKE = (QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, LARA_MINI)
