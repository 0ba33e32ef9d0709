"""The typed configuration of a run: frozen dataclasses, read from YAML and from ``key.path=value`` overrides.

Every mistake is a one-line ``ValueError`` that names the key, what was found and what would work. This file imports
neither jax nor posjax, so that a mistake in a config is reported at once.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import yaml


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_positive(section: str, owner: Any, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        _check(value > 0, f"{section}.{name} must be positive, found {value}")


def _check_fraction(name: str, value: float) -> None:
    _check(0 <= value < 1, f"{name} must be at least 0 and below 1, found {value}")


def _unknown(path: str, found: Any, known: Sequence[str], what: str) -> ValueError:
    near = get_close_matches(str(found), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ValueError(f"{path}: unknown {what} {found!r}{hint} (known: {', '.join(known)})")


@dataclass(frozen=True)
class DataConfig:
    """Which text to read. Every file (.txt, .py) or line (.jsonl) is a document; whole documents are held out."""

    source: Literal["stdlib", "files"] = "stdlib"  # Python's own standard library, or `paths`
    paths: tuple[str, ...] = ()  # files or globs of .txt and .jsonl
    text_key: str = "text"  # where a .jsonl line keeps its text
    held_out: float = 0.05  # share of the documents kept from training, for evaluation

    def __post_init__(self):
        _check_fraction("data.held_out", self.held_out)
        if self.source == "files":
            _check(bool(self.paths), "data.paths is empty: name the .txt or .jsonl files (or globs) to read")
        else:
            _check(not self.paths, f"data.paths is read only with data.source=files, found source {self.source!r}")


@dataclass(frozen=True)
class ModelConfig:
    """The fields of `posjax.nn.DecoderConfig` but the scheme and the vocabulary, which have their own places."""

    num_layers: int = 2
    model_dim: int = 96
    num_heads: int = 4
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mlp_dim: int | None = None
    activation: Literal["swiglu", "gelu"] = "swiglu"
    tied_head: bool = True
    causal: bool = True  # False trains a bidirectional encoder with the masked-token loss
    compute_dtype: Literal["float32", "bfloat16"] = "float32"  # parameters are float32 always
    remat: Literal["none", "full", "dots"] = "none"
    scan_layers: bool = True
    implementation: str | None = None  # the attention backend; None picks the best one that can

    def __post_init__(self):
        _check_positive("model", self, "num_layers", "model_dim", "num_heads")


@dataclass(frozen=True)
class SchemeConfig:
    """A position scheme: ``rope``, or ``{name: rope, label: ..., extend: {...}, option: value, ...}``.

    `options` go to ``posjax.scheme(name, **options)``. `extend` goes to ``Scheme.extend`` after training, without
    retraining: the run is trained as ``trained()`` and evaluated extended.
    """

    name: str = "rope"
    label: str = ""  # in tables and figures; the name unless given
    options: Mapping[str, Any] = field(default_factory=dict)
    extend: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        object.__setattr__(self, "label", self.label or self.name)

    def trained(self) -> SchemeConfig:
        """What is trained: the same scheme without label and extension. Entries that agree here share one training."""
        return SchemeConfig(self.name, options=self.options)


@dataclass(frozen=True)
class MeshConfig:
    """How many devices lie along each axis of the mesh; -1 takes all that are left."""

    data: int = -1

    def __post_init__(self):
        _check(self.data == -1 or self.data > 0, f"train.mesh.data must be positive, or -1 for all, found {self.data}")


@dataclass(frozen=True)
class TrainConfig:
    """One run of training: `steps` updates of `batch_tokens` tokens each, in rows of `length` tokens."""

    length: int = 32
    batch_tokens: int = 2048  # over all devices
    steps: int = 700
    learning_rate: float = 3e-3  # the peak, reached after warm-up
    final_learning_rate: float = 0.1  # the cosine's end, as a share of the peak
    warmup_steps: int = 50
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1  # on matrices only
    clip_norm: float = 1.0
    redraw_every: int = 0  # steps between new random features of Performer; 0 keeps the first ones
    mask_rate: float = 0.15  # share of the tokens to be predicted when model.causal is false
    checkpoint_every: int = 500
    keep: int = 2  # how many checkpoints stay; the newest ones
    log_every: int = 10
    mesh: MeshConfig = field(default_factory=MeshConfig)

    def __post_init__(self):
        _check_positive("train", self, "length", "batch_tokens", "steps", "learning_rate", "clip_norm")
        _check_positive("train", self, "checkpoint_every", "keep", "log_every", "mask_rate")
        for name in ("beta1", "beta2", "mask_rate"):
            _check_fraction(f"train.{name}", getattr(self, name))
        _check(self.redraw_every >= 0, f"train.redraw_every must not be negative, found {self.redraw_every}")
        _check(self.weight_decay >= 0, f"train.weight_decay must not be negative, found {self.weight_decay}")
        _check(
            0 <= self.final_learning_rate <= 1,
            f"train.final_learning_rate is a share of the peak, from 0 to 1, found {self.final_learning_rate}",
        )
        _check(
            0 <= self.warmup_steps < self.steps,
            f"train.warmup_steps must be at least 0 and below train.steps ({self.steps}), found {self.warmup_steps}",
        )
        rows = max(1, round(self.batch_tokens / self.length))
        _check(
            self.batch_tokens % self.length == 0,
            f"train.batch_tokens must be a multiple of train.length ({self.length}), found {self.batch_tokens}; "
            f"{rows * self.length} would work",
        )

    @property
    def rows(self) -> int:
        """Rows in a batch, over all devices."""
        return self.batch_tokens // self.length


@dataclass(frozen=True)
class EvaluateConfig:
    """Perplexity on the held-out documents, in windows of each length."""

    lengths: tuple[int, ...] = (32, 64, 128, 256, 512)
    tokens: int = 131072  # tokens measured at each length
    batch_tokens: int = 4096  # tokens computed at a time

    def __post_init__(self):
        _check_positive("evaluate", self, "tokens", "batch_tokens")
        _check(bool(self.lengths), "evaluate.lengths is empty: name at least one length")
        _check(min(self.lengths) > 1, f"evaluate.lengths must all be above 1, found {min(self.lengths)}")
        rising = all(a < b for a, b in zip(self.lengths, self.lengths[1:], strict=False))
        _check(rising, f"evaluate.lengths must rise, found {list(self.lengths)}")
        longest = self.lengths[-1]
        for name in ("tokens", "batch_tokens"):
            value = getattr(self, name)
            _check(value >= longest, f"evaluate.{name} must hold the longest window ({longest}), found {value}")


@dataclass(frozen=True)
class CompareConfig:
    """The schemes and seeds that ``compare`` trains over the one base config."""

    seeds: tuple[int, ...] = (0,)
    schemes: tuple[SchemeConfig, ...] = ()

    def __post_init__(self):
        _check(bool(self.seeds), "compare.seeds is empty: name at least one seed")
        for seed in self.seeds:
            _check_seed("compare.seeds", seed)
        _check_distinct("compare.seeds", self.seeds, "leave one out")
        _check_distinct("compare.schemes", [entry.label for entry in self.schemes], "give one of them its own label")


def _check_seed(name: str, seed: int) -> None:
    _check(0 <= seed < 2**32, f"{name} must be at least 0 and below 2**32, found {seed}")


def _check_distinct(name: str, values: Sequence[Any], remedy: str) -> None:
    twice = [value for index, value in enumerate(values) if value in values[:index]]
    _check(not twice, f"{name}: {twice[0] if twice else None!r} stands there twice; {remedy}")


@dataclass(frozen=True)
class Config:
    """Everything that decides a run. The run's directory is ``{output}/{name}``."""

    name: str = "run"
    output: str = "runs"
    seed: int = 0
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    scheme: SchemeConfig = field(default_factory=SchemeConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)

    def __post_init__(self):
        _check(bool(self.name), "name is empty: it names the run's directory")
        _check("://" not in self.output, f"output must be a local folder, found {self.output!r}")
        _check_seed("seed", self.seed)

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return Path(self.output) / self.name


