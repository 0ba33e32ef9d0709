"""Restores a model for use: one that a run has trained, or a released one."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding

from posjax.nn import from_pretrained
from posjax.nn.huggingface import load_adapter
from posjax.nn.huggingface.files import reaching
from posjax.nn.huggingface.hub import is_name, pinned, short_name
from posjax.nn.huggingface.load import is_gguf, is_released
from train.checkpoint import integrity
from train.checkpoint.digest import array_name
from train.checkpoint.directory import check_one_run, read_config, with_kept_tokenizer, with_moved_tokenizer
from train.checkpoint.manager import whole_steps
from train.checkpoint.reading import Damaged, read_whole
from train.checkpoint.steps import read_run, tell_passed
from train.config import Config, SchemeConfig, differences, load_values, to_dict
from train.config.settings.checks import check
from train.model.build import RELEASED, Setup
from train.model.sharding import named_sharding, tree_shardings
from train.model.state import overlaid, selected
from train.runtime.distributed import decide
from train.runtime.paths import check_checkpoints, path, write_file


def is_run(location: str | Path) -> bool:
    """Whether there is a run at a path or URL."""
    with reaching(location):
        return (path(location) / "config.yaml").exists()  # is_file answers no at gs:// if access is denied


def config_of(location: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a saved run, with overrides of keys that did not affect its training; or that of a released model.

    Raises FileNotFoundError if there is neither, here or at the hub, and ValueError for a folder of several runs and
    for overrides that would need a new training.
    """
    location = pinned(location)
    if not is_run(location) and is_released(location):
        return _config_of_released(location, overrides)
    if is_gguf(location):
        raise FileNotFoundError(f"there is no {location}")
    check_one_run(path(location))
    if not is_run(location):
        made = "`python -m train fit CONFIG` makes a run, and the folder of a released model has a config.json"
        raise FileNotFoundError(f"{location} is neither a run nor a released model: {made}")
    directory = path(location)
    saved = read_config(directory)
    config = with_moved_tokenizer(saved, load_values(to_dict(saved), overrides))
    changed = differences(saved, config)
    if changed:
        raise ValueError(f"{directory} is trained, so this cannot change: {'; '.join(changed)}")
    return with_kept_tokenizer(config, directory)


def _config_of_released(location: str | Path, overrides: Sequence[str]) -> Config:
    in_folder = _whole(location).rpartition("/")[2].removesuffix(".gguf")
    name = short_name(location) if is_name(location) else in_folder
    config = load_values({"init": {"path": str(location)}, "name": name, "train": {"steps": 0}}, overrides)
    why = f"init: found {config.init.path}, but the command is for {location}; leave init out"
    check(_whole(config.init.path) == _whole(location), why)
    own = config.scheme.name == RELEASED and not config.scheme.options
    check(own, "scheme: nothing is trained here, so the model keeps its own scheme; put changes under scheme.extend")
    return config


def _whole(location: str | Path) -> str:
    """A path or URL in canonical form: two names of the same location become equal. A name at the hub stays itself."""
    if is_name(location):
        return str(location)
    return str(location).rstrip("/") if "://" in str(location) else str(Path(location).resolve())


def restore(
    location: str | Path, config: Config, stage: str = "", mesh: Mesh | None = None
) -> tuple[Config, nnx.Module]:
    """The config of a stage, overrides included, and the model as it was trained there; or a released model.

    Args:
        location: a run directory, or a released model, which is then read from the config's ``init``.
        config: what `config_of` gave for it.
        stage: the name of the stage; if empty, the stage of the newest checkpoint.
        mesh: the parameters are split over it as they are read. Without it the first device holds all of them.
    """
    if not is_run(location):  # nothing is trained: `remat` has no effect, and parameters can keep their narrow dtype
        options = {name: getattr(config.model, name) for name in ("compute_dtype", "scan_layers", "implementation")}
        sharding = None if mesh is None else partial(named_sharding, mesh)
        model = from_pretrained(config.init.path, dtype=None, sharding=sharding, **options)
        adapter, family = config.init.adapter, config.init.values.get("model_type")
        return config, load_adapter(model, adapter, family=family) if adapter else model
    directory = path(location)
    trained, model = restore_model(directory, stage, mesh, averaged=config.evaluate.averaged)
    return config.stage(read_config(directory).every_stage.index(trained)), model


