"""Checkpoints: what is restored, which are whole, which are kept, and what happens to the others."""

import json
import shutil
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import chex
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from refusals import refused

from train.checkpoint import integrity
from train.checkpoint.manager import Checkpoint, Checkpoints, kept_steps
from train.checkpoint.reading import damages
from train.checkpoint.restore import restore_model
from train.cli import main
from train.config import dump, parse, to_dict
from train.model.build import Setup
from train.runtime.paths import write_file

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
    [(2, 4, ("x", "y")), (1, 1, ()), (2, 3, ("x", "y")), (4, 1, (None, "x"))],
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


def largest(folder):
    """The largest file of values."""
    return max(folder.rglob("d/*"), key=lambda place: place.stat().st_size)


def flip(place):
    """Flips one bit in the middle of a file."""
    whole = place.read_bytes()
    middle = len(whole) // 2
    place.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])


def cut_off(place):
    place.write_bytes(place.read_bytes()[:-1])


def change_value(folder, value):
    """Flips a bit of a row of values, in whichever file of the folder holds it."""
    piece = value.tobytes()[:16]
    [place] = [place for place in folder.rglob("d/*") if piece in place.read_bytes()]
    place.write_bytes(place.read_bytes().replace(piece, bytes([piece[0] ^ 1]) + piece[1:]))


def change_the_place(folder):
    place = folder / "run" / "metadata"
    place.write_bytes(place.read_bytes().replace(b'"next":24', b'"next":25').replace(b'"next": 24', b'"next": 25'))


def lose_half_of_the_seal(folder):
    (folder / "checksums" / "0-of-1.json").rename(folder / "checksums" / "0-of-2.json")


WEIGHT = "the values of the array parameters/layers.0.weight have changed since they were saved"
MOMENT = "the values of the array training/optimizer.0.mean.layers.0.weight have changed since they were saved"
PLACE = "run/metadata has changed since it was written"
DAMAGES = {
    WEIGHT: lambda folder: change_value(folder / "parameters", matrix_of(6)[3]),
    MOMENT: lambda folder: change_value(folder / "training", -matrix_of(6)[3]),
    PLACE: change_the_place,
    "bytes of": lambda folder: cut_off(largest(folder)),
    "run/metadata has 0 bytes of": lambda folder: (folder / "run" / "metadata").write_bytes(b""),
    "parameters: DATA_LOSS": lambda folder: flip(next((folder / "parameters" / "d").iterdir())),
    "parameters/_METADATA is missing": lambda folder: (folder / "parameters" / "_METADATA").unlink(),
    "it was not completely written": lambda folder: shutil.rmtree(folder / "checksums"),
    "1 of 2 parts of its checksums": lose_half_of_the_seal,
    "0-of-1.json is unreadable": lambda folder: (folder / "checksums" / "0-of-1.json").write_bytes(b"\x00\xff" * 50),
}


