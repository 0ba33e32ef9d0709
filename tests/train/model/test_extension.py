"""Options of extensions that follow from lengths, and from the scaling that a released model already has."""

import math

import pytest

import posjax as pj
from posjax import rotary
from train.model.extension import completed, continued

OWN = 4096
ROPE = pj.Scheme(features=rotary.Rotary(rotary.Plain(500.0)))
LOCAL = ROPE.replace(mask={"name": "window", "size": 512})
YARN = {"frequencies": {"name": "yarn"}}


def scaled(rule):
    return pj.Scheme(features=rotary.Rotary(rule))


@pytest.mark.parametrize(
    ("extend", "length", "wanted"),
    [
        ({"frequencies": {"name": "yarn"}}, 16384, {"name": "yarn", "factor": 4.0, "original_length": 4096}),
        (
            {"frequencies": {"name": "yarn", "factor": 2.0}},
            16384,
            {"name": "yarn", "factor": 2.0, "original_length": 4096},
        ),
        ({"frequencies": {"name": "linear"}}, 2048, {"name": "linear", "factor": 1.0}),
        ({"remap": {"name": "rerope"}}, 16384, {"name": "rerope", "window": 2048}),
        ({"remap": {"name": "self-extend"}}, 16384, {"name": "self-extend", "window": 512, "group": 16}),
        ({"remap": {"name": "self-extend"}}, 4096, {"name": "self-extend", "window": 512, "group": 1}),
        ({"remap": {"name": "leaky-rerope"}}, 16384, {"name": "leaky-rerope", "window": 1024, "factor": 16.0}),
        ({"remap": {"name": "leaky-rerope"}}, 4096, {"name": "leaky-rerope", "window": 1024, "factor": 1.0}),
        ({"remap": {"name": "streaming"}}, 16384, {"name": "streaming", "first": 4, "recent": 4092}),
        ({"mask": {"name": "lambda"}}, 16384, {"name": "lambda", "window": 4092, "first": 4}),
        ({"scale": {"name": "clipped-log-n"}}, 16384, {"name": "clipped-log-n", "length": 4096}),
        ({"remap": None}, 16384, None),
    ],
)
def test_options_follow_from_the_lengths(extend, length, wanted):
    (slot,) = extend
    assert completed(extend, 4096, length) == {slot: wanted}


@pytest.mark.parametrize("name", ["self-extend", "leaky-rerope"])
def test_the_shortest_models_keep_a_window_of_one_token(name):
    assert completed({"remap": {"name": name}}, 3, 3)["remap"]["window"] == 1


@pytest.mark.parametrize(
    ("rule", "change", "length", "wanted"),
    [
        (rotary.Plain(500.0), {"name": "yarn"}, 2 * OWN, {"name": "yarn", "factor": 2.0, "original_length": OWN}),
        (
            rotary.Llama3(factor=8.0, original_length=512),
            {"name": "llama3"},
            2 * OWN,
            {"name": "llama3", "factor": 16.0, "original_length": 512, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        ),
        (
            rotary.Llama3(factor=8.0, original_length=512),
            {"name": "yarn", "attention_factor": 1.1},
            2 * OWN,
            {"name": "yarn", "factor": 16.0, "original_length": 512, "attention_factor": 1.1},
        ),
        (rotary.Linear(factor=8.0), {"name": "linear"}, 4 * OWN, {"name": "linear", "factor": 32.0}),
        (rotary.Linear(factor=8.0), {"name": "linear", "factor": 2.0}, OWN, {"name": "linear", "factor": 16.0}),
        (
            rotary.Llama3(factor=8.0, original_length=512),
            {"name": "yarn", "factor": 9.0, "original_length": 600},
            2 * OWN,
            {"name": "yarn", "factor": 9.0, "original_length": 600},
        ),
    ],
)
def test_an_extension_continues_the_rule_of_the_model(rule, change, length, wanted):
    assert continued(scaled(rule), {"frequencies": change}, OWN, length) == {"frequencies": wanted}


def extended(scheme, length):
    return scheme.extend(**continued(scheme, YARN, OWN, length))


def extended_by_yarn(rule, times):
    return extended(scaled(rule), times * OWN).features.frequencies


def test_a_yarn_keeps_its_own_options():
    rule = rotary.YaRN(32.0, 128, beta_fast=16.0, truncate=False)
    assert extended_by_yarn(rule, 2) == rotary.YaRN(64.0, 128, beta_fast=16.0, truncate=False)


@pytest.mark.parametrize(
    ("rule", "factor", "own"),
    [
        (rotary.Llama3(factor=8.0, original_length=512), 8.0, 1.0),
        (rotary.NTKByParts(8.0, 512), 8.0, 1.0),
        (rotary.YaRN(32.0, 128), 32.0, 0.1 * math.log(32) + 1),
        (rotary.YaRN(32.0, 128, attention_factor=1.5), 32.0, 1.5),
    ],
)
def test_the_temperature_grows_from_that_of_the_model(rule, factor, own):
    for times in (2, 4):
        grown = own * (0.1 * math.log(times * factor) + 1) / (0.1 * math.log(factor) + 1)
        assert math.isclose(extended_by_yarn(rule, times).table_factor, grown)


def test_a_yarn_of_deepseek_keeps_both_of_its_factors():
    rule = rotary.YaRN(40.0, 128, mscale=1.0, mscale_all_dim=1.0)
    assert extended_by_yarn(rule, 2) == rotary.YaRN(80.0, 128, mscale=1.0, mscale_all_dim=1.0)


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        (rotary.Llama3(factor=8.0, original_length=512), ("yarn", "llama3", "ntk-by-parts")),
        (rotary.Plain(500.0), ("yarn", "llama3", "dynamic-ntk", "linear")),
    ],
)
def test_up_to_its_own_length_a_model_keeps_its_frequencies(rule, names):
    scheme = scaled(rule)
    for name in names:
        assert continued(scheme, {"frequencies": {"name": name}}, OWN, OWN) == {}
    both = {"frequencies": {"name": "yarn"}, "scale": {"name": "clipped-log-n"}}
    assert continued(scheme, both, OWN, OWN) == {"scale": {"name": "clipped-log-n", "length": OWN}}


