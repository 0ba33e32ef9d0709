"""What a run leaves on disk, so that it resumes bit for bit and nothing saved is ever lost.

A run directory holds ``config.yaml`` (every key resolved), ``versions.json``, ``metrics.jsonl``, ``fit.json`` once the
training is finished, ``released`` if it started from a released model, and ``checkpoints/STEP``. A checkpoint has three
items: ``parameters`` (a nested dict, float32), ``training`` (all other arrays of the `TrainState`, by
name) and ``run`` (JSON: the stage, the place in the data, the config, the corpora's digests). Beside them lie its
checksums, written last (see `train.integrity`). docs/checkpoints.md says what of this is stable.
"""

import dataclasses
import json
import shutil
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import jax
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint.checkpoint_managers import LatestN

from train import integrity, report
from train.config import Config, differences, dump, parse, parse_text, to_dict
from train.distributed import decide, gather, is_loss
from train.machine import own_versions
from train.model import build_model
from train.paths import check_checkpoints, is_local, path, write_file
from train.released import KEPT, keep_files
from train.step import TrainState

FOUND = "longrope.json"
"""Where `train.search` leaves what it found."""

RESULTS = "results.jsonl"
"""Where a comparison or a study keeps its rows."""

RUN_FILES = frozenset(
    ("config.yaml", "versions.json", "metrics.jsonl", "fit.json", "checkpoints", "evaluation.jsonl", RESULTS)
) | {*report.FILES, "member.yaml", FOUND, "tensorboard", "wandb", "profile", "watchdog", KEPT}
"""What a run directory may hold; one with anything else in it is not ours to write into."""


def check_run(config: Config, directory: Path) -> None:
    """Raises ValueError for a directory that holds another config's run, naming what differs, or other things."""
    decide(lambda: _check_run(config, directory))


def _check_run(config: Config, directory: Path) -> None:
    if directory.is_file():
        raise ValueError(f"{directory} is a file; choose another name for the run")
    strange = sorted(path.name for path in directory.glob("*") if path.name not in RUN_FILES)
    if strange and directory.is_dir():
        raise ValueError(f"{directory} holds other things than a run ({strange[0]}); choose another name")
    if (directory / "config.yaml").exists():
        saved = read_config(directory)
        if _started(directory):
            _refuse_another(saved, config, str(directory))


def create_run(config: Config, directory: Path) -> None:
    """Makes the run directory, unless a training has started there; call `check_run` first."""
    decide(lambda: _create_run(config, directory))


