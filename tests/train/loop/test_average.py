"""The moving average of the trained parameters (``train.ema``): its values, and where a run uses it."""

import dataclasses
import io
import json

import chex
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from documents import encode, pack
from flax import nnx
from programs import shared_programs
from refusals import refused
from rich.console import Console
from updates import begin, build, placed, random_parameters

from posjax.nn import from_pretrained
from train.checkpoint.export import export
from train.checkpoint.restore import restore_model
from train.config import parse, to_dict
from train.evaluate.saved import evaluate
from train.loop.fit import fit, prepare

TRAINABLE = ["*/attention/[qk]"]
DECAY = 0.75
STILL = 1 - 1e-7
"""A decay with which an average stays what it is in a few updates."""


def leaves(tree, names="qk"):
    attention = tree["stacks"][0][0]["attention"]
    assert not set(names) - set(attention)
    return {name: np.asarray(attention[name], np.float64) for name in names}


@pytest.mark.parametrize("mesh", [{"data": 1}, {"data": 2, "fsdp": 2}], ids=str)
def test_three_updates_give_the_closed_form_also_on_a_mesh(mesh):
    """After a skipped update it is as it was. What is not trained has no average, and averages lie as parameters do."""
    batch = pack([encode(b"to be, or not to be"), encode(b"that is the question")], 8).batch(np.arange(8) % 5)
    program, devices = build(mesh=mesh, ema=DECAY, trainable=TRAINABLE, spike_factor=2.0)
    found = []
    with jax.set_mesh(devices):
        state = begin(program, random_parameters(program))
        for _ in range(3):
            found.append(leaves(state.parameters))
            state, _ = program.update(program.given, state, placed(devices, batch))
        last, average = leaves(state.parameters), leaves(state.average)
        mean = jax.device_put(np.float32(1e-9), state.guard.norm.sharding)
        spiked = dataclasses.replace(state, guard=state.guard._replace(norm=mean))
        after, metrics = program.update(program.given, spiked, placed(devices, batch))
    assert int(metrics.skipped) == 1
    chex.assert_trees_all_equal(leaves(after.average), average)
    assert set(after.average["stacks"][0][0]["attention"]) == {"q", "k"}
    assert len(jax.tree.leaves(after.average)) == 2
    for name in "qk":
        first, second, third = (each[name] for each in found)
        wanted = DECAY**3 * first + (1 - DECAY) * (DECAY**2 * second + DECAY * third + last[name])
        np.testing.assert_allclose(average[name], wanted, rtol=0, atol=2e-7)
        assert np.abs(average[name] - last[name]).max() > 1e-3
    parameters = after.parameters["stacks"][0][0]["attention"]
    for name, leaf in after.average["stacks"][0][0]["attention"].items():
        assert (leaf.dtype, leaf.sharding) == (np.dtype("float32"), parameters[name].sharding)


