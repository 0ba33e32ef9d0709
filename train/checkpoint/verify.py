"""The command `verify`: reads every checkpoint of a run completely."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from train.checkpoint import integrity
from train.checkpoint.directory import check_one_run, read_config
from train.checkpoint.reading import damages
from train.checkpoint.steps import finished_steps, unfinished
from train.runtime.distributed import decide
from train.runtime.paths import check_checkpoints, path


def verify(directory: str | Path, log: Callable[[str], Any] = print) -> bool:
    """Reads all checkpoints of a run and reports every problem of each; returns whether there is none.

    All processes call it together and share the reading. Nothing is changed: the next ``fit`` removes unfinished
    checkpoints, and sets aside damaged ones that are newer than the one it resumes from.

    Raises FileNotFoundError if there is no run, and ValueError for a folder of several runs or an address that cannot
    hold checkpoints.
    """
    folder = path(directory) / "checkpoints"
    check_checkpoints(folder)
    check_one_run(path(directory))
    decide(lambda: read_config(path(directory)).name)
    whole, steps = True, decide(lambda: finished_steps(folder))
    for step in steps:
        if step == steps[0] and decide(lambda: not _is_sealed(folder / str(steps[0]))):
            log(f"step {step}: not finished: {_BEGUN}")
            continue
        found = damages(folder / str(step))
        whole = whole and not found
        for line in found or ["whole"]:
            log(f"step {step}: {line}")
    begun = decide(lambda: unfinished(folder))
    for name in begun:
        log(f"{name} is not finished: {_BEGUN}")
    if not steps and not begun:
        log(f"{folder} holds no checkpoint")
    return whole


_BEGUN = "a run is saving it, or was killed then"


def _is_sealed(folder: Path) -> bool:
    """Whether all processes have sealed a checkpoint, whether or not the seals are readable."""
    try:
        integrity.read_seal(folder)
    except ValueError as error:
        return not isinstance(error, integrity.Unfinished)
    return True
