"""Presets and layer recipes: their numbers, their patterns, and the bad hyper-parameters that every one refuses."""

import inspect
import math

import pytest
from decoders import OPTIONS, preset

import posjax as pj
from posjax import bias, masks, norms, remap, rotary, scales, sinks
from posjax.scheme import SLOT_NAMES, Layers, Scheme
from posjax.scheme.presets import PRESETS, hwfa_window, scheme_options
from posjax.scheme.registry import SLOTS, slot

NAMES = pj.scheme_names()
RECIPES = ("hwfa", "hwfa2", "gemma3", "llama4", "smollm3", "gpt-oss", "rnope-swa")


def where(layers, holds):
    """The indices of the layers for which ``holds`` is true."""
    return [index for index, scheme in enumerate(layers.schemes) if holds(scheme)]


def sees_all(scheme):
    return scheme.mask is None


def rotates(scheme):
    return scheme.rotates


# --- every preset -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_is_built_with_its_defaults_or_names_what_it_needs(name):
    parameters = inspect.signature(PRESETS[name][0]).parameters
    needed = [option for option, of in parameters.items() if of.default is of.empty]
    assert scheme_options(name) == tuple(parameters)
    assert set(needed) <= set(OPTIONS.get(name, ())), "OPTIONS must set every option without a default"
    if needed:
        with pytest.raises(ValueError, match=f"^scheme '{name}' needs {' and '.join(needed)}$"):
            pj.scheme(name)
    else:
        assert hash(pj.scheme(name)) == hash(pj.scheme(name))


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_is_a_value(name):
    made = preset(name)
    assert made == preset(name)
    assert hash(made) == hash(preset(name))
    lists = {key: list(value) if isinstance(value, tuple) else value for key, value in OPTIONS.get(name, {}).items()}
    assert pj.scheme(name, **lists) == made
    assert isinstance(made, Layers) == (name in RECIPES)


@pytest.mark.parametrize("name", NAMES)
def test_slots_are_options_of_every_scheme_but_recipes(name):
    given = OPTIONS.get(name, {}) | {"sinks": {"name": "plus-one"}}
    if name in RECIPES:
        with pytest.raises(ValueError, match=f"unknown scheme '{name}' option 'sinks'"):
            pj.scheme(name, **given)
    elif preset(name).linear is not None:
        with pytest.raises(ValueError, match="sinks does not compose with linear attention"):
            pj.scheme(name, **given)
    else:
        assert pj.scheme(name, **given).sinks == sinks.SoftmaxPlusOne()


def test_an_option_of_the_method_wins_over_the_slot_of_its_name():
    assert "bias" in SLOT_NAMES
    made = pj.scheme("ssmax", bias=True)
    assert (made.scale, made.bias) == (scales.SSMax(bias=True), None)
    assert pj.scheme("ssmax", bias={"name": "alibi"}).bias == bias.ALiBi()


def test_qwen3_normalises_before_it_rotates():
    wanted = Scheme(norm=norms.QKNorm(), features=rotary.Rotary(rotary.Plain(1e6)))
    assert pj.scheme("qwen3") == wanted
    assert pj.scheme("qwen3", base=500.0).features.frequencies.base == 500.0


def test_longformer_windows_are_given_in_keys_on_both_sides():
    assert pj.scheme("longformer").mask == masks.Dilated(257, 1) | masks.GlobalFirst(1)


# --- HWFA -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "alpha"), [(16, 0.676), (17, 0.721), (18, 0.766), (32, 1.39)])
def test_shares_of_the_training_length_printed_for_hwfa(window, alpha):
    """24 layers, 512 tokens (kexue.fm/archives/9603): ``(w - 1)(L - 1) + 1 = alpha N``."""
    exact = ((window - 1) * 23 + 1) / 512
    assert exact == pytest.approx(alpha, abs=5e-3)
    if exact <= 1:
        assert hwfa_window(24, 512, exact) == window
        assert hwfa_window(24, 512, math.nextafter(exact, 0)) == window - 1


def test_hwfa_is_windows_with_rotation_and_a_last_layer_with_log_n():
    assert hwfa_window(24, 512) == 17
    layers = pj.scheme("hwfa", num_layers=24, length=512)
    assert [repeats for _, repeats in layers.patterns] == [23, 1]
    local = Scheme(features=rotary.Rotary(), mask=masks.Window(17))
    assert layers.schemes == (local,) * 23 + (Scheme(scale=scales.LogN(512)),)
    given = pj.scheme("hwfa", num_layers=24, length=512, window=16, base=500.0).schemes[0]
    assert (given.mask, given.features.frequencies.base) == (masks.Window(16), 500.0)


