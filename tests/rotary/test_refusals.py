"""Bad input to the rotary room is refused in one line that names the argument."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from posjax import rotary
from posjax.positions import Range
from posjax.rotary import (
    AXIAL_LAYOUTS,
    CLEX,
    Axial,
    DynamicLinear,
    DynamicNTK,
    DynamicYaRN,
    GeneralRotary,
    HoPE,
    Linear,
    Llama3,
    LongRoPE,
    MixedRotary,
    MRoPE,
    NTKAware,
    NTKByParts,
    NTKFixed,
    NTKMixed,
    NTKOld,
    Plain,
    Proportional,
    RoPETie,
    Rotary,
    Stretched,
    ValueRotary,
    XPos,
    YaRN,
    apply_rotary,
    commute,
    decompose,
    from_hf,
    grid_coordinates,
    largest_context,
    mrope_positions,
    patch_centres,
    permute_projection,
    rotary_table,
    smallest_base,
    tie_positions,
)
from posjax.rotary.longrope import search

# --- the numbers and choices of every rule and feature ----------------------------------------------------------------

RULE = {"base": (1, 0.5, math.nan, "1e4", None, True), "head_dim": (7, 0, 2.5)}
RULE |= {"partial_rotary_factor": (1.5, -0.5, math.nan)}
BELOW_ONE = (0.5, math.nan, "2")
NOT_A_COUNT = (0, 2.5)
NEGATIVE = (-1, math.nan)
NOT_POSITIVE = (0, math.inf)
LENGTH = {"original_length": BELOW_ONE}
RAMP = {"beta_fast": (1.0, math.nan), "beta_slow": (0, 64.0), "ramp": ("pairs",)}
PLACE = {"pairing": ("both",), "precision": ("half",), "frequencies": ("default", 10_000.0)}
FACTORS = {"short_factor": (1.0,) * 4, "long_factor": (2.0,) * 4, "original_length": 8, "factor": 2.0}
SPECS = [
    (Plain, {}, RULE | {"partial_rotary_factor": (0, 1.5)}),
    (Proportional, {}, RULE | {"factor": BELOW_ONE}),
    (HoPE, {"original_length": 8}, RULE | LENGTH),
    *((kind, {"factor": 2.0}, RULE | {"factor": BELOW_ONE}) for kind in (Linear, NTKAware, NTKOld, NTKFixed)),
    (NTKMixed, {"factor": 2.0}, RULE | {"factor": BELOW_ONE, "exponent": (-0.1, 1.1, "0.6")}),
    (NTKByParts, {"factor": 2.0, "original_length": 8}, RULE | LENGTH | RAMP | {"factor": BELOW_ONE}),
    (
        YaRN,
        {"factor": 2.0, "original_length": 8},
        RULE | LENGTH | RAMP | dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim"), NEGATIVE),
    ),
    (DynamicLinear, {"original_length": 8}, RULE | LENGTH),
    (DynamicNTK, {"original_length": 8}, RULE | LENGTH | {"factor": BELOW_ONE, "schedule": ("llama",)}),
    (DynamicNTK, {"original_length": 8, "schedule": "qwen"}, {"factor": (2.0,)}),
    (DynamicYaRN, {"original_length": 8}, RULE | LENGTH | RAMP),
    (
        LongRoPE,
        FACTORS,
        RULE
        | {"short_factor": ((0.0,) * 4, (math.nan,) * 4, "ab"), "long_factor": ((-1.0,) * 4, 2.0)}
        | {"original_length": (1,), "factor": BELOW_ONE, "attention_factor": NEGATIVE, "select": ("auto",)}
        | {"unscaled_first": (-1, 1.5)},
    ),
    (LongRoPE, FACTORS | {"select": "dynamic"}, {"factor": (1.0,)}),
    (LongRoPE, FACTORS | {"head_dim": 8}, {"long_factor": ((1.0,),)}),
    (
        Llama3,
        {},
        RULE | LENGTH | {"factor": BELOW_ONE, "low_freq_factor": (0, 5.0), "high_freq_factor": (0.5, math.nan)},
    ),
    (
        CLEX,
        {"original_length": 8},
        RULE
        | dict.fromkeys(("original_length", "max_factor", "param_factor", "steps"), NOT_A_COUNT)
        | {"activation": ("gelu",)},
    ),
    (Axial, {}, {"order": ((0,), (0, 2), (0, 0)), "split": ("halves",), "offset": (0.5,), "base": (1.0,)}),
    (MRoPE, {}, {"sections": ((3,), (0, 4)), "layout": ("striped",), "rule": (RoPETie(), "yarn"), "base": (1.0,)}),
    (MRoPE, {"head_dim": 128}, {"sections": ((16, 24, 23),)}),
    (MRoPE, {"rule": Plain(5e5)}, {"base": (1e6,)}),
    (RoPETie, {}, RULE | {"num_axes": (1, 2.5), "rule": ("yarn",)}),
    (Stretched, {"rule": Plain(), "factor": 2.0}, {"rule": (1e4,), "factor": (0.0, -2.0, math.inf)}),
    (
        Stretched,
        {"factor": 2.0},
        {"rule": (DynamicLinear(32), CLEX(32), RoPETie(), LongRoPE(*[(1.0,) * 8] * 2, 32, factor=2.0, select="long"))},
    ),
    (Rotary, {}, PLACE),
    (ValueRotary, {}, PLACE | {"targets": ("ov",)}),
    (XPos, {}, PLACE | {"gamma": NOT_POSITIVE, "scale_base": NOT_POSITIVE}),
    (MixedRotary, {}, {"num_axes": (1, 2.5), "base": (1.0,), "pairing": ("neox",)}),
]


@pytest.mark.parametrize(("kind", "good", "bad"), SPECS)
def test_numbers_and_choices_out_of_range_are_refused(kind, good, bad):
    for option, values in bad.items():
        for value in values:
            refused(option, lambda option=option, value=value: kind(**(good | {option: value})))


# --- calls ------------------------------------------------------------------------------------------------------------

X = np.ones((2, 4, 3, 16), np.float32)
TABLE = rotary_table(np.arange(4), rotary.inverse_frequencies(16))
TEXT = Range(0, 4)
F8 = rotary.inverse_frequencies(8)
LEARNED = CLEX(32).init(jax.random.key(0), 16)
MIXED = MixedRotary().init(jax.random.key(0), num_heads=2, num_kv_heads=2, head_dim=16)
UNKNOWN = LongRoPE((1.0,) * 4, (2.0,) * 4, 8, attention_factor=1.0)
INITIAL = LongRoPE(**FACTORS)
NANS = np.full((1, 2, 2), np.nan)
CALLS = [
    ("head_dim", lambda: rotary.inverse_frequencies(7)),
    ("width", lambda: rotary.inverse_frequencies(28, partial_rotary_factor=0.25)),
    ("head_dim", lambda: Plain().at_length()),
    ("head_dim", lambda: Plain(head_dim=8).at_length(head_dim=16)),
    ("head_dim", lambda: Rotary(Plain(head_dim=8)).query({}, X, TEXT, head_dim=16)),
    ("width", lambda: NTKAware(2.0, head_dim=2).at_length()),
    ("head_dim", lambda: NTKAware(2.0).to_hf()),
    ("length", lambda: DynamicYaRN(32).table(TEXT, head_dim=16)),
    ("length", lambda: MRoPE(rule=DynamicNTK(8), sections=(2, 3, 3)).table(TEXT, head_dim=16)),
    ("length", lambda: CLEX(32).table(TEXT, head_dim=16, params=LEARNED)),
    ("params", lambda: CLEX(32).table(TEXT, head_dim=16, length=64)),
    ("up", lambda: CLEX(32).table(TEXT, head_dim=32, length=64, params=LEARNED)),
    ("precision", lambda: rotary_table(TEXT, F8, precision="float32")),
    ("positions", lambda: rotary_table(np.zeros((2, 2, 2), int), F8)),
    ("positions", lambda: rotary_table(np.array([0.5], np.float16), F8)),
    ("inverse_frequencies", lambda: rotary_table(np.arange(3), np.float64(1.0))),
    ("inverse_frequencies", lambda: rotary_table(np.zeros((2, 3), int), np.ones((4, 8)))),
    ("inverse_frequencies", lambda: rotary_table(np.zeros((2, 3), int), np.ones((2, 5, 8)))),
    ("pairing", lambda: apply_rotary(X, TABLE, pairing="neox")),
    ("x", lambda: apply_rotary(X[..., :14], TABLE)),
    ("x", lambda: apply_rotary(X[:, :3], TABLE)),
    ("x", lambda: apply_rotary(X, jax.tree.map(lambda a: jnp.stack([a] * 3), TABLE))),
    ("x", lambda: apply_rotary(X[0, 0], TABLE)),
    ("x", lambda: apply_rotary(X.astype(int), TABLE)),
    ("target", lambda: permute_projection(X, "half", "pairs")),
    ("rotary_dim", lambda: permute_projection(X, "half", "interleaved", rotary_dim=7)),
    ("rotary_dim", lambda: permute_projection(X, "half", "interleaved", rotary_dim=18)),
    ("short_factor", lambda: INITIAL.at_length(head_dim=32)),
    ("short_factor", lambda: LongRoPE(**FACTORS, head_dim=32)),
    ("factor", lambda: LongRoPE((1.0,), (1.0,), 32)),
    ("initial", lambda: search(len, Plain())),
    ("initial", lambda: search(len, UNKNOWN)),
    ("reach", lambda: search(len, INITIAL, reach=0.5)),
    ("step", lambda: search(len, INITIAL, step=0)),
    ("unscaled_first", lambda: search(len, INITIAL, unscaled_first=(1, 2))),
    ("population", lambda: search(len, INITIAL, population=3)),
    ("parents", lambda: search(len, INITIAL, parents=65)),
    ("iterations", lambda: search(len, INITIAL, iterations=0)),
    ("probability", lambda: search(len, INITIAL, probability=0.0)),
    ("context_length", lambda: smallest_base(2, 128)),
    ("context_length", lambda: smallest_base(10.5, 128)),
    ("head_dim", lambda: smallest_base(1000, 2)),
    ("base", lambda: largest_context(1.0, 128)),
    ("head_dim", lambda: largest_context(1e4, 0)),
    ("divisible", lambda: Axial(head_dim=18)),
    ("sections", lambda: MRoPE(sections=(2, 3, 3), layout="interleaved", head_dim=16)),
    ("sections", lambda: MRoPE(sections=(16, 24, 24)).table(TEXT, head_dim=64)),
    ("positions", lambda: RoPETie().table(np.zeros((1, 2, 3), int), head_dim=16)),
    ("positions", lambda: RoPETie(num_axes=3).table(np.zeros((1, 2, 4, 3), int), head_dim=16)),
    ("size", lambda: grid_coordinates(3, 0)),
    ("size", lambda: patch_centres(0)),
    ("spans", lambda: mrope_positions([2, 0])),
    ("spans", lambda: mrope_positions([(2,)])),
    ("spans", lambda: tie_positions([(1, 2, 3, 4)], num_axes=4)),
    ("spans", lambda: tie_positions([(1, 2, 3)])),
    ("spacing", lambda: tie_positions([3], "even")),
    ("head_dim", lambda: MixedRotary(num_axes=9).query_size(16)),
    ("head_dim", lambda: MixedRotary().query_size(15)),
    ("params", lambda: MixedRotary().key({}, X, TEXT, head_dim=16)),
    ("frequencies", lambda: MixedRotary().key({"frequencies": jnp.zeros((2, 3, 8))}, X, TEXT, head_dim=16)),
    ("positions", lambda: MixedRotary().key(MIXED, X[:, :, :2], np.zeros((1, 4, 3), int), head_dim=16)),
    ("head_dim", lambda: GeneralRotary(np.zeros((1, 8, 8))).query_size(16)),
    *(
        ("generators", lambda call=call, matrices=matrices: call(matrices))
        for call in (commute, decompose, GeneralRotary)
        for matrices in (np.ones((1, 4, 4)), np.zeros((1, 3, 3)), np.zeros((1, 2, 4)), np.zeros((4, 4)), NANS)
    ),
    *(
        ("to_hf", spec.to_hf)
        for spec in (
            *(DynamicNTK(32, schedule="qwen"), DynamicYaRN(32), CLEX(32), NTKFixed(8.0), HoPE(32)),
            *(Stretched(Plain(), 2.0), YaRN(4.0, 4096, ramp="rotations"), NTKByParts(4.0, 32, ramp="rotations")),
            *(LongRoPE(**FACTORS, select="long"), LongRoPE(**FACTORS, unscaled_first=4)),
        )
    ),
]


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[f"{n}-{name}" for n, (name, _) in enumerate(CALLS)])
def test_bad_calls_are_refused(name, call):
    refused(name, call)


def test_layouts_are_known_by_name():
    assert set(AXIAL_LAYOUTS) == {"rope-vit", "llama4-vision", "pixtral", "dinov3"}


# --- configurations of Hugging Face -----------------------------------------------------------------------------------

MODEL = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096}
YARN = {"rope_type": "yarn", "factor": 4.0}
LISTS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
LINEAR = {"type": "linear", "factor": 2.0}
GLM = {"model_type": "glm", "head_dim": 128}
MLA = {"model_type": "deepseek_v3", "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "head_dim": 128}


class OfList:
    def to_dict(self):
        return [1]


CONFIGS = [
    ("rope_type", {"rope_type": "yarm"}),
    ("rope_type", {"rope_type": ["yarn"]}),
    ("factor", {"rope_type": "linear"}),
    ("factor", {"rope_type": "linear", "factor": None}),
    ("factor", {"rope_type": "yarn", "original_max_position_embeddings": 8}),
    ("low_freq_factor", {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8}),
    ("short_factor", {"rope_type": "longrope", "original_max_position_embeddings": 8}),
    ("original_max_position_embeddings", YARN),
    ("original_max_position_embeddings", {"rope_type": "dynamic", "factor": 4.0}),
    ("factor", {"rope_type": "linear", "factor": 0.5}),
    ("factor", {"rope_type": "linear", "factor": "8"}),
    ("rope_theta", {"rope_type": "default", "rope_theta": None}),
    ("rope_theta", {**MODEL, "rope_theta": None}),
    ("facto", {"rope_type": "linear", "factor": 2.0, "facto": 3.0}),
    ("factor", {"rope_type": "default", "factor": 2.0}),
    ("short_factor", {**MODEL, "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}}),
    ("factor", {**MODEL, "rope_scaling": {"type": "su", **LISTS, "factor": 0.1}}),
    ("factor", {"rope_type": "longrope", **LISTS, "original_max_position_embeddings": 8}),
    ("dictionary", {"rope_scaling": 3}),
    ("full_attention", {"rope_parameters": {"full_attention": {"rope_type": "yarm"}}}),
    ("rope_parameters", {"rope_parameters": {"a": {"rope_type": "default"}, "factor": 2.0}}),
    ("text_config", {"text_config": MODEL}),
    ("rotary_dim", {"model_type": "gptj", "rotary_dim": 64}),
    ("rotary_dim", {"model_type": "gptj", "n_embd": 32, "n_head": 1, "rotary_dim": 64}),
    (
        "original_max_position_embeddings",
        {**MODEL, "rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}},
    ),
    ("base", {}),
    ("base", {"hidden_size": 64, "num_attention_heads": 4}),
    ("base", {"model_type": "my_own", "rope_scaling": LINEAR}),
    ("rotary_emb_base", {**MODEL, "rotary_emb_base": 1e6}),
    ("rotary_pct", {**MODEL, "rotary_pct": 0.25}),
    ("rope_local_base_freq", {**MODEL, "rope_local_base_freq": 1e5}),
    ("rotary_dim", {"model_type": "minimax", "head_dim": 128, "rotary_dim": 64}),
    ("partial_rotary_factors", {"model_type": "step3p5", "head_dim": 128, "partial_rotary_factors": [0.5, 1.0]}),
    ("rope_thetta", {**MODEL, "rope_thetta": 5e5}),
    ("model_type", {"model_type": "gpt2", "n_embd": 64, "n_head": 4}),
    ("alibi", {"model_type": "falcon", "alibi": True}),
    ("position_embedding_type", {"model_type": "granitemoehybrid"}),
    ("model_type", {"model_type": "efficientloftr", "rope_theta": 1e4}),
    ("partial_rotary_factor", {**MODEL, "partial_rotary_factor": 0.5}),
    ("partial_rotary_factor", {**MODEL, "rope_parameters": {"partial_rotary_factor": 0.5}}),
    ("partial_rotary_factor", {**GLM, "partial_rotary_factor": None}),
    ("qk_rope_head_dim", {**MLA, "partial_rotary_factor": 0.25}),
    ("rope_parameters", {"model_type": "bamba", "partial_rotary_factor": 1.0}),
    ("rope_theta", {"model_type": "gpt_neox", "rope_theta": 5e5}),
    ("rope_parameters", {"model_type": "olmo3", "rope_parameters": YARN | {"original_max_position_embeddings": 8}}),
    ("rope_parameters", {"model_type": "llama", "rope_parameters": {"a": {"rope_theta": 1e4}}}),
    ("rope_theta", {"model_type": "laguna", "rope_parameters": {"a": {"rope_type": "default"}}}),
    ("rope_theta", {"model_type": "my_own", "rope_parameters": {"a": {"rope_type": "default"}}}),
    ("attention_head_dim", {"model_type": "zamba2", "use_mem_rope": True, "hidden_size": 64, "num_attention_heads": 1}),
    ("config", None),
    ("config", "llama"),
    ("config", OfList()),
]


@pytest.mark.parametrize(("name", "config"), CONFIGS)
def test_bad_configurations_are_refused(name, config):
    refused(name, lambda: from_hf(config))


def test_a_misspelt_key_is_told_the_right_one():
    with pytest.raises(ValueError, match="unknown key 'rope_scalling'; did you mean 'rope_scaling'"):
        from_hf({**MODEL, "rope_scalling": LINEAR})