# Orbax abandons its other readings when one fails; they may end after their event loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("problem", DAMAGES)
def test_a_damaged_newest_checkpoint_is_named_kept_and_skipped_for_the_one_before(copy, capsys, problem):
    DAMAGES[problem](copy / "checkpoints" / "6")
    before = contents(copy / "checkpoints" / "6")
    saved, found = restored(copy)
    assert saved == Checkpoint(3, 0, {"next": 12})
    chex.assert_trees_all_equal(found, state(3))
    assert names(copy) == {"3", "6.damaged"}
    assert contents(copy / "checkpoints" / "6.damaged") == before
    [warning] = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: the checkpoint of step 6 in {copy / 'checkpoints'} is damaged (")
    assert problem in warning


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


def test_checkpoints_that_cannot_be_read_when_a_run_starts_stay_as_they_are(copy, monkeypatch):
    def unreadable(*_, **__):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("os.scandir", unreadable)
        with pytest.raises(OSError, match="Too many open files"):
            restored(copy)
    assert names(copy) == {"3", "6"}
    assert restored(copy)[0].step == 6


def test_every_damage_of_a_run_is_reported(copy, capsys):
    write_file(copy / "config.yaml", dump(config()))
    assert main(["verify", str(copy)]) == 0
    assert capsys.readouterr().out == "step 6: whole\nstep 3: whole\n"
    before = contents(copy)
    for problem in (PLACE, MOMENT, WEIGHT):
        DAMAGES[problem](copy / "checkpoints" / "6")
    (copy / "checkpoints" / "9.orbax-checkpoint-tmp").mkdir()
    assert main(["verify", str(copy)]) == 1
    *printed, last, unfinished = capsys.readouterr().out.splitlines()
    assert set(printed) == {f"step 6: {problem}" for problem in (PLACE, MOMENT, WEIGHT)}
    assert last == "step 3: whole"
    assert unfinished.startswith("9.orbax-checkpoint-tmp is not finished")
    assert contents(copy).keys() == before.keys()


def test_the_newest_checkpoint_may_be_in_the_middle_of_a_save(copy, capsys):
    write_file(copy / "config.yaml", dump(config()))
    for step, status in (("6", 0), ("3", 1)):
        lose_half_of_the_seal(copy / "checkpoints" / step)
        assert main(["verify", str(copy)]) == status
    assert capsys.readouterr().out.startswith("step 3: whole\nstep 6 is not finished")


def test_a_run_that_restores_a_damaged_step_resumes_from_the_one_before_and_saves_it_again(copy):
    DAMAGES[WEIGHT](copy / "checkpoints" / "6")
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
    assert capsys.readouterr().err.startswith("warning: the checkpoint of step 9 in ")


def test_when_all_are_damaged_all_are_named_and_none_is_lost(copy, capsys):
    for step in ("3", "6"):
        cut_off(largest(copy / "checkpoints" / step))
    before = {f"{step}.damaged": contents(copy / "checkpoints" / step) for step in ("3", "6")}
    assert restored(copy) == (None, None)
    assert {name: contents(copy / "checkpoints" / name) for name in before} == before
    warnings = capsys.readouterr().err.splitlines()
    assert ["step 6" in warnings[0], "step 3" in warnings[1]] == [True, True]


@pytest.mark.parametrize(("keep", "kept"), [(1, {"6", "15", "21"}), (2, {"6", "15", "18", "21"})])
def test_the_newest_and_the_last_of_each_finished_stage_are_kept_also_after_a_restart(tmp_path, keep, kept):
    for saves in ([(3, 0), (6, 0)], [(9, 1), (12, 1), (15, 1)], [(18, 2), (21, 2)]):
        with Checkpoints(config(keep=keep), tmp_path, TEXT) as checkpoints:
            for step, stage in saves:
                checkpoints.save(step, stage, state(step), None)
    assert names(tmp_path) == kept
    assert restored(tmp_path)[0] == Checkpoint(21, 2, None)


def test_while_a_checkpoint_is_written_the_one_before_it_stays():
    assert kept_steps({3: 0, 6: 0, 9: 0}, 1, saving=9) == {6, 9}


def test_a_step_is_saved_once(copy):
    before = contents(copy / "checkpoints")
    with Checkpoints(config(), copy, TEXT) as checkpoints:
        checkpoints.save(6, 0, state(77), None)
        checkpoints.save(3, 0, state(77), None)
    assert contents(copy / "checkpoints") == before


def test_a_save_that_fails_at_its_end_is_reported_and_nothing_that_was_saved_is_lost(copy, monkeypatch):
    def full(part, location):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        with pytest.raises(OSError, match="No space left"):
            save(copy, 9, keep=1)
    assert names(copy) >= {"3", "6"}
    found, values = restored(copy)
    assert found.step == 6
    chex.assert_trees_all_equal(values, state(6))


def test_another_config_or_another_text_is_refused_and_nothing_changes(two):
    before = contents(two)
    other = parse({**to_dict(config()), "seed": 7})
    refused("seed", lambda: Checkpoints(other, two, TEXT).newest())
    refused("other text", lambda: Checkpoints(config(), two, ["other"]).newest())
    assert contents(two) == before


def test_a_model_is_restored_from_the_newest_whole_checkpoint(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(dump(config()))
    parameters = nnx.to_pure_dict(nnx.state(Setup(config()).model()))
    with Checkpoints(config(), tmp_path, TEXT) as checkpoints:
        for step in (3, 6):
            moved = jax.tree.map(lambda x, step=step: x + step, parameters)
            checkpoints.save(step, 0, State(np.int32(step), moved, ()), None)
    cut_off(largest(tmp_path / "checkpoints" / "6"))
    found, model = restore_model(tmp_path)
    assert found == config()
    chex.assert_trees_all_equal(nnx.to_pure_dict(nnx.state(model)), jax.tree.map(lambda x: x + 3, parameters))
    assert names(tmp_path) == {"3", "6"}
    assert "the checkpoint of step 6 in" in capsys.readouterr().err


def test_the_format_is_the_documented_one_and_orbax_can_read_it_by_itself(two):
    folder = two / "checkpoints" / "6"
    folders = {place.name for place in folder.iterdir() if place.is_dir()}
    assert folders == {"parameters", "training", "run", "checksums"}
    run = json.loads((folder / "run" / "metadata").read_text())
    assert run == {"stage": 0, "stream": {"next": 24}, "config": to_dict(config()), "corpora": TEXT}
    with ocp.CheckpointManager(two / "checkpoints") as manager:
        wanted = ocp.args.Composite(parameters=ocp.args.StandardRestore(abstract(state(6).parameters)))
        found = manager.restore(manager.latest_step(), args=wanted).parameters
    chex.assert_trees_all_equal(found, state(6).parameters)
