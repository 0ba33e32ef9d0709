"""The config of a run, and those of its stages."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.config.settings.checks import check, check_seed, unknown
from train.config.settings.compare import CompareConfig
from train.config.settings.data import DataConfig
from train.config.settings.evaluate import EvaluateConfig
from train.config.settings.model import InitConfig, ModelConfig, SchemeConfig, StageConfig
from train.config.settings.train import MonitorConfig, TrainConfig
from train.config.typed import changed, scheme, to_dict
from train.runtime.paths import check_output, path


@dataclass(frozen=True)
class Config:
    """Everything that decides a run. The run's directory is ``{output}/{name}``.

    `stages` makes a curriculum: a list of ``{name: ..., train: {...}, data: {...}, scheme: ..., extend: {...}}``.
    Omitted keys are inherited from the stage before, or from the config itself for the first stage. Each stage starts
    from the weights of the previous stage, with a schedule of its own, and with a new optimizer unless
    ``train.keep_moments``. `scheme` replaces the scheme; `extend` changes options of the current one, as in ``extend:
    {frequencies: {name: yarn, ...}}``; text that `data` names replaces the text before. A config without stages is a
    run of one stage.

    `init` is the path of a released model, or its name at the Hugging Face hub, from which the training starts: shape,
    scheme and tokenizer are those of the model, so that `model` needs none of its keys, and `scheme` is ``released``
    unless it names another.

    `imports` names modules that are imported before the scheme is built: those that register methods of one's own
    (``posjax.register``). They must be importable (in the working directory, on PYTHONPATH or installed) wherever the
    run is used.
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
    stages: tuple[StageConfig, ...] = ()
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
            "train.steps must be positive, found 0; 0 measures a released model, which must be named, as in init=PATH",
        )
        check_seed("seed", self.seed)
        check(not self.scheme.train, "scheme.train belongs to entries of compare.schemes; set keys of train here")
        object.__setattr__(self, "_resolved", self._resolve())
        check(
            not any(stage.train.stop_loss for stage in self._resolved),
            "train.stop_loss works only without stages; leave out one of them",
        )
        check(
            not any(stage.data.has_conversations and not stage.model.causal for stage in self.every_stage),
            "data.messages_key: a turn is learned from what is before it; model.causal=true would work",
        )
        folders = self._local_folders()
        check(
            len(folders) < 2,
            f"train.local_folder: one folder has the local checkpoints of all stages, found {' and '.join(folders)}; "
            "name one in train, and leave it out of stages",
        )

    def _resolve(self) -> tuple[Config, ...]:
        """The config of every stage, each without stages; empty if the config has no stages."""
        resolved = [self]
        for number, stage in enumerate(self.stages):
            try:
                resolved.append(_next_stage(resolved[-1], stage))
            except ValueError as error:
                raise ValueError(f"stages[{number}]: {error}") from None
        return tuple(resolved[1:])

    def _local_folders(self) -> list[str]:
        """The local folders of the stages that save local checkpoints, each once."""
        return list(dict.fromkeys(stage.train.local_folder for stage in self.every_stage if stage.train.local_every))

    @property
    def local_folder(self) -> str:
        """The folder of local checkpoints on every host; empty if no stage saves any."""
        return next(iter(self._local_folders()), "")

    @property
    def stage_names(self) -> tuple[str, ...]:
        """The name of every stage; its number if it has no name."""
        return tuple(stage.name or str(n) for n, stage in enumerate(self.stages)) or ("0",)

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
        return sum(stage.train.steps for stage in self.every_stage)

    @property
    def every_stage(self) -> tuple[Config, ...]:
        """The config of every stage, each without stages; the config itself if it has no stages."""
        return self._resolved or (self,)

    def stage(self, number: int) -> Config:
        """The config of one stage, by its number."""
        return self.every_stage[number]

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return path(self.output) / self.name


def _next_stage(before: Config, stage: StageConfig) -> Config:
    """The config of a stage: that of the stage before, with its changes."""
    entry = before.scheme if stage.scheme is None else stage.scheme
    if stage.extend:
        entry = scheme({**to_dict(entry), **stage.extend}, "scheme")
    train, data = changed(before.train, stage.train, "train"), _next_data(before.data, stage.data)
    return dataclasses.replace(before, stages=(), scheme=entry, train=train, data=data)


def _next_data(before: DataConfig, changes: Mapping[str, Any]) -> DataConfig:
    """The ``data`` of a stage: if it names text, that replaces all previous text; the model's tokenizer stays."""
    names_text = not changes.keys().isdisjoint(("source", "paths", "mixture"))
    after = changed(before, ({"paths": [], "mixture": []} if names_text else {}) | dict(changes), "data")
    for key in ("tokenizer", "special_tokens", "chat_template"):
        old, new = getattr(before, key), getattr(after, key)
        check(old == new, f"data.{key}: the model has that of the stage before, {old!r}, found {new!r}; leave it out")
    return after


def about_sections() -> dict[str, str]:
    """The sections of a config by name, each with the first line of its dataclass's docstring as plain text."""
    kinds = {name: _kind(hint) for name, hint in typing.get_type_hints(Config).items()}
    return {name: _first_line(kind) for name, kind in kinds.items() if dataclasses.is_dataclass(kind)}


def keys_beside_sections() -> list[str]:
    """The keys of a config that are not sections."""
    return [field.name for field in dataclasses.fields(Config) if field.name not in about_sections()]


def _kind(hint: Any) -> Any:
    """The type of a key; for a list the type of its items."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint


def _first_line(kind: type) -> str:
    return inspect.getdoc(kind).partition("\n")[0].replace("`", "")