@pytest.mark.parametrize(
    ("depth", "full", "places"), [(24, 1, [12]), (24, 2, [8, 16]), (25, 1, [12]), (12, 3, [3, 6, 9])]
)
def test_hwfa2_spreads_its_full_layers(depth, full, places):
    layers = pj.scheme("hwfa2", num_layers=depth, length=512, full_layers=full)
    assert len(layers.schemes) == depth
    assert where(layers, sees_all) == places
    assert where(layers, lambda scheme: scheme.scale == scales.LogN(512)) == places
    assert where(layers, rotates) == list(range(depth))


def test_hwfa2_takes_the_windows_of_its_article():
    """Two to four times the length over the depth (kexue.fm/archives/9731), whose best is 64 for 24 layers and 512."""
    assert pj.scheme("hwfa2", num_layers=24, length=512).schemes[0].mask == masks.Window(64)
    assert pj.scheme("hwfa2", num_layers=24, length=512, window=32).schemes[0].mask == masks.Window(32)


# --- periods ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "depth", "repeats", "full", "without"),
    [
        ("gemma3", 26, [4, 1], [5, 11, 17, 23], []),
        ("gemma3", 18, [3], [5, 11, 17], []),
        ("gemma3", 7, [1, 1], [5], []),
        ("llama4", 48, [12], [*range(3, 48, 4)], [*range(3, 48, 4)]),
        ("llama4", 6, [1, 1], [3], [3]),
        ("smollm3", 36, [9], [*range(36)], [*range(3, 36, 4)]),
        ("gpt-oss", 24, [12], [*range(1, 24, 2)], []),
        ("gpt-oss", 5, [2, 1], [1, 3], []),
        ("rnope-swa", 32, [8], [*range(3, 32, 4)], [*range(3, 32, 4)]),
    ],
)
def test_periods_and_what_is_left_of_the_last(name, depth, repeats, full, without):
    layers = pj.scheme(name, num_layers=depth)
    assert [times for _, times in layers.patterns] == repeats
    assert len(layers.schemes) == depth
    assert where(layers, sees_all) == full
    assert where(layers, lambda scheme: not scheme.rotates) == without


def test_layers_of_gemma3_have_two_bases():
    local, whole = (pj.scheme("gemma3", num_layers=6, factor=8.0).schemes[index] for index in (0, 5))
    assert local.features.frequencies == rotary.Plain(10_000.0)
    assert whole.features.frequencies == rotary.Linear(8.0, base=1_000_000.0)
    assert local.norm == whole.norm == norms.QKNorm()
    assert pj.scheme("gemma3", num_layers=6).schemes[5].features.frequencies == rotary.Plain(1_000_000.0)


def test_scout_and_maverick():
    scout, maverick = pj.scheme("llama4", num_layers=4, factor=16.0), pj.scheme("llama4", num_layers=4, qk_norm=False)
    rule = scout.schemes[0].features.frequencies
    plain = rotary.Plain(500_000.0).inverse_frequencies(128)
    kept = 2 * math.pi / plain < 8192
    assert rule.inverse_frequencies(128).tolist() == pytest.approx(
        [x if k else x / 16 for x, k in zip(plain, kept, strict=True)]
    )
    assert 0 < kept.sum() < 64
    assert [scheme.norm for scheme in scout.schemes] == [norms.QKNorm(gain=False, eps=1e-5)] * 3 + [None]
    assert {scheme.norm for scheme in maverick.schemes} == {None}


# --- extension --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "changed"), [("full", [1, 2]), ("local", [0, 3]), ("all", [0, 1, 2, 3])])
def test_extension_reaches_the_named_layers_alone(layers, changed):
    before = pj.scheme("hwfa2", num_layers=4, length=32)
    assert where(before, sees_all) == [1, 2]
    after = before.extend(layers=layers, remap=remap.ReRoPE(16))
    assert where(after, lambda scheme: scheme.remap == remap.ReRoPE(16)) == changed
    assert [scheme.replace(remap=None) for scheme in after.schemes] == list(before.schemes)
    assert [times for _, times in after.patterns] == [times for _, times in before.patterns]


