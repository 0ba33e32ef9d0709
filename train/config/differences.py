"""Which keys determine the numbers of a training, and which may change before it is resumed."""

from collections.abc import Mapping
from typing import Any

from train.config.config import Config
from train.config.settings.model import own_tokenizer
from train.config.typed import to_dict

_FREE = (
    "name",
    "output",
    "imports",
    "init.path",
    "data.cache",
    "data.bad_records",
    "monitor",
    "evaluate",
    "compare",
    "scheme.label",
    "scheme.extend",
    "scheme.stage",
    "train.mesh",
    "train.context",
    "train.loss_chunks",
    "train.checkpoint_every",
    "train.keep",
    "train.local_every",
    "train.local_folder",
    "train.log_every",
    # How a model computes, not what: results are equal up to rounding, and another mesh may need other values.
    "model.remat",
    "model.scan_layers",
)
"""Keys and sections that may change between the start of a run and its resumption without changing any number of the
training."""


def differences(saved: Config, found: Config) -> list[str]:
    """The differences between two configs in keys that determine the training, as ``key was saved, now found``."""
    before, after = _decisive(saved), _decisive(found)
    keys = [key for key in dict.fromkeys([*before, *after]) if not _is_free(key)]
    return [
        f"{key} was {before.get(key)!r}, now {after.get(key)!r}" for key in keys if before.get(key) != after.get(key)
    ]


def chosen(config: Config) -> dict[str, Any]:
    """The values that are not defaults, by key. So a key that is new, with its default, changes nothing."""
    defaults = _flatten(to_dict(Config()))
    return {
        key: value for key, value in _flatten(to_dict(config)).items() if key not in defaults or defaults[key] != value
    }


def _decisive(config: Config) -> dict[str, Any]:
    """Every key with its value; keys of the stages with inherited values filled in."""
    values = _flatten({**to_dict(config), "stages": len(config.stages)})
    if config.init.path and config.data.tokenizer == own_tokenizer(config.init.path):
        values["data.tokenizer"] = "that of the model under init"  # wherever that is by now
    for number, each in enumerate(config.every_stage if config.stages else ()):
        stage = to_dict(each)
        del stage["data"]["tokenizer"]  # that of the config
        own = _flatten({name: stage[name] for name in ("train", "data", "scheme")})
        values |= {f"stages[{number}].{key}": value for key, value in own.items() if not _is_free(key)}
    return values


def _is_free(key: str) -> bool:
    return any(f"{key}.".startswith(f"{free}.") for free in _FREE)


def _flatten(values: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(values, Mapping):
        return {path: values}
    prefix = f"{path}." if path else ""
    return {key: leaf for name, value in values.items() for key, leaf in _flatten(value, prefix + name).items()}
