"""The configs of the checkout: every comparison loads, and every scheme in them can be built over its model."""

from pathlib import Path

import pytest
from flax import nnx

from train.compare import members
from train.config import load
from train.model import build_model, evaluated_scheme

FOLDER = Path(__file__).parents[2] / "configs"
CONFIGS = sorted(path for path in FOLDER.glob("*.yaml") if "\ncompare:" in path.read_text())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_model_of_a_config_can_be_built_and_extended(path):
    config = load(path)
    for member in members(config)[:: len(config.compare.seeds)]:
        model = nnx.eval_shape(lambda member=member: build_model(member))
        for entry in member.compare.schemes:
            extended = evaluated_scheme(entry, config.model.num_layers)
            assert model.with_scheme(extended).config.scheme == extended


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_measures_at_and_beyond_its_training_length(path):
    config = load(path)
    assert config.evaluate.lengths[0] == config.train.length
    assert config.evaluate.lengths[-1] >= 8 * config.train.length
    for entry in config.compare.schemes:
        distance = entry.options.get("max_distance", 0)
        assert distance < config.train.length, "T5's buckets beyond the training length are never trained"


def test_the_quick_start_compares_what_it_promises():
    config = load(FOLDER / "quickstart.yaml")
    found = {(entry.name, bool(entry.extend)) for entry in config.compare.schemes}
    trained = {(name, False) for name in ("sinusoidal", "rope", "alibi", "coca-strict", "coca-slack")}
    assert found == trained | {("rope", True), ("coca-strict", True), ("coca-slack", True)}
    assert config.data.source == "stdlib"
    assert config.compare.seeds == (0,)
    assert {1, 2, 4, 8} <= {length / config.train.length for length in config.evaluate.lengths}
