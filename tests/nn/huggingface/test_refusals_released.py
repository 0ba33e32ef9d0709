"""Released models that Decoder refuses, decoders that no released layout can store, and old releases that are read."""

import contextlib
import dataclasses
import resource
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from nn.huggingface import released
from nn.huggingface.released import rewritten
from refusals import refused

import posjax as pj
from posjax import masks, norms, rotary
from posjax.nn import Decoder, DecoderConfig, Norm, Residual, from_pretrained, save_pretrained
from posjax.nn.huggingface import FAMILIES, files, read_config
from posjax.nn.huggingface.files import TensorFolder

LLAMA = released.CASES["llama"]
SMALL = {"vocab_size": 16, "num_layers": 2, "model_dim": 32, "num_heads": 4, "embedding_scale": 1.0}


def decoder(**options):
    """A decoder of zeros; nothing is computed with it."""
    config = DecoderConfig(**SMALL | {"scheme": pj.scheme("rope")} | options)
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    return nnx.merge(graph, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), state))


def rope(rule):
    return pj.Scheme(features=rotary.Rotary(rule))


# --- tensors ----------------------------------------------------------------------------------------------------------

Q, GAIN = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"
TENSORS = [
    (Q, lambda tensors: {name: x for name, x in tensors.items() if name != Q}),
    (Q, lambda tensors: tensors | {Q: tensors[Q].T}),
    (GAIN, lambda tensors: tensors | {GAIN: tensors[GAIN].reshape(8, 8)}),
    ("extra.2 and 2 more", lambda tensors: tensors | {f"extra.{n}": np.zeros(4, np.float32) for n in range(5)}),
]


@pytest.mark.parametrize(("name", "change"), TENSORS, ids=["missing", "misshapen", "as many numbers", "unexpected"])
@pytest.mark.parametrize("dtype", ["float32", pytest.param(None, marks=pytest.mark.wide)])
def test_tensors_that_do_not_fit_the_config(name, change, dtype, tmp_path):
    folder = rewritten(released.random_decoder(LLAMA), tmp_path, change)
    refused(name, lambda: from_pretrained(folder, dtype=dtype))


def test_a_fixed_number_may_be_missing_but_not_another_one(tmp_path):
    """Apertus stores two numbers of its activation that no model learns."""
    model, beta = released.random_decoder(released.CASES["apertus"]), "model.layers.1.mlp.act_fn.beta"
    folder = rewritten(model, tmp_path / "less", lambda tensors: {k: x for k, x in tensors.items() if k != beta})
    jax.tree.map(
        np.testing.assert_array_equal, *(released.parameters(each) for each in (from_pretrained(folder), model))
    )
    folder = rewritten(model, tmp_path / "other", lambda tensors: tensors | {beta: np.float32(0.7)})
    refused(beta, lambda: from_pretrained(folder))


# --- config.json ------------------------------------------------------------------------------------------------------

