"""Options of extensions that follow from lengths, and from the scaling that a released model already has."""

import math

import pytest
from refusals import refused

import posjax as pj
from posjax import rotary
from train.model.extension import completed, continued

OWN = 4096
ROPE = pj.Scheme(features=rotary.Rotary(rotary.Plain(500.0)))
LOCAL = ROPE.replace(mask={"name": "window", "size": 512})
YARN = {"frequencies": {"name": "yarn"}}
LLAMA = rotary.Llama3(factor=8.0, original_length=512)


def scaled(rule):
    return pj.Scheme(features=rotary.Rotary(rule))


@pytest.mark.parametrize(
    ("slot", "length", "wanted"),
    [
        ("frequencies", 16384, {"name": "yarn", "factor": 4.0, "original_length": 4096}),
        ("frequencies", 2048, {"name": "linear", "factor": 1.0}),
        ("remap", 16384, {"name": "rerope", "window": 2048}),
        ("remap", 16384, {"name": "self-extend", "window": 512, "group": 16}),
        ("remap", 4096, {"name": "self-extend", "window": 512, "group": 1}),
        ("remap", 16384, {"name": "leaky-rerope", "window": 1024, "factor": 16.0}),
        ("remap", 4096, {"name": "leaky-rerope", "window": 1024, "factor": 1.0}),
        ("remap", 16384, {"name": "streaming", "first": 4, "recent": 4092}),
        ("remap", 16384, {"name": "dual-chunk", "length": 4096}),
        ("remap", 4096, {"name": "string", "length": 4096, "window": 128, "shift": 1365}),
        ("remap", 6144, {"name": "string", "length": 4096, "window": 128, "shift": 2176}),
        ("mask", 16384, {"name": "lambda", "window": 4092, "first": 4}),
        ("scale", 16384, {"name": "clipped-log-n", "length": 4096}),
        ("scale", 16384, {"name": "drope", "extension": 4.0}),
    ],
)
def test_options_follow_from_the_lengths(slot, length, wanted):
    assert completed({slot: {"name": wanted["name"]}}, 4096, length) == {slot: wanted}


def test_options_that_are_given_stay_and_the_shortest_models_keep_a_window_of_one_token():
    given = {"frequencies": {"name": "yarn", "factor": 2.0}, "remap": None}
    wanted = {"name": "yarn", "factor": 2.0, "original_length": 4096}
    assert completed(given, 4096, 16384) == {"frequencies": wanted, "remap": None}
    for name in ("self-extend", "leaky-rerope"):
        assert completed({"remap": {"name": name}}, 3, 3)["remap"]["window"] == 1


OF_LLAMA = {"factor": 16.0, "original_length": 512}
GIVEN = {"factor": 9.0, "original_length": 600}