def _create_run(config: Config, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    if not _started(directory):
        write_file(directory / "config.yaml", dump(config))
        write_file(directory / "versions.json", json.dumps(own_versions(), indent=2) + "\n")
        if config.init.path:
            keep_files(config, directory)


def _started(directory: Path) -> bool:
    """Whether anything was saved; a run that failed in its first moments does not stand in a corrected one's way."""
    metrics = directory / "metrics.jsonl"
    return _saved(directory) or (metrics.exists() and metrics.stat().st_size > 0)


def _saved(directory: Path) -> bool:
    """Whether there is a whole checkpoint; Orbax names one by its step alone only when it is whole."""
    return any(path.name.isdigit() for path in directory.glob("checkpoints/*"))


def read_config(directory: Path) -> Config:
    """The config a run directory was made with."""
    path = directory / "config.yaml"
    if not path.is_file():
        raise FileNotFoundError(f"{directory} is no run directory: it has no config.yaml")
    return parse_text(path.read_text(encoding="utf-8"), str(path))


@dataclass(frozen=True)
class Saved:
    """A whole checkpoint: after how many updates, in which stage (from 0), at which place in the data."""

    step: int
    stage: int
    stream: Any


class Checkpoints:
    """The checkpoints of a run; every process of the run opens them and makes the same calls, in the same order.

    Opening them finds the newest whole one. Newer ones that are not whole, because the run was killed while it saved
    or because the disk lost something, are told on standard error; what Orbax had not finished is removed, anything
    else is kept, as ``STEP.damaged``. So a step that was damaged can be saved again, and nothing whole is in the way.

    Saving is asynchronous. A checkpoint counts once its checksums are written; the ones before are removed only after
    that. ``train.keep`` of them stay, and of each finished stage the last one. The end of a `with` waits for the last.
    """

    def __init__(self, config: Config, directory: Path, corpora: Sequence[str]):
        self._config, self._corpora = config, list(corpora)
        self._folder = directory / "checkpoints"
        check_checkpoints(self._folder)
        _check_alike(config, self._corpora)
        decide(lambda: self._folder.mkdir(parents=True, exist_ok=True))
        _check_shared(self._folder)
        self._newest = self._find()
        self._stages = dict(decide(lambda: list(_stages(self._folder).items())))
        self._manager = _manager(self._folder)
        self._thread = ThreadPoolExecutor(1, "checksums")
        self._sealing: Future | None = None

    def newest(self) -> Saved | None:
        """The newest whole checkpoint when these were opened; None when there was none.

        Raises ValueError, on every process, when it is of another config or other text.
        """
        if self._newest is None:
            return None
        run = decide(lambda: _read_run(self._folder, self._newest))
        where = f"the checkpoint of step {self._newest} in {self._folder}"
        _refuse_another(parse(run["config"]), self._config, where)
        if run["corpora"] != self._corpora:
            raise ValueError(f"{where} was trained on other text: the corpus has changed since; choose another name")
        return Saved(self._newest, run["stage"], run["stream"])

    def restore(self, saved: Saved, abstract: TrainState) -> TrainState:
        """The saved state, laid out as `abstract` says, whatever mesh and number of processes it was saved from."""
        items = {name: ocp.args.StandardRestore(item) for name, item in _items(abstract).items()}
        found = self._restore(saved.step, **items)
        return dataclasses.replace(abstract, parameters=found.parameters, **found.training)

    def restore_parameters(self, saved: Saved, abstract: Any) -> Any:
        """The parameters alone, laid out as `abstract` says: what the next stage starts from."""
        return self._restore(saved.step, parameters=ocp.args.StandardRestore(abstract)).parameters

    def save(self, step: int, stage: int, state: TrainState, stream: Any) -> None:
        """Saves the state after `step` updates of the run with the data's place, unless that step is saved already.

        Raises the error of the save before, if that one failed.
        """
        if step in self._stages:
            return
        self._wait()
        run = {"stage": stage, "stream": stream, "config": to_dict(self._config), "corpora": self._corpora}
        arrays = {name: ocp.args.StandardSave(item) for name, item in _items(state).items()}
        # Orbax lets no process past this before all have come, so what was sealed before is sealed by all of them.
        self._manager.save(step, args=ocp.args.Composite(run=ocp.args.JsonSave(run), **arrays), force=True)
        self._stages[step] = stage
        self._sealing = self._thread.submit(self._seal, step)

    def _seal(self, step: int) -> None:
        """Waits until all processes have written a checkpoint, adds the checksums, and thins out the earlier ones."""
        self._manager.wait_until_finished()
        integrity.seal(self._folder / str(step), jax.process_index(), jax.process_count())
        self._thin(saving=step)

    def _thin(self, saving: int | None = None) -> None:
        """Removes the checkpoints that are not kept; other processes may not have sealed the one they are `saving`."""
        for step in self._stages.keys() - kept_steps(self._stages, self._config.train.keep, saving):
            self._stages.pop(step)
            if jax.process_index() == 0:
                _remove(self._folder / str(step))

    def _wait(self) -> None:
        if self._sealing is not None:
            self._sealing.result()
            self._sealing = None

    def _restore(self, step: int, **items: Any) -> Any:
        self._wait()
        return self._manager.restore(step, args=ocp.args.Composite(**items))

    def _find(self) -> int | None:
        """The newest whole checkpoint; those that are not are told and put out of the way."""
        steps = decide(lambda: _clean(self._folder))
        for step in steps:
            shares = gather(integrity.problem(self._folder / str(step), jax.process_index(), jax.process_count()))
            problem = next(filter(None, shares), "")
            if not problem:
                return step
            decide(lambda step=step, problem=problem: _set_aside(self._folder, step, problem))
        return None

    def __enter__(self):
        return self

    def __exit__(self, kind: Any, error: BaseException | None, _: Any):
        if is_loss(error):
            return  # what is being saved needs the process that was lost
        self._wait()
        self._manager.close()
        self._thread.shutdown()
        if error is None:
            gather("")  # all have sealed theirs
            self._thin()


def _items(state: TrainState) -> dict[str, Any]:
    """The parts of a state that can be restored by themselves."""
    training = {name: value for name, value in vars(state).items() if name != "parameters"}
    return {"parameters": state.parameters, "training": training}


def kept_steps(stages: Mapping[int, int], keep: int, saving: int | None = None) -> set[int]:
    """Of the steps saved, each with its stage, those that stay: the newest `keep`, and the last of each finished stage.

    `saving` is the newest one while it is being written, which stays, but does not count.
    """
    steps = sorted(stages)
    last = {step for step, after in pairwise(steps) if stages[after] > stages[step]}
    return last | set([step for step in steps if step != saving][-keep:]) | ({saving} & set(steps))


def newest_whole(directory: Path, stage: int | None = None) -> int | None:
    """The newest whole checkpoint of a run directory, or of one stage of it, all of which is left as it is.

    Those that are not whole are told.
    """
    folder = directory / "checkpoints"
    for step in _steps(folder):
        if stage is not None and _stages(folder).get(step) != stage:
            continue
        problem = integrity.problem(folder / str(step))
        if not problem:
            return step
        _tell(f"the checkpoint of step {step} in {folder} is damaged ({problem}); taking the one before")
    return None


def restore_model(directory: str | Path, stage: str = "") -> tuple[Config, nnx.Module]:
    """The config of a stage and the model as it was trained there, from a run directory, on the first device.

    Without a stage it is that of the newest whole checkpoint.

    Raises FileNotFoundError when there is no run or no checkpoint, and ValueError for an unknown stage.
    """
    directory = path(directory)
    config = read_config(directory)
    step = newest_whole(directory, config.stage_number(stage) if stage else None)
    if step is None:
        which = f" of stage {stage!r}" if stage else ""
        raise FileNotFoundError(f"{directory} has no checkpoint{which}; train it first with `python -m train fit`")
    config = config.stage(_read_run(directory / "checkpoints", step)["stage"])
    graph, abstract = nnx.split(nnx.eval_shape(lambda: build_model(config)))
    device = SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), nnx.to_pure_dict(abstract))
    wanted = ocp.args.Composite(parameters=ocp.args.StandardRestore(shapes))
    with _manager(directory / "checkpoints", create=False) as manager:
        found = manager.restore(step, args=wanted)
    return config, nnx.merge(graph, found.parameters)


