"""Local checkpoints, on a disk of each host, between the permanent ones: fast, but lost with the host.

Every process keeps its own under ``{train.local_folder}/{run}/P-of-N/STEP``: ``state.npz``, the shards of its devices
as bytes, and ``run``, the same JSON as in a permanent checkpoint, each with the CRC-32 of the ZIP format. A local
checkpoint can be used if every process has it, complete, from the same position in the data, and the devices of each
process hold the same shards again.

Orbax' managers for this (0.12.8) are experimental and do less. The emergency manager needs at least two replicas, and a
run may have one. The multi-tier manager restores changed values without a word, and each process takes the newest step
on its own disk.
"""

import json
import os
import shutil
import tempfile
import uuid
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from train.checkpoint.directory import LOCAL_MARK
from train.checkpoint.manager import Checkpoint
from train.checkpoint.steps import tell
from train.config import Config, differences, parse, to_dict
from train.model.state import TrainState
from train.runtime.distributed import decided, gather
from train.runtime.lines import in_a_line
from train.runtime.paths import write_file

_ARRAYS, _RUN = "state.npz", "run"


@dataclass(frozen=True)
class LocalCheckpoint(Checkpoint):
    """A checkpoint that every process has on a disk of its own, and the state that was read from it."""

    state: TrainState = field(compare=False, repr=False)