# What may change between the start of a run and its resumption without changing a single number of the training.
_FREE_SECTIONS = ("name", "output", "evaluate", "compare", "scheme.label", "scheme.extend")
_FREE_TRAIN = ("train.mesh", "train.checkpoint_every", "train.keep", "train.log_every")


def load(path: str | Path, overrides: Sequence[str] = (), kind: type = Config) -> Any:
    """Reads a YAML file, applies ``key.path=value`` overrides (values are YAML), and checks everything.

    `kind` is the dataclass to make: a `Config`, or that of another command.
    Raises FileNotFoundError without the file and ValueError for anything wrong inside it, in one line.
    A config without a name takes the file's.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no config file {str(path)!r}")
    values = _read_yaml(path.read_text(encoding="utf-8"), str(path))
    values = {} if values is None else values
    _check(isinstance(values, dict), f"{path}: a config is a mapping of keys to values, found {values!r}")
    for override in overrides:
        _override(values, override)
    values.setdefault("name", path.stem)
    return parse(values, kind)


def parse_text(text: str, where: str, kind: type = Config) -> Any:
    """A config from YAML text that `dump` wrote; `where` names it in errors."""
    values = _read_yaml(text, where)
    _check(isinstance(values, dict), f"{where}: a config is a mapping of keys to values, found {values!r}")
    return parse(values, kind)


def parse(values: Mapping[str, Any], kind: type = Config) -> Any:
    """A config from the plain mapping that YAML gives; unknown keys, wrong types and bad values are refused."""
    return _section(values, kind, "")


def to_dict(config: Any) -> dict[str, Any]:
    """The plain mapping of a config: ``parse(to_dict(config)) == config``, with every default spelled out."""
    return _plain(config)


def dump(config: Config) -> str:
    """The config as YAML text, with every default spelled out."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def differences(saved: Config, found: Config) -> list[str]:
    """What differs between two configs among the keys that decide the training, as ``key: saved, now found``."""
    before, after = _flatten(to_dict(saved)), _flatten(to_dict(found))
    keys = [key for key in dict.fromkeys([*before, *after]) if not _is_free(key)]
    return [
        f"{key} was {before.get(key)!r}, now {after.get(key)!r}" for key in keys if before.get(key) != after.get(key)
    ]


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(free + ".") for free in _FREE_SECTIONS + _FREE_TRAIN)


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
    _check(bool(equals and key), f"override {override!r}: write key.path=value, as in train.steps=100")
    *sections, last = key.split(".")
    for depth, name in enumerate(sections):
        values[name] = {} if values.get(name) is None else values[name]
        values = values[name]
        where = ".".join(sections[: depth + 1])
        _check(isinstance(values, dict), f"override {override!r}: {where} is a value, not a section")
    values[last] = _read_yaml(text, f"override {override!r}")


