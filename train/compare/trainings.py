"""The trainings of a comparison: each scheme that is trained, with every seed.

Each (scheme, seed) trains in its own process, or several share one (`processes.py`); ``compare.together`` trainings of
one scheme run as one program. Entries that extend a scheme without retraining are measured by the process that trained
it. With ``compare.sweep``, trials first choose the learning rates of every scheme (`sweep.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from rich.console import Console

from train.checkpoint.directory import RESULTS, read_config, refuse_another
from train.compare.processes import run_trainings
from train.compare.sweep import file_name, own_section, sweep, tuned
from train.compare.training import finished
from train.config import CompareConfig, Config, SchemeConfig
from train.config.settings.checks import check
from train.config.typed import changed
from train.evaluate.perplexity import Perplexity
from train.evaluate.saved import check_causal, evaluation_documents
from train.model.build import Setup, as_released, check_model, evaluated_scheme, learned_positions
from train.model.convert import check_continues
from train.report.numbers import Row
from train.runtime.lines import in_a_line
from train.runtime.rows import read_rows


class Trainings:
    """What a comparison trains and measures, the reasons of `failures`, and the `trials` that chose learning rates.

    Raises ValueError, before anything is trained, for a list of schemes that cannot be compared.
    """

    def __init__(self, config: Config, console: Console):
        self._settings, self._console = config.compare, console
        self._sweeps = bool(config.compare.sweep.learning_rate)
        self._groups = trainings(config)
        self.failures: dict[str, str] = {}
        self.trials: list[Row] = []
        if not self._sweeps:
            _refuse_others(self._trainings)
        # Encoded here once, for all trainings.
        setup = Setup(replace(config, output=str(config.directory)))
        self.documents = evaluation_documents(setup)
        if self._sweeps:
            evaluation_documents(setup, trials=True)

    @property
    def count(self) -> int:
        """The number of trainings."""
        return len(self._trainings)

    @property
    def _trainings(self) -> list[Config]:
        return [training for group in self._groups for training in group]

    @property
    def trained_in(self) -> Path:
        """The directory of a training that has results."""
        return next(training.directory for training in self._trainings if finished(training))

    def run(self) -> None:
        """Trains and measures everything; where trials choose rates, they are first."""
        if self._sweeps:
            bases = _selected_bases(self._settings)
            self._groups = [self._tuned(*each) for each in zip(bases, self._groups, strict=True)]
        asked = [training for training in self._trainings if training.name not in self.failures]
        _refuse_others(asked)
        self.failures |= run_trainings(asked, self._settings, self._console)

    def rows(self) -> list[Row]:
        """The rows of all finished trainings, and those of failures; none if nothing is finished."""
        done = [row for each in self._trainings if finished(each) for row in read_rows(each.directory / RESULTS)]
        failed = [training for training in self._trainings if training.name in self.failures]
        return done and done + [row for each in failed for row in _failed(each, self.failures[each.name])]

    def _tuned(self, base: SchemeConfig, group: list[Config]) -> list[Config]:
        """The trainings of a scheme with the rates of its best trial, unless it has its own rate; notes a failure."""
        if "learning_rate" in base.train:
            return group
        try:
            choice, trials = sweep(group[0], self._settings.sweep, self._run_trials)
            names = learned_positions(Setup(group[0]))
            for tried, rows in trials.items():
                columns = {"label": base.label, **tried._asdict(), "chosen": tried == choice}
                self.trials += [{**row, **columns} for row in rows]
            return [tuned(training, choice, names) for training in group]
        except ValueError as error:
            why = in_a_line(error)
            self._console.print(f"{base.label}: {why}", style="red", markup=False)
            self.failures |= dict.fromkeys((training.name for training in group), why)
            return group

    def _run_trials(self, configs: Sequence[Config]) -> list[list[Row]]:
        _refuse_others(configs)
        for name, error in run_trainings(configs, self._settings, self._console, trials=True).items():
            raise ValueError(f"trial {name}: {error}")
        return [read_rows(config.directory / RESULTS) for config in configs]


def trainings(config: Config) -> list[list[Config]]:
    """The config of every training that a comparison needs now: a group for each selected scheme, of all seeds.

    Each has a directory inside the comparison's, and a ``compare`` section with its own seed and the entries to measure
    with its parameters: first the trained one, then its extensions.

    Raises ValueError without schemes, for a scheme that cannot be built, for an extension of a scheme that is not
    trained here, and for models without a perplexity.
    """
    check_causal(config)
    entries = config.compare.schemes
    if not entries:
        raise ValueError("compare.schemes is empty: list the schemes to compare, as in [rope, alibi]")
    bases = _bases(config.compare)
    for entry in entries:
        _check_entry(config, entry)
        trained = [base.label for base in bases if _same_training(entry, base)]
        if not trained:
            raise ValueError(
                f"compare.schemes: {entry.label!r} extends a {entry.name!r} that is not trained here; "
                f"list {entry.name!r} with the same options and train, without extend and stage"
            )
        if len(trained) > 1:
            raise ValueError(f"compare.schemes: {trained[0]!r} and {trained[1]!r} are the same; leave one out")
    selected = _selected_bases(config.compare)
    planned = [[_member(config, base, seed) for seed in config.compare.seeds] for base in selected]
    if len({group[0].name for group in planned}) < len(planned):
        raise ValueError("compare.schemes: labels name directories, so they must differ by more than spaces and signs")
    return planned


def _bases(settings: CompareConfig) -> list[SchemeConfig]:
    """The entries that are trained."""
    return [entry for entry in settings.schemes if not entry.only_measured]


def _selected_bases(settings: CompareConfig) -> list[SchemeConfig]:
    """The entries to train now: those that ``compare.only`` names, and those whose extensions it names."""
    return [base for base in _bases(settings) if any(_same_training(entry, base) for entry in settings.selected)]


def _check_entry(config: Config, entry: SchemeConfig) -> None:
    """Raises ValueError, with the entry's label, for a scheme that cannot be built or does not fit the model."""
    try:
        check("length" not in entry.train, "train.length is the same for all schemes; leave it out of the entry")
        evaluated_scheme(config, entry)
        config.stage_number(entry.stage)
        if not entry.only_measured:
            _check_stages(replace(_trained_as(config, entry), scheme=replace(entry, train={})))
    except ValueError as error:
        raise ValueError(f"compare.schemes: {entry.label}: {error}") from None


