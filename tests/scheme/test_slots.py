"""What slots require of their specs follows from the protocols, and every spec of the library has it."""

import dataclasses

import pytest

import posjax as pj
from posjax.scheme.registry import SLOTS
from posjax.scheme.slots import PROTOCOLS, lacking


def test_requirements_follow_from_the_protocol():
    assert lacking("scale", object()) == ["init()", "factor()", "shift_invariant"]
    assert lacking("sinks", pj.sinks.LearnedSinks) == lacking("sinks", pj.sinks.LearnedSinks()) == []
    assert lacking("training_positions", object()) == ["draw()", "evaluate()"]
    assert lacking("features", object())[:3] == ["init()", "query_size()", "key_size()"]


def test_masks_and_rules_are_required_by_class_only():
    assert lacking("mask", object()) == lacking("frequencies", object()) == []


def test_every_slot_but_that_of_masks_has_a_protocol():
    assert {field.name for field in dataclasses.fields(pj.Scheme)} - set(PROTOCOLS) == {"mask"}


@pytest.mark.parametrize("slot_name", PROTOCOLS)
def test_every_class_of_the_library_lacks_nothing(slot_name):
    assert {name: lacking(slot_name, kind) for name, kind in SLOTS[slot_name].items() if lacking(slot_name, kind)} == {}


def test_a_spec_need_not_derive_from_a_class_of_the_library():
    @dataclasses.dataclass(frozen=True)
    class Half:
        shift_invariant = True

        def init(self, key):
            return {}

        def factor(self, params, *, positions, visible, num_heads):
            return 0.5

    assert pj.Scheme(scale=Half()).scale == Half()
