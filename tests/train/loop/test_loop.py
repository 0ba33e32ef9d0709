"""Training runs: the files they write, how they resume, and what they refuse."""

import dataclasses
import json
import os
import shutil
import signal
import threading

import chex
import numpy as np
import pytest
from flax import nnx
from programs import shared_programs

from train.checkpoint.manager import whole_steps
from train.checkpoint.restore import restore_model
from train.config import MeshConfig, dump, parse, to_dict
from train.data.sources import all_documents
from train.loop import fit as loop
from train.loop.fit import fit, read_result

STEPS = 6


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for index in range(6):
        (folder / f"{index}.txt").write_text(f"the {index}th of the texts, and not the longest of them. " * 8)
    return folder


@pytest.fixture(scope="module")
def config(text):
    return parse(
        {
            "data": {"source": "files", "paths": [f"{text}/*.txt"], "held_out": 0.2},
            "model": {"num_layers": 1, "model_dim": 16, "num_heads": 2, "mlp_dim": 16},
            "train": {
                "length": 16,
                "batch_tokens": 128,
                "steps": STEPS,
                "warmup_steps": 2,
                "checkpoint_every": 3,
                "log_every": 2,
                "learning_rate": 0.01,
                "mesh": {"data": 2},
            },
        }
    )


@pytest.fixture(scope="module", autouse=True)
def programs():
    """Runs of one config share their compiled programs."""
    with shared_programs():
        yield


@pytest.fixture(scope="module")
def uninterrupted(config, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "straight"
    return fit(config, directory)


def parameters(directory):
    return nnx.to_pure_dict(nnx.state(restore_model(directory)[1]))


def metrics(directory):
    kept = ("step", "loss", "gradient_norm", "learning_rate", "tokens")
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{key: json.loads(line)[key] for key in kept} for line in lines]


def contents(directory):
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


def test_a_run_leaves_everything_behind(config, uninterrupted):
    directory = uninterrupted.directory
    assert {path.name for path in directory.iterdir()} == {
        "config.yaml",
        "versions.json",
        "metrics.jsonl",
        "fit.json",
        "checkpoints",
        "tensorboard",
    }
    assert {path.name for path in (directory / "checkpoints").iterdir()} == {"3", "6"}
    lines = metrics(directory)
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert [line["tokens"] for line in lines] == [256, 512, 768]
    logged = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rates = [line["tokens_per_second"] for line in logged]
    assert rates[:2] == [None, None], "the clock starts after the first five steps"
    assert rates[2] > 0
    np.testing.assert_allclose([line["learning_rate"] for line in lines], [0.01, 0.0055, 0.001], rtol=1e-5)
    assert lines[-1]["loss"] == uninterrupted.final_loss < lines[0]["loss"]
    assert uninterrupted.finished
    assert uninterrupted.steps == STEPS
    assert uninterrupted.tokens_per_second > 0
    assert 2**26 < uninterrupted.peak_memory_bytes < 2**36
    assert "jax" in json.loads((directory / "versions.json").read_text())
    assert (directory / "config.yaml").read_text() == dump(config)


def test_a_finished_run_is_not_touched(config, uninterrupted):
    before = contents(uninterrupted.directory)
    assert fit(config, uninterrupted.directory) == uninterrupted
    assert read_result(uninterrupted.directory) == uninterrupted
    assert contents(uninterrupted.directory) == before


def test_a_restored_model_is_the_trained_one(config, uninterrupted):
    found, model = restore_model(uninterrupted.directory)
    assert found == config
    chex.assert_tree_all_finite(parameters(uninterrupted.directory))
    logits = model(np.zeros((1, 5), np.int32))
    chex.assert_shape(logits, (1, 5, 260))


class Killed(Exception):
    pass


def kill_after(monkeypatch, steps):
    """Makes a run raise `Killed` at the start of step `steps` + 1, so it saves nothing more."""
    original, count = loop.global_batch, iter(range(10**6))

    def global_batch(*arguments):
        if next(count) == steps:
            raise Killed
        return original(*arguments)

    monkeypatch.setattr(loop, "global_batch", global_batch)