@pytest.mark.parametrize(
    ("rule", "change", "length", "wanted"),
    [
        (rotary.Plain(500.0), {"name": "yarn"}, 2 * OWN, {"factor": 2.0, "original_length": OWN}),
        (LLAMA, {"name": "llama3"}, 2 * OWN, OF_LLAMA | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        (LLAMA, {"name": "yarn", "attention_factor": 1.1}, 2 * OWN, OF_LLAMA | {"attention_factor": 1.1}),
        (rotary.Linear(factor=8.0), {"name": "linear", "factor": 2.0}, OWN, {"factor": 16.0}),
        (LLAMA, {"name": "yarn"} | GIVEN, 2 * OWN, GIVEN),
    ],
)
def test_an_extension_continues_the_rule_of_the_model(rule, change, length, wanted):
    found = continued(scaled(rule), {"frequencies": change}, OWN, length)
    assert found == {"frequencies": {"name": change["name"], **wanted}}


def extended(scheme, length):
    return scheme.extend(**continued(scheme, YARN, OWN, length))


def extended_by_yarn(rule, times):
    return extended(scaled(rule), times * OWN).features.frequencies


DEEPSEEK = {"mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize("own", [{"beta_fast": 16.0, "truncate": False}, DEEPSEEK])
def test_a_yarn_keeps_its_own_options(own):
    """Also both temperatures of DeepSeek."""
    assert extended_by_yarn(rotary.YaRN(32.0, 128, **own), 2) == rotary.YaRN(64.0, 128, **own)


@pytest.mark.parametrize(
    ("rule", "factor", "own"),
    [
        (LLAMA, 8.0, 1.0),
        (rotary.YaRN(32.0, 128), 32.0, 0.1 * math.log(32) + 1),
        (rotary.YaRN(32.0, 128, attention_factor=1.5), 32.0, 1.5),
    ],
)
def test_the_temperature_grows_from_that_of_the_model(rule, factor, own):
    for times in (2, 4):
        grown = own * (0.1 * math.log(times * factor) + 1) / (0.1 * math.log(factor) + 1)
        assert math.isclose(extended_by_yarn(rule, times).table_factor, grown)


@pytest.mark.parametrize(
    ("rule", "names"), [(LLAMA, ("yarn", "llama3")), (rotary.Plain(500.0), ("yarn", "dynamic-ntk", "linear"))]
)
def test_up_to_its_own_length_a_model_keeps_its_frequencies(rule, names):
    scheme = scaled(rule)
    for name in names:
        assert continued(scheme, {"frequencies": {"name": name}}, OWN, OWN) == {}
    both = {**YARN, "scale": {"name": "clipped-log-n"}}
    assert continued(scheme, both, OWN, OWN) == {"scale": {"name": "clipped-log-n", "length": OWN}}


@pytest.mark.parametrize(
    "change", [{"name": "hope"}, {"name": "yarn", "factor": 4.0}, {"name": "dynamic-ntk", "original_length": 512}]
)
def test_a_rule_that_changes_a_model_at_any_length_applies_at_its_own_length(change):
    assert continued(ROPE, {"frequencies": change}, OWN, OWN).keys() == {"frequencies"}


def test_layers_with_a_window_are_skipped():
    scheme = pj.Layers((((LOCAL, ROPE), 2),))
    found = extended(scheme, 2 * OWN).schemes
    assert found[0] == LOCAL
    assert isinstance(found[1].features.frequencies, rotary.YaRN)
    windows = scheme.extend(**continued(scheme, {"mask": {"name": "window"}}, OWN, 2 * OWN)).schemes
    assert [each.mask.size for each in windows] == [512, OWN, 512, OWN]
    assert continued(scheme, {"layers": "local", **YARN}, OWN, 2 * OWN)["layers"] == "local"
    assert continued(LOCAL, {}, OWN, 2 * OWN) == {}
    as_long_as_the_model = ROPE.replace(mask={"name": "window", "size": OWN})
    assert isinstance(extended(as_long_as_the_model, 2 * OWN).features.frequencies, rotary.YaRN)


@pytest.mark.parametrize(
    ("named", "scheme", "slot", "change"),
    [
        ("frequencies", scaled(LLAMA), "frequencies", {"name": "linear"}),
        ("frequencies", scaled(rotary.Linear(factor=8.0)), "frequencies", {"name": "dynamic-ntk"}),
        ("frequencies", scaled(rotary.LongRoPE((1.0,) * 8, (2.0,) * 8, 512, 8.0)), "frequencies", {"name": "yarn"}),
        ("yarn", scaled(rotary.YaRN(8.0, 512)), "frequencies", {"name": "llama3"}),
        ("yarn", scaled(rotary.YaRN(8.0, 512, **DEEPSEEK)), "frequencies", {"name": "ntk-by-parts"}),
        ("frequencies", scaled(LLAMA), "frequencies", {"factor": 16}),
        ("window", LOCAL, "frequencies", {"name": "yarn"}),
        ("remap", pj.Layers((((ROPE, pj.Scheme()), 2),)), "remap", {"name": "streaming"}),
    ],
)
@pytest.mark.parametrize("length", [OWN // 2, 2 * OWN])
def test_what_cannot_continue_the_model_is_refused_at_every_length(named, scheme, slot, change, length):
    refused(named, lambda: continued(scheme, {slot: change}, OWN, length))