def _check_stages(config: Config) -> None:
    """Raises ValueError for a stage whose scheme does not fit the model, its length or the stage before."""
    stages = [Setup(stage) for stage in config.every_stage]
    for stage in stages:
        check_model(stage)
    if config.init.path:
        check_continues(Setup(as_released(stages[0].config)), stages[0])
    for before, after in pairwise(stages):
        check_continues(before, after)


def _same_training(one: SchemeConfig, other: SchemeConfig) -> bool:
    return one.trained() == other.trained()


def _member(config: Config, base: SchemeConfig, seed: int) -> Config:
    config = _trained_as(config, base)
    extensions = [entry for entry in config.compare.schemes if entry.only_measured and _same_training(entry, base)]
    entries = tuple(replace(entry, train={}) for entry in (base, *extensions))
    return replace(
        config,
        name=f"{file_name(base.label)}-seed{seed}",
        output=str(config.directory),
        seed=seed,
        scheme=entries[0],
        compare=own_section(config, seed, entries),
    )


def _trained_as(config: Config, entry: SchemeConfig) -> Config:
    """The config with the keys of ``train`` that an entry changes."""
    return replace(config, train=changed(config.train, entry.train, "train"))


def _refuse_others(trainings: Sequence[Config]) -> None:
    """Raises ValueError if the directory of a training holds a training of another config."""
    for training in trainings:
        if (training.directory / "config.yaml").exists():
            refuse_another(read_config(training.directory), training, str(training.directory))


def _failed(training: Config, why: str) -> list[Row]:
    """The rows of a training that failed: no numbers, and the reason."""
    return [
        {
            "label": entry.label,
            "base": training.scheme.label if entry.only_measured else None,
            "seed": training.seed,
            "train_length": training.train.length,
            **Perplexity(length, error=why).as_row(),
        }
        for entry in training.compare.schemes
        for length in training.evaluate.lengths
    ]
