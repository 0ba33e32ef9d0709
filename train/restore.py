"""A model to be used: one that a run has trained, or a released one."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from posjax.nn import from_pretrained
from posjax.nn.huggingface.files import reaching
from posjax.nn.huggingface.load import is_gguf, is_released, open_source, read_parameters
from train.checkpoint import read_config, restore_model
from train.config import Config, SchemeConfig, differences, load, load_values
from train.convert import convert
from train.model import RELEASED, decoder_config
from train.paths import path, write_file
from train.released import with_kept_tokenizer, with_moved_tokenizer
from train.settings.checks import check
from train.step import build_program


def is_run(place: str | Path) -> bool:
    """Whether a run is there."""
    with reaching(place):
        return (path(place) / "config.yaml").is_file()


def config_of(place: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config of a saved run, with overrides of what its training did not depend on; or that of a released model.

    Raises FileNotFoundError without either, and ValueError for overrides that would need another training.
    """
    if not is_run(place) and is_released(place):
        return _config_of_released(place, overrides)
    if is_gguf(place):
        raise FileNotFoundError(f"there is no {place}")
    directory = path(place)
    saved = read_config(directory)
    config = with_moved_tokenizer(saved, load(directory / "config.yaml", overrides))
    changed = differences(saved, config)
    if changed:
        raise ValueError(f"{directory} is trained, so this cannot change: {'; '.join(changed)}")
    return with_kept_tokenizer(config, directory)


def _config_of_released(place: str | Path, overrides: Sequence[str]) -> Config:
    name = _whole(place).rpartition("/")[2].removesuffix(".gguf")
    config = load_values({"init": str(place), "name": name, "train": {"steps": 0}}, overrides)
    why = f"init: found {config.init.path}, but the command names {place}; leave init out"
    check(_whole(config.init.path) == _whole(place), why)
    return config


def _whole(place: str | Path) -> str:
    """A path or URL in the one form in which two of the same place are equal."""
    return str(place).rstrip("/") if "://" in str(place) else str(Path(place).resolve())


def restore(place: str | Path, config: Config, stage: str = "") -> tuple[Config, nnx.Module]:
    """The config of a stage, overrides included, and the model as it was trained there; or a released model.

    Args:
        place: a run directory, or a released model.
        config: what `config_of` gave for it.
        stage: by name; that of the newest checkpoint when empty.
    """
    if not is_run(place):  # nothing is trained: `remat` says nothing, and parameters can stay as narrow as they are
        how = {name: getattr(config.model, name) for name in ("compute_dtype", "scan_layers", "implementation")}
        return config, from_pretrained(place, dtype=None, **how)
    directory = path(place)
    trained, model = restore_model(directory, stage)
    saved = read_config(directory)
    number = next(n for n in range(len(saved.stage_names)) if saved.stage(n) == trained)
    return config.stage(number), model


def entry_in_stage(entry: SchemeConfig, config: Config, stage: Config) -> SchemeConfig:
    """An entry as the stage has it: a stage that changed the scheme of the config changed that of its entries."""
    if stage.scheme.trained() == config.scheme.trained():
        return entry
    extend = entry.extend or stage.scheme.extend
    return dataclasses.replace(stage.scheme, label=entry.label, extend=extend, stage=entry.stage)


def initial_parameters(config: Config, mesh: Mesh) -> Any:
    """The parameters of the released model under ``init`` as those of a config, read straight to the devices' shards.

    Raises FileNotFoundError without the model, and ValueError for tensors that its config does not say.
    """
    released = as_released(config)
    abstract = build_program(released, mesh).abstract.parameters
    source, values = open_source(config.init.path), config.init.values
    found = read_parameters(source, values, decoder_config(released), abstract)
    return jax.jit(partial(convert, released, config))(found) if config.scheme.name != RELEASED else found


def as_released(config: Config) -> Config:
    """The config with the scheme of the released model that it starts from."""
    return dataclasses.replace(config, scheme=SchemeConfig(RELEASED), stages=())


def results_of(place: str | Path, config: Config) -> Path:
    """The directory for results about a model: the run's own, or ``{output}/{name}`` for a released model.

    Raises ValueError if that directory belongs to a run or to another model.
    """
    if is_run(place):
        return path(place)
    directory = config.directory
    check(not is_run(directory), f"{directory} holds a run; choose another name for the results of {place}, by name=")
    mark = directory / _OF
    known = mark.read_text(encoding="utf-8") if mark.is_file() else _whole(place)
    check(known == _whole(place), f"{directory} holds results of {known}; choose another name, by name=")
    directory.mkdir(parents=True, exist_ok=True)
    write_file(mark, _whole(place))
    return directory


_OF = "model.txt"
"""Says of which released model a directory holds results."""
