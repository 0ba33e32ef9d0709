"""The typed configuration of a run: frozen dataclasses, read from YAML and from ``key.path=value`` overrides.

Every mistake is a one-line ``ValueError`` that names the key, what was found and what would work. This file imports
neither jax nor posjax, so that a mistake in a config is reported at once.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
import traceback
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from train.paths import check_output, path
from train.settings import (
    CompareConfig,
    ContextConfig,
    DataConfig,
    EvaluateConfig,
    InitConfig,
    MeshConfig,
    ModelConfig,
    MonitorConfig,
    SchemeConfig,
    TrainConfig,
)
from train.settings.checks import check, check_seed, unknown

__all__ = [
    "CompareConfig",
    "Config",
    "ContextConfig",
    "DataConfig",
    "EvaluateConfig",
    "InitConfig",
    "MeshConfig",
    "ModelConfig",
    "MonitorConfig",
    "SchemeConfig",
    "TrainConfig",
    "differences",
    "dump",
    "load",
    "parse",
    "parse_text",
    "to_dict",
]


@dataclass(frozen=True)
class Config:
    """Everything that decides a run. The run's directory is ``{output}/{name}``.

    `stages` makes a curriculum: a list of ``{name: ..., train: {...}, scheme: ..., extend: {...}}``. What a stage
    leaves out stays as in the stage before it, the first one's as in the config itself; each starts from the weights of
    the one before, with an optimizer and a schedule of its own. `scheme` is another scheme, `extend` changes options of
    the one there is, as in ``extend: {frequencies: {name: yarn, ...}}``. Without stages the run is one.

    `init` is the path of a released model, from which the training starts: shape, scheme and tokenizer are those of the
    model, so that `model` needs none of its keys, and `scheme` is ``released`` unless it names another.

    `imports` names modules that are imported before the scheme is built: those that register methods of one's own
    (``posjax.register``). They lie in the working directory, on PYTHONPATH or are installed, wherever the run is used.
    """

    name: str = "run"
    output: str = "runs"
    seed: int = 0
    imports: tuple[str, ...] = ()
    init: InitConfig = field(default_factory=InitConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    scheme: SchemeConfig = field(default_factory=SchemeConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    stages: tuple[Mapping, ...] = ()
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)

    def __post_init__(self):
        check(bool(self.name), "name is empty: it names the run's directory")
        outside = self.name.startswith("/") or ".." in self.name.split("/")
        check(
            not outside, f"name: the run's directory lies in output, found {self.name!r}; set output for another place"
        )
        check_output(self.output)
        check(
            self.train.steps > 0 or bool(self.init.path),
            "train.steps must be positive, found 0; with 0 a released model is measured, named as in init=PATH",
        )
        check_seed("seed", self.seed)
        for number in range(len(self.stages)):
            self.stage(number)

    @property
    def stage_names(self) -> tuple[str, ...]:
        """The name of every stage; its number where it has none."""
        return tuple(str(stage.get("name", n)) for n, stage in enumerate(self.stages)) or ("0",)

    def stage_number(self, name: str) -> int:
        """The number of a stage by its name, the last one's without a name. Raises ValueError for an unknown name."""
        if not name:
            return len(self.stage_names) - 1
        if name not in self.stage_names:
            raise unknown("stage", name, self.stage_names, "stage")
        return self.stage_names.index(name)

    @property
    def steps(self) -> int:
        """Updates of all stages."""
        return sum(self.stage(number).train.steps for number in range(len(self.stage_names)))

    def stage(self, number: int) -> Config:
        """The config of one stage, without stages. Raises ValueError for a stage that is no good, by its number."""
        values = to_dict(dataclasses.replace(self, stages=()))
        for n, stage in enumerate(self.stages[: number + 1]):
            try:
                values = _with_stage(values, stage)
                resolved = parse(values)
            except ValueError as error:
                raise ValueError(f"stages[{n}]: {error}") from None
        return resolved if self.stages else self

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return path(self.output) / self.name


