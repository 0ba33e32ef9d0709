"""Schemes of several layers: what they have in common, and which of them a change reaches."""

import pytest

import posjax as pj
from posjax import Layers, masks

ROPE, ALIBI, NOPE, T5 = map(pj.scheme, ("rope", "alibi", "nope", "t5"))
LOCAL = pj.scheme("rope", mask=masks.Window(4))
FACTOR = {"frequencies": {"name": "linear", "factor": 2.0}}


def layers(*schemes, repeats=1):
    return Layers(((schemes, repeats),))


def test_periods_are_repeated_in_order():
    assert Layers((((ROPE, NOPE), 2), ((ALIBI,), 1))).schemes == (ROPE, NOPE, ROPE, NOPE, ALIBI)


@pytest.mark.parametrize("patterns", [(), (((), 1),), (((ROPE,), 0),), (((ROPE,), -1),)])
def test_empty_patterns_are_refused(patterns):
    with pytest.raises(ValueError, match="patterns"):
        Layers(patterns)


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
