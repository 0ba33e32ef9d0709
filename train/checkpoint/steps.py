"""The folder of a run's checkpoints: its steps and their stages, and how steps are set aside or removed."""

import json
import shutil
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from train.checkpoint import integrity
from train.runtime.distributed import collect, decide, decided
from train.runtime.paths import is_local, names_in, write_file

COMMIT = ocp.path.atomicity.COMMIT_SUCCESS_FILE
"""The file that Orbax writes last, even into a folder that it then renames."""

_TEMPORARY = ".orbax-checkpoint-tmp"


def place_of(folder: Path) -> epath.Path:
    """A folder as Orbax takes it."""
    return epath.Path(folder.absolute() if is_local(folder) else str(folder))


def read_run(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / str(step) / "run" / "metadata").read_text(encoding="utf-8"))


def finished_steps(folder: Path) -> list[int]:
    """The steps that Orbax has finished writing, the newest first."""
    rest = unfinished(folder)
    return sorted((int(name) for name in names_in(folder) if name.isdigit() and name not in rest), reverse=True)


def unfinished(folder: Path) -> list[str]:
    """The checkpoints that Orbax had begun and not finished.

    On a disk Orbax renames a finished checkpoint. An object store cannot rename, so there Orbax writes a file last. A
    checkpoint that lost this file after it was sealed is not among them: it was complete once.
    """
    begun = [name for name in names_in(folder) if name.isdigit() or _TEMPORARY in name]
    return [name for name in begun if not _is_committed(folder / name)]


def _is_committed(folder: Path) -> bool:
    if is_local(folder) or _TEMPORARY in folder.name:
        return _TEMPORARY not in folder.name
    return (folder / COMMIT).exists() or (folder / integrity.FOLDER).exists()


def stages_of(folder: Path) -> dict[int, int]:
    """The stage of every checkpoint; partly removed ones are left out."""
    stages = {}
    for step in finished_steps(folder):
        try:
            stages[step] = read_run(folder, step)["stage"]
        except (FileNotFoundError, ValueError):
            continue
    return stages


@decided
def clean(folder: Path) -> list[int]:
    """The finished steps, after the checkpoints that Orbax had not finished writing were reported and removed.

    All processes call it together.
    """
    for name in unfinished(folder):
        step = name.partition(_TEMPORARY)[0]
        tell(f"the checkpoint of step {step} in {folder} was not finished when the run ended; removing it")
        remove(folder / name)
    return finished_steps(folder)


@decided
def set_aside(folder: Path, step: int, problem: str) -> None:
    """Renames a damaged checkpoint to a name that is not a step; all processes call it together."""
    taken = names_in(folder)
    names = (f"{step}.damaged{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, len(taken) + 3))))
    name = next(name for name in names if name not in taken)
    tell(f"the checkpoint of step {step} in {folder} is damaged ({problem}); it is kept as {name}, and skipped")
    source, target = folder / str(step), folder / name
    if is_local(source):
        source.rename(target)
    else:
        source.fs.mv(source.path, target.path, recursive=True)


def remove(folder: Path) -> None:
    """Removes a checkpoint, first the mark that it is finished, so that the next run removes what an interruption left.

    On a disk that mark is the folder's name; in an object store it is a few files, removed in one request.
    """
    if is_local(folder):
        gone = folder if _TEMPORARY in folder.name else folder.rename(folder.with_name(folder.name + _TEMPORARY))
        shutil.rmtree(gone, ignore_errors=True)
        return
    marks = [(folder / name).path for name in (COMMIT, integrity.FOLDER) if (folder / name).exists()]
    if marks:
        folder.fs.rm(marks, recursive=True)
    folder.fs.rm(folder.path, recursive=True)


def check_shared(folder: Path, patience: float = 30.0) -> None:
    """Raises ValueError, on every process, unless all of them see what process 0 writes into the folder."""
    if jax.process_count() == 1:
        return
    token = folder / f".shared-{decide(lambda: uuid.uuid4().hex)}"
    decide(lambda: write_file(token, ""))
    until = time.monotonic() + patience  # network file systems take a moment
    while not token.exists() and time.monotonic() < until:
        time.sleep(0.5)
    blind = [process for process, sees_it in enumerate(collect(token.exists)) if not sees_it]
    if jax.process_index() == 0:
        token.unlink()
    if blind:
        raise ValueError(
            f"{folder} is not shared: process {blind[0]} does not see what process 0 writes there; name a folder on a "
            "disk that all hosts share, or a gs:// address, as output"
        )


def tell_passed(folder: Path, step: int, problem: str) -> None:
    """Reports a damaged checkpoint that is left where it is."""
    tell(f"the checkpoint of step {step} in {folder} is damaged ({problem}); taking the one before")


def tell(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)
