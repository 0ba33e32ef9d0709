"""Local checkpoints on a disk of each host: a run uses them if they are newer, whole, and of the same run and mesh."""

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from killed import killed

from train.checkpoint import local as module
from train.config import parse, to_dict
from train.loop import fit as loop
from train.loop.fit import fit


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    text = tmp_path_factory.mktemp("text")
    for n, line in enumerate(("to be or not to be, that is the question; ", "whether it is nobler in the mind ")):
        (text / f"{n}.txt").write_text(line * 60)
    train = {"length": 16, "batch_tokens": 128, "steps": 9, "warmup_steps": 1, "log_every": 1, "checkpoint_every": 4}
    return parse(
        {
            "name": "small",
            "data": {"source": "files", "paths": [f"{text}/*.txt"]},
            "model": {"num_layers": 1, "model_dim": 16, "num_heads": 2, "mlp_dim": 16},
            "train": {**train, "moment_dtype": "bfloat16", "mesh": {"data": 2, "fsdp": 2}},
            "monitor": {"tensorboard": False, "compilation_cache": str(text / "compiled")},
        }
    )


def with_local(config, folder, **train):
    values = to_dict(config)
    values["train"] |= {"local_every": 1, "local_folder": str(folder), **train}
    return parse(values)


def losses(directory):
    return [json.loads(line)["loss"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def straight(config, tmp_path_factory):
    return losses(fit(config, tmp_path_factory.mktemp("straight") / "run").directory)


def resumed_at(config, directory, monkeypatch):
    """Trains to the end of the run; returns its first update."""
    steps = []
    with monkeypatch.context() as patch:
        patch.setattr(loop.Monitor, "before", lambda self, step, state: steps.append(step))
        assert fit(config, directory).finished
    return steps[0]


def local_steps(folder):
    return sorted(int(place.name) for place in folder.glob("*/0-of-1/*"))


def test_a_run_resumes_from_the_newer_of_both_kinds_bit_for_bit(config, straight, tmp_path, monkeypatch):
    wanted = with_local(config, tmp_path / "disk")
    for before, after in ((0, 3), (3, 4), (4, 7)):
        assert killed(wanted, tmp_path / "run", after, monkeypatch) == before + 1
        assert losses(tmp_path / "run") == straight[:after]
        assert max(local_steps(tmp_path / "disk")) == {3: 3, 4: 3, 7: 7}[after]
    assert len(local_steps(tmp_path / "disk")) <= 2
    assert resumed_at(wanted, tmp_path / "run", monkeypatch) == 8
    assert losses(tmp_path / "run") == straight
    assert not list((tmp_path / "disk").iterdir()), "nothing stays of a finished run"


@pytest.fixture
def stopped(config, tmp_path, monkeypatch):
    """A killed run with a permanent checkpoint of step 4 and a local one of step 7."""
    killed(with_local(config, tmp_path / "disk"), tmp_path / "run", 7, monkeypatch)
    return tmp_path


def newest_file(folder):
    return next((folder / "disk").glob("*/0-of-1/7/state.npz"))


def flip(folder):
    content = bytearray(newest_file(folder).read_bytes())
    content[content.index(b"NUMPY") + 200] ^= 1  # in the first array, after its header
    newest_file(folder).write_bytes(content)
    next((folder / "disk").glob("*/0-of-1/6")).rename(folder / "gone")


def change_the_position(folder):
    """Changes the position in the data, as a flipped bit in the JSON may do: another batch would come next."""
    content = newest_file(folder).read_bytes()
    for found in re.findall(rb'"next_index": \d', content):
        content = content.replace(found, found[:-1] + b"9")
    newest_file(folder).write_bytes(content)
    next((folder / "disk").glob("*/0-of-1/6")).rename(folder / "gone")


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (flip, "has changed since it was written|Bad CRC"),
        (change_the_position, "Bad CRC"),
        (lambda folder: shutil.rmtree(folder / "disk"), ""),
    ],
    ids=["damaged", "other place", "gone"],
)
def test_without_a_whole_local_one_the_permanent_one_is_used(
    config, straight, stopped, harm, problem, monkeypatch, capsys
):
    harm(stopped)
    wanted = with_local(config, stopped / "disk")
    assert resumed_at(wanted, stopped / "run", monkeypatch) == 5
    assert losses(stopped / "run") == straight
    warning = capsys.readouterr().err
    assert bool(problem) == ("the local checkpoint of step 7" in warning)
    assert re.search(problem, warning)


def test_a_changed_byte_in_a_zip_directory_is_noticed_or_changes_nothing(config, tmp_path):
    state = {"x": jax.numpy.arange(3.0)}
    (tmp_path / "run").mkdir()
    with module.LocalCheckpoints(with_local(config, tmp_path / "disk"), tmp_path / "run", []) as checkpoints:
        checkpoints.save(7, 0, state, {"next_index": 7})
    [file] = (tmp_path / "disk").glob("*/0-of-1/7/state.npz")
    whole = file.read_bytes()
    for place in range(whole.index(b"PK\x01\x02"), len(whole)):
        content = bytearray(whole)
        content[place] ^= 0xFF
        file.write_bytes(content)
        saved = checkpoints.newest([state], None)
        assert saved in (None, module.LocalCheckpoint(7, 0, {"next_index": 7}))
        if saved:
            np.testing.assert_array_equal(checkpoints.restore(saved, state)["x"], state["x"])
    file.write_bytes(whole)
    assert checkpoints.newest([state], None).step == 7


