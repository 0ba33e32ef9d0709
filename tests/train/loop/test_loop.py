"""Training runs: the files they write, how they resume, and what they refuse."""

import dataclasses
import json
import os
import shutil
import signal

import chex
import numpy as np
import pytest
from documents import held_out_sample
from flax import nnx
from programs import shared_programs
from refusals import refused

from train.checkpoint.manager import whole_steps
from train.checkpoint.restore import restore_model
from train.config import MeshConfig, dump, parse, to_dict
from train.data.packing import pack_sample
from train.loop.fit import fit, read_result

STEPS = 6


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Texts of 255 bytes, so that one of them, with its BOS and EOS, fills 16 rows of 16 tokens."""
    folder = tmp_path_factory.mktemp("text")
    for index in range(6):
        (folder / f"{index}.txt").write_text((f"the {index}th of the texts, and not the longest. " * 8)[:255])
    return folder


@pytest.fixture(scope="module")
def config(text):
    train = {"length": 16, "batch_tokens": 128, "steps": STEPS, "warmup_steps": 2, "learning_rate": 0.01}
    return parse(
        {
            "data": {"source": "files", "paths": [f"{text}/*.txt"], "held_out": 1e-9},
            "model": {"num_layers": 1, "model_dim": 16, "num_heads": 2, "mlp_dim": 16},
            "monitor": {"evaluate_every": 3},
            "train": {**train, "checkpoint_every": 3, "log_every": 2, "mesh": {"data": 2}},
        }
    )


@pytest.fixture(scope="module", autouse=True)
def programs():
    """Runs of one config share their compiled programs."""
    with shared_programs():
        yield


@pytest.fixture(scope="module")
def uninterrupted(config, tmp_path_factory):
    return fit(config, tmp_path_factory.mktemp("runs") / "straight")


def parameters(directory):
    return nnx.to_pure_dict(nnx.state(restore_model(directory)[1]))


def lines(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def metrics(directory):
    kept = ("step", "loss", "gradient_norm", "learning_rate", "tokens", "held_out_loss")
    return [{key: line.get(key) for key in kept} for line in lines(directory)]


def contents(directory):
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


def same_run(directory, uninterrupted):
    assert metrics(directory) == metrics(uninterrupted.directory)
    chex.assert_trees_all_equal(parameters(directory), parameters(uninterrupted.directory))


def test_a_run_leaves_everything_behind(config, uninterrupted):
    directory = uninterrupted.directory
    files = {"config.yaml", "versions.json", "metrics.jsonl", "fit.json", "checkpoints", "tensorboard"}
    assert {path.name for path in directory.iterdir()} == files
    assert {path.name for path in (directory / "checkpoints").iterdir()} == {"3", "6"}
    found = lines(directory)
    assert [(line["step"], line["tokens"]) for line in found] == [(2, 256), (4, 512), (6, 768)]
    assert ["held_out_loss" in line for line in found] == [False, True, True], "due after 3 steps, at the next line"
    assert [bool(line["tokens_per_second"]) for line in found] == [False, False, True], "five steps are left out"
    np.testing.assert_allclose([line["learning_rate"] for line in found], [0.01, 0.0055, 0.001], rtol=1e-5)
    assert found[-1]["loss"] == uninterrupted.final_loss < found[0]["loss"]
    assert (uninterrupted.finished, uninterrupted.steps) == (True, STEPS)
    assert 2**26 < uninterrupted.peak_memory_bytes < 2**36
    assert "jax" in json.loads((directory / "versions.json").read_text())
    assert (directory / "config.yaml").read_text() == dump(config)


def test_a_finished_run_is_not_touched(config, uninterrupted):
    before = contents(uninterrupted.directory)
    assert fit(config, uninterrupted.directory) == read_result(uninterrupted.directory) == uninterrupted
    assert contents(uninterrupted.directory) == before


def test_the_held_out_loss_is_that_of_the_restored_model(uninterrupted):
    """Over all sixteen rows of the held-out text, by NumPy in float64."""
    config, model = restore_model(uninterrupted.directory)
    rows = pack_sample(held_out_sample(config), 16)
    assert len(rows) == 16
    batch = rows.batch(np.arange(16))
    logits = np.asarray(model(batch.tokens, segment_ids=batch.segment_ids), np.float64)
    chances = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = -np.take_along_axis(chances, batch.labels[..., None], -1)[batch.labels >= 0].mean()
    np.testing.assert_allclose(lines(uninterrupted.directory)[-1]["held_out_loss"], wanted, rtol=1e-5)


@pytest.mark.parametrize("step", [2, 4])
def test_a_killed_run_repeats_the_uninterrupted_one_bit_for_bit(config, uninterrupted, tmp_path, killed, step):
    """Before the first checkpoint, and after it; the line that was being written at the kill is torn."""
    killed(config, tmp_path, step)
    assert read_result(tmp_path) is None
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    assert fit(config, tmp_path).finished
    same_run(tmp_path, uninterrupted)


def test_a_run_killed_before_its_result_was_written_is_finished(config, uninterrupted, tmp_path):
    directory = shutil.copytree(uninterrupted.directory, tmp_path / "copy")
    (directory / "fit.json").unlink()
    again = fit(config, directory)
    assert (again.steps, again.final_loss) == (uninterrupted.steps, uninterrupted.final_loss)
    assert read_result(directory) == again


def test_a_run_resumes_on_another_number_of_devices(config, uninterrupted, tmp_path, killed):
    killed(config, tmp_path, 4)
    more = dataclasses.replace(config, train=dataclasses.replace(config.train, mesh=MeshConfig(data=4)))
    assert fit(more, tmp_path).finished
    chex.assert_trees_all_close(parameters(tmp_path), parameters(uninterrupted.directory), atol=1e-4)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops(config, uninterrupted, tmp_path, fit_until, number):
    handler = signal.getsignal(number)
    stopped = fit_until(config, tmp_path, 4, lambda: os.kill(os.getpid(), number))
    assert (stopped.steps, stopped.finished) == (5, False)
    assert signal.getsignal(number) is handler
    assert (tmp_path / "checkpoints" / "5").is_dir()
    assert fit(config, tmp_path).finished
    chex.assert_trees_all_equal(parameters(tmp_path), parameters(uninterrupted.directory))


def test_another_config_is_refused_and_nothing_changes(config, uninterrupted):
    before = contents(uninterrupted.directory)
    refused("seed", lambda: fit(parse({**to_dict(config), "seed": 7}), uninterrupted.directory))
    assert contents(uninterrupted.directory) == before


def test_changed_text_is_refused(config, text, tmp_path, killed):
    killed(config, tmp_path, 4)
    extra = text / "later.txt"
    extra.write_text("a text that was not there before")
    try:
        refused("other text", lambda: fit(config, tmp_path))
    finally:
        extra.unlink()


def test_a_directory_of_other_things_is_refused(config, tmp_path):
    (tmp_path / "config.yaml").write_text("mine: true")
    (tmp_path / "thesis.tex").write_text("years of work")
    refused("thesis.tex", lambda: fit(config, tmp_path))
    refused("thesis.tex", lambda: fit(config, tmp_path / "thesis.tex"))
    (tmp_path / "thesis.tex").unlink()
    refused("mine", lambda: fit(config, tmp_path))
    assert (tmp_path / "config.yaml").read_text() == "mine: true"


@pytest.mark.parametrize("train", [{"stop_after_skips": 2}, {"steps": 1}], ids=["two in a row", "no update"])
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_what_was_saved(config, tmp_path, train):
    values = to_dict(config)
    values["train"] |= {"learning_rate": 1e30, "clip_norm": 1e30, "warmup_steps": 0, "checkpoint_every": 1}
    values["train"] |= train
    values["model"]["logit_scale"] = 1e38 if "steps" in train else 1.0
    refused("train.learning_rate", lambda: fit(parse(values), tmp_path))
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert not (tmp_path / "fit.json").exists()
    assert bool(list(whole_steps(tmp_path))) == ("steps" not in train)


@pytest.mark.parametrize(
    ("named", "changes", "kind"),
    [
        ("ropee", {"scheme": "ropee"}, ValueError),
        ("train.length=4096", {"train": {"length": 4096, "batch_tokens": 8 * 4096}}, ValueError),
        ("train.batch_tokens", {"train": {"batch_tokens": 96, "mesh": {}}}, ValueError),
        ("train.steps", {"train": {"steps": 0, "warmup_steps": 0}}, ValueError),
        ("train.loss_chunks", {"train": {"loss_chunks": 7}}, ValueError),
        ("monitor.evaluate_every", {"train": {"length": 300, "batch_tokens": 2400}}, ValueError),
        ("data.paths", {"data": {"paths": ["/none/*.txt"]}}, FileNotFoundError),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(config, tmp_path, named, changes, kind):
    values = to_dict(config)
    for section, value in changes.items():
        values[section] = {**values[section], **value} if section in ("model", "train", "data") else value
    refused(named, lambda: fit(parse(values), tmp_path / "run"), kind)
    assert not (tmp_path / "run").exists()


def test_a_run_that_never_started_does_not_block_another_config(config, tmp_path):
    (tmp_path / "config.yaml").write_text(dump(dataclasses.replace(config, seed=9)))
    assert fit(config, tmp_path).finished
    assert (tmp_path / "config.yaml").read_text() == dump(config)
