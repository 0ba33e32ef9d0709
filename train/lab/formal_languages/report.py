"""Every scheme on every language: the numbers, tables for the terminal, and a figure."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console

from train.lab.formal_languages.config import LanguagesConfig
from train.lab.formal_languages.generators import LANGUAGES
from train.lab.formal_languages.trainer import check_fit, train_and_test
from train.report import numbers, style
from train.report.figures import Panel, draw_panels, groups
from train.report.tables import Table, headings, percent, shown, table
from train.runtime.paths import path
from train.runtime.rows import write_rows


def run(config: LanguagesConfig) -> list[dict[str, Any]]:
    """Trains and tests everything, prints a table for each language, and writes ``results.jsonl`` and ``figure.png``.

    A row of results is the accuracy of one scheme on one language at one length, with the columns of a task. Raises
    ValueError for what cannot be built, before anything is trained.
    """
    pairs = [(name, entry) for name in config.languages for entry in config.entries(LANGUAGES[name])]
    for name, entry in pairs:
        try:
            check_fit(LANGUAGES[name], entry, config)
        except ValueError as error:
            raise ValueError(f"{name}: {entry.label}: {error}") from None
    console, rows = Console(), []
    directory = path(config.output) / config.name
    directory.mkdir(parents=True, exist_ok=True)
    fixed = {"base": None, "error": None, "depth": None, "seed": config.seed}
    for name, entry in pairs:
        start, language = time.perf_counter(), LANGUAGES[name]
        found = train_and_test(language, entry, config)
        console.print(f"[dim]{name}: {entry.label}, {time.perf_counter() - start:.0f} s[/dim]")
        about = {"task": name, "label": entry.label, "train_length": config.lengths(language)[0], **fixed}
        about |= {"chance": 1 / language.classes, "cases": config.batch * config.test_batches}
        rows += [about | {"length": length, "accuracy": accuracy} for length, accuracy in found.items()]
        write_rows(directory / "results.jsonl", rows)
    for name, mine in numbers.grouped(rows, "task").items():
        accuracies(name, mine).show(console)
    (directory / "figure.png").write_bytes(draw(rows))
    console.print(f"numbers: {directory / 'results.jsonl'} · figure: {directory / 'figure.png'}")
    return rows


def accuracies(name: str, rows: Sequence[dict[str, Any]]) -> Table:
    """The accuracies of one language in percent, one row a scheme, one column a length."""
    lengths, level = numbers.lengths(rows), LANGUAGES[name].level
    points = {label: numbers.accuracies(rows, label) for label in numbers.labels(rows)}
    body = {label: [shown(mine[length], percent) for length in lengths] for label, mine in points.items()}
    title = f"{name} ({level}): right answers in %; a guess has {percent(rows[0]['chance'])}"
    return table(title, headings(lengths, numbers.train_length(rows)), body)


def draw(rows: Sequence[dict[str, Any]]) -> bytes:
    """A panel for each language, as a PNG: accuracy against length; a dotted line is the level of guessing."""

    def axes(panel: Any, mine: Sequence[dict[str, Any]]) -> None:
        style.length_axis(panel, "length", numbers.lengths(mine), numbers.train_length(mine))
        style.share_axis(panel)
        panel.axhline(mine[0]["chance"], color="#888888", linestyle=":", linewidth=1.0, label="_guess")

    panels = [
        Panel(name, mine, group, numbers.accuracies, partial(axes, mine=mine))
        for name, mine in numbers.grouped(rows, "task").items()
        for group in groups(mine)
    ]
    return draw_panels(panels, "accuracy")
