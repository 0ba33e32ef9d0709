"""Checkpoints: what is restored, which are whole, which are kept, and what happens to the others."""

import json
import re
import shutil
import threading
import zlib
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chex
import fsspec
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from train.checkpoint import digest, integrity, steps
from train.checkpoint import manager as managing
from train.checkpoint.manager import Checkpoint, Checkpoints, kept_steps, whole_steps
from train.checkpoint.reading import damages
from train.checkpoint.restore import restore_model
from train.cli import main
from train.config import dump, parse, to_dict
from train.model.build import build_model
from train.runtime.paths import path, write_file

TEXT = ["a digest of the text"]
Moments = namedtuple("Moments", "count mean")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """A stub of `TrainState`, which is a dataclass with a field `parameters`."""

    step: Any
    parameters: Any
    optimizer: Any


def mesh(rows: int, columns: int) -> Mesh:
    devices = np.array(jax.devices()[: rows * columns]).reshape(rows, columns)
    return Mesh(devices, ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def matrix_of(number: int) -> np.ndarray:
    """Finite numbers that do not compress, too many to fit into TensorStore's index, which has its own checksum."""
    bits = np.random.default_rng(number).integers(0, 2**32, (8, 1200), np.uint32)
    return (bits & np.uint32(0xBFFFFFFF)).view(np.float32)


def state(number: int, on: Mesh | None = None, matrix: Any = ("x", "y")) -> State:
    """Values that differ by position and by `number`, sharded over a mesh."""
    on = on or mesh(2, 4)

    def put(values, spec):
        return jax.device_put(values, NamedSharding(on, PartitionSpec(*spec)))

    values = matrix_of(number)
    weight, gain = put(values, matrix), put(values[0], ())
    mean = {"layers": {0: {"weight": put(-values, matrix)}}, "gain": put(-values[0], ())}
    moments = (Moments(put(np.int32(number), ()), mean), ())
    return State(put(np.int32(number + 5), ()), {"layers": {0: {"weight": weight}}, "gain": gain}, moments)


def abstract(found: State) -> State:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), found)


def config(**train):
    return parse({"model": {"num_layers": 1, "model_dim": 16, "num_heads": 2, "mlp_dim": 16}, "train": train})


def save(directory, *steps, **train):
    """A run directory with checkpoints of these steps, all of the first stage."""
    with Checkpoints(config(**train), directory, TEXT) as checkpoints:
        for step in steps:
            checkpoints.save(step, 0, state(step), {"next": step * 4})
    return directory


def names(directory):
    return {place.name for place in (directory / "checkpoints").iterdir()}


def restored(directory):
    """The newest whole checkpoint and its state."""
    with Checkpoints(config(), directory, TEXT) as checkpoints:
        return checkpoints.resume(lambda saved: (saved, saved and checkpoints.restore(saved, abstract(state(0)))))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return save(tmp_path_factory.mktemp("runs") / "two", 3, 6)


@pytest.fixture
def copy(two, tmp_path):
    return shutil.copytree(two, tmp_path / "copy")


def contents(folder):
    return {str(place.relative_to(folder)): place.read_bytes() for place in folder.rglob("*") if place.is_file()}


@pytest.mark.parametrize(
    ("rows", "columns", "matrix"),
    [(2, 4, ("x", "y")), (4, 2, ("x", "y")), (1, 1, ()), (2, 3, ("x", "y")), (4, 1, (None, "x"))],
)
def test_a_state_comes_back_bit_for_bit_on_any_mesh(two, rows, columns, matrix):
    wanted = state(6, mesh(rows, columns), matrix)
    with Checkpoints(config(), two, TEXT) as checkpoints:
        saved = checkpoints.newest()
        found = checkpoints.restore(saved, abstract(wanted))
    assert saved == Checkpoint(6, 0, {"next": 24})
    chex.assert_trees_all_equal(found, wanted)
    chex.assert_trees_all_equal_dtypes(found, wanted)
    assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, wanted)


