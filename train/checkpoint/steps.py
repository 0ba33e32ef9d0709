"""The folder of a run's checkpoints: its steps, their stages, and what is set aside or removed."""

import json
import shutil
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import fsspec
import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import LatestN

from train.checkpoint import integrity
from train.runtime.distributed import decide, gather
from train.runtime.paths import is_local, write_file


def open_manager(folder: Path, create: bool = True) -> ocp.CheckpointManager:
    """Orbax's manager, which saves and restores; what is kept and what is whole is decided here."""
    options = ocp.CheckpointManagerOptions(
        create=create, preservation_policy=LatestN(), lightweight_initialize=True, save_root_metadata=False
    )
    return ocp.CheckpointManager(epath.Path(folder.absolute() if is_local(folder) else str(folder)), options=options)


def read_run(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / str(step) / "run" / "metadata").read_text(encoding="utf-8"))


def finished_steps(folder: Path) -> list[int]:
    """The steps that Orbax has finished writing, the newest first."""
    return sorted((int(name) for name in _names(folder) if name.isdigit()), reverse=True)


def _names(folder: Path) -> list[str]:
    """What is in a folder; nothing where there is none, as in an object store where an empty one does not exist."""
    return sorted(place.name for place in folder.iterdir()) if folder.exists() else []


def stages_of(folder: Path) -> dict[int, int]:
    """The stage of every checkpoint; one that was half removed is none."""
    stages = {}
    for step in finished_steps(folder):
        try:
            stages[step] = read_run(folder, step)["stage"]
        except (OSError, ValueError):
            continue
    return stages


def clean(folder: Path) -> list[int]:
    """The steps to look at, after what Orbax had not finished writing is told and removed."""
    for name in _names(folder):
        step, unfinished, _ = name.partition(".orbax-checkpoint-tmp")
        if unfinished:
            tell(f"the checkpoint of step {step} in {folder} was not finished when the run ended; removing it")
            remove(folder / name)
    return finished_steps(folder)


def set_aside(folder: Path, step: int, problem: str) -> None:
    """Keeps a damaged checkpoint under a name that is no step."""
    taken = _names(folder)
    names = (f"{step}.damaged{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, len(taken) + 3))))
    name = next(name for name in names if name not in taken)
    tell(f"the checkpoint of step {step} in {folder} is damaged ({problem}); it is kept as {name}, and skipped")
    _move(folder / str(step), folder / name)


def _move(source: Path, target: Path) -> None:
    if is_local(source):
        source.rename(target)
    else:
        system, root = fsspec.core.url_to_fs(str(source))
        system.mv(root, str(target), recursive=True)


def remove(folder: Path) -> None:
    """Removes a checkpoint, its checksums first, so that what an interruption leaves is never taken for whole."""
    for place in (folder / integrity.FOLDER, folder):
        if is_local(place):
            shutil.rmtree(place, ignore_errors=True)
        elif place.exists():
            system, root = fsspec.core.url_to_fs(str(place))
            system.rm(root, recursive=True)


def check_shared(folder: Path, patience: float = 30.0) -> None:
    """Raises ValueError, on every process, unless what process 0 writes into the folder is seen by all of them."""
    if jax.process_count() == 1:
        return
    token = folder / decide(lambda: _write_token(folder))
    until = time.monotonic() + patience  # network file systems take a moment
    while not (seen := token.exists()) and time.monotonic() < until:
        time.sleep(0.5)
    blind = [process for process, answer in enumerate(gather("seen" if seen else "")) if not answer]
    if jax.process_index() == 0:
        token.unlink()
    if blind:
        raise ValueError(
            f"{folder} is not shared: process {blind[0]} does not see what process 0 writes there; name a folder on a "
            "disk that all hosts share, or a gs:// address, as output"
        )


def _write_token(folder: Path) -> str:
    name = f".shared-{uuid.uuid4().hex}"
    write_file(folder / name, "")
    return name


def tell(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)
