"""Compares schemes: one config, with several position schemes and seeds, trained, measured and reported.

Each (scheme, seed) trains in its own process, or several share one (`processes.py`); ``compare.together`` trainings of
one scheme run as one program. Entries that extend a scheme without retraining are measured by the process that trained
it. With ``compare.sweep``, trials first choose the learning rates of every scheme (`sweep.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import Console

from train import report
from train.checkpoint.directory import RESULTS, read_config, refuse_another
from train.compare.processes import run_trainings
from train.compare.study import run_study
from train.compare.sweep import TRIALS_FOLDER, file_name, own_section, sweep, tuned
from train.config import CompareConfig, Config, SchemeConfig, dump
from train.config.settings.checks import check
from train.config.typed import changed
from train.data.cache import TOKENS
from train.evaluate.about import about, read_versions
from train.evaluate.perplexity import Perplexity
from train.evaluate.saved import check_causal, evaluation_documents
from train.model.build import Setup, as_released, check_model, evaluated_scheme, learned_positions
from train.model.convert import check_continues
from train.runtime.lines import in_a_line
from train.runtime.paths import read_rows, write_file, write_rows

TRIALS = "trials.jsonl"


def compare(config: Config, console: Console | None = None) -> Path:
    """Trains and measures every scheme of ``config.compare`` with every seed, and writes the report.

    With ``train.steps: 0`` the released model under ``init`` is studied instead; see `run_study`.

    The run's directory, which is returned, gets one directory for each training, ``config.yaml``, ``results.jsonl``,
    ``figure.png`` and ``index.html``. Finished trainings and measurements are not repeated.

    Raises ValueError, before anything is trained, for a list of schemes that cannot be compared; and, after the report
    of the others is written, in one line if some trainings failed.
    """
    console = console or Console(highlight=False)
    if not config.steps:
        return run_study(config, console)
    planned = trainings(config)
    _refuse_other_things(config.directory)
    if not config.compare.sweep.learning_rate:
        _refuse_others([training for group in planned for training in group])
    # Encoded here once, for all trainings.
    held_out = evaluation_documents(replace(config, output=str(config.directory)))
    if config.compare.sweep.learning_rate:
        evaluation_documents(config, trials=True)
    config.directory.mkdir(parents=True, exist_ok=True)
    found = _Progress(config.compare, console)
    for base, group in zip(_bases(config), planned, strict=True):
        found.plan(group, tune=bool(config.compare.sweep.learning_rate) and "learning_rate" not in base.train)
    found.run()
    _report(config, found, held_out, console)
    if found.failures:
        reasons = "; ".join(f"{name}: {why}" for name, why in found.failures.items())
        count = sum(len(group) for group in planned)
        raise ValueError(f"{len(found.failures)} of {count} trainings failed: {reasons}")
    return config.directory


class _Progress:
    """The work done so far: trainings, the reasons of failures, and the trials that chose learning rates."""

    def __init__(self, settings: CompareConfig, console: Console):
        self._settings, self._console = settings, console
        self.trainings: list[Config] = []
        self.failures: dict[str, str] = {}
        self.trials: list[report.Row] = []

    def plan(self, group: Sequence[Config], tune: bool) -> None:
        """Notes the trainings of one scheme; with `tune`, trials choose its rates first."""
        group, why = self._tuned(group) if tune else (group, "")
        self.trainings += group
        if why:
            self._console.print(f"{group[0].scheme.label}: {why}", style="red", markup=False)
            self.failures |= dict.fromkeys((training.name for training in group), why)
            return
        _refuse_others(group)

    def run(self) -> None:
        """Trains and measures everything that was planned."""
        asked = [training for training in self.trainings if training.name not in self.failures]
        self.failures |= run_trainings(asked, self._settings, self._console)

    def _tuned(self, group: Sequence[Config]) -> tuple[list[Config], str]:
        """The trainings with the rates of the best trial, and the reason if there is none."""
        try:
            choice, trials = sweep(group[0], self._settings.sweep, self._run_trials)
        except ValueError as error:
            return list(group), in_a_line(error)
        label, names = group[0].scheme.label, learned_positions(Setup(group[0]))
        for trial in trials:
            columns = {"label": label, **trial.choice._asdict(), "chosen": trial.choice == choice}
            self.trials += [{**row, **columns} for row in trial.rows]
        return [tuned(training, choice, names) for training in group], ""

    def _run_trials(self, configs: Sequence[Config]) -> list[list[report.Row]]:
        _refuse_others(configs)
        for name, error in run_trainings(configs, self._settings, self._console, trials=True).items():
            raise ValueError(f"trial {name}: {error}")
        return [read_rows(config.directory / RESULTS) for config in configs]


def trainings(config: Config) -> list[list[Config]]:
    """The config of every training that a comparison needs: a group for each scheme, of all seeds.

    Each has a directory inside the comparison's, and a ``compare`` section with its own seed and the entries to measure
    with its parameters: first the trained one, then its extensions.

    Raises ValueError without schemes, for a scheme that cannot be built, for an extension of a scheme that is not
    trained here, and for models without a perplexity.
    """
    check_causal(config)
    entries = config.compare.schemes
    if not entries:
        raise ValueError("compare.schemes is empty: list the schemes to compare, as in [rope, alibi]")
    bases = _bases(config)
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
    planned = [[_member(config, base, seed) for seed in config.compare.seeds] for base in bases]
    if len({group[0].name for group in planned}) < len(planned):
        raise ValueError("compare.schemes: labels name directories, so they must differ by more than spaces and signs")
    return planned


def _bases(config: Config) -> list[SchemeConfig]:
    """The entries that are trained."""
    return [entry for entry in config.compare.schemes if not entry.only_measured]


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


def _refuse_other_things(directory: Path) -> None:
    """Raises ValueError for a directory with other content than a comparison: a run, or other files."""
    if directory.is_file():
        raise ValueError(f"{directory} is a file; choose another name for the comparison")
    for path in sorted(directory.glob("*")):
        ours = path.name in ("config.yaml", TOKENS, RESULTS, TRIALS, *report.FILES) or path.suffix == ".log"
        ours = ours or path.name == TRIALS_FOLDER
        training = path.is_dir() and (path / "config.yaml").exists()
        empty = path.is_dir() and not any(path.iterdir())
        if not (ours or training or empty):
            raise ValueError(f"{directory} has files that are not of a comparison ({path.name}); choose another name")
    if (directory / "config.yaml").exists() and not read_config(directory).steps:
        raise ValueError(f"{directory} holds a study of a released model; choose another name for the comparison")


def _refuse_others(trainings: Sequence[Config]) -> None:
    """Raises ValueError if the directory of a training holds a training of another config."""
    for training in trainings:
        if (training.directory / "config.yaml").exists():
            refuse_another(read_config(training.directory), training, str(training.directory))


def _report(config: Config, found: _Progress, held_out: Sequence[np.ndarray], console: Console) -> None:
    """Writes and shows the trainings' results, in the order of ``compare.schemes``; nothing if all of them failed."""
    failures = found.failures
    done = [training for training in found.trainings if training.name not in failures]
    if not done:
        return
    rows = [row for training in done for row in read_rows(training.directory / RESULTS)]
    rows += [
        row
        for training in found.trainings
        if training.name in failures
        for row in _failed(training, failures[training.name])
    ]
    order = [entry.label for entry in config.compare.schemes]
    rows.sort(key=lambda row: (order.index(row["label"]), row["seed"], row["length"]))
    write_file(config.directory / "config.yaml", dump(config))
    write_rows(config.directory / RESULTS, rows)
    if found.trials:
        write_rows(config.directory / TRIALS, found.trials)
    report.write(config.directory, rows, about(config, held_out, read_versions(done[0].directory)), found.trials)
    report.show(rows, console, [*report.updates_to_loss(rows), *report.chosen_rates(found.trials)])
    console.print(f"{config.directory / 'index.html'} has the figure, the tables, the config and the versions.")


def _failed(training: Config, why: str) -> list[report.Row]:
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
