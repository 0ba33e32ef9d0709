"""What a run writes to disk, so that it resumes bit for bit and never loses anything saved.

A run directory holds ``config.yaml`` (every key resolved), ``versions.json``, ``metrics.jsonl``, ``fit.json`` once the
training is finished, ``released`` if it started from a released model, and ``checkpoints/STEP``. A checkpoint has these
items: ``parameters`` (a nested dict, float32), with ``train.ema`` ``average`` (the same of the averaged parameters),
``training`` (all other arrays of the `TrainState`, by name) and ``run`` (JSON: the stage, the position in the data, the
config, the corpora's digests). Its checksums are in the same folder, written last (see `integrity.py`).
docs/checkpoints.md says which parts of this format are stable.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from train.checkpoint import integrity
from train.checkpoint.digest import digests, values_of
from train.checkpoint.directory import refuse_another
from train.checkpoint.reading import Damaged, read_whole
from train.checkpoint.steps import (
    check_shared,
    clean,
    finished_steps,
    place_of,
    read_run,
    remove,
    set_aside,
    stages_of,
    tell_passed,
)
from train.config import Config, differences, parse, to_dict
from train.model.state import TrainState
from train.runtime.distributed import collect, decide, decided, gather, is_loss
from train.runtime.paths import check_checkpoints


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: the number of updates before it, its stage (from 0), and its position in the data."""

    step: int
    stage: int
    stream: Any


class Checkpoints:
    """The checkpoints of a run; every process of the run opens them and makes the same calls, in the same order.

    Opening finds the newest complete checkpoint. Newer ones that are incomplete, because the run was killed during a
    save or the disk lost data, are reported on standard error. What Orbax had not finished is removed; anything else is
    kept, as ``STEP.damaged``. So a damaged step can be saved again. Opening reads no array: changed values are found at
    restore, and then the previous checkpoint is used.

    Saving is asynchronous. A checkpoint counts once its checksums are written; earlier ones are removed only after
    that. ``train.keep`` of them are kept, and the last one of each finished stage. The end of a `with` waits for the
    last save.
    """

    def __init__(self, config: Config, directory: Path, corpora: Sequence[str]):
        self._config, self._corpora = config, list(corpora)
        self._folder = directory / "checkpoints"
        check_checkpoints(self._folder)
        _check_alike(config, self._corpora)
        decide(lambda: self._folder.mkdir(parents=True, exist_ok=True))
        check_shared(self._folder)
        self._newest = self._find()
        self._stages = dict(decide(lambda: list(stages_of(self._folder).items())))
        self._saver = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        self._thread = ThreadPoolExecutor(1, "checksums")
        self._sealing: Future | None = None

    def newest(self) -> Checkpoint | None:
        """The newest complete checkpoint at the time of opening; None if there was none.

        Raises ValueError, on every process, if it belongs to another config or other text.
        """
        if self._newest is None:
            return None
        run = decide(lambda: read_run(self._folder, self._newest))
        where = f"the checkpoint of step {self._newest} in {self._folder}"
        refuse_another(parse(run["config"]), self._config, where)
        if run["corpora"] != self._corpora:
            raise ValueError(f"{where} was trained on other text: the corpus has changed since; choose another name")
        return Checkpoint(self._newest, run["stage"], run["stream"])

    def resume(self, begin: Callable[[Checkpoint | None], Any]) -> Any:
        """Returns ``begin(newest())``; if restoring finds a damaged checkpoint, calls `begin` again with the
        previous one.

        Only reading the values of a checkpoint shows whether they are those that were saved.
        """
        while True:
            try:
                return begin(self.newest())
            except Damaged:
                continue  # it was already reported and set aside

    def restore(self, saved: Checkpoint, abstract: TrainState) -> TrainState:
        """The saved state, laid out as `abstract` says; the save may be from any mesh and number of processes.

        Raises Damaged for values other than those saved, and sets the checkpoint aside; `newest` then gives another.
        """
        found = self._restore(saved.step, **_items(abstract))
        return dataclasses.replace(abstract, **found.pop("training"), **found)

    def restore_parameters(self, saved: Checkpoint, abstract: Any) -> Any:
        """The parameters alone, laid out as `abstract` says: what the next stage starts from. Raises as `restore`."""
        return self._restore(saved.step, parameters=abstract)["parameters"]

    def save(self, step: int, stage: int, state: TrainState, stream: Any) -> None:
        """Saves the state after `step` updates of the run with the data's position, unless that step is saved already.

        Raises the error of the previous save, if that failed.
        """
        if step in self._stages:
            return
        self._wait()
        run = {"stage": stage, "stream": stream, "config": to_dict(self._config), "corpora": self._corpora}
        items = _items(state)
        found = digests(items)  # before the next update reuses the state's memory
        arrays = {name: ocp.args.StandardSave(item) for name, item in items.items()}
        # Orbax makes all processes wait for each other here, so all of them have sealed the previous checkpoint.
        place = place_of(self._folder / str(step))
        self._saver.save(place, args=ocp.args.Composite(run=ocp.args.JsonSave(run), **arrays))
        self._stages[step] = stage
        self._sealing = self._thread.submit(self._seal, step, found)

    def _seal(self, step: int, found: Mapping[str, jax.Array]) -> None:
        """Waits until all processes have written a checkpoint, adds the checksums, and removes old checkpoints."""
        self._saver.wait_until_finished()
        process = jax.process_index()
        arrays = values_of(found) if process == 0 else {}
        integrity.seal(self._folder / str(step), process, jax.process_count(), arrays)
        self._thin(saving=step)

    def _thin(self, saving: int | None = None) -> None:
        """Removes the checkpoints that are not kept. Other processes may not yet have sealed the one they are
        `saving`."""
        for step in self._stages.keys() - kept_steps(self._stages, self._config.train.keep, saving):
            self._stages.pop(step)
            if jax.process_index() == 0:
                remove(self._folder / str(step))

    def _wait(self) -> None:
        if self._sealing is not None:
            self._sealing.result()
            self._sealing = None

    def _restore(self, step: int, **wanted: Any) -> dict[str, Any]:
        self._wait()
        try:
            return read_whole(self._folder / str(step), **wanted)
        except Damaged as damage:
            set_aside(self._folder, step, str(damage))
            del self._stages[step]
            self._newest = self._find()
            raise

    def _find(self) -> int | None:
        """The newest complete checkpoint; newer incomplete ones are reported and set aside."""
        for step in clean(self._folder):
            problem = self._problem(step)
            if not problem:
                return step
            set_aside(self._folder, step, problem)
        return None

    def _problem(self, step: int) -> str:
        """The problem that any process finds in its share of a checkpoint; empty if none finds one."""
        folder, process, processes = self._folder / str(step), jax.process_index(), jax.process_count()
        return next(filter(None, collect(lambda: next(integrity.problems(folder, process, processes), ""))), "")

    def __enter__(self):
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any):
        if is_loss(error):
            return  # the current save cannot finish without the lost process
        self._wait()
        self._saver.close()
        self._thread.shutdown()
        if error is None:
            gather("")  # waits until all processes have sealed their parts
            self._thin()