def test_the_parameters_alone_come_back(two):
    wanted = state(6, mesh(4, 2)).parameters
    with Checkpoints(config(), two, TEXT) as checkpoints:
        found = checkpoints.restore_parameters(checkpoints.newest(), abstract(wanted))
    chex.assert_trees_all_equal(found, wanted)


def test_nothing_is_found_where_nothing_was_saved(tmp_path):
    assert restored(tmp_path) == (None, None)


def largest(folder):
    """The largest file of values."""
    return max(folder.rglob("d/*"), key=lambda place: place.stat().st_size)


def flip(place):
    """Flips one bit in the middle of a file."""
    whole = place.read_bytes()
    middle = len(whole) // 2
    place.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])


def truncate(folder):
    place = largest(folder)
    place.write_bytes(place.read_bytes()[:-1])
    return f"{place.relative_to(folder)} has {place.stat().st_size} bytes of {place.stat().st_size + 1}"


def empty(folder):
    (folder / "run" / "metadata").write_bytes(b"")
    return "run/metadata has 0 bytes of"


def change_value(folder, value):
    """Flips a bit of a row of values, in whichever file of the folder holds it."""
    piece = value.tobytes()[:16]
    [place] = [place for place in folder.rglob("d/*") if piece in place.read_bytes()]
    place.write_bytes(place.read_bytes().replace(piece, bytes([piece[0] ^ 1]) + piece[1:]))
    return place


def change_a_weight(folder):
    change_value(folder / "parameters", matrix_of(6)[3])
    return "the values of the array parameters/layers.0.weight have changed since they were saved"


def change_a_moment(folder):
    change_value(folder / "training", -matrix_of(6)[3])
    return "the values of the array training/optimizer.0.mean.layers.0.weight have changed since they were saved"


def garble_the_index(folder):
    [place] = (folder / "parameters" / "d").iterdir()
    flip(place)
    return "parameters: DATA_LOSS"


def garble(folder):
    place = folder / "run" / "metadata"
    place.write_bytes(place.read_bytes().replace(b'"next":24', b'"next":25').replace(b'"next": 24', b'"next": 25'))
    return "run/metadata has changed since it was written"


def lose(folder):
    (folder / "parameters" / "_METADATA").unlink()
    return "parameters/_METADATA is missing"


def lose_all_arrays(folder):
    shutil.rmtree(folder / "training")
    return "is missing"


def leave_unsealed(folder):
    shutil.rmtree(folder / "checksums")
    return "it was not completely written"


def leave_half_sealed(folder):
    (folder / "checksums" / "0-of-1.json").rename(folder / "checksums" / "0-of-2.json")
    return "it was not completely written: 1 of 2 parts of its checksums exist"


def garble_seal(folder):
    (folder / "checksums" / "0-of-1.json").write_bytes(b"\x00\xff" * 50)
    return "checksums/0-of-1.json is unreadable"