def _with_stage(values: dict[str, Any], stage: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping of a config with what a stage changes."""
    known = ("name", "train", "scheme", "extend")
    for key in stage:
        if key not in known:
            raise unknown("a stage", key, known, "key")
    for key in ("train", "extend"):
        check(isinstance(stage.get(key, {}), Mapping), f"{key}: expected a section of keys, found {stage.get(key)!r}")
    scheme = stage.get("scheme", values["scheme"])
    check(
        isinstance(scheme, str | Mapping), f"scheme: expected a name or {{name: ..., option: value}}, found {scheme!r}"
    )
    if "extend" in stage:
        scheme = {**({"name": scheme} if isinstance(scheme, str) else scheme), **stage["extend"]}
    return {**values, "train": _merged(values["train"], stage.get("train", {})), "scheme": scheme}


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `changes`, section by section."""

    def both(key: str, change: Any) -> Any:
        sections = isinstance(change, Mapping) and isinstance(values.get(key), Mapping)
        return _merged(values[key], change) if sections else change

    return {**values, **{key: both(key, change) for key, change in changes.items()}}


# What may change between the start of a run and its resumption without changing a single number of the training.
_FREE_SECTIONS = ("name", "output", "imports", "init.path", "data.cache", "monitor", "evaluate", "compare")
# How a model computes, not what: equal up to rounding, and another mesh may need another.
_FREE_MODEL = ("model.remat", "model.scan_layers")
_FREE_SCHEME = ("scheme.label", "scheme.extend", "scheme.stage")
_FREE_TRAIN = (
    "train.mesh",
    "train.context",
    "train.loss_chunks",
    "train.checkpoint_every",
    "train.keep",
    "train.log_every",
)


def load(path: str | Path, overrides: Sequence[str] = (), kind: type = Config) -> Any:
    """Reads a YAML file, applies ``key.path=value`` overrides (values are YAML), and checks everything.

    `kind` is the dataclass to make: a `Config`, or that of another command.
    Raises FileNotFoundError without the file and ValueError for anything wrong inside it, in one line.
    A config without a name takes the file's.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no config file {str(path)!r}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text in UTF-8: {error.reason} at byte {error.start}") from None
    values = _read_yaml(text, str(path))
    values = {} if values is None else values
    check(isinstance(values, dict), f"{path}: a config is a mapping of keys to values, found {values!r}")
    return load_values({"name": path.stem, **values}, overrides, kind)


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

    A released model under `init` fills in what the config leaves to it. The modules named under `imports` are imported.
    """
    if kind is Config and isinstance(values, Mapping) and _starts_from(values.get("init")):
        from train.released import resolved  # which imports jax, as a config without init need not

        values = resolved(values)
    config = _section(values, kind, "")
    for name in getattr(config, "imports", ()):
        _import(name)
    return config


def _starts_from(init: Any) -> bool:
    """Whether a config names a released model."""
    return bool(init.get("path") if isinstance(init, Mapping) else init)


def _import(name: str) -> None:
    """Imports a module. Raises ValueError where there is none, or where it fails, in one line."""
    try:
        importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            where = "the working directory or on PYTHONPATH"
            raise ValueError(f"imports: there is no module {name!r} in {where}") from None
        line = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {error}, in {line.filename}, line {line.lineno}"
        raise ValueError(f"imports: {name!r} cannot be imported: {why}") from error


def to_dict(config: Any) -> dict[str, Any]:
    """The plain mapping of a config: ``parse(to_dict(config)) == config``, with every default spelled out."""
    return _plain(config)


def dump(config: Config) -> str:
    """The config as YAML text, with every default spelled out."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def differences(saved: Config, found: Config) -> list[str]:
    """What differs between two configs among the keys that decide the training, as ``key: saved, now found``."""
    before, after = _decisive(saved), _decisive(found)
    keys = [key for key in dict.fromkeys([*before, *after]) if not _is_free(key)]
    return [
        f"{key} was {before.get(key)!r}, now {after.get(key)!r}" for key in keys if before.get(key) != after.get(key)
    ]


def _decisive(config: Config) -> dict[str, Any]:
    """Every key with its value, those of the stages as they are when filled in."""
    values = _flatten({**to_dict(config), "stages": len(config.stages)})
    if config.init.path and config.data.tokenizer == own_tokenizer(config.init.path):
        values["data.tokenizer"] = "that of the model under init"  # wherever that lies by now
    for number in range(len(config.stages)):
        stage = to_dict(config.stage(number))
        own = _flatten({name: stage[name] for name in ("train", "scheme")})
        values |= {f"stages[{number}].{key}": value for key, value in own.items() if not _is_free(key)}
    return values


def own_tokenizer(path: str) -> str:
    """Where the tokenizer of a released model is."""
    return path if path.endswith(".gguf") else f"{path.rstrip('/')}/tokenizer.json"


def _is_free(key: str) -> bool:
    return any(
        key == free or key.startswith(free + ".") for free in _FREE_SECTIONS + _FREE_MODEL + _FREE_SCHEME + _FREE_TRAIN
    )


def _flatten(values: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(values, Mapping):
        return {path: values}
    prefix = f"{path}." if path else ""
    return {key: leaf for name, value in values.items() for key, leaf in _flatten(value, prefix + name).items()}


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads ``1e-3`` as text; here it is a number, as everywhere else."""


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


def _section(values: Any, kind: type, path: str) -> Any:
    """The dataclass `kind` from a mapping."""
    check(isinstance(values, Mapping), f"{path}: expected a section of keys, found {values!r}")
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in hints:
            raise unknown(path or "config", key, list(hints), "key")
    prefix = f"{path}." if path else ""
    return kind(**{key: _convert(value, hints[key], prefix + key) for key, value in values.items()})


def _scheme(values: Any, path: str) -> SchemeConfig:
    """A scheme entry: a name, or a mapping with a name; the keys beyond the three known ones are options."""
    if isinstance(values, str):
        return SchemeConfig(values)
    check(
        isinstance(values, Mapping) and "name" in values,
        f"{path}: expected a scheme's name or {{name: ..., option: value}}, found {values!r}",
    )
    known = {key: _convert(values[key], str, f"{path}.{key}") for key in ("name", "label", "stage") if key in values}
    extend = _convert(values.get("extend", {}), Mapping, f"{path}.extend")
    options = {key: value for key, value in values.items() if key not in ("name", "label", "extend", "stage")}
    for key in (*options, *extend):
        check(isinstance(key, str), f"{path}: expected the name of an option, found {key!r}")
    return SchemeConfig(**known, options=options, extend=extend)


def _convert(value: Any, kind: Any, path: str) -> Any:
    """`value` as the annotated type `kind`, or a ValueError that names `path`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is SchemeConfig:
        return _scheme(value, path)
    if kind is InitConfig and isinstance(value, str):
        return InitConfig(value)
    if dataclasses.is_dataclass(kind):
        return _section(value, kind, path)
    if origin is types.UnionType:
        return None if value is None else _convert(value, arguments[0], path)
    if origin is tuple:
        value = [value] if isinstance(value, str) and arguments[0] is str else value
        check(isinstance(value, list | tuple), f"{path}: expected a list, found {value!r}")
        return tuple(_convert(item, arguments[0], f"{path}[{index}]") for index, item in enumerate(value))
    if origin is Literal:
        if value not in arguments:
            raise unknown(path, value, arguments, "value")
        return value
    if kind is Mapping:
        check(isinstance(value, Mapping), f"{path}: expected a section of keys, found {value!r}")
        return dict(value)
    return _scalar(value, kind, path)


def _scalar(value: Any, kind: type, path: str) -> Any:
    """An int, float, bool or str. A whole number is a float too; a bool is never a number."""
    wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
    accepted = (int, float) if kind is float else kind
    right = isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))
    check(right, f"{path}: expected {wanted}, found {value!r}")
    check(kind is not float or math.isfinite(value), f"{path}: expected a finite number, found {value!r}")
    return kind(value)


def _plain(value: Any) -> Any:
    if isinstance(value, SchemeConfig):
        extend = {"extend": _plain(value.extend)} if value.extend else {}
        extend |= {"stage": value.stage} if value.stage else {}
        return {"name": value.name, "label": value.label, **extend, **_plain(value.options)}
    if dataclasses.is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
