"""Configs from YAML and from ``key.path=value`` overrides.

Every error is a one-line ``ValueError`` that names the key, what was found and what would work. Nothing here imports
jax or posjax unless a config names a released model, so that an error is reported at once.
"""

import importlib
import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from train.config.config import Config
from train.config.settings.checks import check
from train.config.typed import section, to_dict
from train.runtime.paths import path


def load(location: str | Path, overrides: Sequence[str] = (), kind: type = Config) -> Any:
    """Reads a YAML file, local or at a URL, applies ``key.path=value`` overrides, and checks everything.

    `kind` is the dataclass to make: a `Config`, or that of another command. Values of overrides are YAML. Raises
    FileNotFoundError if there is no such file, and a one-line ValueError for anything wrong in it. A config without a
    name gets the file's name.
    """
    location = path(location)
    if not location.is_file():
        folder = "; it is a folder: the config of a run is the config.yaml in it" if location.is_dir() else ""
        raise FileNotFoundError(f"no config file {str(location)!r}{folder}")
    try:
        text = location.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{location}: not a text in UTF-8: {error.reason} at byte {error.start}") from None
    values = _read_yaml(text, str(location))
    values = {} if values is None else values
    check(isinstance(values, dict), f"{location}: a config is a mapping of keys to values, found {values!r}")
    return load_values({"name": location.stem, **values}, overrides, kind)


def load_values(values: dict[str, Any], overrides: Sequence[str] = (), kind: type = Config) -> Any:
    """A config from the mapping that YAML gives, with overrides; errors are as in `load`."""
    for override in overrides:
        _override(values, override)
    return parse(values, kind)


def parse_text(text: str, where: str, kind: type = Config) -> Any:
    """A config from YAML text that `dump` wrote; `where` names it in errors."""
    values = _read_yaml(text, where)
    check(isinstance(values, dict), f"{where}: a config is a mapping of keys to values, found {values!r}")
    return parse(values, kind)


def parse(values: Mapping[str, Any], kind: type = Config) -> Any:
    """A config from the plain mapping that YAML gives; unknown keys, wrong types and bad values are refused.

    A released model under `init` fills in keys that the config omits. The modules named under `imports` are imported.
    """
    if kind is Config and isinstance(values, Mapping) and _starts_from(values.get("init")):
        from train.config.released import resolved  # imports jax, which a config without init does not need

        values = resolved(values)
    config = section(values, kind, "")
    for name in getattr(config, "imports", ()):
        _import(name)
    return config


def _starts_from(init: Any) -> bool:
    """Whether a config names a released model."""
    return bool(init.get("path") if isinstance(init, Mapping) else init)


def _import(name: str) -> None:
    """Imports a module. Raises a one-line ValueError if there is none, or if its import fails."""
    try:
        importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            where = "the working directory or on PYTHONPATH"
            raise ValueError(f"imports: there is no module {name!r} in {where}") from None
        line = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {error}, in {line.filename}, line {line.lineno}"
        raise ValueError(f"imports: {name!r} cannot be imported: {why}") from error


def dump(config: Config) -> str:
    """The config as YAML text, with every default spelled out."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """A loader that reads ``1e-3`` as a number; in YAML 1.1 it is text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _read_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "unreadable"
        raise ValueError(f"{where}{line}: not valid YAML: {problem}") from None


def _override(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    check(bool(equals and key), f"override {override!r}: write key.path=value, as in train.steps=100")
    *sections, last = key.split(".")
    for depth, name in enumerate(sections):
        values[name] = {} if values.get(name) is None else values[name]
        values = values[name]
        where = ".".join(sections[: depth + 1])
        check(isinstance(values, dict), f"override {override!r}: {where} is a value, not a section")
    values[last] = _read_yaml(text, f"override {override!r}")