def _items(state: TrainState) -> dict[str, Any]:
    """The parts of a state that can be restored by themselves."""
    own = {name: vars(state).get(name) for name in ("parameters", "average")}
    training = {name: value for name, value in vars(state).items() if name not in own}
    return {name: value for name, value in own.items() if value is not None} | {"training": training}


def kept_steps(stages: Mapping[int, int], keep: int, saving: int | None = None) -> set[int]:
    """The saved steps that are kept: the newest `keep`, and the last of each finished stage. `stages` maps each to its
    stage.

    `saving` is the newest step while it is being written; it is kept, but does not count towards `keep`.
    """
    steps = sorted(stages)
    last = {step for step, after in pairwise(steps) if stages[after] > stages[step]}
    return last | set([step for step in steps if step != saving][-keep:]) | ({saving} & set(steps))


def whole_steps(directory: Path, stage: int | None = None) -> Iterator[int]:
    """The complete checkpoints of a run directory, or of one stage of it, the newest first; nothing is changed on disk.

    Incomplete ones are reported. Only reading the values shows whether they are those that were saved. All processes
    iterate together and get the same checkpoints.
    """
    folder = directory / "checkpoints"
    for step in _steps_of(folder, stage):
        if _passes(folder, step):
            yield step


@decided
def _steps_of(folder: Path, stage: int | None) -> list[int]:
    """The finished steps, or those of one stage, the newest first."""
    if stage is None:
        return finished_steps(folder)
    return sorted((step for step, own in stages_of(folder).items() if own == stage), reverse=True)


@decided
def _passes(folder: Path, step: int) -> bool:
    """Whether a checkpoint is complete, judged by its files; an incomplete one is reported."""
    problem = next(integrity.problems(folder / str(step)), "")
    if problem:
        tell_passed(folder, step, problem)
    return not problem


def _check_alike(config: Config, corpora: list[str]) -> None:
    """Raises ValueError, on every process, unless all of them were given the same config and read the same text."""
    first, *others = map(json.loads, gather(json.dumps([to_dict(config), corpora])))
    for process, (values, texts) in enumerate(others, start=1):
        changed = differences(parse(first[0]), parse(values))
        if changed:
            raise ValueError(f"process {process} has another config than process 0: {'; '.join(changed)}")
        if texts != first[1]:
            raise ValueError(f"process {process} reads other text than process 0; data.paths must hold the same on all")