def _manager(folder: Path, create: bool = True) -> ocp.CheckpointManager:
    """Orbax's manager, which saves and restores; what is kept and what is whole is decided here."""
    options = ocp.CheckpointManagerOptions(
        create=create, preservation_policy=LatestN(), lightweight_initialize=True, save_root_metadata=False
    )
    return ocp.CheckpointManager(epath.Path(folder.absolute() if is_local(folder) else str(folder)), options=options)


def _read_run(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / str(step) / "run" / "metadata").read_text(encoding="utf-8"))


def _steps(folder: Path) -> list[int]:
    """The steps that Orbax has finished writing, the newest first."""
    return sorted((int(name) for name in _names(folder) if name.isdigit()), reverse=True)


def _names(folder: Path) -> list[str]:
    """What is in a folder; nothing where there is none, as in an object store where an empty one does not exist."""
    return sorted(place.name for place in folder.iterdir()) if folder.exists() else []


def _stages(folder: Path) -> dict[int, int]:
    """The stage of every checkpoint; one that was half removed is none."""
    stages = {}
    for step in _steps(folder):
        try:
            stages[step] = _read_run(folder, step)["stage"]
        except (OSError, ValueError):
            continue
    return stages


def _clean(folder: Path) -> list[int]:
    """The steps to look at, after what Orbax had not finished writing is told and removed."""
    for name in _names(folder):
        step, unfinished, _ = name.partition(".orbax-checkpoint-tmp")
        if unfinished:
            _tell(f"the checkpoint of step {step} in {folder} was not finished when the run ended; removing it")
            _remove(folder / name)
    return _steps(folder)


def _set_aside(folder: Path, step: int, problem: str) -> None:
    """Keeps a damaged checkpoint under a name that is no step."""
    taken = _names(folder)
    names = (f"{step}.damaged{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, len(taken) + 3))))
    name = next(name for name in names if name not in taken)
    _tell(f"the checkpoint of step {step} in {folder} is damaged ({problem}); it is kept as {name}, and skipped")
    _move(folder / str(step), folder / name)


def _move(source: Path, target: Path) -> None:
    if is_local(source):
        source.rename(target)
    else:
        system, root = fsspec.core.url_to_fs(str(source))
        system.mv(root, str(target), recursive=True)


def _remove(folder: Path) -> None:
    """Removes a checkpoint, its checksums first, so that what an interruption leaves is never taken for whole."""
    for place in (folder / integrity.FOLDER, folder):
        if is_local(place):
            shutil.rmtree(place, ignore_errors=True)
        elif place.exists():
            system, root = fsspec.core.url_to_fs(str(place))
            system.rm(root, recursive=True)


def _check_alike(config: Config, corpora: list[str]) -> None:
    """Raises ValueError, on every process, unless all of them were given the same config and read the same text."""
    first, *others = map(json.loads, gather(json.dumps([to_dict(config), corpora])))
    for process, (values, texts) in enumerate(others, start=1):
        changed = differences(parse(first[0]), parse(values))
        if changed:
            raise ValueError(f"process {process} has another config than process 0: {'; '.join(changed)}")
        if texts != first[1]:
            raise ValueError(f"process {process} reads other text than process 0; data.paths must hold the same on all")


def _check_shared(folder: Path, patience: float = 30.0) -> None:
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


def _tell(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


def _refuse_another(saved: Config, found: Config, where: str) -> None:
    changed = differences(saved, found)
    if changed:
        raise ValueError(f"{where} belongs to another config: {'; '.join(changed)}. Choose another name to keep both")
