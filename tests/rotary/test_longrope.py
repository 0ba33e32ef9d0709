"""The full rule of LongRoPE, with its unscaled first tokens, and the search for its factors."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from posjax.positions import Range
from posjax.rotary import LongRoPE, NTKAware, NTKByParts, Plain, Rotary, rotary_table
from posjax.rotary.longrope import UNSCALED_FIRST, search

LISTS = (tuple(1 + 0.1 * np.arange(8)), tuple(1.0 + np.arange(8)))
RULE = LongRoPE(*LISTS, 32, factor=4.0, unscaled_first=4)


@pytest.mark.parametrize("length", [20, 64])
def test_first_positions_keep_plain_angles(length):
    """microsoft/LongRoPE, the "mixed" embedding: the first rows are those of the original one, unit factor included."""
    positions = np.array([[0, 3, 4, 5], [9, 1, -1, 100]])
    found = jax.jit(lambda p: RULE.table(p, head_dim=16, length=length))(positions)
    plain = rotary_table(positions, Plain().at_length(head_dim=16)[0])
    scaled = dataclasses.replace(RULE, unscaled_first=0).table(positions, head_dim=16, length=length)
    first = (positions < 4)[..., None]
    chex.assert_trees_all_close(found, jax.tree.map(lambda a, b: np.where(first, a, b), plain, scaled), atol=1e-6)
    assert np.abs(found.cos[0, 1] - scaled.cos[0, 1]).max() > 0.1


@pytest.mark.parametrize(("first", "invariant"), [(4, False), (0, True)])
def test_it_declares_that_it_is_not_shift_invariant(first, invariant):
    rule = dataclasses.replace(RULE, unscaled_first=first)
    near, far = (rule.table(Range(start, 8), head_dim=16, length=64) for start in (0, 100))
    apart = [cos @ cos.T + sin @ sin.T for cos, sin in (near, far)]
    assert Rotary(rule).shift_invariant == (np.abs(apart[0] - apart[1]).max() < 1e-5) == invariant


INITIAL = LongRoPE((1.0,) * 4, (1.0, 1.0, 2.0, 2.0), 32, factor=4.0, base=500.0, head_dim=8)


def distance_to(factors, first):
    def fitness(rule):
        return float(np.abs(np.log(np.array(rule.long_factor) / factors)).sum() + (rule.unscaled_first != first))

    return fitness


def test_search_finds_a_known_optimum():
    target = (1.0, 1.5, 3.0, 4.5)
    found = search(distance_to(target, 16), INITIAL, step=0.5, seed=3)
    assert found.rule == dataclasses.replace(INITIAL, long_factor=target, unscaled_first=16)
    assert found.fitness == found.history[-1] == 0
    assert len(found.history) == 41


def test_search_keeps_to_its_space_and_starts_from_the_known_rules():
    tried = []

    def fitness(rule):
        tried.append(rule)
        return distance_to((1.05, 1.33, 2.71, 4.99), 2)(rule)

    found = search(fitness, INITIAL, iterations=10)
    factors = np.array([rule.long_factor for rule in tried])
    assert (np.diff(factors) >= 0).all()
    assert factors.min() == 1
    assert 4 < factors.max() <= 5
    np.testing.assert_allclose(factors, np.round(factors, 2), atol=1e-12)
    assert {rule.unscaled_first for rule in tried} <= set(UNSCALED_FIRST)
    assert {rule.select for rule in tried} == {"long"}
    assert len(set(tried)) == len(tried) <= 64 + 10 * 32
    plain = Plain(500.0, head_dim=8).inverse_frequencies()
    static = (NTKAware(4.0, base=500.0, head_dim=8), NTKByParts(4.0, 32, base=500.0, head_dim=8))
    seeds = [np.full(4, 4.0), *(plain / rule.inverse_frequencies() for rule in static), INITIAL.long_factor]
    np.testing.assert_allclose(factors[:4], seeds, atol=0.0051)
    assert {rule.unscaled_first for rule in tried[:4]} == {0}
    assert (np.diff(found.history) <= 0).all()
    assert found.fitness < found.history[0] <= min(map(fitness, tried[:4]))
    assert found.rule.select == "by_length"


def test_search_is_deterministic_and_ranks_nan_last():
    def fitness(rule):
        value = distance_to((1.0, 2.0, 3.0, 4.0), 0)(rule)
        return value if value < 2 else float("nan")

    runs = [search(fitness, INITIAL, seed=seed, iterations=3) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert np.isfinite(runs[0].history).all()
