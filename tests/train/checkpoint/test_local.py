"""Local checkpoints on a disk of each host: a run uses them if they are newer, whole, and of the same run and mesh."""

import json
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from refusals import refused

from train.checkpoint.local import LocalCheckpoint, LocalCheckpoints
from train.checkpoint.manager import Checkpoint
from train.config import parse
from train.loop.fit import fit


def state(number, devices=4):
    """Values that differ by position and by `number`, over a mesh of four devices or fewer."""
    mesh = jax.make_mesh((devices,), ("x",))
    values = np.arange(48).reshape(8, 6) + 1000 * number

    def put(value, *spec):
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))

    return {"w": put(jnp.float32(values), "x"), "mean": put(jnp.bfloat16(values), "x"), "step": put(np.int32(number))}


@pytest.fixture
def opened(tmp_path):
    """A function that opens the local checkpoints of a run."""

    def open_them(text="text", **train):
        (tmp_path / "run").mkdir(exist_ok=True)
        train = {"local_every": 1, "local_folder": str(tmp_path / "disk"), **train}
        return LocalCheckpoints(parse({"name": "small", "train": train}), tmp_path / "run", [text])

    return open_them


@pytest.fixture
def saved(opened, tmp_path):
    """The disk after steps 5, 6 and 7 were saved."""
    with opened() as checkpoints:
        for step in (5, 6, 7):
            checkpoints.save(step, 0, state(step), {"next_index": step})
    return tmp_path / "disk"


def steps(disk):
    return sorted(int(place.name) for place in disk.glob("*/0-of-1/[0-9]*"))  # not what is being written


def test_the_newest_comes_back_bit_for_bit_and_at_most_two_stay(opened, saved):
    assert steps(saved) == [6, 7]
    with opened() as checkpoints:
        found = checkpoints.newest([state(0)], Checkpoint(6, 0, None))
        assert found == LocalCheckpoint(7, 0, {"next_index": 7}, state(7))
        restored = found.state
        assert checkpoints.newest([state(0)], Checkpoint(7, 0, None)) is None
        chex.assert_trees_all_equal(restored, state(7))
        chex.assert_trees_all_equal_dtypes(restored, state(7))
        checkpoints.save(8, 0, state(8), None)
        assert 6 not in steps(saved)
    checkpoints.forget()
    assert not list(saved.iterdir()), "nothing stays of a finished run"


def flip_a_value(content):
    place = content.index(b"NUMPY") + 140  # in the first array, after its header
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def change_the_position(content):
    """As a flipped bit in the JSON may do: another batch would come next."""
    return content.replace(b'"next_index": 7', b'"next_index": 9')


@pytest.mark.parametrize("damage", [flip_a_value, change_the_position])
def test_a_damaged_one_is_named_and_the_one_before_is_used(opened, saved, damage, capsys):
    [file] = saved.glob("*/0-of-1/7/state.npz")
    content = file.read_bytes()
    file.write_bytes(damage(content))
    assert file.read_bytes() != content
    with opened() as checkpoints:
        assert checkpoints.newest([state(0)], None).step == 6
    assert "the local checkpoint of step 7" in capsys.readouterr().err


def test_a_changed_byte_in_a_zip_directory_is_noticed_or_changes_nothing(opened, saved):
    shutil.rmtree(next(saved.glob("*/0-of-1/6")))
    [file] = saved.glob("*/0-of-1/7/state.npz")
    whole, wanted = file.read_bytes(), state(7)
    with opened() as checkpoints:
        for place in range(whole.index(b"PK\x01\x02"), len(whole), 3):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
            if found := checkpoints.newest([wanted], None):
                assert found == LocalCheckpoint(7, 0, {"next_index": 7}, state(7))
                chex.assert_trees_all_equal(found.state, wanted)


@pytest.mark.parametrize(
    ("now", "devices"), [({}, 2), ({"text": "other"}, 4), ({"weight_decay": 0.3}, 4), ({}, 4)], ids=str
)
def test_those_of_another_mesh_text_config_or_run_are_not_used(opened, saved, now, devices, capsys):
    if not now and devices == 4:
        shutil.rmtree(saved.parent / "run")  # and a new run begins there
    with opened(**now) as checkpoints:
        assert checkpoints.newest([state(0, devices)], None) is None
    assert ("because of another mesh" in capsys.readouterr().err) == (devices == 2)


def test_a_full_disk_is_reported_and_the_run_continues(opened, saved, monkeypatch, capsys):
    def full(place, **arrays):
        raise OSError("No space left on device")

    with opened() as checkpoints:
        checkpoints.newest([state(0)], None)
        monkeypatch.setattr(np, "savez", full)
        for step in (8, 9):
            checkpoints.save(step, 0, state(step), None)
    assert steps(saved) == [7]
    assert "could not be written to" in capsys.readouterr().err


@pytest.fixture
def config(tmp_path):
    for n, line in enumerate(("to be or not to be, that is the question; ", "whether it is nobler in the mind ")):
        (tmp_path / f"{n}.txt").write_text(line * 60)
    train = {"length": 16, "batch_tokens": 128, "steps": 7, "warmup_steps": 1, "log_every": 1, "checkpoint_every": 4}
    return {
        "data": {"source": "files", "paths": [f"{tmp_path}/*.txt"]},
        "model": {"num_layers": 1, "model_dim": 16, "num_heads": 2, "mlp_dim": 16},
        "train": {**train, "mesh": {"data": 2, "fsdp": 2}},
        "monitor": {"tensorboard": False, "compilation_cache": str(tmp_path / "compiled")},
    }


def with_local(config, folder):
    return parse({**config, "train": {**config["train"], "local_every": 1, "local_folder": str(folder)}})


def losses(directory):
    return [json.loads(line)["loss"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_a_killed_run_resumes_from_the_newer_of_both_kinds_bit_for_bit(config, tmp_path, killed, resumed):
    straight = losses(fit(parse(config), tmp_path / "straight").directory)
    wanted, disk = with_local(config, tmp_path / "disk"), tmp_path / "disk"
    killed(wanted, tmp_path / "run", 4)
    assert max(steps(disk)) == 3
    killed(wanted, tmp_path / "run", 7)
    assert resumed(wanted, tmp_path / "run") == 7, "after the local one of step 6"
    assert losses(tmp_path / "run") == straight
    assert not list(disk.iterdir())
    killed(wanted, tmp_path / "other", 7)
    shutil.rmtree(disk)
    assert resumed(wanted, tmp_path / "other") == 5, "after the permanent one of step 4"


def test_all_stages_have_one_folder_on_a_disk(config, tmp_path):
    named, other = ({"train": {"local_every": 1, "local_folder": f"{tmp_path}/{name}"}} for name in ("disk", "other"))
    assert parse({**config, "stages": [{"name": "a"}, {"name": "b", **named}]}).local_folder == f"{tmp_path}/disk"
    two = [{"name": "a", **other}, {"name": "b", **named}]
    refused("train.local_folder", lambda: parse({**config, "stages": two}))
    (tmp_path / "file").write_text("")
    refused("train.local_folder", lambda: fit(with_local(config, tmp_path / "file"), tmp_path / "run"))
    refused("train.local_every", lambda: with_local(config, "gs://bucket/local"))
