"""The configs in the repository: each one loads, and every scheme and stage in it can be built over its model."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from flax import nnx

from posjax.nn.huggingface.load import named_parameters
from train.compare.compare import trainings
from train.config import load
from train.loop.optimizer import TRAINED, param_labels
from train.model.build import build_model, check_model, evaluated_scheme
from train.model.convert import check_continues

FOLDER = Path(__file__).parents[3] / "configs"
TEXTS = {path: path.read_text() for path in FOLDER.glob("*.yaml")}
CONFIGS = sorted(path for path, text in TEXTS.items() if "\ncompare:" in text and "name: released" not in text)


@pytest.mark.parametrize(
    "changes", [("model.scan_layers=true",), pytest.param((), marks=pytest.mark.wide)], ids=["scanned", "as written"]
)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_model_of_a_config_can_be_built_and_extended(path, changes):
    """With scanned layers; in the wide grid also as the config says, where layers may be traced one by one."""
    config = load(path, changes)
    for training, *_ in trainings(config):
        model = nnx.eval_shape(lambda training=training: build_model(training))
        for entry in training.compare.schemes:
            extended = evaluated_scheme(config, entry)
            assert model.with_scheme(extended).config.scheme == extended


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_measures_at_and_beyond_its_training_length(path):
    config = load(path)
    assert config.evaluate.lengths[0] == config.train.length
    assert config.evaluate.lengths[-1] >= 8 * config.train.length
    for entry in config.compare.schemes:
        distance = entry.options.get("max_distance", 0)
        assert distance < config.train.length, "T5's buckets beyond the training length are never trained"


def commands(text):
    """The arguments of every ``python -m train compare`` in the comments of a config."""
    whole = text.replace("\\\n#", "")
    return [shlex.split(line) for line in re.findall(r"^# *python -m train compare (.*)$", whole, re.M)]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_commands_in_a_config_name_it_and_fit_it(path):
    found = commands(TEXTS[path])
    for place, *changes in found:
        assert place == f"configs/{path.name}"
        assert trainings(load(path, changes))
    assert len({load(path, changes).name for _, *changes in found}) == len(found) > 0


def test_the_quick_start_compares_what_it_promises():
    config = load(FOLDER / "quickstart.yaml")
    found = {(entry.name, bool(entry.extend)) for entry in config.compare.schemes}
    trained = {(name, False) for name in ("sinusoidal", "rope", "alibi", "coca-strict", "coca-slack")}
    assert found == trained | {("rope", True), ("coca-strict", True), ("coca-slack", True)}
    assert config.data.source == "stdlib"
    assert config.compare.seeds == (0,)
    assert {1, 2, 4, 8} <= {length / config.train.length for length in config.evaluate.lengths}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{name: mrope, sections: [3, 3, 3]}", r"compare\.schemes: mrope: sections \(3, 3, 3\) add up to 9 pairs"),
        ("{name: longformer, dilation: [1, 2, 3]}", r"longformer: mask: it has one pattern for each of 3 heads"),
        ("{name: randomised, max_length: 8}", r"randomised: length 32 is above max_length=8"),
        ("{name: gemma3, label: tiny}", r"tiny: num_layers must be at least 6, one period of this recipe, found 2"),
        ("{name: rope, mask: {name: [a]}}", r"rope: unknown mask \['a'\]"),
    ],
)
def test_schemes_that_do_not_fit_are_refused_before_anything_trains(entry, message):
    with pytest.raises(ValueError, match=message):
        trainings(load(FOLDER / "quickstart.yaml", [f"compare.schemes=[{entry}]"]))


def test_recipes_take_the_number_of_layers_of_the_model():
    config = load(FOLDER / "quickstart.yaml", ["compare.schemes=[smollm3]", "model.num_layers=4"])
    ((training,),) = trainings(config)
    layers = nnx.eval_shape(lambda: build_model(training)).config.layers
    assert [bool(scheme.rotates) for scheme in layers.schemes] == [True, True, True, False]


def trained_names(config):
    """The last parts of the names of the parameters that a stage trains."""
    parameters = nnx.to_pure_dict(nnx.eval_shape(lambda: nnx.state(build_model(config))))
    chosen = param_labels(config.train, parameters)
    return {name.rpartition("/")[2] for name, label in named_parameters(chosen) if label == TRAINED}


def test_a_long_row_can_be_trained_on():
    config = load(FOLDER / "long.yaml")
    check_model(config)
    assert (config.train.length, config.train.rows, config.train.steps) == (131072, 1, 1)


def test_rope_turns_into_coca_in_the_steps_of_the_paper():
    config = load(FOLDER / "rope-to-coca.yaml")
    stages = [config.stage(number) for number in range(len(config.stage_names))]
    for before, after in pairwise(stages):
        check_continues(before, after)
    assert [stage.scheme.name for stage in stages] == ["rope", "coca-strict", "coca-strict", "coca-strict"]
    rope, keys, attention, everything = map(trained_names, stages)
    assert (keys, attention) == ({"k"}, {"q", "k", "v"})
    assert attention < everything == rope
    assert config.data.source == "stdlib"