def test_new_frequencies_skip_layers_without_position():
    before = pj.scheme("llama4", num_layers=5)
    after = before.extend(frequencies={"name": "yarn", "factor": 4.0, "original_length": 64})
    assert where(after, rotates) == where(before, rotates) == [0, 1, 2, 4]
    assert {s.features.frequencies for s in after.schemes if rotates(s)} == {rotary.YaRN(4.0, 64, base=500_000.0)}
    assert after.schemes[3] == before.schemes[3]
    both = before.extend(frequencies=rotary.Linear(2.0), remap=remap.ReRoPE(8), mask=masks.Window(4))
    assert where(both, lambda scheme: scheme.remap is not None) == [0, 1, 2, 4]
    assert where(both, lambda scheme: scheme.mask == masks.Window(4)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama4", {"layers": "globl"}, r"unknown layers 'globl'"),
        ("llama4", {"layers": "full", "frequencies": rotary.Linear(2.0)}, r"frequencies: no 'full' layer .* rotates"),
        ("smollm3", {"layers": "local", "scale": scales.ClippedLogN(8)}, r"layers: this scheme has no 'local' layer"),
        ("hwfa", {"layers": "full", "remap": remap.ReRoPE(8)}, r"remap: no 'full' layer of this scheme rotates"),
        ("gemma3", {"norm": None}, r"norm: None needs parameters"),
        ("gpt-oss", {"sinks": None}, r"sinks: None needs parameters"),
    ],
)
def test_extensions_of_layers_that_change_nothing_or_too_much_are_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        preset(name).extend(**changes)


# --- bad hyper-parameters ---------------------------------------------------------------------------------------------

NOT_A_COUNT = (0, -1, 2.5, math.nan, math.inf)
NOT_POSITIVE = (0, -1, math.nan, math.inf)
NEGATIVE = (-1, math.nan, math.inf)
BELOW_ONE = (0.5, 0, -2.0, math.nan, math.inf)
SHARE = (0, 1.5, -0.5, math.nan)
RULE = {"base": (1, *BELOW_ONE), "head_dim": (7, 2.5, 0, -2), "partial_rotary_factor": SHARE}
PLACE = {"pairing": ("both",), "precision": ("half",), "frequencies": ("default",)}
RAMP = {
    "original_length": BELOW_ONE,
    "beta_fast": (1.0, math.nan),
    "beta_slow": (0, 64.0, math.nan),
    "ramp": ("pairs",),
}
ALPHA = {"alpha": (0, 1, 0.5, -1, math.nan)}
TABLE = {"max_length": NOT_A_COUNT, "stddev": NEGATIVE}

GOOD = {
    "embedding": {"learned": {"max_length": 8}, "hierarchical": {"max_length": 8}},
    "frequencies": {
        **{name: {"factor": 2.0} for name in ("linear", "ntk", "ntk-old", "ntk-fixed", "ntk-mixed")},
        **{name: {"factor": 2.0, "original_length": 8} for name in ("ntk-by-parts", "yarn")},
        **{name: {"original_length": 8} for name in ("hope", "dynamic-linear", "dynamic-ntk", "dynamic-yarn", "clex")},
        "longrope": {"short_factor": (1.0,) * 4, "long_factor": (2.0,) * 4, "original_length": 8, "factor": 2.0},
    },
    "features": {
        "coca": {"variant": "strict"},
        "coca-planes": {"planes": (1, 3)},
        "general": {"generators": (((0.0, -1.0), (1.0, 0.0)),)},
    },
    "scale": {
        "constant": {"value": 2.0},
        **{name: {"length": 8} for name in ("log-n", "clipped-log-n", "ministral", "learned-cosine")},
        **{name: {"extension": 2.0} for name in ("yarn", "drope")},
        "gradient-maximal": {"n": 8},
    },
    "mask": {
        **{name: {"size": 4} for name in ("window", "chunked", "band")},
        **{name: {"count": 2} for name in ("global-first", "first-tokens")},
        "dilated": {"size": 4, "dilation": 2},
        "lambda": {"window": 4, "first": 2},
    },
    "remap": {
        **{name: {"window": 4} for name in ("rerope", "leaky-rerope")},
        "dual-chunk": {"length": 8},
    },
    "training_positions": {"clex": {"original_length": 8}, "pose": {"max_length": 8}},
}
"""What a spec of each slot cannot do without."""

