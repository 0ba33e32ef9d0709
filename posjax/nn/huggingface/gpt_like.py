"""GPT-2 and families with similar blocks: LayerNorm, plain MLPs, fused queries, keys and values."""

from collections.abc import Sequence
from typing import Any

from posjax import absolute, bias
from posjax._checks import check, describe
from posjax.nn.config import DecoderConfig
from posjax.nn.huggingface.family import (
    PLAIN,
    Family,
    Values,
    biases,
    rope_rule,
    rope_values,
    rule_of,
)
from posjax.nn.huggingface.views import View
from posjax.nn.specs import Norm, Residual
from posjax.rotary import Rotary
from posjax.scheme import Scheme

EQUAL = ("q", "heads"), ("k", "heads"), ("v", "heads")
ALL_BIASES = ("qkv", "output", "mlp")
LAYER_NORM = Norm("layer", bias=True)
PLAIN_TANH = {"gelu_pytorch_tanh": "gelu"} | PLAIN
"""``PLAIN``, but the approximate GELU is written by this name."""


def norm(ours: str, theirs: str) -> dict[str, View]:
    """The views of a LayerNorm."""
    return {
        f"{ours}/gain": View(f"{theirs}.weight", "embed -> embed"),
        f"{ours}/bias": View(f"{theirs}.bias", "embed -> embed"),
    }


def matrix(ours: str, theirs: str, pattern: str, bias_pattern: str = "embed -> embed") -> dict[str, View]:
    """The views of a projection that is not fused, and of its bias."""
    return {ours: View(f"{theirs}.weight", pattern), f"{ours}_bias": View(f"{theirs}.bias", bias_pattern)}


def mlp(layer: str, up: str, down: str) -> dict[str, View]:
    """The views of a plain MLP in torch's Linear layers."""
    return matrix("block/mlp/up", f"{layer}{up}", "mlp embed -> embed mlp", "mlp -> mlp") | matrix(
        "block/mlp/down", f"{layer}{down}", "embed mlp -> mlp embed"
    )


def output(layer: str, name: str) -> dict[str, View]:
    """The views of the output projection of attention in a Linear layer."""
    return matrix("block/attention/o", f"{layer}{name}", "embed (heads size) -> heads size embed")


def fused(name: str, rows: str, parts: Sequence[tuple[str, str]]) -> dict[str, View]:
    """The views of queries, keys and values in one Linear layer, whose rows are split as in ``rows``."""
    views = {}
    for part, (ours, heads) in enumerate(parts):
        views[f"block/attention/{ours}"] = View(f"{name}.weight", f"({rows}) embed -> embed {heads} size", part)
        views[f"block/attention/{ours}_bias"] = View(f"{name}.bias", f"({rows}) -> {heads} size", part)
    return views