@pytest.mark.parametrize(
    ("rule", "name", "message"),
    [
        (rotary.Llama3(factor=8.0, original_length=512), "linear", "own Llama3; llama3 or ntk-by-parts or yarn can"),
        (rotary.Linear(factor=8.0), "dynamic-ntk", "'dynamic-ntk' would replace the model's own Linear; linear can"),
        (rotary.LongRoPE((1.0,) * 8, (2.0,) * 8, 512, factor=8.0), "yarn", "own LongRoPE; no rule can continue it"),
        (rotary.YaRN(8.0, 512), "llama3", "'llama3' cannot keep the temperature of the model's own YaRN; use 'yarn'"),
    ],
)
@pytest.mark.parametrize("length", [OWN // 2, 2 * OWN])
def test_a_rule_that_cannot_continue_the_model_is_refused_at_every_length(rule, name, message, length):
    with pytest.raises(ValueError, match=message):
        continued(scaled(rule), {"frequencies": {"name": name}}, OWN, length)


@pytest.mark.parametrize("length", [OWN // 2, 2 * OWN])
def test_a_model_that_does_not_rotate_is_extended_at_no_length(length):
    with pytest.raises(ValueError, match="rotates nothing"):
        extended(pj.scheme("alibi"), length)


def test_layers_with_a_window_are_skipped():
    scheme = pj.Layers((((LOCAL, ROPE), 2),))
    found = extended(scheme, 2 * OWN).schemes
    assert found[0] == LOCAL
    assert isinstance(found[1].features.frequencies, rotary.YaRN)
    windows = scheme.extend(**continued(scheme, {"mask": {"name": "window"}}, OWN, 2 * OWN)).schemes
    assert [each.mask.size for each in windows] == [512, OWN, 512, OWN]
    chosen = continued(scheme, {"layers": "local", **YARN}, OWN, 2 * OWN)
    assert chosen["layers"] == "local"


def test_a_window_as_long_as_the_model_confines_nothing():
    wide = ROPE.replace(mask={"name": "window", "size": OWN})
    found = extended(wide, 2 * OWN)
    assert isinstance(found.features.frequencies, rotary.YaRN)
    assert found.mask == wide.mask


def test_a_mask_that_some_layers_would_lack_is_refused():
    scheme = pj.Layers((((ROPE, pj.Scheme()), 2),))
    with pytest.raises(ValueError, match="'streaming' would leave the layers of this model that do not rotate without"):
        continued(scheme, {"remap": {"name": "streaming"}}, OWN, 2 * OWN)
    assert continued(scheme, {"remap": {"name": "rerope"}}, OWN, 2 * OWN)


@pytest.mark.parametrize("change", [{"factor": 16}, {"name": ["yarn"]}])
def test_a_slot_without_a_valid_name_is_refused(change):
    with pytest.raises(ValueError, match=r"frequencies: expected \{name: \.\.\., option: value\}, found"):
        continued(scaled(rotary.Llama3()), {"frequencies": change}, OWN, 2 * OWN)


def test_a_model_of_windows_alone_has_nothing_to_extend():
    with pytest.raises(ValueError, match="every layer of this model has a local window"):
        continued(LOCAL, YARN, OWN, 2 * OWN)
    assert continued(LOCAL, {}, OWN, 2 * OWN) == {}


@pytest.mark.parametrize(
    "change", [{"name": "hope"}, {"name": "yarn", "factor": 4.0}, {"name": "dynamic-ntk", "original_length": 512}]
)
def test_a_rule_that_changes_a_model_at_any_length_applies_at_its_own_length(change):
    assert continued(ROPE, {"frequencies": change}, OWN, OWN).keys() == {"frequencies"}
