"""Some trainings of a comparison, in a process of their own: ``python -m train.compare.training < GROUPS``.

The input is JSON: ``groups`` of configs, each of one scheme; whether they are ``trials``; and whether the process runs
``alone``. The ``compare`` section of each config holds the schemes to measure with its trained parameters.
"""

import json
import sys
from collections.abc import Sequence
from functools import partial

from train.checkpoint.directory import RESULTS, is_started
from train.config import Config, chosen, parse
from train.evaluate.saved import SavedRun, evaluation_documents, measure_runs
from train.loop.fit import Diverged, fit
from train.loop.together import fit_together
from train.model.build import Setup
from train.runtime.lines import in_a_line
from train.runtime.rows import key_of, read_rows, write_rows

ERROR = "error: "  # begins the line with the error on standard error
DIVERGED = "training diverged"
_COSTS = ("train_tokens_per_second", "peak_memory_bytes", "train_seconds", "tokens_per_second")


def run(configs: Sequence[Config], trials: bool, alone: bool) -> None:
    """Trains the configs, measures every scheme of their ``compare.schemes``, and writes the rows.

    `trials` are measured on text of their own. A trial that diverges gets a row with that error. Costs are those of the
    whole process and machine, so they are written only for what runs `alone`.

    Raises KeyboardInterrupt if a training was interrupted, and ValueError if one diverged. Finished work is saved;
    another run resumes.
    """
    failed = _train(configs, trials, alone)
    done = [config for config in configs if config not in failed]
    if done:
        held_out, entries = evaluation_documents(Setup(done[0]), trials), done[0].compare.schemes
        runs = [SavedRun(config.directory, config) for config in done]
        found = measure_runs(runs, held_out, entries, log=partial(print, flush=True) if alone else lambda _: None)
        for config, rows in zip(done, found, strict=True):
            _write(config, rows if alone else [{**row, **dict.fromkeys(_COSTS)} for row in rows])
    if failed and not trials:
        raise ValueError(f"{', '.join(config.name for config in failed)}: {DIVERGED}")
    for config in failed:
        _write(config, [{"label": config.scheme.label, "seed": config.seed, "error": DIVERGED}])


def _train(configs: Sequence[Config], trials: bool, shown: bool) -> list[Config]:
    """Trains the configs, as one program if several have not begun; returns those that diverged."""
    new = [config for config in configs if not is_started(config.directory)]
    together = new if len(new) > 1 else []
    failed = [config for config in configs if config not in together and not _fit(config, trials, shown)]
    if together:
        label = f"{together[0].scheme.label}, {len(together)} trainings"
        fitted = fit_together(together, progress=label if shown else None)
        failed += [config for config, each in zip(together, fitted, strict=True) if not each.finished]
    return failed


def _fit(config: Config, trial: bool, shown: bool) -> bool:
    """Trains one config; returns False only for a trial that diverged."""
    try:
        fitted = fit(config, progress=config.scheme.label if shown else None)
    except Diverged:
        if not trial:
            raise
        return False
    if not fitted.finished:
        raise KeyboardInterrupt(f"interrupted after {fitted.steps} of {config.steps} steps; run again to resume")
    return True


def _write(config: Config, rows: list) -> None:
    config.directory.mkdir(parents=True, exist_ok=True)
    key = key_of(chosen(config))
    write_rows(config.directory / RESULTS, [{"key": key, **row} for row in rows])


def finished(config: Config) -> bool:
    """Whether the training's directory holds the results of exactly this config."""
    rows = read_rows(config.directory / RESULTS)
    return bool(rows) and rows[0].get("key") == key_of(chosen(config))


def main() -> int:
    """Runs the groups of standard input, one after the other; each that fails gives one line on standard error.

    Returns 1 if any failed. An interrupt ends all.
    """
    asked, status = json.load(sys.stdin), 0
    for values in asked["groups"]:
        names = ", ".join(each["name"] for each in values)
        try:
            run([parse(each) for each in values], asked["trials"], asked["alone"])
        except (ValueError, OSError, KeyboardInterrupt) as error:
            print(f"{ERROR}{names}: {in_a_line(error)}", file=sys.stderr)
            status = 1
            if isinstance(error, KeyboardInterrupt):
                break
    return status


if __name__ == "__main__":
    sys.exit(main())