BAD = {
    "embedding": {
        "sinusoidal": {"convention": ("sines",), "base": (1, *BELOW_ONE)},
        "learned": TABLE,
        "hierarchical": TABLE | ALPHA,
    },
    "frequencies": {
        "default": RULE,
        "proportional": RULE | {"partial_rotary_factor": SHARE[1:], "factor": BELOW_ONE},
        "hope": RULE | {"original_length": BELOW_ONE},
        **dict.fromkeys(("linear", "ntk", "ntk-old", "ntk-fixed"), RULE | {"factor": BELOW_ONE}),
        "ntk-mixed": RULE | {"factor": BELOW_ONE, "exponent": (-0.1, 1.1, math.nan)},
        "ntk-by-parts": RULE | RAMP | {"factor": BELOW_ONE},
        "dynamic-linear": RULE | {"original_length": BELOW_ONE},
        "dynamic-ntk": RULE | {"original_length": BELOW_ONE, "factor": BELOW_ONE, "schedule": ("llama",)},
        "dynamic-yarn": RULE | RAMP,
        "yarn": RULE
        | RAMP
        | {"factor": BELOW_ONE, "attention_factor": NEGATIVE, "mscale": NEGATIVE, "mscale_all_dim": NEGATIVE},
        "longrope": RULE
        | {
            "short_factor": ((0.0,) * 4, (math.nan,) * 4, 2.0),
            "long_factor": ((-1.0,) * 4, "long"),
            "original_length": (1, 0, math.nan),
            "factor": BELOW_ONE,
            "attention_factor": NEGATIVE,
            "select": ("auto",),
            "unscaled_first": (-1, 0.5),
        },
        "axial": RULE | {"order": ((0, 0), (1, 2)), "split": ("halves",)},
        "mrope": RULE | {"sections": ((3,), (0, 4)), "layout": ("both",)},
        "rope-tie": RULE | {"num_axes": (1, *NOT_A_COUNT)},
        "clex": RULE
        | dict.fromkeys(("original_length", "max_factor", "param_factor", "steps"), NOT_A_COUNT)
        | {"activation": ("gelu",)},
        "llama3": RULE
        | {
            "factor": BELOW_ONE,
            "original_length": BELOW_ONE,
            "low_freq_factor": (0, 5.0, math.nan),
            "high_freq_factor": (0.5, math.nan),
        },
    },
    "features": {
        "rotary": PLACE,
        "vo-rope": PLACE | {"targets": ("v",)},
        "xpos": PLACE | {"gamma": NOT_POSITIVE, "scale_base": NOT_POSITIVE},
        "mixed": {"num_axes": (1, *NOT_A_COUNT), "base": (1, *BELOW_ONE), "pairing": ("both",)},
        "coca": PLACE | {"variant": ("coca",)},
        "coca-planes": PLACE | {"planes": ((3, 1), (-1, 2), (1,), (0, 1, 2), (0, 1.5), (False, True), 2, None)},
        "general": {"generators": ((), (((0.0, 1.0), (1.0, 0.0)),))},
        "pope": {"frequencies": (None,), "init_delta": ("ones",), "precision": ("half",)},
    },
    "norm": {name: {"eps": NEGATIVE} for name in ("key-norm", "qk-norm", "cosine")},
    "scale": {
        "log-n": {"length": (1, *BELOW_ONE), "minimum": NOT_POSITIVE},
        "clipped-log-n": {"length": (1, *BELOW_ONE)},
        "ssmax": {"initial": (math.nan, math.inf, "log")},
        "llama4": {"floor_scale": NOT_A_COUNT, "attn_scale": NEGATIVE},
        "ministral": {"length": NOT_A_COUNT, "beta": NEGATIVE},
        "yarn": {"extension": NOT_POSITIVE, "mscale": NEGATIVE},
        "cosine": {"length": (3, 0, math.nan, math.inf)},
        "learned-cosine": {"length": (1, *BELOW_ONE)},
        "constant": {"value": NOT_POSITIVE},
        "drope": {"extension": BELOW_ONE, "slope": NEGATIVE},
        "gradient-maximal": {"n": (1, *BELOW_ONE)},
    },
    "bias": {
        "alibi": {"factor": BELOW_ONE, "direction": ("left", "offset", "slopes")},
        "t5": {"num_buckets": (1, *NOT_A_COUNT), "max_distance": (4, *NOT_A_COUNT), "stddev": NEGATIVE},
        "kerple": {"kind": ("linear",)},
        "sandwich": {"dbar": (7, 0, -2), "variant": ("from_two",), "factor": NOT_POSITIVE},
        "fire": {"width": NOT_A_COUNT, "c": NOT_POSITIVE, "threshold": NOT_POSITIVE},
        "fox": {"decay_times": ((0, 8.0), (8.0, 2.0), (math.nan, 8.0)), "data_dependent": (False,)},
        "cope": {"max_position": (1, *NOT_A_COUNT)},
        "scale-invariant": {"tau": NOT_POSITIVE, "alpha": NOT_POSITIVE, "beta": (*NOT_POSITIVE, 0.1)},
    },
    "mask": {
        **{name: {"size": NOT_A_COUNT} for name in ("window", "chunked", "band")},
        **{name: {"count": NOT_A_COUNT} for name in ("global-first", "first-tokens")},
        "dilated": {"size": NOT_A_COUNT, "dilation": (0, -1, 1.5, (), (1, 0))},
        "lambda": {"window": NOT_A_COUNT, "first": NOT_A_COUNT},
    },
    "remap": {
        "rerope": {"window": NOT_A_COUNT},
        "leaky-rerope": {"window": NOT_A_COUNT, "factor": (*NOT_POSITIVE, 1.3)},
        "self-extend": {"group": (3, *NOT_A_COUNT), "window": (1023, *NOT_A_COUNT)},
        "lm-infinite": {"n_local": NOT_A_COUNT, "n_global": NOT_A_COUNT},
        "streaming": {"first": NOT_A_COUNT, "recent": NOT_A_COUNT},
        "dual-chunk": {"length": (7, *NOT_A_COUNT), "chunk": (3, 8, *NOT_A_COUNT)},
    },
    "linear": {
        "performer": {
            "num_features": NOT_A_COUNT,
            "norms": ("unit",),
            "eps": NEGATIVE,
            "scale": NOT_POSITIVE,
        },
        **{name: {"order": (1, 3, *NOT_A_COUNT), "scale": NOT_POSITIVE} for name in ("taylor", "limit")},
    },
    "training_positions": {
        "randomised": {"max_length": (2**31, *NOT_A_COUNT), "test": ("odd",)},
        "equal-mean": {"distribution": ("normal",), "factor": (1, *BELOW_ONE), "alpha": NOT_POSITIVE},
        "clex": {"original_length": (2**31, *NOT_A_COUNT), "max_factor": NOT_A_COUNT},
        "pose": {"max_length": (2**31, *NOT_A_COUNT), "chunks": NOT_A_COUNT},
    },
}
"""For every spec of every slot its numbers and choices, each with values out of range."""