def megatron(layer: str, attention: str) -> dict[str, View]:
    """The views of a Megatron block: every head's query, key and value are adjacent."""
    views = fused(f"{layer}{attention}.query_key_value", "heads 3 size", EQUAL)
    views |= output(layer, f"{attention}.dense") | mlp(layer, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    views |= norm("block/attention_norm", f"{layer}input_layernorm")
    return views | norm("block/mlp_norm", f"{layer}post_attention_layernorm")


def tables(embedding: str, head: str) -> dict[str, View]:
    """The views of the embedding and of a head without a bias."""
    return {
        "embed": View(f"{embedding}.weight", "vocab embed -> vocab embed"),
        "head": View(f"{head}.weight", "vocab embed -> embed vocab"),
    }


def positions(name: str) -> dict[str, View]:
    """The view of learned positions."""
    return {"embedding/embedding/embedding": View(f"{name}.weight", "positions embed -> positions embed")}


# --- GPT-2 ------------------------------------------------------------------------------------------------------------

_GPT_KEYS = {
    "vocab_size": "vocab_size",
    "n_embd": "model_dim",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_positions": "trained_length",
    "n_inner": "mlp_dim",
    "tie_word_embeddings": "tied_head",
}
_GPT_ALIASES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
_GPT_ALIASES |= {"max_position_embeddings": "n_positions"}
_GPT_DEFAULTS = {"n_positions": 1024, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}
_H = "transformer.h.{layer}."
_GPT_BUFFERS = ("attn.bias", "attn.masked_bias", "attn.embed_positions")


def _gpt2_tensors(config: DecoderConfig) -> dict[str, View]:
    """The views of GPT-2, whose Conv1D layers hold the transposes of the matrices of Linear layers."""
    views = tables("transformer.wte", "lm_head")
    views |= positions("transformer.wpe")
    for part, name in enumerate("qkv"):
        heads = "embed (3 heads size) -> embed heads size"
        fused_name = f"{_H}attn.c_attn"
        views[f"block/attention/{name}"] = View(f"{fused_name}.weight", heads, part)
        views[f"block/attention/{name}_bias"] = View(f"{fused_name}.bias", "(3 heads size) -> heads size", part)
    views |= matrix("block/attention/o", f"{_H}attn.c_proj", "(heads size) embed -> heads size embed")
    views |= matrix("block/mlp/up", f"{_H}mlp.c_fc", "embed mlp -> embed mlp", "mlp -> mlp")
    views |= matrix("block/mlp/down", f"{_H}mlp.c_proj", "mlp embed -> mlp embed")
    return views | _gpt2_norms()


def _gpt2_norms() -> dict[str, View]:
    views = norm("block/attention_norm", f"{_H}ln_1") | norm("block/mlp_norm", f"{_H}ln_2")
    return views | norm("norm", "transformer.ln_f")


def _learned(config: DecoderConfig) -> int:
    """The number of learned positions. Raises ValueError for a decoder without them."""
    spec = config.layers.embedding
    check(type(spec) is absolute.Learned, f"embedding: this layout has learned positions, found {spec}")
    return spec.max_length


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    _GPT_KEYS,
    lambda values: {"biases": ALL_BIASES, "scheme": Scheme(embedding=absolute.Learned(values["n_positions"]))},
    lambda config: {"n_positions": _learned(config)},
    _gpt2_tensors,
    _GPT_DEFAULTS | {"tie_word_embeddings": True},
    {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    "transformer.",
    _GPT_BUFFERS,
    _GPT_ALIASES,
    norm=LAYER_NORM,
    eps="layer_norm_epsilon",
    activation="activation_function",
    activations=PLAIN,
)

# --- GPT-BigCode ------------------------------------------------------------------------------------------------------


def _bigcode_tensors(config: DecoderConfig) -> dict[str, View]:
    """The views of StarCoder: one key head after all queries, or like Megatron a query, a key and a value per head."""
    views = tables("transformer.wte", "lm_head") | positions("transformer.wpe") | _gpt2_norms()
    one = config.num_kv_heads == 1
    rows, parts = ("heads+kv_heads+kv_heads size", _ONE_KEY_HEAD) if one else ("heads 3 size", EQUAL)
    views |= fused(f"{_H}attn.c_attn", rows, parts)
    return views | output(_H, "attn.c_proj") | mlp(_H, "mlp.c_fc", "mlp.c_proj")


_ONE_KEY_HEAD = ("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads")

GPT_BIGCODE = Family(
    "gpt_bigcode",
    "GPTBigCodeForCausalLM",
    _GPT_KEYS,
    lambda values: {
        "biases": ALL_BIASES,
        "num_kv_heads": 1 if values["multi_query"] else values["n_head"],
        "scheme": Scheme(embedding=absolute.Learned(values["n_positions"])),
    },
    lambda config: {"n_positions": _learned(config), "multi_query": config.num_kv_heads == 1},
    _bigcode_tensors,
    _GPT_DEFAULTS | {"tie_word_embeddings": True, "multi_query": True, "activation_function": "gelu_pytorch_tanh"},
    {"scale_attn_weights": True, "add_cross_attention": False},
    "transformer.",
    _GPT_BUFFERS,
    _GPT_ALIASES,
    norm=LAYER_NORM,
    eps="layer_norm_epsilon",
    activation="activation_function",
    activations=PLAIN_TANH,
)

# --- OPT --------------------------------------------------------------------------------------------------------------

_OPT = "model.decoder.layers.{layer}."


def _opt_tensors(config: DecoderConfig) -> dict[str, View]:
    views = tables("model.decoder.embed_tokens", "lm_head") | positions("model.decoder.embed_positions")
    for name in "qkv":
        rows = "(heads size) embed -> embed heads size"
        theirs = f"{_OPT}self_attn.{name}_proj"
        views |= matrix(f"block/attention/{name}", theirs, rows, "(heads size) -> heads size")
    views |= output(_OPT, "self_attn.out_proj") | mlp(_OPT, "fc1", "fc2")
    views |= norm("block/attention_norm", f"{_OPT}self_attn_layer_norm")
    return views | norm("block/mlp_norm", f"{_OPT}final_layer_norm") | norm("norm", "model.decoder.final_layer_norm")


def _opt(values: Values) -> dict[str, Any]:
    """The table of positions has two rows before that of position 0."""
    width, wanted = values.get("word_embed_proj_dim"), values["hidden_size"]
    why = "Decoder has no projection of embeddings, as OPT-350M does"
    check(width in (None, wanted), f"config.json: word_embed_proj_dim must be {wanted}, found {describe(width)}: {why}")
    return {
        "biases": ALL_BIASES if values["enable_bias"] else (),
        "scheme": Scheme(embedding=absolute.Learned(values["max_position_embeddings"], unused=2)),
    }


OPT = Family(
    "opt",
    "OPTForCausalLM",
    {
        "vocab_size": "vocab_size",
        "hidden_size": "model_dim",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "ffn_dim": "mlp_dim",
        "max_position_embeddings": "trained_length",
        "tie_word_embeddings": "tied_head",
    },
    _opt,
    lambda config: {
        "max_position_embeddings": _learned(config),
        "enable_bias": "mlp" in config.biases,
        "word_embed_proj_dim": config.model_dim,
    },
    _opt_tensors,
    {"ffn_dim": 3072, "max_position_embeddings": 2048, "activation_function": "relu"}
    | {"tie_word_embeddings": True, "enable_bias": True},
    {"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True},
    norm=Norm("layer", eps=1e-5, bias=True),
    eps="",
    activation="activation_function",
    activations=PLAIN,
)

# --- GPT-J ------------------------------------------------------------------------------------------------------------


def _gptj_tensors(config: DecoderConfig) -> dict[str, View]:
    views = {"embed": View("transformer.wte.weight", "vocab embed -> vocab embed")}
    views |= matrix("head", "lm_head", "vocab embed -> embed vocab", "vocab -> vocab")
    for name in "qkv":
        heads = "(heads size) embed -> embed heads size"
        views[f"block/attention/{name}"] = View(f"{_H}attn.{name}_proj.weight", heads)
    views |= output(_H, "attn.out_proj") | mlp(_H, "mlp.fc_in", "mlp.fc_out")
    return views | norm("block/attention_norm", f"{_H}ln_1") | norm("norm", "transformer.ln_f")


def _gptj_values(config: DecoderConfig) -> dict[str, int]:
    rule = rule_of(config)
    return {"rotary_dim": config.head_dim if rule is None else rule.rotary_dim()}


GPTJ = Family(
    "gptj",
    "GPTJForCausalLM",
    _GPT_KEYS,
    lambda values: {
        "biases": ("mlp", "head"),
        "residual": Residual(parallel=True, shared_norm=True),
        "scheme": Scheme(features=Rotary(rope_rule(values), pairing="interleaved")),
    },
    _gptj_values,
    _gptj_tensors,
    _GPT_DEFAULTS | {"n_positions": 2048, "rotary_dim": 64, "tie_word_embeddings": False},
    {},
    "transformer.",
    _GPT_BUFFERS,
    _GPT_ALIASES,
    norm=LAYER_NORM,
    eps="layer_norm_epsilon",
    activation="activation_function",
    activations=PLAIN,
)

# --- GPT-NeoX, Pythia -------------------------------------------------------------------------------------------------

_NEOX = "gpt_neox.layers.{layer}."


def _neox_tensors(config: DecoderConfig) -> dict[str, View]:
    """The views of GPT-NeoX, whose head is ``embed_out`` in released files, but ``lm_head`` in ``state_dict``."""
    views = megatron(_NEOX, "attention") | norm("norm", "gpt_neox.final_layer_norm")
    return views | tables("gpt_neox.embed_in", "embed_out")


def _neox_biases(values: Values) -> tuple[str, ...]:
    attention = values["attention_bias"]
    return biases(qkv=attention, output=attention, mlp=True)


GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    {
        "vocab_size": "vocab_size",
        "hidden_size": "model_dim",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "intermediate_size": "mlp_dim",
        "max_position_embeddings": "trained_length",
        "tie_word_embeddings": "tied_head",
    },
    lambda values: {
        "biases": _neox_biases(values),
        "residual": Residual(parallel=values["use_parallel_residual"]),
        "scheme": Scheme(features=Rotary(rope_rule(values))),
    },
    lambda config: (
        {"attention_bias": "qkv" in config.biases, "use_parallel_residual": config.residual.parallel}
        | _neox_rope_values(config)
    ),
    _neox_tensors,
    {
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "attention_bias": True,
        "use_parallel_residual": True,
        "intermediate_size": 24576,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "rotary_emb_base": 10_000.0,
        "rotary_pct": 0.25,
    },
    {},
    "gpt_neox.",
    ("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
    renamed={"embed_out.weight": "lm_head.weight"},
    norm=LAYER_NORM,
    eps="layer_norm_eps",
    activations=PLAIN,
)


def _neox_rope_values(config: DecoderConfig) -> dict[str, Any]:
    """The keys of the rule.

    transformers 4 reads ``rotary_pct`` and ``rotary_emb_base``, transformers 5 reads ``rope_parameters``.
    """
    values, rule = rope_values(config), rule_of(config)
    if rule is None:
        return values
    share = values["rope_parameters"].get("partial_rotary_factor", 1.0)
    older = {"rotary_pct": share, "rotary_emb_base": values["rope_theta"]}
    return values | older | {"rope_parameters": values["rope_parameters"] | {"partial_rotary_factor": share}}


# --- BLOOM ------------------------------------------------------------------------------------------------------------


def _bloom_tensors(config: DecoderConfig) -> dict[str, View]:
    views = megatron(_H, "self_attention") | norm("norm", "transformer.ln_f")
    views |= norm("embedding_norm", "transformer.word_embeddings_layernorm")
    return views | tables("transformer.word_embeddings", "lm_head")


BLOOM = Family(
    "bloom",
    "BloomForCausalLM",
    {
        "vocab_size": "vocab_size",
        "hidden_size": "model_dim",
        "n_layer": "num_layers",
        "n_head": "num_heads",
        "seq_length": "trained_length",
        "tie_word_embeddings": "tied_head",
    },
    lambda values: {
        "activation": "gelu",
        "biases": ALL_BIASES,
        "embedding_norm": True,
        "scheme": Scheme(bias=bias.ALiBi()),
    },
    lambda config: {},
    _bloom_tensors,
    {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    {"apply_residual_connection_post_layernorm": False, "slow_but_exact": False},
    "transformer.",
    (),
    {"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    norm=LAYER_NORM,
    eps="layer_norm_epsilon",
    activation="",
)

# --- MPT --------------------------------------------------------------------------------------------------------------

_BLOCKS = "transformer.blocks.{layer}."


def _mpt_tensors(config: DecoderConfig) -> dict[str, View]:
    views = tables("transformer.wte", "lm_head")
    views |= fused(f"{_BLOCKS}attn.Wqkv", "3 heads size", EQUAL)
    views |= output(_BLOCKS, "attn.out_proj") | mlp(_BLOCKS, "ffn.up_proj", "ffn.down_proj")
    views |= norm("block/attention_norm", f"{_BLOCKS}norm_1") | norm("block/mlp_norm", f"{_BLOCKS}norm_2")
    return views | norm("norm", "transformer.norm_f")


_MPT_ATTENTION = {
    "attn_type": ("multihead_attention",),
    "alibi": (True,),
    "alibi_bias_max": (8,),
    "clip_qkv": (None,),
    "qk_ln": (False,),
    "prefix_lm": (False,),
    "attn_uses_sequence_id": (False,),
}
"""Options of MPT's attention, each with the values that ``Decoder`` supports."""


def _mpt(values: Values) -> dict[str, Any]:
    attention = values.get("attn_config") or {}
    for key, fits in _MPT_ATTENTION.items():
        setting = attention.get(key, fits[0])
        why = f"attn_config.{key} {describe(setting)} is an option that Decoder does not have; {fits[0]!r} would work"
        check(setting in fits, f"config.json: {why}")
    return {
        "query_scale": attention.get("softmax_scale"),
        "activation": "gelu-exact",
        "scheme": Scheme(bias=bias.ALiBi()),
    }


def _mpt_values(config: DecoderConfig) -> dict[str, Any]:
    attention = {key: fits[0] for key, fits in _MPT_ATTENTION.items()} | {"softmax_scale": config.query_scale}
    return {"expansion_ratio": 4, "attn_config": attention, "no_bias": True}


MPT = Family(
    "mpt",
    "MptForCausalLM",
    {
        "vocab_size": "vocab_size",
        "d_model": "model_dim",
        "n_layers": "num_layers",
        "n_heads": "num_heads",
        "max_seq_len": "trained_length",
        "tie_word_embeddings": "tied_head",
    },
    _mpt,
    _mpt_values,
    _mpt_tensors,
    {"layer_norm_epsilon": 1e-5, "max_seq_len": 2048, "tie_word_embeddings": True},
    {"no_bias": True, "logit_scale": None, "norm_type": "low_precision_layernorm", "embedding_fraction": 1.0}
    | {"expansion_ratio": 4},
    "transformer.",
    (),
    {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"},
    norm=Norm("layer"),
    eps="layer_norm_epsilon",
    activation="",
)

# --- Falcon -----------------------------------------------------------------------------------------------------------

_FALCON_ROWS = "kv_heads each+1+1 size"
_FALCON_PARTS = ("q", "(kv_heads each)"), ("k", "kv_heads"), ("v", "kv_heads")


def _falcon_tensors(config: DecoderConfig) -> dict[str, View]:
    """The views of Falcon. Each group of heads has its queries, then its key, then its value.

    Falcon 7B has one group, which is the whole tensor.
    """
    views = tables("transformer.word_embeddings", "lm_head")
    views |= fused(f"{_H}self_attention.query_key_value", _FALCON_ROWS, _FALCON_PARTS)
    views |= output(_H, "self_attention.dense") | mlp(_H, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    shared = config.residual.shared_norm
    views |= norm("block/attention_norm", f"{_H}{'input_layernorm' if shared else 'ln_attn'}")
    return views | norm("block/mlp_norm", f"{_H}ln_mlp") | norm("norm", "transformer.ln_f")


def _falcon(values: Values) -> dict[str, Any]:
    new, bias_everywhere = values["new_decoder_architecture"], values["bias"]
    check(
        new or values["multi_query"],
        "config.json: a Falcon with neither new_decoder_architecture nor multi_query cannot be read",
    )
    norms = values.get("num_ln_in_parallel_attn") or (2 if new else 1)
    check(
        norms in ((1, 2) if new else (1,)),
        f"config.json: num_ln_in_parallel_attn {describe(norms)} is an option that Decoder does not have; 1 would work",
    )
    return {
        "num_kv_heads": (values.get("num_kv_heads") or values["num_attention_heads"]) if new else 1,
        "residual": Residual(parallel=True, shared_norm=norms == 1),
        "biases": ALL_BIASES if bias_everywhere else (),
        "scheme": Scheme(features=Rotary(rope_rule(values))),
    }


def _falcon_values(config: DecoderConfig) -> dict[str, Any]:
    two = not config.residual.shared_norm
    new = two or config.num_kv_heads > 1
    return {
        "bias": "mlp" in config.biases,
        "new_decoder_architecture": new,
        "multi_query": config.num_kv_heads == 1,
        "num_kv_heads": config.num_kv_heads,
        "num_ln_in_parallel_attn": (2 if two else 1) if new else None,
        "parallel_attn": True,
        "alibi": False,
    } | rope_values(config)


FALCON = Family(
    "falcon",
    "FalconForCausalLM",
    {
        "vocab_size": "vocab_size",
        "hidden_size": "model_dim",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "ffn_hidden_size": "mlp_dim",
        "max_position_embeddings": "trained_length",
        "tie_word_embeddings": "tied_head",
    },
    _falcon,
    _falcon_values,
    _falcon_tensors,
    {
        "layer_norm_epsilon": 1e-5,
        "activation": "gelu",
        "bias": False,
        "new_decoder_architecture": False,
        "multi_query": True,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    {"alibi": False, "parallel_attn": True},
    "transformer.",
    ("rotary_emb.inv_freq",),
    {"n_embed": "hidden_size"},
    norm=LAYER_NORM,
    eps="layer_norm_epsilon",
    activation="activation",
    activations=PLAIN,
)

GPT_LIKE = (GPT2, GPTJ, GPT_NEOX, BLOOM, MPT, FALCON, GPT_BIGCODE, OPT)