FULL, SLIDING = "full_attention", "sliding_attention"
STRETCHED = released.rope(1e4, rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
SMALL_TEXT, FP8 = {"hidden_size": 64}, {"quantization_config": {"quant_method": "fp8"}}
CONFIGS = [
    ("model_type", "llama", {"model_type": "lama"}),
    ("paligemma", "gemma3_text", {"model_type": "paligemma", "text_config": SMALL_TEXT}),
    ("text_config", "gemma3_text", {"model_type": "gemma3"}),
    ("text_config", "gemma3_text", {"model_type": "gemma3", "text_config": []}),
    ("text_config.model_type", "mistral", {"model_type": "mistral3", "text_config": {"model_type": "gemma"}}),
    ("fp8", "mistral", {"model_type": "mistral3", "text_config": SMALL_TEXT} | FP8),
    ("gptq", "llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
    ("hidden_act", "llama", {"hidden_act": "silly"}),
    ("rope_type", "llama", {"rope_parameters": released.rope(1e4, rope_type="yarm")}),
    ("rope_parameters", "llama", {"rope_parameters": {FULL: released.rope(1e4), SLIDING: released.rope(1e3)}}),
    ("rope_local_base_freq", "llama", {"rope_local_base_freq": 55.0, "rope_parameters": None}),
    ("rotary_pct", "cohere2", {"rotary_pct": 0.5}),
    ("rope_theta", "gpt_neox", {"rotary_emb_base": ..., "rope_theta": 500.0}),
    ("rope_theta", "phi3", {"rope_parameters": ..., "rope_theta": None}),
    ("partial_rotary_factor", "gpt_neox", {"partial_rotary_factor": 1.0}),
    ("partial_rotary_factor", "llama", {"partial_rotary_factor": 0.5}),
    ("partial_rotary_factor", "falcon", {"rope_parameters": released.rope(1e4, partial_rotary_factor=0.5)}),
    ("is_causal", "llama", {"is_causal": False}),
    ("per_layer_config", "llama", {"per_layer_config": {"0": {}}}),
    ("layer_types", "gemma2", {"layer_types": [FULL]}),
    ("layer_types", "gemma2", {"layer_types": [FULL, FULL, "chunked_attention"]}),
    ("layer_types", "qwen2", {"use_sliding_window": False, "layer_types": [SLIDING] * 3}),
    ("layer_types", "mistral", {"layer_types": [SLIDING, FULL]}),
    ("layer_types", "gemma2", {"layer_types": "full_attention"}),
    ("no_rope_layers", "smollm3", {"no_rope_layers": [1, 0]}),
    ("sliding_window", "smollm3", {"layer_types": [SLIDING] * 3}),
    ("sliding_window", "mistral", {"sliding_window": 2.5}),
    ("alibi", "falcon", {"alibi": True}),
    ("parallel_attn", "falcon", {"parallel_attn": False, "new_decoder_architecture": False}),
    ("new_decoder_architecture", "falcon", {"multi_query": False, "new_decoder_architecture": False}),
    ("num_ln_in_parallel_attn", "falcon-7b", {"num_ln_in_parallel_attn": 2}),
    ("attn_config.clip_qkv", "mpt", {"attn_config": {"alibi": True, "clip_qkv": 6.0}}),
    ("attn_config.alibi", "mpt", {"attn_config": {"alibi": False}}),
    ("attn_config", "mpt", {"attn_config": []}),
    ("no_bias", "mpt", {"no_bias": False}),
    ("expansion_ratio", "mpt", {"expansion_ratio": 2}),
    ("scale_attn_by_inverse_layer_idx", "gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("activation_function", "gpt2", {"activation_function": "silu"}),
    ("n_head", "gpt2", {"n_head": 0}),
    ("apply_residual_connection_post_layernorm", "bloom", {"apply_residual_connection_post_layernorm": True}),
    ("layer_norm_epsilon", "bloom", {"layer_norm_epsilon": "1e-5"}),
    ("use_qk_norm", "cohere2", {"use_qk_norm": True}),
    ("word_embed_proj_dim", "opt", {"word_embed_proj_dim": 24}),
    ("do_layer_norm_before", "opt", {"do_layer_norm_before": False}),
    ("rope_parameters", "nanochat", {"rope_theta": None, "rope_parameters": STRETCHED}),
    ("alpha", "hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": -1.0, "factor": 1.0}}),
    ("hidden_act", "apertus", {"hidden_act": "silu"}),
    ("rope_parameters", "gemma3_text", {"rope_parameters": released.rope(1e3)}),
    ("hidden_size_per_layer_input", "gemma4_text", {"hidden_size_per_layer_input": ...}),
    ("hidden_size_per_layer_input", "gemma4_text", {"hidden_size_per_layer_input": 8}),
    ("num_experts", "gemma4_text", {"enable_moe_block": True}),
    ("num_kv_shared_layers", "gemma4_text", {"num_kv_shared_layers": 1}),
    ("use_bidirectional_attention", "gemma4_text", {"use_bidirectional_attention": "all"}),
    ("per_layer_config", "gemma4_text", {"per_layer_config": {"1": {"num_attention_heads": 2}}}),
    ("per_layer_config", "gemma4_text", {"per_layer_config": {"full_attention": {"head_dim": 20}}}),
    ("head_dim", "gemma4_text", {"per_layer_config": {"1": {"head_dim": 2.5}}}),
    ("rope_parameters", "gemma3_text", {"rope_parameters": {FULL: 3}}),
    ("attn_logit_softcapping", "gemma3_text", {"attn_logit_softcapping": 2.0}),
    ("use_bidirectional_attention", "gemma2", {"use_bidirectional_attention": True}),
    ("query_pre_attn_scalar", "gemma2", {"query_pre_attn_scalar": 0}),
    ("rope_type of phi3", "phi3", {"rope_parameters": released.rope(1e4, rope_type="linear", factor=2.0)}),
    ("rope_parameters", "phi3-longrope", {"rope_parameters": released.LONG | {"long_factor": 3}}),
    ("head_dim", "gpt_neox", {"head_dim": 6}),
    ("rotary_dim", "gptj", {"rotary_dim": 64}),
    ("logits_scaling", "granite", {"logits_scaling": 0}),
    ("num_hidden_layers", "llama", {"num_hidden_layers": 1.5}),
    ("hidden_size", "llama", {"hidden_size": "64"}),
    ("rms_norm_eps", "mistral", {"rms_norm_eps": None}),
    ("tie_word_embeddings", "llama", {"tie_word_embeddings": "no"}),
    ("base", "qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}),
    ("sliding_window_pattern", "gemma3_text", {"layer_types": None, "sliding_window_pattern": 2**63}),
    ("glm_moe_dsa", "youtu", {"model_type": "glm_moe_dsa"}),
    ("deepseek_v32", "deepseek_v3", {"model_type": "deepseek_v32"}),
    ("kv_lora_rank", "youtu", {"kv_lora_rank": 0}),
    ("num_kv_heads", "youtu", {"num_key_value_heads": 2}),
    ("topk_method", "deepseek_v2", {"topk_method": "noaux_tc"}),
    ("norm_topk_prob", "deepseek_v2", {"norm_topk_prob": True}),
    ("scoring_func", "deepseek_v3", {"scoring_func": "softmax"}),
    ("num_experts_per_tok", "deepseek_v2", {"num_experts_per_tok": None}),
]


@pytest.mark.parametrize(("name", "case", "changes"), CONFIGS, ids=[f"{c[1]}, {c[0]}" for c in CONFIGS])
def test_a_config_that_decoder_does_not_support(name, case, changes):
    values = released.CASES[case] | changes
    refused(name, lambda: read_config({key: value for key, value in values.items() if value is not ...}))


@pytest.mark.parametrize("key", ["model_type", "hidden_size"])
def test_a_missing_key_is_named(key):
    refused(key, lambda: read_config({name: x for name, x in LLAMA.items() if name not in (key, "rope_parameters")}))


def test_values_that_change_nothing_are_ignored():
    yarn = released.rope(1e6, rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    for changes in ({"text_config": None}, {"rope_scaling": None, "partial_rotary_factor": None}):
        assert read_config(LLAMA | changes) == read_config(LLAMA)
    rules = [yarn, yarn | {"attn_factor": 0.878}]
    plain, factor = (read_config(released.CASES["qwen3"] | {"rope_parameters": rule}) for rule in rules)
    assert plain == factor


def test_kimi_k2_is_a_deepseek_v3_and_sarvam_has_a_name_of_its_own_for_yarn():
    values = released.CASES["deepseek_v3"]
    assert read_config(values | {"model_type": "kimi_k2"}) == read_config(values)
    values, yarn = released.CASES["sarvam_mla"], released.YARN | {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    names = ({"type": name, "rope_theta": 1e4} | yarn for name in ("yarn", "deepseek_yarn"))
    one, other = (read_config(values | {"rope_scaling": rule}) for rule in names)
    assert one == other


def test_layers_that_predict_further_tokens_are_not_read(tmp_path):
    model = released.random_decoder(released.CASES["deepseek_v3"])
    more = {"model.layers.3.eh_proj.weight": np.zeros((2, 2), np.float32)}
    folder = rewritten(model, tmp_path, lambda tensors: tensors | more)
    jax.tree.map(np.testing.assert_array_equal, *map(released.parameters, (from_pretrained(folder), model)))
    within = {"model.layers.2.eh_proj.weight": np.zeros((2, 2), np.float32)}
    folder = rewritten(model, tmp_path / "within", lambda tensors: tensors | within)
    refused("eh_proj", lambda: from_pretrained(folder))


@pytest.mark.parametrize("case", released.cases(*released.WHOLE))
def test_every_key_may_be_missing_or_of_any_kind(case):
    """The config is then read, or refused with a ValueError and no other error."""
    values = released.CASES[case]
    for key in values:
        for changed in ({}, *({key: wrong} for wrong in (None, "x", [], ["a"], {"a": 1}, -1, 0, 1.5, True))):
            rest = {name: value for name, value in values.items() if name != key}
            with contextlib.suppress(ValueError):
                read_config(rest | changed)


# --- decoders ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Halved(rotary.Plain):
    """Plain RoPE at half of its frequencies, under the name of plain RoPE."""

    def _scaled(self, inverse_frequencies):
        return inverse_frequencies / 2


@dataclasses.dataclass(frozen=True)
class Turned(rotary.Plain):
    """The frequencies of plain RoPE, but another table."""

    def table(self, positions, **options):
        cos, sin = super().table(positions, **options)
        return rotary.RotaryTable(cos, -sin)


OWN_LINEAR = dataclasses.make_dataclass("Own", [], bases=(rotary.Linear,), frozen=True)
TWO_WINDOWS = pj.Layers(((tuple(pj.scheme("rope", mask=masks.Window(n)) for n in (3, 4)), 1),))
NEOX = {"biases": ("qkv", "output", "mlp"), "norm": Norm("layer", bias=True), "activation": "gelu"}
NEOX |= {"tied_head": False, "residual": Residual(parallel=True)}
DECODERS = [
    ("scheme", None, {"scheme": pj.scheme("coca-slack")}),
    ("scheme", None, {"scheme": pj.scheme("xpos")}),
    ("remap", None, {"scheme": pj.scheme("rerope", window=4)}),
    ("bias", None, {"scheme": pj.scheme("t5")}),
    ("norm", None, {"scheme": pj.scheme("cosine", length=8)}),
    ("embedding", None, {"scheme": pj.scheme("sinusoidal")}),
    ("mask", None, {"scheme": TWO_WINDOWS}),
    ("norm", None, {"norm": Norm("layer")}),
    ("activation", None, {"activation": "silu"}),
    ("hidden_act", None, {"activation": "reglu"}),
    ("biases", None, {"biases": ("head",)}),
    ("residual", None, {"residual": Residual(first_norm=False)}),
    ("attention_softcap", None, {"attention_softcap": 3.0}),
    ("causal", None, {"causal": False}),
    ("query_scale", "llama", {"query_scale": 0.5}),
    ("logit_scale", "llama", {"logit_scale": 0.5}),
    ("norm", "llama", {"scheme": pj.scheme("rope", norm=norms.QKNorm())}),
    ("mask", "llama", {"scheme": pj.scheme("window", size=5)}),
    ("mask", "mistral", {"scheme": pj.scheme("chunked", size=6)}),
    ("window", "mistral", {"scheme": TWO_WINDOWS}),
    ("embedding", "gpt2", {}),
    ("to_hf", "llama", {"scheme": rope(rotary.DynamicLinear(32))}),
    ("model_type", "lama", {}),
    ("head_dim", "llama", {"head_dim": (8, 12)}),
    ("head_dim", "gemma4_text", {"head_dim": (8, 12)}),
    ("keys_as_values", "llama", {"keys_as_values": True}),
    ("value_norm", "llama", {"value_norm": True}),
    ("rope_type of phi3", "phi3", {"scheme": rope(rotary.YaRN(2.0, 16))}),
    ("long_factor", "phi3", {"scheme": rope(rotary.LongRoPE((1.0,) * 8, (2.0,) * 8, 16, factor=2.0)), "head_dim": 16}),
    # Rules that only look like a known one.
    ("Halved", None, {"scheme": rope(Halved())}),
    ("Halved", "gpt_neox", {"scheme": rope(Halved()), **NEOX}),
    ("Turned", "llama", {"scheme": rope(Turned())}),
    ("Own", "qwen2", {"scheme": rope(OWN_LINEAR(2.0)), "biases": ("qkv",)}),
    ("YaRN", "llama", {"scheme": rope(rotary.YaRN(4.0, 16, mscale=1.0, mscale_all_dim=0.5))}),
]


@pytest.mark.parametrize(("name", "family", "options"), DECODERS, ids=[f"{n} {d[:2]}" for n, d in enumerate(DECODERS)])
def test_a_decoder_that_a_layout_cannot_store(name, family, options, tmp_path):
    with pytest.raises(ValueError, match=rf"(?<!\w){name}\b") as caught:
        save_pretrained(decoder(**options), tmp_path / "out", family=family)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


FIRST = {
    "llama": {"query_scale": 8**-0.5, "compute_dtype": "bfloat16", "remat": "full", "trained_length": 9},
    "mistral": {"scheme": pj.scheme("window", size=5)},
    "qwen2": {"biases": ("qkv",)},
    "qwen3": {"scheme": pj.scheme("rope", norm=norms.QKNorm())},
    "smollm3": {"scheme": pj.Layers((((pj.scheme("rope"), pj.Scheme()), 1),))},
    "granite": {"logit_scale": 0.5},
    "olmo2": {"residual": Residual("after"), "projection_norm": True},
    "phi3": {"scheme": rope(rotary.Plain(partial_rotary_factor=0.5))},
    "gpt2": {"scheme": pj.scheme("learned", max_length=16), "norm": Norm("layer", bias=True)}
    | {"activation": "gelu", "biases": ("mlp", "qkv", "output")},
}


@pytest.mark.parametrize("family", FIRST)
def test_the_first_layout_that_fits_is_taken(family, tmp_path):
    save_pretrained(decoder(**FIRST[family]), tmp_path / "out")
    assert released.config_of(tmp_path / "out")["model_type"] == family


@pytest.mark.parametrize(("family", "options"), [("llama", {}), ("gpt_neox", NEOX)])
def test_ntk_aware_scaling_is_written_as_plain_rope_with_its_base(family, options, tmp_path):
    """Scaling by 2 is plain RoPE with the base 10,000 * 2^(8/6) for heads of 8 channels."""
    save_pretrained(decoder(scheme=rope(rotary.NTKAware(2.0)), **options), tmp_path / "out", family=family)
    written = released.config_of(tmp_path / "out")
    bases = [written[key] for key in ("rope_theta", "rotary_emb_base") if key in written]
    np.testing.assert_allclose([*bases, written["rope_parameters"]["rope_theta"]], 1e4 * 2 ** (8 / 6), rtol=1e-12)


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00002.safetensors", files.INDEX])
def test_a_folder_with_a_part_of_a_model_is_left_alone(name, tmp_path):
    """Otherwise a reader of the folder would mix it with the new tensors."""
    (tmp_path / name).write_bytes(b"of another model")
    refused(name, lambda: save_pretrained(decoder(), tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "out").write_text("stays")
    refused(f"{tmp_path}/out is a file", lambda: save_pretrained(decoder(), tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_other_files_stay_and_a_failed_write_leaves_nothing(tmp_path):
    """The disk allows files of 1,000 bytes only. Another folder in the same place may even be ``out.partial``."""
    (tmp_path / "out.partial").mkdir()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_pretrained(decoder(), tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("stays")
    save_pretrained(decoder(), tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"README.md", "config.json", "model.safetensors"}


def test_arguments_are_checked(tmp_path):
    save_pretrained(decoder(), out := tmp_path / "out")
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    refused("max_file_bytes", lambda: save_pretrained(decoder(), tmp_path / "other", max_file_bytes=0))
    refused("scheme", lambda: from_pretrained(out, scheme=pj.scheme("alibi")))
    refused("num_layers", lambda: from_pretrained(out, num_layers=3))
    refused("dtype", lambda: from_pretrained(out, dtype="float64"))
    refused("sharding", lambda: from_pretrained(out, sharding=lambda axes, shape: NamedSharding(mesh, P("x"))))
    assert from_pretrained(out, compute_dtype="bfloat16").config.compute_dtype == "bfloat16"


# --- what is accepted -------------------------------------------------------------------------------------------------

MASKS = ("attn.bias", "attn.masked_bias")
OLD = {
    "llama": ("model.layers", ("self_attn.rotary_emb.inv_freq",)),
    "gpt2": ("transformer.h", MASKS),
    "gptj": ("transformer.h", MASKS),
    "gpt_neox": ("gpt_neox.layers", ("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq")),
}
"""The buffers that old releases of a family have in every layer."""


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", pytest.param("gptj", marks=pytest.mark.wide)])
def test_buffers_of_old_releases_and_names_without_a_prefix(name, tmp_path):
    """The released GPT-2 has both: ``h.0.attn.bias`` is a mask."""
    model, (layers, names) = released.random_decoder(released.CASES[name]), OLD[name]
    buffers = {f"{layers}.{n}.{each}": np.ones((1, 1, 3, 3), np.float32) for n in range(2) for each in names}

    def older(tensors):
        return {key.removeprefix(FAMILIES[name].prefix): x for key, x in (tensors | buffers).items()}

    folder = rewritten(model, tmp_path, older)
    found = from_pretrained(folder)
    jax.tree.map(np.testing.assert_array_equal, *(released.parameters(each) for each in (found, model)))
    # Buffers are not parameters, so they are not written back.
    save_pretrained(found, tmp_path / "back", like=folder)
    assert TensorFolder(tmp_path / "back").entries.keys() == TensorFolder(tmp_path / "before").entries.keys()