def test_another_mesh_uses_the_permanent_one(config, stopped, monkeypatch, capsys):
    wanted = with_local(config, stopped / "disk", mesh={"data": 1, "fsdp": 4})
    assert resumed_at(wanted, stopped / "run", monkeypatch) == 5
    assert "its devices now hold other parts of the state, because of another mesh" in capsys.readouterr().err


def test_a_new_run_does_not_use_the_local_checkpoints_of_the_run_before(config, straight, stopped, monkeypatch):
    shutil.rmtree(stopped / "run")
    assert resumed_at(with_local(config, stopped / "disk"), stopped / "run", monkeypatch) == 1
    assert losses(stopped / "run") == straight


def test_a_step_that_one_process_lacks_is_not_used(config, stopped, monkeypatch):
    """Two processes report their steps; the other one has not written the newest."""
    monkeypatch.setattr(module, "gather", lambda text: [text, "[5, 6]"] if text.startswith("[") else [text])
    assert resumed_at(with_local(config, stopped / "disk"), stopped / "run", monkeypatch) == 7


def test_a_step_that_processes_saved_at_different_positions_is_not_used(config, stopped, monkeypatch, capsys):
    """Two processes report their positions; the other one is at another batch, so no local checkpoint fits both."""
    monkeypatch.setattr(module, "gather", lambda text: [text, "[0, {}]"] if '"next_index"' in text else [text])
    assert resumed_at(with_local(config, stopped / "disk"), stopped / "run", monkeypatch) == 5
    assert "is not used (the processes saved it at 2 positions in the data)" in capsys.readouterr().err


def test_at_most_two_stay_when_another_process_fails_to_write(config, tmp_path, monkeypatch):
    """Two processes report; the other one writes only the first. Step 4 is a permanent checkpoint."""
    original = module.LocalCheckpoints.save

    def save(self, step, *rest):
        if step > 2:
            monkeypatch.setattr(module, "gather", lambda text: [text, "No space left on device"])
        original(self, step, *rest)

    monkeypatch.setattr(module.LocalCheckpoints, "save", save)
    killed(with_local(config, tmp_path / "disk"), tmp_path / "run", 7, monkeypatch)
    assert local_steps(tmp_path / "disk") == [1, 7]


def test_the_last_process_of_a_host_removes_the_folder(config, tmp_path, monkeypatch):
    """Processes do not wait for each other: another may have removed the folder already, or still have files in it."""
    wanted = with_local(config, tmp_path / "disk")
    (tmp_path / "run").mkdir()
    checkpoints = []
    for index in range(2):
        monkeypatch.setattr(module.jax, "process_index", lambda index=index: index)
        checkpoints.append(module.LocalCheckpoints(wanted, tmp_path / "run", []))
    checkpoints[0].forget()
    assert list((tmp_path / "disk").glob("*/*"))
    original = Path.rmdir

    def rmdir(place):
        original(place)  # the other process removes it in between
        original(place)

    monkeypatch.setattr(Path, "rmdir", rmdir)
    checkpoints[1].forget()
    assert not list((tmp_path / "disk").iterdir())


def test_a_full_disk_is_reported_and_the_run_continues(config, straight, tmp_path, monkeypatch, capsys):
    written = np.savez

    def full(place, **arrays):
        if isinstance(place, Path):
            raise OSError("No space left on device")
        written(place, **arrays)  # the token cache is still written

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", full)
        assert fit(with_local(config, tmp_path / "disk"), tmp_path / "run").finished
    assert losses(tmp_path / "run") == straight
    assert "could not be written to" in capsys.readouterr().err


def test_a_folder_that_a_stage_names_is_used(config, tmp_path, monkeypatch):
    values, named = to_dict(config), {"local_every": 1, "local_folder": str(tmp_path / "disk")}
    values["stages"] = [{"name": "first", "train": {"steps": 2}}, {"name": "second", "train": named}]
    wanted = parse(values)
    assert (wanted.local_folder, config.local_folder) == (named["local_folder"], "")
    killed(wanted, tmp_path / "run", 3, monkeypatch)
    assert local_steps(tmp_path / "disk") == [3]


def test_a_folder_of_its_own_for_a_stage_is_refused(config, tmp_path):
    values = to_dict(with_local(config, tmp_path / "disk"))
    values["stages"] = [{"name": "first"}, {"name": "second", "train": {"local_folder": str(tmp_path / "other")}}]
    with pytest.raises(ValueError, match=r"^train.local_folder: one folder .* found .*/disk and .*/other; name one"):
        parse(values)
    values["stages"][1]["train"]["local_every"] = 0
    assert parse(values).local_folder == str(tmp_path / "disk")


def test_an_invalid_folder_is_refused(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^train.local_folder: process 0 cannot write there: .*file"):
        fit(with_local(config, tmp_path / "file"), tmp_path / "run")
    for folder in ("", "gs://bucket/local"):
        with pytest.raises(ValueError, match=r"^train.local_every: name a folder on a disk of each host"):
            with_local(config, folder)