class LocalCheckpoints:
    """The local checkpoints of a run; every process opens them and makes the same calls, in the same order.

    Saving is asynchronous. At most two are kept: the newest that all processes have, and the one being written. A
    failing disk is reported on standard error, and the run continues.

    Raises ValueError, on every process, if any of them cannot write into its folder.
    """

    def __init__(self, config: Config, directory: Path, corpora: Sequence[str]):
        self._config = config
        run = f"{config.name.replace('/', '-')}-{zlib.crc32(str(directory.absolute()).encode()):08x}"
        self._root = Path(config.local_folder) / run
        self._folder = self._root / f"{jax.process_index()}-of-{jax.process_count()}"
        self._said = {"mark": _mark(directory), "corpora": list(corpora), "config": to_dict(config)}
        if problem := next(filter(None, gather(self._open())), ""):
            raise ValueError(f"train.local_folder: {problem}; name a folder on a disk of each host")
        self._thread = ThreadPoolExecutor(1, "local checkpoints")
        self._writing: Future | None = None
        self._last: int | None = None  # the newest step that was restored or written
        self._common: int | None = None  # the newest that all processes are known to have

    def newest(self, states: Sequence[TrainState], lasting: Checkpoint | None) -> LocalCheckpoint | None:
        """The newest local checkpoint that every process can use, if it is newer than the permanent one, `lasting`.

        `states` are the shapes and shardings of the states of all stages; the checkpoint holds one like them.
        """
        held = [set(json.loads(steps)) for steps in gather(json.dumps(self._steps()))]
        for step in sorted(set.intersection(*held), reverse=True):
            if lasting is not None and step <= lasting.step:
                return None
            found = self._read(step, states)
            positions = set(gather(json.dumps(found and [found.stage, found.stream])))
            if len(positions) == 1 and found:
                self._last = self._common = step
                return found
            if found:
                self._tell_unused(step, "other processes have none, or one of another position in the data")
            del found  # makes room on the devices for the next
        return None

    def save(self, step: int, stage: int, state: TrainState, stream: Any) -> None:
        """Saves the state after `step` updates of the run, with the data's position."""
        if not any(gather(self._wait())):
            self._common = self._last
        self._remove_all_but(self._common)
        run = json.dumps({**self._said, "stage": stage, "stream": stream})
        arrays, self._last = {**dict(_shards(state)), _RUN: np.frombuffer(run.encode(), np.uint8)}, step
        self._writing = self._thread.submit(self._write, step, arrays)

    def forget(self) -> None:
        """Removes all local checkpoints, when the run is finished."""
        shutil.rmtree(self._folder, ignore_errors=True)
        with suppress(OSError):  # not empty or already gone, because of other processes of the host
            self._root.rmdir()

    def _open(self) -> str:
        """Makes the folder, without what an interruption left; returns why it cannot be written."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for part in self._folder.glob(".*"):
                shutil.rmtree(part, ignore_errors=True)
            tempfile.TemporaryFile(dir=self._folder).close()
        except OSError as error:
            return f"process {jax.process_index()} cannot write there: {error}"
        return ""

    def _steps(self) -> list[int]:
        return sorted(int(location.name) for location in self._folder.iterdir() if location.name.isdigit())

    def _read(self, step: int, states: Sequence[TrainState]) -> LocalCheckpoint | None:
        """A checkpoint of this process; None if it cannot be used, which is reported unless it belongs to another run
        or config."""
        try:
            # If NumPy opened the file itself, it would not close a damaged one.
            with (self._folder / str(step) / _ARRAYS).open("rb") as file, np.load(file) as arrays:
                run = json.loads(arrays[_RUN].tobytes())
                if any(run[key] != self._said[key] for key in ("mark", "corpora")):
                    return None
                if differences(parse(run["config"]), self._config):
                    return None
                leaves, structure = jax.tree.flatten(states[run["stage"]])
                state = structure.unflatten([_on_devices(arrays, number, leaf) for number, leaf in enumerate(leaves)])
                return LocalCheckpoint(step, run["stage"], run["stream"], state)
        except KeyError:
            self._tell_unused(step, "its devices now hold other parts of the state, because of another mesh")
        except Exception as error:  # zipfile and NumPy raise errors of any kind for a damaged file
            self._tell_unused(step, in_a_line(error))
        return None

    def _tell_unused(self, step: int, why: str) -> None:
        tell(f"the local checkpoint of step {step} in {self._folder} is not used ({why})")

    def _write(self, step: int, arrays: dict[str, np.ndarray]) -> str:
        part = self._folder / f".{step}"
        try:
            part.mkdir()
            np.savez(part / _ARRAYS, **arrays)
            shutil.rmtree(self._folder / str(step), ignore_errors=True)
            os.replace(part, self._folder / str(step))
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            tell(f"the local checkpoint of step {step} could not be written to {self._folder} ({error})")
            return str(error)
        return ""

    def _remove_all_but(self, kept: int | None) -> None:
        for step in set(self._steps()) - {kept}:
            shutil.rmtree(self._folder / str(step), ignore_errors=True)

    def _wait(self) -> str:
        """The problem of the last save; empty if there was none."""
        found = "" if self._writing is None else self._writing.result()
        self._writing = None
        return found

    def __enter__(self):
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any):
        self._wait()
        self._thread.shutdown()


@decided
def _mark(directory: Path) -> str:
    """The name that distinguishes the run from an earlier one in the same directory."""
    location = directory / LOCAL_MARK
    if not location.exists():
        write_file(location, uuid.uuid4().hex)
    return location.read_text(encoding="utf-8")


def _shards(state: TrainState) -> Iterator[tuple[str, np.ndarray]]:
    """Copies of what the devices of this process hold, each part once, as bytes by leaf and position."""
    leaves = jax.tree.leaves(state)
    jax.tree.map(lambda leaf: leaf.copy_to_host_async(), leaves)
    for number, leaf in enumerate(leaves):
        found = {_key(number, leaf.shape, shard.index): shard for shard in leaf.addressable_shards}
        for key, shard in found.items():
            # A copy: on CPUs an array may be the device's own memory, which the next update overwrites.
            yield key, np.array(shard.data, copy=True).reshape(-1).view(np.uint8)


def _key(number: int, shape: tuple[int, ...], index: tuple[slice, ...]) -> str:
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return "_".join([str(number), *(f"{start}-{stop}" for start, stop in bounds)])


def _on_devices(arrays: Any, number: int, leaf: Any) -> jax.Array:
    """A leaf of a saved state. Reading a part raises an error if its checksum in the file is another one."""

    def part(index: tuple[slice, ...]) -> np.ndarray:
        shape = leaf.sharding.shard_shape(leaf.shape)
        return arrays[_key(number, leaf.shape, index)].view(leaf.dtype).reshape(shape)

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)