WITHOUT_NUMBERS = {"sinks": {"learned", "plus-one"}, "linear": {"elu", "exponential", "cosine"}}
"""Specs without hyper-parameters: nothing but a name can be wrong."""

LENGTH = {"length": NOT_A_COUNT}
DEPTH = {"num_layers": NOT_A_COUNT}
BAD_PRESETS = {
    "sinusoidal": BAD["embedding"]["sinusoidal"],
    "learned": TABLE,
    "hierarchical": TABLE | ALPHA,
    **dict.fromkeys(("rope", "qwen3", "coca-strict", "coca-tied", "coca-slack", "coca-relative"), RULE),
    "p-rope": BAD["frequencies"]["proportional"],
    "hope": BAD["frequencies"]["hope"],
    "clex": BAD["frequencies"]["clex"],
    "axial": {"layout": ("vit",)},
    "mrope": RULE | {"sections": ((2,), (2, 0, 2), (2, -1, 1), (2, 1.5, 1)), "layout": ("striped",), "rule": ("yarn",)},
    "rope-tie": RULE | {"num_axes": (1, *NOT_A_COUNT), "rule": ("yarn",)},
    "kerple-log": {},
    "kerple-power": {},
    "inverse-leaky": {"length": (6, *NOT_A_COUNT), "extension": BELOW_ONE},
    "longformer": {"window": NOT_A_COUNT, "dilation": (0, -1, (), (1, 0)), "global_tokens": NOT_A_COUNT},
    "softmax-plus-one": {},
    "learned-sinks": {},
    "nope": {},
    "cosine": BAD["scale"]["cosine"],
    "learned-cosine": BAD["scale"]["learned-cosine"],
    "performer": BAD["linear"]["performer"],
    **{f"linear-{name}": BAD["linear"].get(name, {}) for name in ("elu", "exp", "taylor", "limit", "cosine")},
    "hwfa": {
        "num_layers": (1, *NOT_A_COUNT),
        "length": (2, *NOT_A_COUNT),
        "alpha": (0, 1.1, -1, math.nan),
        "window": NOT_A_COUNT,
        "base": BELOW_ONE,
    },
    "hwfa2": DEPTH | LENGTH | {"full_layers": (3, *NOT_A_COUNT), "window": NOT_A_COUNT, "base": BELOW_ONE},
    "gemma3": DEPTH | {"window": NOT_A_COUNT, "local_base": BELOW_ONE, "global_base": BELOW_ONE, "factor": BELOW_ONE},
    "llama4": DEPTH
    | {
        "chunk": NOT_A_COUNT,
        "base": BELOW_ONE,
        "floor_scale": NOT_A_COUNT,
        "attn_scale": NEGATIVE,
        "factor": BELOW_ONE,
        "original_length": NOT_A_COUNT,
    },
    "smollm3": DEPTH | {"base": BELOW_ONE},
    "gpt-oss": DEPTH | {"window": NOT_A_COUNT, "base": BELOW_ONE, "factor": BELOW_ONE, "original_length": BELOW_ONE},
    "rnope-swa": DEPTH | {"window": NOT_A_COUNT, "base": BELOW_ONE},
} | {
    # Presets that are one spec and have its name.
    name: kinds[name]
    for kinds in BAD.values()
    for name in kinds
    if name in NAMES and name not in (*BAD["embedding"], *BAD["frequencies"], "cosine", "performer")
}


