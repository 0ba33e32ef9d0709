"""The search for LongRoPE's factors: the settings that it runs with."""

import pytest
from flax import nnx

from train.config import parse
from train.evaluate import search
from train.model.build import build_model

VALUES = {"model": {"num_layers": 1, "model_dim": 16, "num_heads": 2, "mlp_dim": 16}, "train": {"length": 32}}


@pytest.mark.parametrize(("population", "parents", "quarter"), [(16, 8, 4), (5, 2, 1)])
def test_half_of_the_population_are_parents_and_a_quarter_each_mutations_and_crossovers(
    monkeypatch, population, parents, quarter
):
    given = {}
    monkeypatch.setattr(search.longrope, "search", lambda fitness, initial, **numbers: given.update(numbers))
    config = parse(VALUES)
    model = nnx.eval_shape(lambda: build_model(config))
    search.search_factors(config, model, [], 64, search.Effort(population, 3, seed=5), 32)
    wanted = {"population": population, "parents": parents, "mutations": quarter, "crossovers": quarter}
    assert given == wanted | {"seed": 5, "iterations": 3}


def test_a_search_measures_whole_texts_only():
    """At the given length, without sliding windows."""
    config = parse(VALUES | {"evaluate": {"lengths": [32, 64], "stride": 16, "tokens": 64, "batch_tokens": 128}})
    found = search._at(config, 100)
    assert (found.lengths, found.stride, found.tokens, found.batch_tokens) == ((100,), 0, 100, 128)
