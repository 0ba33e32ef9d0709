"""Schemes with other slots over the same parameters: what is kept, and what needs another model."""

import pytest

import posjax as pj
from posjax import bias, coca, masks, rotary, scales
from posjax.scheme import Layers, Scheme

ROPE = pj.scheme("rope")


def test_extension_by_name_keeps_base_head_size_and_share():
    before = pj.scheme("rope", base=500.0, head_dim=16, partial_rotary_factor=0.5)
    after = before.extend(frequencies={"name": "dynamic-ntk", "original_length": 32})
    rule = rotary.DynamicNTK(32, base=500.0, head_dim=16, partial_rotary_factor=0.5)
    assert after == Scheme(features=rotary.Rotary(rule))
    assert before.extend(frequencies={"name": "linear", "factor": 2.0, "base": 7.0}).features.frequencies.base == 7.0
    assert before.extend() == before


def test_extension_keeps_the_other_slots_and_the_kind_of_features():
    before = Scheme(features=coca.Coca("slack", pairing="interleaved"), mask=masks.Window(9))
    after = before.extend(frequencies=rotary.Linear(2.0), scale={"name": "clipped-log-n", "length": 8})
    features = coca.Coca("slack", rotary.Linear(2.0), pairing="interleaved")
    assert after == Scheme(features=features, mask=masks.Window(9), scale=scales.ClippedLogN(8))
    both = before.extend(features=coca.Coca("strict"), frequencies=rotary.Linear(2.0))
    assert both.features == coca.Coca("strict", rotary.Linear(2.0))


def test_extension_takes_a_rule_that_fits_one_head_size_only():
    for scheme in (ROPE, pj.scheme("coca-strict")):
        rule = rotary.LongRoPE((1.0,) * 3, (2.0,) * 3, original_length=8, factor=2.0)
        assert scheme.extend(frequencies=rule).features.frequencies == rule


@pytest.mark.parametrize(
    ("scheme", "changes", "message"),
    [
        (ROPE, {"scale": scales.SSMax()}, r"scale: .*SSMax.* needs parameters .*train it instead"),
        (ROPE, {"norm": {"name": "qk-norm"}}, r"norm: .*QKNorm.* needs parameters"),
        (ROPE, {"bias": bias.T5()}, r"bias: .*T5.* needs parameters"),
        (pj.scheme("t5"), {"bias": None}, r"but the model has \{'table'"),
        (pj.scheme("t5"), {"bias": bias.T5(num_buckets=16)}, r"bias: .*needs parameters .*\(16, 8\)"),
        (ROPE, {"features": coca.Coca("strict")}, r"features: .* needs other projections"),
        (pj.scheme("coca-strict"), {"features": coca.Coca("tied")}, r"features: .* needs other projections"),
        (pj.scheme("coca-strict"), {"features": None}, r"features: None needs other projections"),
        (ROPE, {"frequency": None}, r"unknown slot 'frequency'; did you mean 'frequencies'\?"),
        (ROPE, {"frequencies": "dynamic-ntk"}, r"frequencies must be a frequency rule"),
        (ROPE, {"frequencies": {"name": "dynamic"}}, r"unknown frequencies 'dynamic'; did you mean 'dynamic-ntk'\?"),
        (ROPE, {"frequencies": {"name": "linear", "facto": 2}}, r"option 'facto'; did you mean 'factor'\?"),
        (pj.scheme("nope"), {"frequencies": rotary.Linear(2.0)}, r"this scheme rotates nothing"),
        (
            pj.scheme("p-rope"),
            {"frequencies": {"name": "dynamic-ntk", "original_length": 8}},
            r"would not rotate the pairs that Proportional",
        ),
        (
            pj.scheme("rope", partial_rotary_factor=0.5),
            {"frequencies": {"name": "proportional"}},
            r"would not rotate the pairs that Plain",
        ),
    ],
)
def test_extensions_that_need_another_model_are_refused(scheme, changes, message):
    with pytest.raises(ValueError, match=message):
        scheme.extend(**changes)


def test_layers_extend_every_scheme():
    windowed = pj.scheme("rope", mask=masks.Window(3))
    layers = Layers((((windowed, ROPE), 2), ((windowed,), 1))).extend(scale=scales.ClippedLogN(4))
    assert [(s.mask, s.scale) for s in layers.schemes] == [
        (mask, scales.ClippedLogN(4)) for mask in (masks.Window(3), None, masks.Window(3), None, masks.Window(3))
    ]
