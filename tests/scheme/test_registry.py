"""``register``: the specs that it accepts or refuses, and the functions that then know the name."""

import dataclasses
import functools
import re

import jax
import pytest
from attention.own_methods import LearnedRows, Strided

import posjax as pj
from posjax.scheme.registry import SLOTS, slot

frozen = dataclasses.dataclass(frozen=True)


@pytest.fixture(autouse=True)
def _names(monkeypatch):
    """After each test, removes the names that it has registered."""
    for name, known in SLOTS.items():
        monkeypatch.setitem(SLOTS, name, dict(known))


@frozen
class Wavelengths(pj.rotary.FrequencyRule):
    longest: float

    def inverse_frequencies(self, head_dim=None):
        return self.longest ** -pj.rotary.Plain().inverse_frequencies(self._head_dim(head_dim))


def test_presets_extend_and_replace_know_a_registered_name():
    pj.register("bias", "rows", LearnedRows)
    pj.register("mask", "strided", Strided)
    pj.register("frequencies", "wavelengths", Wavelengths)
    scheme = pj.scheme("rope", bias={"name": "rows", "entries": 6}, mask={"name": "strided", "recent": 3})
    assert scheme == pj.Scheme(features=pj.rotary.Rotary(), bias=LearnedRows(6), mask=Strided(3))
    assert scheme.init(jax.random.key(0), num_heads=2, head_dim=8)["bias"]["rows"].shape == (2, 6)
    longer = scheme.extend(frequencies={"name": "wavelengths", "longest": 50.0})
    assert longer.features.frequencies == Wavelengths(50.0)
    assert scheme.replace(mask={"name": "strided"}).mask == Strided()
    with pytest.raises(ValueError, match=r"unknown bias 'rowz'; did you mean 'rows'\?"):
        pj.scheme("rope", bias={"name": "rowz"})
    with pytest.raises(ValueError, match=r"unknown bias 'rows' option 'entry'; did you mean 'entries'\?"):
        pj.scheme("rope", bias={"name": "rows", "entry": 1})


def test_a_name_in_a_slot_is_not_a_preset_and_the_error_says_how_to_use_it():
    pj.register("bias", "rows", LearnedRows)
    with pytest.raises(ValueError, match=re.escape("in a slot: scheme('rope', bias={'name': 'rows'})")):
        pj.scheme("rows")
    with pytest.raises(ValueError, match=re.escape("scheme('rope', frequencies={'name': 'yarn'})")):
        pj.scheme("yarn")


def test_a_function_may_make_the_spec():
    def two_strides(first: int, second: int):
        return Strided(1, first) | Strided(1, second)

    pj.register("mask", "two-strides", two_strides)
    assert slot("mask", "two-strides", first=3, second=5) == Strided(1, 3) | Strided(1, 5)
    pj.register("bias", "no-bias", lambda: Strided())
    with pytest.raises(ValueError, match="spec: Strided must be derived from BiasSpec for the slot 'bias'"):
        slot("bias", "no-bias")


def test_a_cell_of_a_notebook_may_run_twice():
    for _ in range(2):

        @frozen
        class Again(LearnedRows):
            pass

        pj.register("bias", "again", Again)
    assert SLOTS["bias"]["again"] is Again


def test_lambdas_and_partials_do_not_replace_each_other():
    for make in (lambda n: lambda: LearnedRows(n), lambda n: functools.partial(LearnedRows, n)):
        pj.register("bias", f"{make}", make(1))
        with pytest.raises(ValueError, match="is taken in the slot 'bias'"):
            pj.register("bias", f"{make}", make(2))


def test_the_lists_of_the_subpackages_stay_unchanged():
    pj.register("training_positions", "mine", pj.training_positions.Randomised)
    assert "mine" not in pj.training_positions.RULES


class Unhashable(LearnedRows):
    __hash__ = None


@frozen
class Loose:
    def init(self, key, num_heads):
        return {}


@frozen
class Unbound(pj.bias.BiasSpec):
    pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("biass", "mine", LearnedRows), "unknown slot 'biass'; did you mean 'bias'?"),
        (
            ("bias", "alibi", LearnedRows),
            "name: 'alibi' is taken in the slot 'bias', by <class 'posjax.bias.alibi.ALiBi'>",
        ),
        (("bias", "", LearnedRows), "name must be a text that configs can use, found ''"),
        (("bias", 3, LearnedRows), "name must be a text that configs can use, found 3"),
        (("bias", "mine", LearnedRows()), "spec must be a class, or a function that makes a spec, found LearnedRows("),
        (("bias", "mine", Loose), "spec: Loose must be derived from BiasSpec for the slot 'bias'"),
        (("bias", "mine", Unbound), "spec: Unbound lacks bind(), which the slot 'bias' needs"),
        (("bias", "mine", Unhashable), "spec: Unhashable is not hashable; write @dataclasses.dataclass(frozen=True)"),
        (("mask", "mine", LearnedRows), "spec: LearnedRows must be derived from Mask for the slot 'mask'"),
        (("features", "mine", Loose), "spec: Loose must be derived from Features for the slot 'features'"),
        (("frequencies", "mine", Loose), "spec: Loose must be derived from FrequencyRule for the slot 'frequencies'"),
        (("scale", "mine", Loose), "spec: Loose lacks factor(), shift_invariant, which the slot 'scale' needs"),
    ],
)
def test_bad_registrations_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        pj.register(*arguments)


@pytest.mark.parametrize("slot_name", SLOTS)
def test_every_class_of_the_library_has_the_required_protocol(slot_name):
    for name, spec in list(SLOTS[slot_name].items()):
        pj.register(slot_name, f"{name}, again", spec)
