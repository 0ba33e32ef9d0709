"""Schemes with other slots over the same parameters, and schemes of several layers."""

import pytest

import posjax as pj
from posjax import coca, masks, rotary, scales
from posjax.scheme import Layers, Scheme, uniform

ROPE, ALIBI, NOPE, T5, FIRE = map(pj.scheme, ("rope", "alibi", "nope", "t5", "fire"))
LOCAL = pj.scheme("rope", mask=masks.Window(4))
FACTOR = {"frequencies": {"name": "linear", "factor": 2.0}}


def layers(*schemes, repeats=1):
    return Layers(((schemes, repeats),))


def test_extension_by_name_keeps_base_head_size_and_share():
    before = pj.scheme("rope", base=500.0, head_dim=16, partial_rotary_factor=0.5)
    after = before.extend(frequencies={"name": "dynamic-ntk", "original_length": 32})
    rule = rotary.DynamicNTK(32, base=500.0, head_dim=16, partial_rotary_factor=0.5)
    assert after == Scheme(features=rotary.Rotary(rule))
    assert before.extend(frequencies={"name": "linear", "factor": 2.0, "base": 7.0}).features.frequencies.base == 7.0
    assert before.extend() == before
    mrope = pj.scheme("mrope", sections=(2, 1, 1)).extend(frequencies=rotary.YaRN(4.0, 8))
    assert mrope.features.frequencies == rotary.MRoPE(sections=(2, 1, 1), rule=rotary.YaRN(4.0, 8))


def test_extension_keeps_the_other_slots_and_the_kind_of_features():
    before = Scheme(features=coca.Coca("slack", pairing="interleaved"), mask=masks.Window(9))
    after = before.extend(frequencies=rotary.Linear(2.0), scale={"name": "clipped-log-n", "length": 8})
    features = coca.Coca("slack", rotary.Linear(2.0), pairing="interleaved")
    assert after == Scheme(features=features, mask=masks.Window(9), scale=scales.ClippedLogN(8))
    both = before.extend(features=coca.Coca("strict"), frequencies=rotary.Linear(2.0))
    assert both.features == coca.Coca("strict", rotary.Linear(2.0))


def test_periods_are_repeated_in_order_and_counted_without_listing_them():
    both = Layers((((ROPE, NOPE), 2), ((ALIBI,), 1)))
    assert both.schemes == (ROPE, NOPE, ROPE, NOPE, ALIBI)
    assert (both.count, both.kinds) == (5, (ROPE, NOPE, ALIBI))
    assert uniform(ROPE, 3).schemes == (ROPE,) * 3
    assert uniform(both, 5) is both
    sinusoidal = uniform(pj.scheme("sinusoidal"), 2**16)
    assert (sinusoidal.count, sinusoidal.embedding) == (2**16, pj.absolute.Sinusoidal())
    assert layers(pj.scheme("randomised", max_length=64)).training_positions is not None


@pytest.mark.parametrize(
    ("schemes", "counted"),
    [((ALIBI, T5), True), ((ALIBI, NOPE), True), ((NOPE,), False), ((ALIBI, ROPE), False), ((ALIBI, FIRE), False)],
)
def test_tokens_are_counted_in_the_row_with_biases_of_distance_and_without_features(schemes, counted):
    assert layers(*schemes).counts_in_row is counted


def test_a_change_reaches_the_selected_layers_that_rotate():
    both = layers(ROPE, LOCAL, NOPE)
    changed = [scheme.extend(**FACTOR) for scheme in (ROPE, LOCAL)]
    assert both.extend(**FACTOR).schemes == (*changed, NOPE)
    assert both.extend(layers="full", **FACTOR).schemes == (changed[0], LOCAL, NOPE)
    assert both.extend(layers="local", **FACTOR).schemes == (ROPE, changed[1], NOPE)


@pytest.mark.parametrize(
    ("scheme", "invariant"),
    [
        (pj.scheme("rope", mask=masks.Window(3), scale=scales.LogN(8)), True),
        (pj.scheme("rope", mask=masks.Window(3) | masks.FirstTokens(1)), False),
        (pj.scheme("rope", mask=masks.Chunked(4)), False),
        (pj.scheme("nope", scale=scales.Llama4Temperature()), False),
        (pj.scheme("alibi", embedding=pj.absolute.Sinusoidal()), False),
        (pj.scheme("coca-relative", scale=scales.SSMax()), True),
        (pj.scheme("coca-slack"), False),
        (pj.scheme("performer"), False),
    ],
)
def test_shift_invariance_and_reading_the_length_follow_from_the_slots(scheme, invariant):
    assert scheme.shift_invariant is invariant
    assert layers(pj.scheme("nope", embedding=scheme.embedding), scheme).shift_invariant is invariant
    assert not scheme.reads_length
    if scheme.rotates:
        dynamic = scheme.replace(linear=None, frequencies=rotary.DynamicNTK(8))
        assert dynamic.reads_length
        assert layers(scheme, dynamic).reads_length
