"""Reads what a checkpoint holds, and checks whether it is still what was saved; the command `verify`.

All processes call these functions together. Each reads its share without a barrier of Orbax, so that a process with a
damaged share blocks no other; then all agree on the outcome.
"""

import gc
import io
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from train.checkpoint import integrity
from train.checkpoint.digest import digests, read_digests, values_of
from train.checkpoint.directory import check_one_run, read_config
from train.checkpoint.steps import finished_steps, place_of, unfinished
from train.runtime.distributed import collect, decide, decided, gather
from train.runtime.lines import in_a_line
from train.runtime.paths import check_checkpoints, path


class Damaged(Exception):
    """Raised on every process for a checkpoint that is not what was saved; says what is wrong, in a few words."""


def read_whole(folder: Path, **wanted: Any) -> dict[str, Any]:
    """Items of a checkpoint, laid out as `wanted` says; their values are those that were saved.

    Raises Damaged for other values. If reading fails for a reason other than damage, that error is raised.
    """
    found, error = _attempt(lambda: _read(folder, wanted))
    reason = next(filter(None, gather(in_a_line(error, 300) if error else "")), "")
    # If there is a reason, the files are damaged, or cannot be read.
    problems = _read_again(folder) if reason else integrity.differing(folder, values_of(digests(found)))
    if problems:
        raise Damaged(problems[0])
    if reason:
        raise error or OSError(f"{folder}: another process could not read it: {reason}")
    return found


def _attempt(read: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """The result of `read`, or its error; errors of the devices, such as too little memory, are raised."""
    try:
        return read(), None
    except jax.errors.JaxRuntimeError:
        raise
    except Exception as error:  # Orbax raises errors of any kind for a damaged file
        traceback.clear_frames(error.__traceback__)
        return None, error


def _read_again(folder: Path) -> list[str]:
    """`damages`, while Orbax abandons the other readings of the first attempt: for each, Python would print a traceback
    when it has ended."""
    with redirect_stderr(io.StringIO()):
        found = damages(folder)
        gc.collect()
    return found


def _read(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    process = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(process, {process}, f"process_{process}")
    items = {name: ocp.args.StandardRestore(item) for name, item in wanted.items()}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler(), multiprocessing_options=alone) as checkpointer:
        found = checkpointer.restore(place_of(folder), args=ocp.args.Composite(**items))
    return {name: found[name] for name in wanted}


def damages(folder: Path) -> list[str]:
    """All problems of a checkpoint, each in a few words, found by reading all of it.

    Raises OSError, on every process, if any of them cannot read something.
    """
    shares = collect(lambda: [*integrity.problems(folder, jax.process_index(), jax.process_count())])
    found = sorted({line for share in shares for line in share})
    for item in sorted({name.partition("/")[0] for name in _sealed_arrays(folder)}):
        found += _damaged_arrays(folder, item)
    return found


@decided
def _sealed_arrays(folder: Path) -> list[str]:
    try:
        return list(integrity.read_seal(folder).arrays)
    except ValueError:
        return []


def _damaged_arrays(folder: Path, item: str) -> list[str]:
    def read() -> tuple[str, dict[str, int]]:
        try:
            return "", read_digests(folder, item, jax.process_index(), jax.process_count())
        except ValueError as error:
            return in_a_line(error, 300), {}

    shares = collect(read)
    errors = sorted({f"{item}: {error}" for error, _ in shares if error})
    if errors:
        return errors
    whole = {name: sum(share[name] for _, share in shares) % 2**32 for name in shares[0][1]}
    return integrity.differing(folder, whole)


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
    begun = decide(lambda: unfinished(folder))
    if steps and decide(lambda: integrity.missing(folder / str(steps[0]))):
        begun.insert(0, f"step {steps.pop(0)}")
    for step in steps:
        found = damages(folder / str(step))
        whole = whole and not found
        for line in found or ["whole"]:
            log(f"step {step}: {line}")
    for name in begun:
        log(f"{name} is not finished: a run is saving it, or was killed then")
    if not steps and not begun:
        log(f"{folder} holds no checkpoint")
    return whole