def _section(values: Any, kind: type, path: str) -> Any:
    """The dataclass `kind` from a mapping."""
    _check(isinstance(values, Mapping), f"{path}: expected a section of keys, found {values!r}")
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in hints:
            raise _unknown(path or "config", key, list(hints), "key")
    prefix = f"{path}." if path else ""
    return kind(**{key: _convert(value, hints[key], prefix + key) for key, value in values.items()})


def _scheme(values: Any, path: str) -> SchemeConfig:
    """A scheme entry: a name, or a mapping with a name; the keys beyond the three known ones are options."""
    if isinstance(values, str):
        return SchemeConfig(values)
    _check(
        isinstance(values, Mapping) and "name" in values,
        f"{path}: expected a scheme's name or {{name: ..., option: value}}, found {values!r}",
    )
    known = {key: _convert(values[key], str, f"{path}.{key}") for key in ("name", "label") if key in values}
    extend = _convert(values.get("extend", {}), Mapping, f"{path}.extend")
    options = {key: value for key, value in values.items() if key not in ("name", "label", "extend")}
    for key in (*options, *extend):
        _check(isinstance(key, str), f"{path}: expected the name of an option, found {key!r}")
    return SchemeConfig(**known, options=options, extend=extend)


def _convert(value: Any, kind: Any, path: str) -> Any:
    """`value` as the annotated type `kind`, or a ValueError that names `path`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is SchemeConfig:
        return _scheme(value, path)
    if dataclasses.is_dataclass(kind):
        return _section(value, kind, path)
    if origin is types.UnionType:
        return None if value is None else _convert(value, arguments[0], path)
    if origin is tuple:
        value = [value] if isinstance(value, str) and arguments[0] is str else value
        _check(isinstance(value, list | tuple), f"{path}: expected a list, found {value!r}")
        return tuple(_convert(item, arguments[0], f"{path}[{index}]") for index, item in enumerate(value))
    if origin is Literal:
        if value not in arguments:
            raise _unknown(path, value, arguments, "value")
        return value
    if kind is Mapping:
        _check(isinstance(value, Mapping), f"{path}: expected a section of keys, found {value!r}")
        return dict(value)
    return _scalar(value, kind, path)


def _scalar(value: Any, kind: type, path: str) -> Any:
    """An int, float, bool or str. A whole number is a float too; a bool is never a number."""
    wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
    accepted = (int, float) if kind is float else kind
    right = isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))
    _check(right, f"{path}: expected {wanted}, found {value!r}")
    _check(kind is not float or math.isfinite(value), f"{path}: expected a finite number, found {value!r}")
    return kind(value)


def _plain(value: Any) -> Any:
    if isinstance(value, SchemeConfig):
        extend = {"extend": _plain(value.extend)} if value.extend else {}
        return {"name": value.name, "label": value.label, **extend, **_plain(value.options)}
    if dataclasses.is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