def refused(make, what, option, value):
    """``make`` must raise one line that names the option, by its last word at least."""
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        make(**{option: value})
    message = str(caught.value).lower()
    named = option in message or option.rpartition("_")[2].rstrip("s") in message
    assert named, f"{what}: {option}={value!r} got {caught.value}"


def test_every_spec_and_every_preset_has_bad_values():
    for slot_name, kinds in SLOTS.items():
        plain = WITHOUT_NUMBERS.get(slot_name, set())
        assert set(BAD.get(slot_name, {})) | plain == set(kinds), f"BAD, or WITHOUT_NUMBERS if it has none: {slot_name}"
    assert set(BAD_PRESETS) == set(NAMES), "BAD_PRESETS"
    for name, bad in BAD_PRESETS.items():
        assert set(bad) <= set(scheme_options(name)), name
        assert bool(bad) == bool(scheme_options(name)), name


@pytest.mark.parametrize(("slot_name", "name"), [(s, n) for s, kinds in SLOTS.items() for n in kinds])
def test_bad_hyper_parameters_of_a_spec_are_refused(slot_name, name):
    good = GOOD.get(slot_name, {}).get(name, {})
    assert slot(slot_name, name, **good) is not None
    for option, values in BAD.get(slot_name, {}).get(name, {}).items():
        for value in values:
            refused(lambda **bad: slot(slot_name, name, **(good | bad)), f"{slot_name} {name}", option, value)
    with pytest.raises(ValueError, match=f"unknown {slot_name} '{name}' option 'sise'"):
        slot(slot_name, name, **good, sise=3)


@pytest.mark.parametrize("name", NAMES)
def test_bad_hyper_parameters_of_a_preset_are_refused(name):
    for option, values in BAD_PRESETS.get(name, {}).items():
        for value in values:
            refused(lambda **bad: pj.scheme(name, **(OPTIONS.get(name, {}) | bad)), name, option, value)
    with pytest.raises(ValueError, match=f"unknown scheme '{name}' option 'sise'"):
        pj.scheme(name, **OPTIONS.get(name, {}), sise=3)


def test_what_does_not_fit_the_head_is_refused():
    odd = pj.scheme("mrope", sections=(2, 1, 2))
    with pytest.raises(ValueError, match=r"sections \(2, 1, 2\) add up to 5 pairs, but a width of 8 has 4"):
        odd.query_size(8)
    with pytest.raises(ValueError, match=r"sections \(2, 1, 2\) add up to 5 pairs"):
        pj.scheme("mrope", sections=(2, 1, 2), head_dim=8)
    odd_number = "head_dim must be a positive even number, found 7"
    for name in ("rope", "xpos", "p-rope", "qwen3", "coca-tied"):
        with pytest.raises(ValueError, match=odd_number):
            pj.scheme(name).query_size(7)
    for name in ("coca-strict", "coca-tied"):
        with pytest.raises(ValueError, match=odd_number):
            pj.scheme(name).key_size(7)


def test_slopes_for_no_heads_are_refused():
    for heads in (0, -2, 1.5):
        with pytest.raises(ValueError, match=f"num_heads must be positive and whole, found {heads}"):
            bias.ALiBi().bind(num_heads=heads)
