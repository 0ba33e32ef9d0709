"""``register``: names of own specs, and the functions that then know them."""

import dataclasses

import jax
import pytest
from attention.own_methods import LearnedRows, Strided
from refusals import refused

import posjax as pj
from posjax.scheme.registry import SLOTS, slot


@pytest.fixture(autouse=True)
def _names(monkeypatch):
    """After each test, removes the names that it has registered."""
    for name, known in SLOTS.items():
        monkeypatch.setitem(SLOTS, name, dict(known))


@dataclasses.dataclass(frozen=True)
class Wavelengths(pj.rotary.FrequencyRule):
    longest: float

    def inverse_frequencies(self, head_dim=None):
        return self.longest ** -pj.rotary.Plain().inverse_frequencies(head_dim)


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
    refused("rows", lambda: pj.scheme("rope", bias={"name": "rowz"}))
    refused("entries", lambda: pj.scheme("rope", bias={"name": "rows", "entry": 1}))
    refused("scheme('rope', bias={'name': 'rows'}", lambda: pj.scheme("rows"))


def test_a_function_may_make_the_spec():
    pj.register("mask", "two-strides", lambda first, second: Strided(1, first) | Strided(1, second))
    assert slot("mask", "two-strides", first=3, second=5) == Strided(1, 3) | Strided(1, 5)
    pj.register("bias", "no-bias", lambda: Strided())
    refused("BiasSpec", lambda: slot("bias", "no-bias"))


def test_a_cell_of_a_notebook_may_run_twice():
    for _ in range(2):

        @dataclasses.dataclass(frozen=True)
        class Again(LearnedRows):
            pass

        pj.register("bias", "again", Again)
    assert isinstance(slot("bias", "again"), Again)