def leave_nothing(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    return "it was not completely written"


DAMAGES = [
    truncate,
    empty,
    change_a_weight,
    change_a_moment,
    garble_the_index,
    garble,
    lose,
    lose_all_arrays,
    leave_unsealed,
    leave_half_sealed,
    garble_seal,
    leave_nothing,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_named_kept_and_skipped_for_the_one_before(copy, capsys, damage):
    problem = damage(copy / "checkpoints" / "6")
    before = contents(copy / "checkpoints" / "6")
    saved, found = restored(copy)
    assert saved == Checkpoint(3, 0, {"next": 12})
    chex.assert_trees_all_equal(found, state(3))
    assert names(copy) == {"3", "6.damaged"}
    assert contents(copy / "checkpoints" / "6.damaged") == before
    warning = capsys.readouterr().err
    assert warning.startswith(f"warning: the checkpoint of step 6 in {copy / 'checkpoints'} is damaged (")
    assert problem in warning
    assert warning.endswith("); it is kept as 6.damaged, and skipped\n")
    assert warning.count("\n") == 1


def test_any_other_bit_in_any_file_is_noticed_or_changes_nothing(copy):
    folder, unread = copy / "checkpoints" / "6", set()
    assert damages(folder) == []
    for name in integrity.files(folder):
        whole = (folder / name).read_bytes()
        flip(folder / name)
        found = damages(folder)
        if "/d/" not in name:
            assert f"{name} has changed since it was written" in found
        elif not found:
            unread.add(name)
            chex.assert_trees_all_equal(restored(copy)[1], state(6))
        (folder / name).write_bytes(whole)
    assert damages(folder) == []
    # Orbax keeps an index of each process's part beside the values, but reads only the index that it merged from them.
    assert all("/ocdbt.process_0/d/" in name for name in unread)


def test_neither_sealing_nor_checking_reads_a_file_of_values(copy, monkeypatch):
    read, original = [], Path.open

    def opened(place, *rest, **kind):
        read.append(place)
        return original(place, *rest, **kind)

    folder = copy / "checkpoints" / "6"
    arrays = integrity.read_seal(folder).arrays
    monkeypatch.setattr(Path, "open", opened)
    integrity.seal(folder, 0, 1, arrays)
    assert integrity.problem(folder) == ""
    assert folder / "parameters" / "manifest.ocdbt" in read
    assert not [place for place in read if place.parent.name == "d"]


def seal_as_before(folder):
    """A seal of an earlier version: the CRC-32 of every file, and no digests."""
    sums = {
        name: [found.size, zlib.crc32((folder / name).read_bytes())] for name, found in integrity.files(folder).items()
    }
    (folder / "checksums" / "0-of-1.json").write_text(json.dumps({"files": sums}))


def test_a_checkpoint_of_an_earlier_version_is_read_and_checked_by_its_checksums(copy, capsys):
    for step in ("3", "6"):
        seal_as_before(copy / "checkpoints" / step)
    saved, found = restored(copy)
    assert saved.step == 6
    chex.assert_trees_all_equal(found, state(6))
    assert damages(copy / "checkpoints" / "6") == []
    flip(largest(copy / "checkpoints" / "6"))
    saved, found = restored(copy)
    chex.assert_trees_all_equal(found, state(3))
    assert re.search(r"damaged \(.*/d/\w+ has changed since it was written\)", capsys.readouterr().err)


@pytest.mark.parametrize(("sealing", "checking"), [(1, 1), (3, 1), (1, 3), (4, 3)])
def test_any_number_of_processes_seals_and_checks(copy, sealing, checking):
    folder = copy / "checkpoints" / "6"
    arrays = integrity.read_seal(folder).arrays
    shutil.rmtree(folder / "checksums")
    for process in range(sealing):
        assert "not completely written" in integrity.problem(folder)
        integrity.seal(folder, process, sealing, {} if process else arrays)
    parts = [json.loads(place.read_text())["files"] for place in folder.glob("checksums/*")]
    assert sorted(name for part in parts for name in part) == sorted(integrity.files(folder))
    problems = [integrity.problem(folder, process, checking) for process in range(checking)]
    assert problems == [""] * checking
    assert damages(folder) == []
    garble(folder)
    problems = [integrity.problem(folder, process, checking) for process in range(checking)]
    assert sorted(map(bool, problems)) == [False] * (checking - 1) + [True]


@pytest.mark.parametrize("readers", [1, 3])
def test_the_devices_and_the_files_give_the_same_digests(two, readers):
    """However the arrays lie on the devices, and however many processes share the reading."""
    parts = [
        digest.read_digests(two / "checkpoints" / "6", item, process, readers)
        for item in ("parameters", "training")
        for process in range(readers)
    ]
    whole = {name: sum(part.get(name, 0) for part in parts) % 2**32 for part in parts for name in part}
    for on, matrix in ((mesh(2, 4), ("x", "y")), (mesh(1, 1), ()), (mesh(4, 1), (None, "x"))):
        found = state(6, on, matrix)
        items = {"parameters": found.parameters, "training": {"step": found.step, "optimizer": found.optimizer}}
        assert digest.by_name(digest.names(items), digest.digests(items)) == whole


def test_what_cannot_be_read_for_another_reason_is_not_damaged(copy, monkeypatch):
    """The checkpoint stays where it is, and the error is raised."""

    def read(*_):
        raise OSError("the network is unreachable")

    monkeypatch.setattr("train.checkpoint.reading._read", read)
    with pytest.raises(OSError, match="the network is unreachable"):
        restored(copy)
    assert names(copy) == {"3", "6"}


def unreadable(*_, **__):
    raise OSError(24, "Too many open files")


@pytest.mark.parametrize("broken", ["train.checkpoint.integrity._checksum", "os.scandir"])
def test_checkpoints_that_cannot_be_read_when_a_run_starts_stay_as_they_are(copy, monkeypatch, broken):
    with monkeypatch.context() as patch:
        patch.setattr(broken, unreadable)
        with pytest.raises(OSError, match="Too many open files"):
            restored(copy)
    assert names(copy) == {"3", "6"}
    assert restored(copy)[0].step == 6


def test_a_file_that_is_gone_when_it_is_read_is_missing(copy, monkeypatch):
    original = integrity._checksums

    def checksums(folder, found):
        (folder / "run" / "metadata").unlink()
        return original(folder, found)

    monkeypatch.setattr(integrity, "_checksums", checksums)
    assert integrity.problem(copy / "checkpoints" / "6").endswith("run/metadata is missing")


def test_arrays_that_cannot_be_read_are_not_damaged(copy, monkeypatch):
    """TensorStore raises a ValueError for it, as it does for damage."""

    def unavailable(*_):
        raise ValueError("UNAVAILABLE: Error reading the database")

    monkeypatch.setattr(digest, "_read_digest", unavailable)
    with pytest.raises(OSError, match=r"^UNAVAILABLE"):
        damages(copy / "checkpoints" / "6")


def test_every_damage_of_a_run_is_reported(copy, capsys):
    write_file(copy / "config.yaml", dump(config()))
    assert main(["verify", str(copy)]) == 0
    assert capsys.readouterr().out == "step 6: whole\nstep 3: whole\n"
    before = contents(copy)
    lines = [f"step 6: {damage(copy / 'checkpoints' / '6')}" for damage in (garble, change_a_moment, change_a_weight)]
    (copy / "checkpoints" / "9.orbax-checkpoint-tmp").mkdir()
    assert main(["verify", str(copy)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert set(printed[:3]) == set(lines)
    assert printed[3:] == [
        "step 3: whole",
        "9.orbax-checkpoint-tmp is not finished: a run is saving it, or was killed then",
    ]
    assert contents(copy).keys() == before.keys()
    assert main(["verify", str(copy / "checkpoints")]) == 2


@pytest.mark.parametrize("leave", [leave_unsealed, leave_half_sealed])
def test_the_newest_checkpoint_may_be_in_the_middle_of_a_save(copy, capsys, leave):
    write_file(copy / "config.yaml", dump(config()))
    leave(copy / "checkpoints" / "6")
    assert main(["verify", str(copy)]) == 0
    assert capsys.readouterr().out == ("step 6: not finished: a run is saving it, or was killed then\nstep 3: whole\n")
    leave(copy / "checkpoints" / "3")
    assert main(["verify", str(copy)]) == 1
    assert "step 3: it was not completely written" in capsys.readouterr().out


def test_a_run_without_checkpoints_is_reported(tmp_path, capsys):
    write_file(tmp_path / "config.yaml", dump(config()))
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'checkpoints'} holds no checkpoint\n"


def test_a_run_where_checkpoints_cannot_exist_is_refused_and_not_called_damaged(two, capsys):
    """TensorStore cannot read from memory://."""
    system = fsspec.filesystem("memory")
    system.put(str(two / "checkpoints"), "/elsewhere/checkpoints", recursive=True)
    system.pipe("/elsewhere/config.yaml", dump(config()).encode())
    for command in (["verify"], ["generate", "--tokens", "1"]):
        assert main([command[0], "memory://elsewhere", *command[1:]]) == 2
        assert capsys.readouterr().err.startswith("error: memory://elsewhere/checkpoints: checkpoints cannot be")


def test_a_step_that_was_damaged_is_saved_again_and_again(copy):
    truncate(copy / "checkpoints" / "6")
    save(copy, 6)
    assert names(copy) == {"3", "6", "6.damaged"}
    truncate(copy / "checkpoints" / "6")
    save(copy, 6)
    assert names(copy) == {"3", "6", "6.damaged", "6.damaged-2"}
    saved, found = restored(copy)
    assert saved.step == 6
    chex.assert_trees_all_equal(found, state(6))


def test_a_run_that_restores_a_damaged_step_resumes_from_the_one_before_and_saves_it_again(copy):
    change_a_weight(copy / "checkpoints" / "6")
    with Checkpoints(config(), copy, TEXT) as checkpoints:
        saved = checkpoints.resume(lambda saved: checkpoints.restore(saved, abstract(state(0))) and saved)
        assert saved.step == checkpoints.newest().step == 3
        checkpoints.save(6, 0, state(6), {"next": 24})
    assert names(copy) == {"3", "6", "6.damaged"}
    chex.assert_trees_all_equal(restored(copy)[1], state(6))


def test_an_unfinished_checkpoint_is_named_and_removed(copy, capsys):
    shutil.copytree(copy / "checkpoints" / "6", copy / "checkpoints" / "9.orbax-checkpoint-tmp")
    assert restored(copy)[0].step == 6
    assert names(copy) == {"3", "6"}
    which = f"step 9 in {copy / 'checkpoints'}"
    assert capsys.readouterr().err == (
        f"warning: the checkpoint of {which} was not finished when the run ended; removing it\n"
    )


def test_when_all_are_damaged_all_are_named_and_none_is_lost(copy, capsys):
    before = {step: contents(copy / "checkpoints" / step) for step in ("3", "6")}
    for step in ("3", "6"):
        place = largest(copy / "checkpoints" / step)
        before[step].pop(str(place.relative_to(copy / "checkpoints" / step)))
        place.unlink()
    assert restored(copy) == (None, None)
    assert {step: contents(copy / "checkpoints" / f"{step}.damaged") for step in ("3", "6")} == before
    assert [line.split(" in ")[0] for line in capsys.readouterr().err.splitlines()] == [
        "warning: the checkpoint of step 6",
        "warning: the checkpoint of step 3",
    ]


@pytest.mark.parametrize(
    ("stages", "keep", "saving", "kept"),
    [
        ({}, 2, None, set()),
        ({3: 0, 6: 0, 9: 0}, 2, None, {6, 9}),
        ({3: 0, 6: 0, 9: 0}, 2, 9, {3, 6, 9}),
        ({3: 0, 6: 0, 9: 0}, 1, None, {9}),
        ({3: 0, 6: 0, 9: 1}, 1, None, {6, 9}),
        ({3: 0, 6: 0, 9: 1, 12: 1, 15: 1}, 1, None, {6, 15}),
        ({3: 0, 6: 0, 9: 1, 12: 1, 15: 2, 18: 2}, 1, 18, {6, 12, 15, 18}),
        ({3: 0, 6: 0, 9: 1}, 1, 9, {6, 9}),
        ({3: 0, 6: 2}, 1, None, {3, 6}),
    ],
)
def test_the_newest_and_the_last_of_each_finished_stage_are_kept(stages, keep, saving, kept):
    assert kept_steps(stages, keep, saving) == kept


def test_the_policy_holds_on_disk_and_after_a_restart(tmp_path):
    for saves in ([(3, 0), (6, 0)], [(9, 1), (12, 1), (15, 1)], [(18, 2)]):
        with Checkpoints(config(keep=1), tmp_path, TEXT) as checkpoints:
            for step, stage in saves:
                checkpoints.save(step, stage, state(step), None)
    assert names(tmp_path) == {"6", "15", "18"}
    assert restored(tmp_path)[0] == Checkpoint(18, 2, None)


def test_a_step_is_saved_once(copy):
    before = contents(copy / "checkpoints")
    with Checkpoints(config(), copy, TEXT) as checkpoints:
        checkpoints.save(6, 0, state(77), None)
        checkpoints.save(3, 0, state(77), None)
    assert contents(copy / "checkpoints") == before


def test_saving_does_not_wait_and_the_one_before_stays_until_the_new_one_is_whole(tmp_path, monkeypatch):
    allowed, original = threading.Event(), integrity.seal
    whole = []

    def seal(folder, *rest):
        allowed.wait(60)
        whole.append((int(folder.name), next(whole_steps(tmp_path)), names(tmp_path)))
        original(folder, *rest)

    save(tmp_path, 3, keep=1)
    monkeypatch.setattr(integrity, "seal", seal)
    with Checkpoints(config(keep=1), tmp_path, TEXT) as checkpoints:
        checkpoints.save(6, 0, state(6), None)
        assert next(whole_steps(tmp_path)) == 3
        allowed.set()
        checkpoints.save(9, 0, state(9), None)
    # Other processes may be slower to seal 6, so 3 stays until all have reached the next save.
    assert whole == [(6, 3, {"3", "6"}), (9, 6, {"3", "6", "9"})]
    assert names(tmp_path) == {"9"}


def test_a_failed_save_is_reported_and_removes_nothing(copy, monkeypatch):
    def seal(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(integrity, "seal", seal)
        with pytest.raises(OSError, match="No space left"):
            save(copy, 9, keep=1)
    assert names(copy) >= {"3", "6"}
    assert restored(copy)[0].step == 6


def test_another_config_or_another_text_is_refused_and_nothing_changes(two):
    before = contents(two)
    other = parse({**to_dict(config()), "seed": 7})
    with pytest.raises(ValueError, match=r"step 6 in .* belongs to another config: seed was 0, now 7"):
        Checkpoints(other, two, TEXT).newest()
    with pytest.raises(ValueError, match=r"step 6 in .* was trained on other text"):
        Checkpoints(config(), two, ["other"]).newest()
    assert contents(two) == before


def flip_everywhere(folder):
    """Flips a bit in every 512th byte of the largest file of parameter values."""
    place = largest(folder / "parameters" / "ocdbt.process_0")
    content = bytearray(place.read_bytes())
    content[::512] = bytes(byte ^ 1 for byte in content[::512])
    place.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip_everywhere])
def test_a_model_is_restored_from_the_newest_whole_checkpoint(tmp_path, capsys, damage):
    (tmp_path / "config.yaml").write_text(dump(config()))
    parameters = nnx.to_pure_dict(nnx.state(build_model(config())))
    with Checkpoints(config(), tmp_path, TEXT) as checkpoints:
        for step in (3, 6):
            moved = jax.tree.map(lambda x, step=step: x + step, parameters)
            checkpoints.save(step, 0, State(np.int32(step), moved, ()), None)
    damage(tmp_path / "checkpoints" / "6")
    found, model = restore_model(tmp_path)
    assert found == config()
    chex.assert_trees_all_equal(nnx.to_pure_dict(nnx.state(model)), jax.tree.map(lambda x: x + 3, parameters))
    assert names(tmp_path) == {"3", "6"}
    warning = capsys.readouterr().err
    assert warning.startswith(f"warning: the checkpoint of step 6 in {tmp_path / 'checkpoints'} is damaged (")
    assert warning.count("\n") == 1


def test_all_processes_go_through_the_same_checkpoints(copy, monkeypatch):
    """Process 1 sees another state of the disk than process 0, but follows the decisions of process 0."""
    answers = []

    def on_the_first(function):
        answers.append(function())
        return answers[-1]

    monkeypatch.setattr(managing, "decide", on_the_first)
    assert list(whole_steps(copy)) == [6, 3]
    truncate(copy / "checkpoints" / "3")
    shutil.rmtree(copy / "checkpoints" / "6")
    monkeypatch.setattr(managing, "decide", lambda function: answers.pop(0))
    assert list(whole_steps(copy)) == [6, 3]


def test_the_format_is_the_documented_one_and_orbax_can_read_it_by_itself(two):
    folder = two / "checkpoints" / "6"
    assert {place.name for place in folder.iterdir() if place.is_dir()} == {
        "parameters",
        "training",
        "run",
        "checksums",
    }
    run = json.loads((folder / "run" / "metadata").read_text())
    assert run == {"stage": 0, "stream": {"next": 24}, "config": to_dict(config()), "corpora": TEXT}
    with ocp.CheckpointManager(two / "checkpoints") as manager:
        wanted = ocp.args.Composite(parameters=ocp.args.StandardRestore(abstract(state(6).parameters)))
        found = manager.restore(manager.latest_step(), args=wanted).parameters
    chex.assert_trees_all_equal(found, state(6).parameters)


def test_an_object_store_is_checked_and_cleaned_alike(two, capsys):
    system, root = fsspec.filesystem("memory"), "/store/checkpoints"
    for step in ("3", "6", "9.orbax-checkpoint-tmp"):
        system.put(
            str(two / "checkpoints" / step.replace("9.orbax-checkpoint-tmp", "6")), f"{root}/{step}", recursive=True
        )
    system.pipe(f"{root}/6/run/metadata", b"{}")
    folder = path(f"memory:/{root}")
    assert next(whole_steps(path("memory://store"))) == 3
    with pytest.raises(ValueError, match="cannot be written to memory://"):
        Checkpoints(config(), path("memory://store"), TEXT)
    assert steps.clean(folder) == [6, 3]
    steps.set_aside(folder, 6, integrity.problem(folder / "6"))
    assert {place.name for place in folder.iterdir()} == {"3", "6.damaged"}
    assert integrity.files(folder / "6.damaged").keys() == integrity.files(two / "checkpoints" / "6").keys()
    assert (folder / "6.damaged" / "run" / "metadata").read_bytes() == b"{}"
    assert "step 6 in memory://store/checkpoints is damaged (run/metadata has 2 bytes of" in capsys.readouterr().err


def test_what_an_object_store_holds_unfinished_is_removed_and_what_was_finished_is_kept(two, capsys):
    """There Orbax renames no folder at the end; it writes commit_success.txt last."""
    system, root = fsspec.filesystem("memory"), "/cut/checkpoints"
    for step in ("3", "6", "7", "9"):
        system.put(str(two / "checkpoints" / "6"), f"{root}/{step}", recursive=True)
    system.rm([f"{root}/9/commit_success.txt", f"{root}/9/checksums", f"{root}/7/commit_success.txt"], recursive=True)
    folder = path(f"memory:/{root}")
    assert steps.unfinished(folder) == ["9"]
    assert next(whole_steps(path("memory://cut"))) == 6
    assert steps.clean(folder) == [7, 6, 3]
    assert integrity.problem(folder / "7") == "commit_success.txt is missing"  # so it was whole once
    assert not system.find(f"{root}/9")
    assert "step 9 in memory://cut/checkpoints was not finished when the run ended" in capsys.readouterr().err


def test_a_removal_that_was_cut_off_is_completed(two, tmp_path, monkeypatch, capsys):
    """On a disk, and in an object store."""
    folder = shutil.copytree(two, tmp_path / "copy") / "checkpoints"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        steps.remove(folder / "3")
    assert steps.clean(folder) == [6]
    system, root = fsspec.filesystem("memory"), "/removed/checkpoints"
    system.put(str(two / "checkpoints"), root, recursive=True)
    with monkeypatch.context() as patch:
        original, removes = type(system).rm, iter((True, False))
        patch.setattr(type(system), "rm", lambda *place, **how: original(*place, **how) if next(removes) else None)
        steps.remove(path(f"memory:/{root}/3"))
    assert len(system.find(f"{root}/3")) > 5
    assert steps.clean(path(f"memory:/{root}")) == [6]
    assert not system.find(f"{root}/3")
    assert capsys.readouterr().err.count("step 3 in") == 2
