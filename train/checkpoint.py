"""What a run leaves on disk, so that it can go on bit for bit and nothing saved is ever lost.

A run directory holds ``config.yaml`` (every key resolved), ``versions.json``, ``metrics.jsonl``, ``fit.json`` once the
training is finished, and ``checkpoints/STEP``. A checkpoint has three items: ``parameters`` (a nested dict, float32),
``optimizer`` (optax's state) and ``run`` (JSON: the place in the data, the config, the corpus's digest).
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint.checkpoint_managers import LatestN

from train.config import Config, differences, dump, parse, parse_text, to_dict
from train.machine import versions, write_file
from train.model import build_model
from train.step import TrainState

FOUND = "longrope.json"
"""Where `train.search` leaves what it found."""

RUN_FILES = frozenset(
    ("config.yaml", "versions.json", "metrics.jsonl", "fit.json", "checkpoints", "evaluation.jsonl", "results.jsonl")
) | {"member.yaml", FOUND, "tensorboard", "wandb", "profile", "watchdog.txt"}
"""What a run directory may hold; one with anything else in it is not ours to write into."""

_PACKAGES = ("posjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def check_run(config: Config, directory: Path) -> None:
    """Raises ValueError for a directory that holds another config's run, naming what differs, or other things."""
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
    directory.mkdir(parents=True, exist_ok=True)
    if not _started(directory):
        write_file(directory / "config.yaml", dump(config))
        write_file(directory / "versions.json", json.dumps(_versions(), indent=2) + "\n")


def _versions() -> dict[str, str]:
    """The versions of everything that decides a number, and the device's name."""
    return {"device": jax.devices()[0].device_kind, **versions(_PACKAGES)}


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


class Checkpoints:
    """The checkpoints of a run. Saving is asynchronous; ``close()``, or the end of a `with`, waits for it."""

    def __init__(self, config: Config, directory: Path, corpus: str):
        self._config, self._corpus = config, corpus
        self._manager = _manager(
            directory,
            ocp.CheckpointManagerOptions(preservation_policy=LatestN(config.train.keep), cleanup_tmp_directories=True),
        )

    def save(self, step: int, state: TrainState, stream: Any) -> None:
        """Saves the state after `step` updates with the data's place, unless that step is saved already."""
        if step in self._manager.all_steps():
            return
        run = {"stream": stream, "config": to_dict(self._config), "corpus": self._corpus}
        items = {"parameters": state.parameters, "optimizer": state.optimizer}
        saved = {name: ocp.args.StandardSave(item) for name, item in items.items()}
        self._manager.save(step, args=ocp.args.Composite(run=ocp.args.JsonSave(run), **saved))

    def restore(self, abstract: TrainState) -> tuple[TrainState, Any] | None:
        """The newest state, laid out as `abstract` says, and the data's place; None when nothing is saved.

        Raises ValueError for a checkpoint of another config or corpus.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        run = self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore())).run
        where = f"the checkpoint of step {step} in {self._manager.directory}"
        _refuse_another(parse(run["config"]), self._config, where)
        if run["corpus"] != self._corpus:
            raise ValueError(f"{where} was trained on other text: the corpus has changed since; choose another name")
        items = {"parameters": abstract.parameters, "optimizer": abstract.optimizer}
        wanted = {name: ocp.args.StandardRestore(item) for name, item in items.items()}
        found = self._manager.restore(step, args=ocp.args.Composite(**wanted))
        count = jax.device_put(jnp.int32(step), abstract.step.sharding)
        return TrainState(count, found.parameters, found.optimizer), run["stream"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._manager.close()


def restore_model(directory: str | Path) -> tuple[Config, nnx.Module]:
    """The config and the trained model of a run directory, from its newest checkpoint, on the first device.

    Raises FileNotFoundError when there is no run or no checkpoint.
    """
    directory = Path(directory)
    config = read_config(directory)
    graph, abstract = nnx.split(nnx.eval_shape(lambda: build_model(config)))
    device = SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), nnx.to_pure_dict(abstract))
    if not _saved(directory):
        raise FileNotFoundError(f"{directory} has no checkpoint; train it first with `python -m train fit`")
    wanted = ocp.args.Composite(parameters=ocp.args.StandardRestore(shapes))
    with _manager(directory, ocp.CheckpointManagerOptions(create=False)) as manager:
        found = manager.restore(manager.latest_step(), args=wanted)
    return config, nnx.merge(graph, found.parameters)


def _manager(directory: Path, options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManager:
    return ocp.CheckpointManager((directory / "checkpoints").absolute(), options=options)


def _refuse_another(saved: Config, found: Config, where: str) -> None:
    changed = differences(saved, found)
    if changed:
        raise ValueError(f"{where} belongs to another config: {'; '.join(changed)}. Choose another name to keep both")