@pytest.fixture(scope="module", autouse=True)
def programs():
    with shared_programs():
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A stage with an average, and one that continues with its moments and an average that hardly moves."""
    text = tmp_path_factory.mktemp("text")
    for n, line in enumerate(("to be or not to be, that is the question; ", "whether it is nobler in the mind ")):
        (text / f"{n}.txt").write_text(line * 60)
    train = {"length": 16, "batch_tokens": 256, "steps": 4, "warmup_steps": 0, "log_every": 1, "checkpoint_every": 1}
    still = {"ema": STILL, "keep_moments": True, "steps": 3}
    return parse(
        {
            "data": {"source": "files", "paths": [f"{text}/*.txt"]},
            "model": {"num_layers": 1, "model_dim": 16, "num_heads": 2, "mlp_dim": 16},
            "train": {**train, "ema": DECAY, "trainable": TRAINABLE, "learning_rate": 0.1, "mesh": {"data": 1}},
            "monitor": {"tensorboard": False, "evaluate_every": 1, "evaluate_tokens": 64},
            "evaluate": {"lengths": [16], "tokens": 64, "batch_tokens": 64, "mesh": {"data": 1}},
            "stages": [{"name": "first"}, {"name": "still", "train": still}],
        }
    )


def lines(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def saved(directory, step, item):
    """An item of a checkpoint, as Orbax reads it by itself."""
    with ocp.StandardCheckpointer() as checkpointer:
        place = directory / "checkpoints" / str(step) / item
        shapes = checkpointer.metadata(place).item_metadata.tree
        return checkpointer.restore(place, jax.tree.map(lambda x: np.empty(x.shape, x.dtype), shapes))


def parameters_of(model):
    return jax.device_get(nnx.to_pure_dict(nnx.state(model)))


def stored_leaves(tree):
    """`leaves` of what Orbax reads by itself, whose keys are texts."""
    attention = tree["stacks"]["0"]["0"]["attention"]
    return {name: np.asarray(attention[name], np.float64) for name in "qk"}


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    return fit(config, tmp_path_factory.mktemp("straight") / "run").directory


def test_a_killed_run_resumes_its_average_bit_for_bit(config, run, tmp_path, killed):
    for step in (3, 6):
        killed(config, tmp_path, step)
    assert fit(config, tmp_path).finished
    assert [line["held_out_loss"] for line in lines(tmp_path)] == [line["held_out_loss"] for line in lines(run)]
    for stage in ("first", "still"):
        both = [parameters_of(restore_model(place, stage)[1]) for place in (run, tmp_path)]
        chex.assert_trees_all_equal(*both)


def test_held_out_text_is_measured_with_the_average_which_goes_on_with_the_moments(run):
    """In the second stage the average hardly moves, so the loss does not either, while that of training does."""
    found = lines(run)
    first, *rest = (line["held_out_loss"] for line in found[3:])
    np.testing.assert_allclose(rest, first, rtol=1e-5)
    assert np.ptp([line["held_out_loss"] for line in found[:4]]) > 1e-3
    chex.assert_trees_all_close(
        stored_leaves(saved(run, 7, "average")), stored_leaves(saved(run, 4, "average")), atol=1e-6
    )
    moved = stored_leaves(saved(run, 7, "parameters"))["q"] - stored_leaves(saved(run, 4, "parameters"))["q"]
    assert np.abs(moved).max() > 1e-2


def test_the_averages_are_what_is_restored_and_exported_unless_the_last_are_asked_for(run, tmp_path):
    for averaged, item in ((True, "average"), (False, "parameters")):
        said = []
        export(run, str(tmp_path / item), [f"evaluate.averaged={averaged}"], log=said.append)
        wanted, rest = stored_leaves(saved(run, 7, item)), saved(run, 7, "parameters")
        restored = parameters_of(restore_model(run, averaged=averaged)[1])
        for found in (restored, parameters_of(from_pretrained(str(tmp_path / item)))):
            chex.assert_trees_all_equal(leaves(found), wanted)
            np.testing.assert_array_equal(found["embed"], rest["embed"])
        assert any("average" in line for line in said)


def test_an_evaluation_says_which_parameters_it_measured(run, unpainted):
    printed = io.StringIO()
    averaged, last = (
        evaluate(run, [f"evaluate.averaged={averaged}"], Console(file=printed, width=160))[0]
        for averaged in (True, False)
    )
    assert averaged["label"] != last["label"]
    assert averaged["window_nll"] != last["window_nll"]
    page = (run / "index.html").read_text()
    assert all(row["label"] in page for row in (averaged, last))
    assert printed.getvalue().count("evaluate.averaged") == 2


def test_a_decay_that_is_none_and_another_one_for_a_run_that_began_are_refused(config, run):
    values = to_dict(config)
    for ema in (1.0, -0.1, 1.5, float("nan")):
        refused("train.ema", lambda ema=ema: parse({**values, "train": values["train"] | {"ema": ema}}))
    for ema in (0.0, 0.5):
        other = parse({**values, "train": values["train"] | {"ema": ema}})
        refused("train.ema", lambda other=other: fit(other, run))


def test_a_slow_average_is_warned_of(config):
    said = []
    prepare(config, said.append)
    assert sum("train.ema" in line for line in said) == 1, "that of the first stage"
