"""Options of extensions that follow from lengths, and from what a released model has itself."""

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
        ({"far": {"name": "rerope"}}, 16384, {"name": "rerope", "window": 2048}),
        ({"far": {"name": "self-extend"}}, 16384, {"name": "self-extend", "window": 512, "group": 16}),
        ({"far": {"name": "self-extend"}}, 4096, {"name": "self-extend", "window": 512, "group": 1}),
        ({"far": {"name": "leaky-rerope"}}, 16384, {"name": "leaky-rerope", "window": 1024, "factor": 16.0}),
        ({"far": {"name": "streaming"}}, 16384, {"name": "streaming", "sinks": 4, "recent": 4092}),
        ({"mask": {"name": "lambda"}}, 16384, {"name": "lambda", "window": 4092, "sinks": 4}),
        ({"scale": {"name": "clipped-log-n"}}, 16384, {"name": "clipped-log-n", "length": 4096}),
        ({"far": None}, 16384, None),
    ],
)
def test_options_follow_from_the_lengths(extend, length, wanted):
    (slot,) = extend
    assert completed(extend, 4096, length) == {slot: wanted}


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
            {"name": "yarn"},
            2 * OWN,
            {"name": "yarn", "factor": 16.0, "original_length": 512},
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


def test_a_yarn_keeps_its_own_options_but_not_the_temperature_of_its_factor():
    rule = rotary.YaRN(32.0, 128, beta_fast=16.0, truncate=False, attention_factor=1.35)
    scheme = scaled(rule)
    extended = scheme.extend(**continued(scheme, YARN, OWN, 2 * OWN)).features.frequencies
    assert extended == rotary.YaRN(64.0, 128, beta_fast=16.0, truncate=False)


@pytest.mark.parametrize("rule", [rotary.Llama3(factor=8.0, original_length=512), rotary.Plain(500.0)])
def test_up_to_its_own_length_a_model_keeps_its_frequencies(rule):
    scheme = scaled(rule)
    for name in ("yarn", "llama3", "dynamic-ntk", "linear"):
        assert continued(scheme, {"frequencies": {"name": name}}, OWN, OWN) == {}
    both = {"frequencies": {"name": "yarn"}, "scale": {"name": "clipped-log-n"}}
    assert continued(scheme, both, OWN, OWN) == {"scale": {"name": "clipped-log-n", "length": OWN}}


@pytest.mark.parametrize(
    ("rule", "name", "message"),
    [
        (rotary.Llama3(factor=8.0, original_length=512), "linear", "own Llama3; llama3 or ntk-by-parts or yarn can"),
        (rotary.Linear(factor=8.0), "dynamic-ntk", "'dynamic-ntk' would replace the model's own Linear; linear can"),
        (rotary.LongRoPE((1.0,) * 8, (2.0,) * 8, 512, factor=8.0), "yarn", "own LongRoPE; no rule can continue it"),
    ],
)
def test_a_rule_of_another_kind_is_refused(rule, name, message):
    with pytest.raises(ValueError, match=message):
        continued(scaled(rule), {"frequencies": {"name": name}}, OWN, 2 * OWN)


def test_layers_with_a_window_are_passed_over():
    scheme = pj.Layers((((LOCAL, ROPE), 2),))
    extended = scheme.extend(**continued(scheme, YARN, OWN, 2 * OWN)).schemes
    assert extended[0] == LOCAL
    assert isinstance(extended[1].features.frequencies, rotary.YaRN)
    windows = scheme.extend(**continued(scheme, {"mask": {"name": "window"}}, OWN, 2 * OWN)).schemes
    assert [each.mask.size for each in windows] == [512, OWN, 512, OWN]
    chosen = continued(scheme, {"layers": "local", **YARN}, OWN, 2 * OWN)
    assert chosen["layers"] == "local"


def test_a_window_as_long_as_the_model_confines_nothing():
    wide = ROPE.replace(mask={"name": "window", "size": OWN})
    extended = wide.extend(**continued(wide, YARN, OWN, 2 * OWN))
    assert isinstance(extended.features.frequencies, rotary.YaRN)
    assert extended.mask == wide.mask


def test_a_mask_that_some_layers_would_lack_is_refused():
    scheme = pj.Layers((((ROPE, pj.Scheme()), 2),))
    with pytest.raises(ValueError, match="'streaming' would leave the layers of this model that do not rotate without"):
        continued(scheme, {"far": {"name": "streaming"}}, OWN, 2 * OWN)
    assert continued(scheme, {"far": {"name": "rerope"}}, OWN, 2 * OWN)


@pytest.mark.parametrize("change", [{"factor": 16}, {"name": ["yarn"]}])
def test_a_slot_without_its_name_is_told(change):
    with pytest.raises(ValueError, match=r"frequencies: expected \{name: \.\.\., option: value\}, found"):
        continued(scaled(rotary.Llama3()), {"frequencies": change}, OWN, 2 * OWN)


def test_a_model_of_windows_alone_has_nothing_to_extend():
    with pytest.raises(ValueError, match="every layer of this model sees a window of its own alone"):
        continued(LOCAL, YARN, OWN, 2 * OWN)
    assert continued(LOCAL, {}, OWN, 2 * OWN) == {}


@pytest.mark.parametrize(
    "change", [{"name": "hope"}, {"name": "yarn", "factor": 4.0}, {"name": "dynamic-ntk", "original_length": 512}]
)
def test_what_changes_a_model_at_any_length_does_so_at_its_own(change):
    assert continued(ROPE, {"frequencies": change}, OWN, OWN).keys() == {"frequencies"}
