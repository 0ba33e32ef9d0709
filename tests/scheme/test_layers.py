"""Schemes of several layers: what they have in common, and which of them a change reaches."""

import pytest

import posjax as pj
from posjax import Layers, masks
from posjax.scheme.layers import MOST_LAYERS, uniform

ROPE, ALIBI, NOPE, T5 = map(pj.scheme, ("rope", "alibi", "nope", "t5"))
LOCAL = pj.scheme("rope", mask=masks.Window(4))
FACTOR = {"frequencies": {"name": "linear", "factor": 2.0}}


def layers(*schemes, repeats=1):
    return Layers(((schemes, repeats),))


def test_periods_are_repeated_in_order():
    assert Layers((((ROPE, NOPE), 2), ((ALIBI,), 1))).schemes == (ROPE, NOPE, ROPE, NOPE, ALIBI)


@pytest.mark.parametrize(("name", "field"), [("sinusoidal", "embedding"), ("randomised", "training_positions")])
def test_one_layer_has_what_its_scheme_has(name, field):
    scheme = pj.scheme(name, **({"max_length": 64} if name == "randomised" else {}))
    assert getattr(layers(scheme), field) == getattr(scheme, field) is not None


@pytest.mark.parametrize("patterns", [(), (((), 1),), (((ROPE,), 0),), (((ROPE,), -1),)])
def test_empty_patterns_are_refused(patterns):
    with pytest.raises(ValueError, match=r"patterns is empty|every period needs schemes and repeats"):
        Layers(patterns)


def test_one_layer_that_reads_the_length_is_enough():
    dynamic = pj.scheme("rope", frequencies={"name": "dynamic-ntk", "original_length": 16})
    assert layers(ROPE, dynamic).reads_length
    assert not layers(ROPE, NOPE).reads_length


def test_one_scheme_for_all_layers():
    assert uniform(ROPE, 3).schemes == (ROPE,) * 3
    both = layers(ROPE, NOPE)
    assert uniform(both, 2) is both
    with pytest.raises(ValueError, match="2"):
        uniform(both, 3)


def test_what_layers_have_in_common_is_known_without_listing_them():
    """The largest number of layers, in one pattern each; a list of them would take minutes at 2^63."""
    many = uniform(pj.scheme("sinusoidal"), MOST_LAYERS)
    assert (many.count, many.kinds, many.embedding) == (2**16, (pj.scheme("sinusoidal"),), pj.absolute.Sinusoidal())
    both = Layers((((ROPE, NOPE), 3), ((ROPE,), 2)))
    assert (both.count, both.kinds) == (8, (ROPE, NOPE, ROPE))


HUGE = 2**63


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("num_layers", lambda: uniform(ROPE, HUGE)),
        ("num_layers", lambda: uniform(layers(ROPE), HUGE)),
        ("patterns", lambda: layers(ROPE, NOPE, repeats=HUGE)),
        ("num_layers", lambda: pj.scheme("smollm3", num_layers=HUGE)),
        ("num_layers", lambda: pj.scheme("hwfa", num_layers=HUGE, length=64)),
        ("num_layers", lambda: pj.scheme("hwfa2", num_layers=HUGE, length=64, full_layers=HUGE - 1)),
    ],
)
def test_more_layers_than_any_model_has_are_refused(name, make):
    with pytest.raises(ValueError, match=f"{name}.*(found|is) ({HUGE}|{2 * HUGE})"):
        make()


@pytest.mark.parametrize(
    ("schemes", "counted"),
    [((ALIBI, T5), True), ((ALIBI, NOPE), True), ((NOPE, NOPE), False), ((ROPE, ROPE), False), ((ALIBI, ROPE), False)],
)
def test_tokens_are_counted_in_the_row_with_biases_and_without_features(schemes, counted):
    assert layers(*schemes).counts_in_row is counted


def test_a_bias_that_shifts_change_is_counted_in_documents():
    assert not layers(ALIBI, pj.scheme("fire")).counts_in_row


def test_a_change_reaches_the_selected_layers_that_rotate():
    both = layers(ROPE, LOCAL, NOPE)
    changed = [scheme.extend(**FACTOR) for scheme in (ROPE, LOCAL)]
    assert both.extend(**FACTOR).schemes == (*changed, NOPE)
    assert both.extend(layers="full", **FACTOR).schemes == (changed[0], LOCAL, NOPE)
    assert both.extend(layers="local", **FACTOR).schemes == (ROPE, changed[1], NOPE)


def test_a_change_that_reaches_no_layer_is_refused():
    with pytest.raises(ValueError, match="layers: this scheme has no 'local' layer"):
        layers(ROPE).extend(layers="local", **FACTOR)
    with pytest.raises(ValueError, match=r"^frequencies: no layer of this scheme rotates anything"):
        layers(NOPE).extend(**FACTOR)
    with pytest.raises(ValueError, match=r"^frequencies: no 'full' layer of this scheme rotates anything"):
        layers(NOPE, LOCAL).extend(layers="full", **FACTOR)
