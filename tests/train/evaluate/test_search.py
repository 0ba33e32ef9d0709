"""The search for LongRoPE's factors: the settings that it runs with."""

from types import SimpleNamespace

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posjax as pj
from posjax import rotary
from train.config import parse
from train.evaluate import search
from train.evaluate.predictor import Predictor
from train.model.build import build_model

VALUES = {"model": {"num_layers": 1, "model_dim": 16, "num_heads": 2, "mlp_dim": 16}, "train": {"length": 32}}


@pytest.mark.parametrize(("population", "parents", "quarter"), [(16, 8, 4), (5, 2, 1)])
def test_half_of_the_population_are_parents_and_a_quarter_each_mutations_and_crossovers(
    monkeypatch, population, parents, quarter
):
    given = {}

    def found(fitness, initial, **numbers):
        given.update(numbers)
        assert (initial.short_factor, initial.long_factor) == ((1.0,) * 4, (1.0,) * 4)  # for heads of 8
        assert (initial.original_length, initial.factor) == (32, 2.0)

    monkeypatch.setattr(search.longrope, "search", found)
    config = parse(VALUES)
    model = nnx.eval_shape(lambda: build_model(config))
    search.search_factors(config, model, [], 64, search.Effort(population, 3, seed=5), 32)
    wanted = {"population": population, "parents": parents, "mutations": quarter, "crossovers": quarter}
    assert given == wanted | {"seed": 5, "iterations": 3}


class Model(nnx.Module):
    """A stand-in for a decoder."""

    config = SimpleNamespace(head_dim=8)

    def with_scheme(self, scheme):
        return self


def test_the_fitness_is_the_mean_loss_of_the_last_tokens(monkeypatch):
    """Of a model that looks at the token before; two devices share the rows of a batch."""
    table = np.random.default_rng(0).normal(size=(7, 7)).astype(np.float32)
    predictor = Predictor(lambda table, tokens, length: table[tokens], lambda table, hidden: hidden, rows=2)
    monkeypatch.setattr(search, "predictor_of", lambda model, seed, mesh: (predictor, jnp.asarray(table)))
    pieces = np.random.default_rng(1).integers(0, 7, (3, 17))
    scheme = pj.scheme("rope")
    fitness = search._fitness(Model(), scheme, parse(VALUES), list(pieces), 16, 5)
    costs = np.log(np.exp(table.astype(np.float64)).sum(-1, keepdims=True)) - table
    rule = rotary.LongRoPE((1.0,) * 4, (2.0,) * 4, 8, factor=2.0, select="long")
    np.testing.assert_allclose(fitness(rule), costs[pieces[:, -6:-1], pieces[:, -5:]].mean(), rtol=1e-5)


def test_the_first_tokens_are_not_scaled_and_the_others_turn_by_the_given_angles():
    theta = np.array([0.5, 0.25], np.float32)
    rule = search._Traced(theta=jnp.asarray(theta), first=jnp.asarray(3), factor=1.5, base=100.0)
    positions = np.arange(6)
    found = rule.table(jnp.asarray(positions), head_dim=4)
    chex.assert_shape(found.cos, (6, 2))
    plain, scaled = positions[:, None] * [1, 0.1], positions[:, None] * theta
    for table, function in zip(found, (np.cos, np.sin), strict=True):
        wanted = np.where(positions[:, None] < 3, function(plain), 1.5 * function(scaled))
        np.testing.assert_allclose(table, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"population": 3}, "population of a search must be at least 4, found 3"),
        ({"iterations": 0}, "iterations of a search must be at least 1, found 0"),
    ],
)
def test_a_search_has_a_least_size(given, message):
    search.Effort(population=4, iterations=1)
    with pytest.raises(ValueError, match=message):
        search.Effort(**given)


@pytest.mark.parametrize("scheme", ["alibi", {"name": "rope", "partial_rotary_factor": 0.5}])
def test_schemes_without_plain_rope_over_the_whole_head_are_refused(scheme):
    with pytest.raises(ValueError, match="search rescales plain RoPE over the whole head of every layer"):
        search.check_searchable(parse(VALUES | {"scheme": scheme}))


def test_a_search_measures_whole_texts_only():
    """At the given length, without sliding windows."""
    config = parse(VALUES | {"evaluate": {"lengths": [32, 64], "stride": 16, "tokens": 64, "batch_tokens": 128}})
    found = search._at(config, 100)
    assert (found.lengths, found.stride, found.tokens, found.batch_tokens) == ((100,), 0, 100, 128)