def restore_model(
    directory: str | Path, stage: str = "", mesh: Mesh | None = None, *, averaged: bool = True
) -> tuple[Config, nnx.Module]:
    """The config of a stage and the model as it was trained there, from a run directory; see `restore`.

    Without a stage it is that of the newest complete checkpoint. With ``train.ema`` the model has the averaged
    parameters, unless `averaged` is false.

    Raises FileNotFoundError if there is no run or no checkpoint, and ValueError for an unknown stage, or an address
    where checkpoints cannot be stored.
    """
    directory = path(directory)
    config, folder = read_config(directory), directory / "checkpoints"
    check_checkpoints(folder)
    for step in whole_steps(directory, config.stage_number(stage) if stage else None):
        trained = config.stage(decide(lambda step=step: read_run(folder, step)["stage"]))
        try:
            return trained, _restored(folder / str(step), trained, mesh, averaged)
        except Damaged as damage:
            tell_passed(folder, step, str(damage))
    which = f" of stage {stage!r}" if stage else ""
    raise FileNotFoundError(f"{directory} has no checkpoint{which}; train it first with `python -m train fit`")


def _restored(folder: Path, config: Config, mesh: Mesh | None, averaged: bool) -> nnx.Module:
    setup = Setup(config)
    shapes, device = setup.shapes, SingleDeviceSharding(jax.devices()[0])
    on_first = jax.tree.map(lambda _: device, shapes)
    shardings = on_first if mesh is None else tree_shardings(mesh, setup.axes, shapes)
    wanted = jax.tree.map(lambda x, own: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own), shapes, shardings)
    averages = _averages_in(folder, wanted) if averaged else {}
    items = {"average": averages} if averages else {}
    if len(jax.tree.leaves(averages)) < len(jax.tree.leaves(wanted)):  # else the parameters themselves are not needed
        items["parameters"] = wanted
    found = {"parameters": wanted, "average": {}} | read_whole(folder, **items)
    return nnx.merge(nnx.graphdef(setup.abstract), overlaid(found["parameters"], found["average"]))


def _averages_in(folder: Path, parameters: Any) -> Any:
    """The leaves of a tree of parameters of which a checkpoint has averages."""
    names = decide(lambda: sorted(integrity.read_seal(folder).arrays))
    return selected(
        parameters,
        jax.tree_util.tree_map_with_path(lambda path, _: f"average/{array_name(path)}" in names, parameters),
    )


def parameters_in_words(config: Config) -> str:
    """Which parameters `restore` gives of a stage with ``train.ema``; empty for other stages."""
    if not config.train.ema:
        return ""
    averages = f"averaged parameters (train.ema: {config.train.ema})"
    if config.evaluate.averaged:
        return f"{averages}; evaluate.averaged=false takes the last ones"
    return f"the last parameters; evaluate.averaged=true takes the {averages}"


def entry_in_stage(entry: SchemeConfig, config: Config, stage: Config) -> SchemeConfig:
    """An entry as the stage sees it: a stage that changed the config's scheme changed its entries in the same way."""
    if stage.scheme.trained() == config.scheme.trained():
        return entry
    extend = entry.extend or stage.scheme.extend
    return dataclasses.replace(stage.scheme, label=entry.label, extend=extend, stage=entry.stage)


def results_of(location: str | Path, config: Config) -> Path:
    """The directory for results about a model: the run's own, or ``{output}/{name}`` for a released model.

    Raises ValueError if that directory belongs to a run or to another model.
    """
    if is_run(location):
        return path(location)
    directory = config.directory
    check(
        not is_run(directory), f"{directory} holds a run; choose another name for the results of {location}, by name="
    )
    adapter = f", adapter {_whole(config.init.adapter)}" if config.init.adapter else ""
    mark, model = directory / _MODEL_FILE, f"{_whole(config.init.path)}{adapter}"
    known = mark.read_text(encoding="utf-8") if mark.is_file() else model
    check(known == model, f"{directory} holds results of {known}; choose another name, by name=")
    directory.mkdir(parents=True, exist_ok=True)
    write_file(mark, model)
    return directory


_MODEL_FILE = "model.txt"
"""The file in a directory of results that names the released model they belong to."""
