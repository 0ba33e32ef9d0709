"""Compares schemes: one config, with several position schemes, measured and reported.

The schemes are trained first, with several seeds (`trainings.py`); or, with ``train.steps: 0``, they are extensions of
the released model under ``init``, which are only measured (`study`).
"""

from pathlib import Path

from rich.console import Console

from train import report
from train.checkpoint.directory import RESULTS, read_config
from train.compare.study.study import CELLS, Study
from train.compare.sweep import TRIALS_FOLDER
from train.compare.trainings import Trainings
from train.config import Config, dump
from train.config.settings.checks import check
from train.data.cache import TOKENS
from train.evaluate.about import about, read_versions
from train.runtime.paths import write_file
from train.runtime.rows import write_rows

TRIALS = "trials.jsonl"
_FILES = ("config.yaml", TOKENS, RESULTS, TRIALS, CELLS, TRIALS_FOLDER, *report.FILES)


def compare(config: Config, console: Console | None = None) -> Path:
    """Measures every scheme of ``config.compare``, trained with every seed unless nothing is, and writes the report.

    The run's directory, which is returned, gets one directory for each training, ``config.yaml``, ``results.jsonl``,
    ``figure.png`` and ``index.html``. Finished trainings and measurements are not repeated, also with other schemes,
    lengths or texts; the report covers only those of this config.

    Raises ValueError, before anything is computed, for a config that cannot be compared; and, after the report of the
    others is written, in one line if some trainings failed.
    """
    console = console or Console(highlight=False)
    _refuse_other_things(config)
    found = Trainings(config, console) if config.steps else Study(config, console)
    config.directory.mkdir(parents=True, exist_ok=True)
    write_file(config.directory / "config.yaml", dump(config))
    try:
        found.run()
    finally:
        _report(config, found, console)
    if found.failures:
        reasons = "; ".join(f"{name}: {why}" for name, why in found.failures.items())
        raise ValueError(f"{len(found.failures)} of {found.count} trainings failed: {reasons}")
    return config.directory


def _refuse_other_things(config: Config) -> None:
    """Raises ValueError for a directory with other content than such a comparison: a run, or other files."""
    directory, other = config.directory, "choose another name"
    check(not directory.is_file(), f"{directory} is a file; {other}")
    for path in sorted(directory.glob("*")):
        training = path.is_dir() and ((path / "config.yaml").exists() or not any(path.iterdir()))
        ours = path.name in _FILES or path.suffix == ".log" or training
        check(ours, f"{directory} has files that are not of a comparison ({path.name}); {other}")
    if not (directory / "config.yaml").exists():
        check(not (directory / RESULTS).exists(), f"{directory} holds no comparison or study: no config.yaml; {other}")
        return
    saved = read_config(directory)
    if config.steps:
        check(bool(saved.steps), f"{directory} holds a study of a released model; {other}")
        return
    check(not saved.steps, f"{directory} holds a comparison of schemes that were trained; {other}")
    same = saved.init.values == config.init.values
    check(same, f"{directory} holds the study of another model, {saved.init.path}; {other}")


def _report(config: Config, found: Trainings | Study, console: Console) -> None:
    """Writes and shows the rows that were found, in the order of ``compare.schemes``; nothing if there are none."""
    rows, order = found.rows(), [entry.label for entry in config.compare.schemes]
    if not rows:
        return
    rows.sort(key=lambda row: (order.index(row["label"]), row["seed"], row["length"]))
    write_rows(config.directory / RESULTS, rows)
    if found.trials:
        write_rows(config.directory / TRIALS, found.trials)
    versions = read_versions(found.trained_in)
    report.write(config.directory, rows, about(config, found.documents, versions), found.trials)
    report.show(rows, console, found.trials)
    console.print(f"{config.directory / 'index.html'} has the figure, the tables, the config and the versions.")
