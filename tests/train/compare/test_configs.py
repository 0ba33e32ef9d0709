"""The configs in the repository: each one loads, and every scheme and stage in it can be built over its model."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from posjax.nn.huggingface.load import named_parameters
from train.compare.trainings import trainings
from train.config import load
from train.loop.optimizer import TRAINED, param_labels
from train.model.build import Setup, check_model
from train.model.convert import check_continues

FOLDER = Path(__file__).parents[3] / "configs"
TEXTS = {path: path.read_text() for path in FOLDER.glob("*.yaml")}
CONFIGS = sorted(path for path, text in TEXTS.items() if "\ncompare:" in text and "name: released" not in text)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_is_a_comparison_at_and_beyond_its_training_length(path):
    """Its commands, in its comments, name it and fit it."""
    config = load(path)
    assert trainings(config)
    assert config.evaluate.lengths[0] == config.train.length
    assert config.evaluate.lengths[-1] >= 8 * config.train.length
    for entry in config.compare.schemes:
        distance = entry.options.get("max_distance", 0)
        assert distance < config.train.length, "T5's buckets beyond the training length are never trained"
    lines = re.findall(r"^# *python -m train compare (.*)$", TEXTS[path].replace("\\\n#", ""), re.M)
    found = [load(FOLDER.parent / place, changes) for place, *changes in map(shlex.split, lines)]
    assert all(shlex.split(line)[0] == f"configs/{path.name}" for line in lines)
    assert len({each.name for each in found}) == len(found) > 0


def test_a_long_row_can_be_trained_on():
    config = load(FOLDER / "long.yaml")
    check_model(Setup(config))
    assert (config.train.length, config.train.rows) == (131072, 1)


def trained_names(config):
    """The last parts of the names of the parameters that a stage trains."""
    parameters = Setup(config).shapes
    chosen = param_labels(config.train, parameters)
    return {name.rpartition("/")[2] for name, label in named_parameters(chosen) if label == TRAINED}


def test_rope_turns_into_coca_in_the_steps_of_the_paper():
    config = load(FOLDER / "rope-to-coca.yaml")
    stages = [config.stage(number) for number in range(len(config.stage_names))]
    for before, after in pairwise(stages):
        check_continues(Setup(before), Setup(after))
    assert [stage.scheme.name for stage in stages] == ["rope", "coca-strict", "coca-strict", "coca-strict"]
    rope, keys, attention, everything = map(trained_names, stages)
    assert (keys, attention) == ({"k"}, {"q", "k", "v"})
    assert attention < everything == rope