@pytest.mark.parametrize("steps", [1, pytest.param(3, marks=pytest.mark.wide), 5])
def test_a_killed_run_repeats_the_uninterrupted_one_bit_for_bit(config, uninterrupted, tmp_path, monkeypatch, steps):
    directory = tmp_path / "killed"
    with monkeypatch.context() as patch:
        kill_after(patch, steps)
        with pytest.raises(Killed):
            fit(config, directory)
    assert read_result(directory) is None
    assert fit(config, directory).finished
    chex.assert_trees_all_equal(parameters(directory), parameters(uninterrupted.directory))
    assert metrics(directory) == metrics(uninterrupted.directory)


def test_a_run_killed_before_its_result_was_written_is_finished(config, uninterrupted, tmp_path):
    directory = shutil.copytree(uninterrupted.directory, tmp_path / "copy")
    (directory / "fit.json").unlink()
    again = fit(config, directory)
    assert (again.steps, again.final_loss) == (uninterrupted.steps, uninterrupted.final_loss)
    assert read_result(directory) == again


def test_a_run_resumes_on_another_number_of_devices(config, uninterrupted, tmp_path, monkeypatch):
    directory = tmp_path / "moved"
    with monkeypatch.context() as patch:
        kill_after(patch, 4)
        with pytest.raises(Killed):
            fit(config, directory)
    more = dataclasses.replace(config, train=dataclasses.replace(config.train, mesh=MeshConfig(data=4)))
    assert fit(more, directory).finished
    chex.assert_trees_all_close(parameters(directory), parameters(uninterrupted.directory), atol=1e-4)


def test_a_torn_line_of_metrics_is_written_again(config, uninterrupted, tmp_path, monkeypatch):
    directory = tmp_path / "torn"
    with monkeypatch.context() as patch:
        kill_after(patch, 5)
        with pytest.raises(Killed):
            fit(config, directory)
    file = directory / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    fit(config, directory)
    assert metrics(directory) == metrics(uninterrupted.directory)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops(config, uninterrupted, tmp_path, monkeypatch, number):
    directory = tmp_path / "stopped"
    handler = signal.getsignal(number)
    with monkeypatch.context() as patch:
        original, count = loop.global_batch, iter(range(10**6))

        def global_batch(*arguments):
            if next(count) == 3:
                os.kill(os.getpid(), number)
            return original(*arguments)

        patch.setattr(loop, "global_batch", global_batch)
        stopped = fit(config, directory)
    assert (stopped.steps, stopped.finished) == (4, False)
    assert signal.getsignal(number) is handler
    assert (directory / "checkpoints" / "4").is_dir()
    assert fit(config, directory).finished
    chex.assert_trees_all_equal(parameters(directory), parameters(uninterrupted.directory))
    assert metrics(directory) == metrics(uninterrupted.directory)


def test_signals_are_left_alone_outside_the_main_thread():
    handler, seen = signal.getsignal(signal.SIGINT), []

    def look():
        with loop.stop_requested():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [handler]


def test_progress_is_plain_lines_without_a_terminal(config, tmp_path, capsys):
    fit(config, tmp_path / "shown", progress="mine")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" · ")[0] for line in lines] == [f"mine: step {step}/6" for step in (2, 4, 6)]
    assert "loss" in lines[0]
    assert "tokens/s" in lines[-1]
    assert lines[-1].endswith("0:00:00 left")


