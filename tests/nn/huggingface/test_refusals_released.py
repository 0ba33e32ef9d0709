"""Released models that Decoder refuses, decoders that no released layout can store, and old releases that are read."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from nn.huggingface import released
from nn.huggingface.released import refuse

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


# --- tensors ----------------------------------------------------------------------------------------------------------


Q = "model.layers.1.self_attn.q_proj.weight"
TENSORS = {
    "missing": (
        lambda tensors: {name: x for name, x in tensors.items() if name != Q},
        [f"tensor {Q!r} is missing", "did you mean 'model.layers.1.self_attn.v_proj.weight'?"],
    ),
    "unexpected": (
        lambda tensors: tensors | {"model.layers.0.self_attn.sinks": np.zeros(4, np.float32)},
        ["unexpected tensors: model.layers.0.self_attn.sinks;", "config.json of llama does not describe them"],
    ),
    "many unexpected": (
        lambda tensors: tensors | {f"extra.{n}": np.zeros(4, np.float32) for n in range(5)},
        ["unexpected tensors: extra.0, extra.1, extra.2 and 2 more;"],
    ),
    "misshapen": (
        lambda tensors: tensors | {Q: tensors[Q].T},
        [f"tensor {Q!r} has shape (64, 48); by config.json it must have (48, 64)"],
    ),
    "as many numbers": (
        lambda tensors: tensors | {"model.norm.weight": tensors["model.norm.weight"].reshape(8, 8)},
        ["tensor 'model.norm.weight' has shape (8, 8); by config.json it must have (64,)"],
    ),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("dtype", ["float32", None])
def test_tensors_that_do_not_fit_the_config(name, dtype, tmp_path):
    change, words = TENSORS[name]
    folder = released.rewritten(released.random_decoder(LLAMA), tmp_path, change)
    refuse(words, from_pretrained, folder, dtype=dtype)


# --- config.json ------------------------------------------------------------------------------------------------------

CONFIGS = {
    "base of another family": (
        LLAMA | {"rope_local_base_freq": 55.0, "rope_parameters": None},
        ["config.json", "rope_local_base_freq 55.0", "rope_theta"],
    ),
    "share of another family": (
        released.CASES["cohere2"] | {"rotary_pct": 0.5},
        ["config.json", "rotary_pct 0.5", "partial_rotary_factor"],
    ),
    "no model type": ({"vocab_size": 3}, ["config.json lacks model_type"]),
    "unknown": (LLAMA | {"model_type": "lama"}, ["model_type: unknown value 'lama'; did you mean 'llama'?"]),
    "several modalities": (
        {"model_type": "gemma3", "text_config": released.CASES["gemma3_text"]},
        ["config.json: 'gemma3' reads more than text, which Decoder does not; only its text part can be read"],
    ),
    "quantised": (
        LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        ["the tensors are quantised by 'gptq'; read the model before quantisation"],
    ),
    "no width": (
        {key: LLAMA[key] for key in LLAMA if key not in ("hidden_size", "rope_parameters")},
        ["config.json lacks 'hidden_size'"],
    ),
    "activation": (LLAMA | {"hidden_act": "silly"}, ["hidden_act: unknown value 'silly'; did you mean 'silu'?"]),
    "plain": (released.CASES["gpt2"] | {"activation_function": "silu"}, ["activation_function: unknown value 'silu'"]),
    "rope": (LLAMA | {"rope_parameters": released.rope(1e4, rope_type="yarm")}, ["rope_type", "'yarm'", "'yarn'"]),
    "layer types": (
        released.CASES["gemma2"] | {"layer_types": ["full_attention"]},
        ["layer_types names 1 layers of 3"],
    ),
    "layer type": (
        released.CASES["gemma2"] | {"layer_types": ["full_attention", "full_attention", "chunked_attention"]},
        ["layer_types: unknown value 'chunked_attention'"],
    ),
    "falcon alibi": (
        released.FALCON | {"alibi": True},
        ["alibi True is an option that Decoder does not have"],
    ),
    "falcon in turn": (released.FALCON | {"parallel_attn": False}, ["parallel_attn False", "True would work"]),
    "falcon heads": (released.FALCON | {"multi_query": False}, ["neither new_decoder_architecture nor multi_query"]),
    "mpt clip": (
        released.CASES["mpt"] | {"attn_config": {"alibi": True, "clip_qkv": 6.0}},
        ["attn_config.clip_qkv 6.0 is an option that Decoder does not have; None would work"],
    ),
    "mpt without alibi": (
        released.CASES["mpt"] | {"attn_config": {"alibi": False}},
        ["attn_config.alibi False is an option that Decoder does not have; True would work"],
    ),
    **{
        f"huge {key}": (
            released.CASES["gemma3_text"] | {"layer_types": None, key: 2**63},
            [f"config.json: {key} must be at most", f"found {2**63}"],
        )
        for key in ("num_hidden_layers", "vocab_size", "intermediate_size", "sliding_window_pattern")
    },
    "mpt slopes": (
        released.CASES["mpt"] | {"attn_config": {"alibi": True, "alibi_bias_max": 4}},
        ["attn_config.alibi_bias_max 4 is an option that Decoder does not have; 8 would work"],
    ),
    "mpt biases": (
        released.CASES["mpt"] | {"no_bias": False},
        ["no_bias False is an option that Decoder"],
    ),
    "gpt2 scales": (
        released.CASES["gpt2"] | {"scale_attn_by_inverse_layer_idx": True},
        ["scale_attn_by_inverse_layer_idx True is an option that Decoder does not have; False would work"],
    ),
    "bloom": (
        released.CASES["bloom"] | {"apply_residual_connection_post_layernorm": True},
        ["apply_residual_connection_post_layernorm True is an option that Decoder does not have"],
    ),
    "cohere2": (
        released.CASES["cohere2"] | {"use_qk_norm": True},
        ["use_qk_norm True is an option that Decoder does not have"],
    ),
    "not causal": (
        LLAMA | {"is_causal": False},
        ["is_causal False is an option that Decoder does not"],
    ),
    "layers of their own": (LLAMA | {"per_layer_config": {"0": {}}}, ["per_layer_config {'0': {}} is an option"]),
    "part of a head": (
        LLAMA | {"partial_rotary_factor": 0.5},
        ["partial_rotary_factor must be 1 for llama, which"],
    ),
    "part of a head, falcon": (
        released.FALCON | {"rope_parameters": released.rope(1e4, partial_rotary_factor=0.5)},
        ["partial_rotary_factor must be 1 for falcon, which rotates whole heads; found 0.5"],
    ),
    "rules by layer": (
        LLAMA | {"rope_parameters": {"full_attention": released.rope(1e4), "sliding_attention": released.rope(1e3)}},
        ["rope_parameters {'full_attention': ", "llama has one rule for all layers; give only that rule"],
    ),
    "smollm3 layer types": (
        released.CASES["smollm3"] | {"layer_types": ["full_attention"]},
        ["layer_types names 1 layers of 3"],
    ),
    "smollm3 window": (
        released.CASES["smollm3"] | {"layer_types": ["sliding_attention"] * 3},
        ["sliding_window must be a whole number above 0 for sliding layers, found None"],
    ),
    "smollm3 rope": (released.CASES["smollm3"] | {"no_rope_layers": [1, 0]}, ["no_rope_layers names 2 layers of 3"]),
    "gemma3 rule": (
        released.CASES["gemma3_text"] | {"rope_parameters": released.rope(1e3)},
        ["rope_parameters {'rope_type': 'default', 'rope_theta': 1000.0}: gemma3_text has separate"],
    ),
    "gemma3 cap": (
        released.CASES["gemma3_text"] | {"attn_logit_softcapping": 2.0},
        ["attn_logit_softcapping 2.0 is an option that Decoder does not have; None would work"],
    ),
    "qwen2 layer types": (
        released.CASES["qwen2"] | {"layer_types": ["full_attention"]},
        ["layer_types names 1 layers of 3"],
    ),
    "qwen2 windows": (
        released.CASES["qwen2"] | {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3},
        ["layer_types has sliding layers, but use_sliding_window is off"],
    ),
    "mistral layer types": (
        released.CASES["mistral"] | {"layer_types": ["sliding_attention", "full_attention"]},
        ["layer_types has full_attention, but all layers of mistral are sliding_attention", "leave layer_types out"],
    ),
    "phi3 rule": (
        released.PHI3 | {"rope_parameters": released.rope(1e4, rope_type="linear", factor=2.0)},
        ["rope_type of phi3: unknown value 'linear' (known: default, longrope)"],
    ),
    "neox base": (
        {key: value for key, value in released.CASES["gpt_neox"].items() if key != "rotary_emb_base"}
        | {"rope_theta": 500.0},
        ["rope_theta 500.0: transformers reads rotary_emb_base for gpt_neox, which gives [10000.0] here"],
    ),
    "neox share": (
        released.CASES["gpt_neox"] | {"partial_rotary_factor": 1.0},
        ["partial_rotary_factor 1.0: transformers reads rotary_pct for gpt_neox, which gives [0.5] here"],
    ),
    "neox heads": (
        released.CASES["gpt_neox"] | {"head_dim": 6},
        ["head_dim must be 12 for gpt_neox, found 6"],
    ),
    "mpt width": (released.CASES["mpt"] | {"expansion_ratio": 2}, ["expansion_ratio 2 is an option that Decoder does"]),
    "falcon norms": (
        released.CASES["falcon-7b"] | {"num_ln_in_parallel_attn": 2},
        ["num_ln_in_parallel_attn 2 is an option that Decoder does not have; 1 would work"],
    ),
    "gptj width": (released.CASES["gptj"] | {"rotary_dim": 64}, ["rotary_dim must be a whole number from 1 to 12"]),
    "gemma2": (
        released.CASES["gemma2"] | {"use_bidirectional_attention": True},
        ["use_bidirectional_attention True is an option that Decoder does not have"],
    ),
}


BROKEN = {
    "half a layer": ("llama", "num_hidden_layers", 1.5, "must be a whole number above 0, found 1.5"),
    "a width in words": ("llama", "hidden_size", "64", "must be a whole number above 0, found '64'"),
    "no heads": ("gpt2", "n_head", 0, "must be a whole number above 0, found 0"),
    "an eps of none": ("mistral", "rms_norm_eps", None, "must be a finite number, found None"),
    "an eps in words": ("bloom", "layer_norm_epsilon", "1e-5", "must be a finite number, found '1e-5'"),
    "tied by a word": ("llama", "tie_word_embeddings", "no", "must be true or false, found 'no'"),
    "tied by none": ("llama", "tie_word_embeddings", None, "must be true or false, found None"),
    "rope that is a list": ("llama", "rope_parameters", [1], "must be an object, found [1]"),
    "rope of one kind": ("gemma3_text", "rope_parameters", {"full_attention": 3}, "{'full_attention': 3}: gemma3_text"),
    "base": ("qwen3", "rope_parameters", {"rope_type": "default", "rope_theta": "x"}, ": base must be a number, found"),
    "factors": ("phi3-longrope", "rope_parameters", released.LONG | {"long_factor": 3}, ": "),
    "layers in words": ("gemma2", "layer_types", "full_attention", "must be a list, found 'full_attention'"),
    "options": ("mpt", "attn_config", [], "must be an object, found []"),
    "scale of 0": ("granite", "logits_scaling", 0, "must be positive, found 0"),
    "scalar of 0": ("gemma2", "query_pre_attn_scalar", 0, "must be positive, found 0"),
    "activation": ("gptj", "activation_function", ["gelu"], "must be a name, found ['gelu']"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_values_of_a_wrong_kind_are_named_by_their_key(name):
    case, key, value, words = BROKEN[name]
    refuse([f"config.json: {key}", words], read_config, released.CASES[case] | {key: value})


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma3_text", "phi3", "cohere2"])
def test_a_null_base_is_refused_as_transformers_cannot_compute_with_it(case):
    """Settings and a share that are null are left out, as in transformers."""
    plain = {key: value for key, value in released.CASES[case].items() if key not in ("rope_parameters", "rope_theta")}
    refuse(["rope_theta is None: give the base"], read_config, plain | {"rope_theta": None})
    nulls = dict.fromkeys(("rope_parameters", "rope_scaling", *(("partial_rotary_factor",) if case == "llama" else ())))
    assert read_config(plain | nulls) == read_config(plain)


def test_the_attn_factor_of_a_released_model_is_not_read():
    yarn = released.rope(1e6, rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    found = [
        read_config(released.CASES["qwen3"] | {"rope_parameters": yarn | more}) for more in ({}, {"attn_factor": 0.878})
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("case", released.CASES)
def test_a_message_does_not_repeat_a_long_value(case):
    found = []
    for key in (*released.CASES[case], "rope_scaling", "quantization_config", "is_causal", "head_dim"):
        for value in ("x" * 3000, ["x" * 3000], {"quant_method": "x" * 3000}):
            try:
                read_config(released.CASES[case] | {key: value})
            except ValueError as error:
                found.append(str(error))
    assert len(found) > 20
    assert max(map(len, found)) < 600


@pytest.mark.parametrize("case", released.CASES)
def test_every_key_may_be_missing_or_of_any_kind(case):
    """The config is then read, or refused with a ValueError and no other error."""
    values = released.CASES[case]
    for key in values:
        for changed in ({}, *({key: wrong} for wrong in (None, "x", [], ["a"], {"a": 1}, -1, 0, 1.5, True))):
            rest = {name: value for name, value in values.items() if name != key}
            with contextlib.suppress(ValueError):
                read_config(rest | changed)


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_decoder_does_not_support(name):
    values, words = CONFIGS[name]
    refuse(words, read_config, values)


def test_an_empty_text_config_is_ignored():
    assert read_config(LLAMA | {"text_config": None}) == read_config(LLAMA)


# --- decoders ---------------------------------------------------------------------------------------------------------

CAN = "Released layouts can store RoPE with a rule that has to_hf"
SCHEMES = {
    "coca": ({"scheme": pj.scheme("coca-slack")}, ["cannot store Coca(variant='slack'", "CoCA and other maps", CAN]),
    "xpos": ({"scheme": pj.scheme("xpos")}, ["cannot store XPos(", CAN]),
    "rerope": (
        {"scheme": pj.scheme("rerope", window=4)},
        ["scheme: the layout of llama cannot store remap ReRoPE(window=4), only remap None", CAN],
    ),
    "t5": ({"scheme": pj.scheme("t5")}, ["scheme: the layout of llama cannot store", "bias T5(", "bias None", CAN]),
    "cosine": ({"scheme": pj.scheme("cosine", length=8)}, ["norm CosineNorm(", "only norm None", CAN]),
    "sinusoidal": ({"scheme": pj.scheme("sinusoidal")}, ["embedding Sinusoidal(", CAN]),
    "two windows": (
        {"scheme": pj.Layers(((tuple(pj.scheme("rope", mask=masks.Window(n)) for n in (3, 4)), 1),))},
        ["scheme: the layout of llama cannot store mask Window(size=3), only mask None", CAN],
    ),
    "layer norm": ({"norm": Norm("layer")}, ["norm: the layout of llama cannot store Norm(kind='layer'"]),
    "gelu": ({"activation": "gelu"}, ["activation: the layout of llama cannot store 'gelu'"]),
    "relu": ({"activation": "reglu"}, ["hidden_act: unknown value 'reglu'"]),
    "one bias": (
        {"biases": ("output",)},
        ["biases: the layout of llama cannot store {'output'}, only set()"],
    ),
    "first norm": ({"residual": Residual(first_norm=False)}, ["residual: the layout of llama cannot store"]),
    "cap": (
        {"attention_softcap": 3.0},
        ["attention_softcap: the layout of llama cannot store 3.0, only None"],
    ),
    "encoder": ({"causal": False}, ["causal: the layout of llama cannot store False, only True"]),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_decoders_that_no_layout_can_store(name, tmp_path):
    options, words = SCHEMES[name]
    refuse(
        [*words, "no released layout can store this decoder; the reason for llama: "],
        save_pretrained,
        decoder(**options),
        tmp_path / "out",
    )
    assert list(tmp_path.iterdir()) == []


@dataclasses.dataclass(frozen=True)
class Halved(rotary.Plain):
    """Plain RoPE at half of its frequencies, under the name of plain RoPE."""

    def _scaled(self, inverse_frequencies):
        return inverse_frequencies / 2


@dataclasses.dataclass(frozen=True)
class Flat(rotary.NTKAware):
    """All frequencies at half, under the name and the base of NTK-aware scaling."""

    def _multipliers(self, half):
        return np.full(half, 0.5)


@dataclasses.dataclass(frozen=True)
class Turned(rotary.Plain):
    """The frequencies of plain RoPE, but another table."""

    def table(self, positions, **options):
        cos, sin = super().table(positions, **options)
        return rotary.RotaryTable(cos, -sin)


OTHERS = {
    "halved": Halved(),
    "flat": Flat(2.0),
    "turned": Turned(),
    "linear": dataclasses.make_dataclass("Own", [], bases=(rotary.Linear,), frozen=True)(2.0),
    "a factor of the logits": rotary.YaRN(4.0, 16, mscale=1.0, mscale_all_dim=0.5),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("family", [None, "llama", "qwen2", "gpt_neox"])
def test_a_rule_that_only_looks_like_a_known_one_is_not_written_as_that(name, family, tmp_path):
    scheme = pj.Scheme(features=rotary.Rotary(OTHERS[name]))
    biases = {"biases": ("qkv",)} if family == "qwen2" else {}
    if family == "gpt_neox":
        biases = {"biases": ("qkv", "output", "mlp"), "norm": Norm("layer", bias=True), "activation": "gelu"}
        biases |= {"tied_head": False, "residual": Residual(parallel=True)}
    refuse(
        ["scheme: the layout of", type(OTHERS[name]).__name__],
        save_pretrained,
        decoder(scheme=scheme, **biases),
        tmp_path / "out",
        family=family,
    )
    plain = pj.Scheme(features=rotary.Rotary(rotary.NTKAware(2.0)))
    save_pretrained(decoder(scheme=plain, **biases), tmp_path / "out", family=family)
    written = released.config_of(tmp_path / "out")
    bases = {written[key] for key in ("rope_theta", "rotary_emb_base") if key in written}
    assert bases == {written["rope_parameters"]["rope_theta"]}
    assert bases != {1e4}


LONG = rotary.LongRoPE((1.0,) * 8, (2.0,) * 8, 16, factor=2.0)
NAMED = {
    "query norm": (
        "llama",
        {"scheme": pj.scheme("rope", norm=norms.QKNorm())},
        [
            "scheme: the layout of llama cannot store norm QKNorm(",
            "only norm None",
            "norms of queries and keys",
        ],
    ),
    "window": ("llama", {"scheme": pj.scheme("window", size=5)}, ["mask Window(size=5), only mask None"]),
    "chunks": (
        "mistral",
        {"scheme": pj.scheme("chunked", size=6)},
        ["scheme: config.json cannot store mask Chunked(", "a window"],
    ),
    "two windows": ("mistral", SCHEMES["two windows"][0], ["scheme: config.json has one window for all layers"]),
    "granite's scale": (
        "llama",
        {"logit_scale": 0.5},
        ["logit_scale: the layout of llama cannot store 0.5, only"],
    ),
    "gpt2": ("gpt2", {}, ["embedding: GPT-2 has learned positions, found None"]),
    "another frequency rule": (
        "llama",
        {"scheme": pj.Scheme(features=rotary.Rotary(rotary.DynamicLinear(32)))},
        ["to_hf: Hugging Face has no rope_type for DynamicLinear"],
    ),
    "unknown": ("lama", {}, ["model_type: unknown value 'lama'; did you mean 'llama'?"]),
    "phi3, linear": (
        "phi3",
        {"scheme": pj.Scheme(features=rotary.Rotary(rotary.Linear(2.0)))},
        ["rope_type of phi3: unknown value 'linear' (known: default, longrope)"],
    ),
    "phi3, yarn": (
        "phi3",
        {"scheme": pj.Scheme(features=rotary.Rotary(rotary.YaRN(2.0, 16)))},
        ["rope_type of phi3: unknown value 'yarn' (known: default, longrope)"],
    ),
    "phi3, wide heads": (
        "phi3",
        {"scheme": pj.Scheme(features=rotary.Rotary(LONG)), "head_dim": 16},
        ["long_factor must have 4 numbers for phi3 with heads of 8 channels, found"],
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_decoders_that_the_named_layout_cannot_store(name, tmp_path):
    family, options, words = NAMED[name]
    refuse(words, save_pretrained, decoder(**options), tmp_path / "out", family=family)
    assert list(tmp_path.iterdir()) == []


def test_the_first_layout_that_fits_is_taken(tmp_path):
    fits = {
        "llama": {},
        "mistral": {"scheme": pj.scheme("window", size=5)},
        "qwen2": {"biases": ("qkv",)},
        "qwen3": {"scheme": pj.scheme("rope", norm=norms.QKNorm())},
        "smollm3": {"scheme": pj.Layers((((pj.scheme("rope"), pj.Scheme()), 1),))},
        "granite": {"logit_scale": 0.5},
        "olmo2": {"residual": Residual("after"), "projection_norm": True},
        "phi3": {"scheme": pj.Scheme(features=rotary.Rotary(rotary.Plain(partial_rotary_factor=0.5)))},
        "gpt2": {"scheme": pj.scheme("learned", max_length=16), "norm": Norm("layer", bias=True)}
        | {"activation": "gelu", "biases": ("qkv", "output", "mlp")},
    }
    for name, options in fits.items():
        save_pretrained(decoder(**options), tmp_path / name)
        assert released.config_of(tmp_path / name)["model_type"] == name
        assert read_config(released.config_of(tmp_path / name)) == from_pretrained(tmp_path / name).config


def test_a_folder_with_a_model_is_left_alone(tmp_path):
    save_pretrained(decoder(), tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    refuse(
        [f"{tmp_path}/out holds a model already; choose another folder"], save_pretrained, decoder(), tmp_path / "out"
    )
    refuse(["holds a model already"], save_pretrained, decoder(), tmp_path / "out", like=tmp_path / "out")
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "out").write_text("stays")
    refuse([f"{tmp_path}/out is a file; choose a folder"], save_pretrained, decoder(), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_other_folders_stay_and_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    """Another folder in the same place may have any name, even ``out.partial``."""
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "letter").write_text("stays")

    def disk_full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("posjax.nn.huggingface.save._write", disk_full)
    with pytest.raises(OSError, match="no space left"):
        save_pretrained(decoder(), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.partial"]
    monkeypatch.undo()
    save_pretrained(decoder(), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.partial"]
    assert (tmp_path / "out.partial" / "letter").read_text() == "stays"


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors", files.INDEX])
def test_tensors_without_a_config_are_left_alone(name, tmp_path):
    """Otherwise a reader of the folder would mix them with the new tensors."""
    (tmp_path / name).write_bytes(b"tensors of another model")
    refuse(
        [f"{tmp_path} holds a model already; choose another folder (found {name})"],
        save_pretrained,
        decoder(),
        tmp_path,
    )
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_folder_with_other_files_is_written_into(tmp_path):
    (tmp_path / "README.md").write_text("stays")
    save_pretrained(decoder(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_arguments_are_checked(tmp_path):
    refuse(["max_file_bytes must be positive, found 0"], save_pretrained, decoder(), tmp_path / "out", max_file_bytes=0)
    save_pretrained(decoder(), tmp_path / "out")
    refuse(["scheme"], from_pretrained, tmp_path / "out", scheme=pj.scheme("alibi"))
    refuse(["num_layers"], from_pretrained, tmp_path / "out", num_layers=3)
    assert from_pretrained(tmp_path / "out", compute_dtype="bfloat16").config.compute_dtype == "bfloat16"


# --- what is accepted -------------------------------------------------------------------------------------------------


def buffers(family, layers):
    """The buffers that old releases of a family have in every layer."""
    names = {"gpt2": ("attn.bias", "attn.masked_bias"), "gptj": ("attn.bias", "attn.masked_bias")}
    names |= {"gpt_neox": ("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq")}
    names |= {"llama": ("self_attn.rotary_emb.inv_freq",), "falcon": ("self_attention.rotary_emb.inv_freq",)}
    return {f"{layers}.{n}.{name}": np.ones((1, 1, 3, 3), np.float32) for n in range(2) for name in names[family]}


OLD = {
    "llama": "model.layers",
    "gpt2": "transformer.h",
    "gptj": "transformer.h",
    "gpt_neox": "gpt_neox.layers",
    "falcon": "transformer.h",
}


@pytest.mark.parametrize("name", OLD)
def test_buffers_of_old_releases_and_names_without_a_prefix(name, tmp_path):
    """The released GPT-2 has both: ``h.0.attn.bias`` is a mask."""
    model, prefix = released.random_decoder(released.CASES[name]), FAMILIES[name].prefix

    def older(tensors):
        return {key.removeprefix(prefix): x for key, x in (tensors | buffers(name, OLD[name])).items()}

    folder = released.rewritten(model, tmp_path, older)
    found = from_pretrained(folder)
    jax.tree.map(np.testing.assert_array_equal, *(released.parameters(each) for each in (found, model)))
    # Buffers are not parameters, so they are not written back.
    save_pretrained(found, tmp_path / "back", like=folder)
    assert TensorFolder(tmp_path / "back").entries.keys() == TensorFolder(tmp_path / "before").entries.keys()
