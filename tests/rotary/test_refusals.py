"""Bad input to the rotary room is refused in one line that names the argument."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from posjax import rotary
from posjax.positions import Range
from posjax.rotary import longrope

# --- the numbers and choices of every rule and feature ----------------------------------------------------------------

RULE = {"base": (1, 0.5, math.nan, "1e4", None, True), "head_dim": (7, 0, 2.5)}
RULE |= {"partial_rotary_factor": (1.5, -0.5, math.nan)}
BELOW_ONE = (0.5, math.nan, "2")
NOT_A_COUNT = (0, 2.5)
NEGATIVE = (-1, math.nan)
NOT_POSITIVE = (0, math.inf)
LENGTH = {"original_length": BELOW_ONE}
RAMP = {"beta_fast": (0.5, math.nan), "beta_slow": (0, 64.0), "ramp": ("pairs",)}
MSCALES = ("mscale", "mscale_all_dim")
SIZES = ("original_length", "max_factor", "param_factor", "steps")
PLACE = {"pairing": ("both",), "precision": ("half",), "frequencies": ("default", 10_000.0)}
FACTORS = {"short_factor": (1.0,) * 4, "long_factor": (2.0,) * 4, "original_length": 8, "factor": 2.0}
SELECTED = rotary.LongRoPE(**FACTORS, select="long")
SPECS = [
    (rotary.Plain, {}, RULE | {"partial_rotary_factor": (0, 1.5)}),
    (rotary.Proportional, {}, RULE | {"factor": BELOW_ONE}),
    (rotary.HoPE, {"original_length": 8}, RULE | LENGTH),
    *(
        (kind, {"factor": 2.0}, RULE | {"factor": BELOW_ONE})
        for kind in (rotary.Linear, rotary.NTKAware, rotary.NTKOld, rotary.NTKFixed)
    ),
    (rotary.NTKMixed, {"factor": 2.0}, RULE | {"factor": BELOW_ONE, "exponent": (-0.1, 1.1, "0.6")}),
    (rotary.NTKByParts, {"factor": 2.0, "original_length": 8}, RULE | LENGTH | RAMP | {"factor": BELOW_ONE}),
    (rotary.YaRN, {"factor": 2.0, "original_length": 8}, RULE | LENGTH | RAMP),
    (rotary.YaRN, {"factor": 2.0, "original_length": 8}, dict.fromkeys(("attention_factor", *MSCALES), NEGATIVE)),
    (rotary.DynamicLinear, {"original_length": 8}, RULE | LENGTH),
    (rotary.DynamicNTK, {"original_length": 8}, RULE | LENGTH | {"factor": BELOW_ONE, "schedule": ("llama",)}),
    (rotary.DynamicNTK, {"original_length": 8, "schedule": "qwen"}, {"factor": (2.0,)}),
    (rotary.DynamicYaRN, {"original_length": 8}, RULE | LENGTH | RAMP),
    (rotary.LongRoPE, FACTORS, RULE | {"factor": BELOW_ONE, "attention_factor": NEGATIVE, "select": ("auto",)}),
    (rotary.LongRoPE, FACTORS, {"short_factor": ((0.0,) * 4, "ab"), "long_factor": ((math.nan,) * 4, 2.0)}),
    (rotary.LongRoPE, FACTORS, {"original_length": (1,), "unscaled_first": (-1, 1.5)}),
    (rotary.LongRoPE, FACTORS | {"select": "dynamic"}, {"factor": (1.0,)}),
    (rotary.LongRoPE, FACTORS | {"head_dim": 8}, {"long_factor": ((1.0,),)}),
    (rotary.Llama3, {}, RULE | LENGTH | {"low_freq_factor": (0, 5.0), "high_freq_factor": (0.5, math.nan)}),
    (rotary.CLEX, {"original_length": 8}, RULE | dict.fromkeys(SIZES, NOT_A_COUNT) | {"activation": ("gelu",)}),
    (rotary.Axial, {}, {"order": ((0,), (0, 2), (0, 0)), "split": ("halves",), "offset": (0.5,), "base": (1.0,)}),
    (rotary.MRoPE, {}, {"sections": ((3,), (0, 4)), "layout": ("striped",), "rule": ("yarn",), "base": (1.0,)}),
    (rotary.MRoPE, {"head_dim": 128}, {"sections": ((16, 24, 23),)}),
    (rotary.MRoPE, {"rule": rotary.Plain(5e5)}, {"base": (1e6,)}),
    (rotary.RoPETie, {}, RULE | {"num_axes": (1, 2.5), "rule": ("yarn",)}),
    (rotary.Stretched, {"rule": rotary.Plain(), "factor": 2.0}, {"rule": (1e4,), "factor": (0.0, -2.0, math.inf)}),
    (rotary.Stretched, {"factor": 2.0}, {"rule": (rotary.CLEX(32), rotary.RoPETie(), SELECTED)}),
    (rotary.Resonance, {}, RULE | {"partial_rotary_factor": (0, 1.5), "rule": (1e4, rotary.CLEX(32), rotary.Axial())}),
    (rotary.Rotary, {}, PLACE),
    (rotary.ValueRotary, {}, PLACE | {"targets": ("ov",)}),
    (rotary.XPos, {}, PLACE | {"gamma": NOT_POSITIVE, "scale_base": NOT_POSITIVE}),
    (rotary.MixedRotary, {}, {"num_axes": (1, 2.5), "base": (1.0,), "pairing": ("neox",)}),
]


@pytest.mark.parametrize(("kind", "good", "bad"), SPECS)
def test_numbers_and_choices_out_of_range_are_refused(kind, good, bad):
    for option, values in bad.items():
        for value in values:
            refused(option, lambda option=option, value=value: kind(**(good | {option: value})))


# --- calls ------------------------------------------------------------------------------------------------------------

X = np.ones((2, 4, 3, 16), np.float32)
TABLE = rotary.rotary_table(np.arange(4), rotary.inverse_frequencies(16))
TEXT = Range(0, 4)
F8 = rotary.inverse_frequencies(8)
LEARNED = rotary.CLEX(32).init(jax.random.key(0), 16)
MIXED = rotary.MixedRotary().init(jax.random.key(0), num_heads=2, num_kv_heads=2, head_dim=16)
UNKNOWN = rotary.LongRoPE((1.0,) * 4, (2.0,) * 4, 8, attention_factor=1.0)
INITIAL = rotary.LongRoPE(**FACTORS)
NOT_GENERATORS = [np.ones(shape) for shape in ((1, 4, 4), (1, 3, 3), (1, 2, 4), (4, 4))] + [np.full((1, 2, 2), np.nan)]
CALLS = [
    ("head_dim", lambda: rotary.inverse_frequencies(7)),
    ("width", lambda: rotary.inverse_frequencies(28, partial_rotary_factor=0.25)),
    ("head_dim", lambda: rotary.Plain(head_dim=8).at_length(head_dim=16)),
    ("width", lambda: rotary.NTKAware(2.0, head_dim=2).at_length()),
    ("length", lambda: rotary.DynamicYaRN(32).table(TEXT, head_dim=16)),
    ("length", lambda: rotary.CLEX(32).table(TEXT, head_dim=16, params=LEARNED)),
    ("params", lambda: rotary.CLEX(32).table(TEXT, head_dim=16, length=64)),
    ("up", lambda: rotary.CLEX(32).table(TEXT, head_dim=32, length=64, params=LEARNED)),
    ("positions", lambda: rotary.rotary_table(np.zeros((2, 2, 2), int), F8)),
    ("inverse_frequencies", lambda: rotary.rotary_table(np.arange(3), np.float64(1.0))),
    ("inverse_frequencies", lambda: rotary.rotary_table(np.zeros((2, 3), int), np.ones((4, 8)))),
    ("pairing", lambda: rotary.apply_rotary(X, TABLE, pairing="neox")),
    ("x", lambda: rotary.apply_rotary(X[..., :14], TABLE)),
    ("x", lambda: rotary.apply_rotary(X[:, :3], TABLE)),
    ("x", lambda: rotary.apply_rotary(X.astype(int), TABLE)),
    ("target", lambda: rotary.permute_projection(X, "half", "pairs")),
    ("rotary_dim", lambda: rotary.permute_projection(X, "half", "interleaved", rotary_dim=18)),
    ("short_factor", lambda: INITIAL.at_length(head_dim=32)),
    ("factor", lambda: rotary.LongRoPE((1.0,), (1.0,), 32)),
    ("initial", lambda: longrope.search(len, UNKNOWN)),
    ("reach", lambda: longrope.search(len, INITIAL, reach=0.5)),
    ("step", lambda: longrope.search(len, INITIAL, step=0)),
    ("unscaled_first", lambda: longrope.search(len, INITIAL, unscaled_first=(1, 2))),
    ("population", lambda: longrope.search(len, INITIAL, population=3)),
    ("parents", lambda: longrope.search(len, INITIAL, parents=65)),
    ("probability", lambda: longrope.search(len, INITIAL, probability=0.0)),
    ("context_length", lambda: rotary.smallest_base(2, 128)),
    ("head_dim", lambda: rotary.smallest_base(1000, 2)),
    ("base", lambda: rotary.largest_context(1.0, 128)),
    ("divisible", lambda: rotary.Axial(head_dim=18)),
    ("sections", lambda: rotary.MRoPE(sections=(2, 3, 3), layout="interleaved", head_dim=16)),
    ("positions", lambda: rotary.RoPETie().table(np.zeros((1, 2, 3), int), head_dim=16)),
    ("size", lambda: rotary.grid_coordinates(3, 0)),
    ("spans", lambda: rotary.mrope_positions([2, 0])),
    ("spans", lambda: rotary.tie_positions([(1, 2, 3)])),
    ("spacing", lambda: rotary.tie_positions([3], "even")),
    ("head_dim", lambda: rotary.MixedRotary(num_axes=9).query_size(16)),
    ("params", lambda: rotary.MixedRotary().key({}, X, TEXT, head_dim=16)),
    ("frequencies", lambda: rotary.MixedRotary().key({"frequencies": jnp.zeros((2, 3, 8))}, X, TEXT, head_dim=16)),
    ("positions", lambda: rotary.MixedRotary().key(MIXED, X[:, :, :2], np.zeros((1, 4, 3), int), head_dim=16)),
    ("head_dim", lambda: rotary.GeneralRotary(np.zeros((1, 8, 8))).query_size(16)),
    *(("generators", functools.partial(rotary.decompose, matrices)) for matrices in NOT_GENERATORS),
    ("generators", lambda: rotary.GeneralRotary(NOT_GENERATORS[0])),
    ("generators", lambda: rotary.commute(NOT_GENERATORS[0])),
    ("to_hf", rotary.DynamicNTK(32, schedule="qwen").to_hf),
    ("to_hf", rotary.HoPE(32).to_hf),
    ("to_hf", rotary.YaRN(4.0, 4096, ramp="rotations").to_hf),
    ("to_hf", SELECTED.to_hf),
    ("to_hf", rotary.LongRoPE(**FACTORS, unscaled_first=4).to_hf),
]


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[f"{n}-{name}" for n, (name, _) in enumerate(CALLS)])
def test_bad_calls_are_refused(name, call):
    refused(name, call)


# --- configurations of Hugging Face -----------------------------------------------------------------------------------

MODEL = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096}
YARN = {"rope_type": "yarn", "factor": 4.0}
LINEAR = {"type": "linear", "factor": 2.0}
GLM = {"model_type": "glm", "head_dim": 128}
MLA = {"model_type": "deepseek_v3", "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "head_dim": 128}


class OfList:
    def to_dict(self):
        return [1]


CONFIGS = [
    ("factor", {"rope_type": "linear"}),
    ("low_freq_factor", {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8}),
    ("original_max_position_embeddings", YARN),
    ("factor", {"rope_type": "linear", "factor": 0.5}),
    ("rope_theta", {**MODEL, "rope_theta": None}),
    ("facto", {"rope_type": "linear", "factor": 2.0, "facto": 3.0}),
    ("short_factor", {**MODEL, "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}}),
    ("dictionary", {"rope_scaling": 3}),
    ("full_attention", {"rope_parameters": {"full_attention": {"rope_type": "yarm"}}}),
    ("rope_parameters", {"rope_parameters": {"a": {"rope_type": "default"}, "factor": 2.0}}),
    ("text_config", {"text_config": MODEL}),
    ("rotary_dim", {"model_type": "gptj", "rotary_dim": 64}),
    (
        "original_max_position_embeddings",
        {**MODEL, "rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}},
    ),
    ("base", {}),
    ("base", {"model_type": "my_own", "rope_scaling": LINEAR}),
    ("rotary_dim", {"model_type": "minimax", "head_dim": 128, "rotary_dim": 64}),
    ("partial_rotary_factors", {"model_type": "step3p5", "head_dim": 128, "partial_rotary_factors": [0.5, 1.0]}),
    ("rope_thetta", {**MODEL, "rope_thetta": 5e5}),
    ("model_type", {"model_type": "gpt2", "n_embd": 64, "n_head": 4}),
    ("alibi", {"model_type": "falcon", "alibi": True}),
    ("position_embedding_type", {"model_type": "granitemoehybrid"}),
    ("model_type", {"model_type": "efficientloftr", "rope_theta": 1e4}),
    ("partial_rotary_factor", {**MODEL, "partial_rotary_factor": 0.5}),
    ("partial_rotary_factor", {**GLM, "partial_rotary_factor": None}),
    ("qk_rope_head_dim", {**MLA, "partial_rotary_factor": 0.25}),
    ("rope_theta", {"model_type": "gpt_neox", "rope_theta": 5e5}),
    ("rope_parameters", {"model_type": "olmo3", "rope_parameters": YARN | {"original_max_position_embeddings": 8}}),
    ("rope_parameters", {"model_type": "llama", "rope_parameters": {"a": {"rope_theta": 1e4}}}),
    ("rope_theta", {"model_type": "laguna", "rope_parameters": {"a": {"rope_type": "default"}}}),
    ("attention_head_dim", {"model_type": "zamba2", "use_mem_rope": True, "hidden_size": 64, "num_attention_heads": 1}),
    ("config", OfList()),
]


@pytest.mark.parametrize(("name", "config"), CONFIGS)
def test_bad_configurations_are_refused(name, config):
    refused(name, lambda: rotary.from_hf(config))


def test_a_misspelt_key_is_told_the_right_one():
    with pytest.raises(ValueError, match="unknown key 'rope_scalling'; did you mean 'rope_scaling'"):
        rotary.from_hf({**MODEL, "rope_scalling": LINEAR})