def test_missing_flags_are_printed_once(config, uninterrupted, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("train.runtime.flags.advice", lambda kind: f"flags for {kind}")
    fit(config, tmp_path / "shown", progress="mine")
    assert capsys.readouterr().out.splitlines()[0] == "flags for cpu"
    fit(config, uninterrupted.directory, progress="finished")
    monkeypatch.setattr("train.loop.fit.read_result", lambda directory: None)
    fit(config, uninterrupted.directory, progress="resumes")
    assert "flags" not in capsys.readouterr().out


def test_another_config_is_refused_and_nothing_changes(config, uninterrupted):
    before = contents(uninterrupted.directory)
    other = parse({**to_dict(config), "seed": 7, "scheme": "alibi"})
    message = r"straight belongs to another config: seed was 0, now 7; scheme.name was 'rope', now 'alibi'"
    with pytest.raises(ValueError, match=message) as error:
        fit(other, uninterrupted.directory)
    assert "\n" not in str(error.value)
    assert contents(uninterrupted.directory) == before


def test_a_checkpoint_of_another_config_is_refused(config, tmp_path, monkeypatch):
    directory = tmp_path / "swapped"
    with monkeypatch.context() as patch:
        kill_after(patch, 4)
        with pytest.raises(Killed):
            fit(config, directory)
    other = dataclasses.replace(config, train=dataclasses.replace(config.train, weight_decay=0.2))
    (directory / "config.yaml").write_text(dump(other))
    message = r"the checkpoint of step 3 in .* belongs to another config: train.weight_decay was 0.1, now 0.2"
    with pytest.raises(ValueError, match=message):
        fit(other, directory)
    assert (directory / "checkpoints" / "3").is_dir()


def test_changed_text_is_refused(config, text, tmp_path, monkeypatch):
    directory = tmp_path / "changed"
    with monkeypatch.context() as patch:
        kill_after(patch, 4)
        with pytest.raises(Killed):
            fit(config, directory)
    extra = text / "later.txt"
    extra.write_text("a text that was not there before")
    assert "later.txt" in [name for name, _ in all_documents(config.data)]
    try:
        with pytest.raises(ValueError, match=r"was trained on other text: the corpus has changed since"):
            fit(config, directory)
    finally:
        extra.unlink()


def test_a_directory_of_other_things_is_refused(config, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"has files that are not of a run \(thesis\.tex\); choose another name"):
        fit(config, tmp_path)
    with pytest.raises(ValueError, match=r"thesis\.tex is a file; choose another name"):
        fit(config, tmp_path / "thesis.tex")
    (tmp_path / "config.yaml").write_text("mine: true")
    with pytest.raises(ValueError, match="has files that are not of a run"):
        fit(config, tmp_path)
    (tmp_path / "thesis.tex").unlink()
    with pytest.raises(ValueError, match="unknown key 'mine'"):
        fit(config, tmp_path)
    assert (tmp_path / "config.yaml").read_text() == "mine: true"


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_what_was_saved(config, tmp_path):
    values = to_dict(config)
    values["train"] |= {"learning_rate": 1e30, "clip_norm": 1e30, "warmup_steps": 0}
    values["train"] |= {"checkpoint_every": 1, "stop_after_skips": 2}
    with pytest.raises(ValueError, match=r"diverged: at step \d+ the loss is .* and 2 updates in a row"):
        fit(parse(values), tmp_path / "run")
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert not (tmp_path / "run" / "fit.json").exists()
    assert list(whole_steps(tmp_path / "run"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheme": "ropee"}, "unknown scheme 'ropee'; did you mean 'rope'"),
        ({"scheme": {"name": "rope", "bass": 3}}, "scheme 'rope'.*bass"),
        ({"model": {"num_heads": 3}}, "model_dim must be a multiple of num_heads"),
        ({"model": {"model_dim": 18}}, "head_dim"),
        ({"train": {"length": 4096, "batch_tokens": 8 * 4096}}, "too few for one row of train.length=4096"),
        ({"train": {"batch_tokens": 96, "mesh": {}}}, "6 rows at a time, which 8 devices along .* cannot share"),
        ({"data": {"paths": ["/none/*.txt"]}}, "no file matches '/none/.*txt'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_made(config, tmp_path, changes, message):
    values = to_dict(config)
    for section, value in changes.items():
        values[section] = {**values[section], **value} if section in ("model", "train", "data") else value
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        fit(parse(values), tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_run_that_never_started_does_not_block_another_config(config, tmp_path, monkeypatch):
    directory = tmp_path / "corrected"
    with monkeypatch.context() as patch:
        kill_after(patch, 0)
        with pytest.raises(Killed):
            fit(dataclasses.replace(config, data=dataclasses.replace(config.data, held_out=0.3)), directory)
    assert fit(config, directory).finished


def test_models_are_restored_from_runs_only(config, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"is no run directory: it has no config.yaml"):
        restore_model(tmp_path)
    with monkeypatch.context() as patch:
        kill_after(patch, 1)
        with pytest.raises(Killed):
            fit(config, tmp_path / "early")
    with pytest.raises(FileNotFoundError, match="early has no checkpoint"):
        restore_model(tmp_path / "early")
