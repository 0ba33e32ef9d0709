"""Every scheme on every task: the numbers, tables for the terminal, and a figure."""

import json
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from train.languages.config import TasksConfig
from train.languages.generators import LANGUAGES
from train.languages.trainer import check_fit, train_and_test
from train.report import ends, style
from train.runtime.paths import path, write_file


def run(config: TasksConfig) -> list[dict[str, Any]]:
    """Trains and tests everything, prints a table for each task, and writes ``results.jsonl`` and ``figure.png``.

    A row of results is the accuracy of one scheme on one task at one length. Raises ValueError for what cannot be
    built, before anything is trained.
    """
    pairs = [(name, entry) for name in config.tasks for entry in config.entries(LANGUAGES[name])]
    for name, entry in pairs:
        try:
            check_fit(LANGUAGES[name], entry, config)
        except ValueError as error:
            raise ValueError(f"{name}: {entry.label}: {error}") from None
    console, rows = Console(), []
    directory = path(config.output) / config.name
    directory.mkdir(parents=True, exist_ok=True)
    for name, entry in pairs:
        start = time.perf_counter()
        found = train_and_test(LANGUAGES[name], entry, config)
        console.print(f"[dim]{name}: {entry.label}, {time.perf_counter() - start:.0f} s[/dim]")
        about = {"task": name, "level": LANGUAGES[name].level, "label": entry.label, "seed": config.seed}
        rows += [about | {"length": length, "accuracy": accuracy} for length, accuracy in found.items()]
        write_file(directory / "results.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    for name in config.tasks:
        console.print(table(name, rows, config))
    (directory / "figure.png").write_bytes(draw(rows, config))
    console.print(f"numbers: {directory / 'results.jsonl'} · figure: {directory / 'figure.png'}")
    return rows


def curves(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Accuracy by length, by scheme, of one task."""
    found: dict[str, dict[int, float]] = {}
    for row in (row for row in rows if row["task"] == name):
        found.setdefault(row["label"], {})[row["length"]] = row["accuracy"]
    return found


def table(name: str, rows: Sequence[dict[str, Any]], config: TasksConfig) -> Table:
    """The accuracies of one task in percent, one row a scheme, one column a length."""
    task = LANGUAGES[name]
    longest, lengths = config.lengths(task)
    title = f"{name} ({task.level}): accuracy in %, guessing {100 / task.classes:.0f}, trained up to length {longest}"
    grid = Table("scheme", *map(str, lengths), title=title, min_width=len(title))
    for label, points in curves(name, rows).items():
        grid.add_row(label, *(f"{100 * accuracy:.1f}" for accuracy in points.values()))
    return grid


def draw(rows: Sequence[dict[str, Any]], config: TasksConfig) -> bytes:
    """One panel a task, as a PNG: accuracy against length; dashed the training length, dotted the level of guessing."""
    columns = min(2, len(config.tasks))
    figure = style.new_figure(style.WIDTH, 3.7 * -(-len(config.tasks) // columns))
    for n, name in enumerate(config.tasks, 1):
        _panel(figure.add_subplot(-(-len(config.tasks) // columns), columns, n), name, rows, config)
    figure.supylabel("accuracy")
    return style.png(figure)


def _panel(panel: Any, name: str, rows: Sequence[dict[str, Any]], config: TasksConfig) -> None:
    task = LANGUAGES[name]
    longest, lengths = config.lengths(task)
    for n, (label, points) in enumerate(curves(name, rows).items()):
        colour, marker = style.COLOURS[n % len(style.COLOURS)], style.MARKERS[n % len(style.MARKERS)]
        panel.plot(list(points), list(points.values()), color=colour, marker=marker)
        ends.name(panel, label, colour, list(points), list(points.values()))
    panel.axhline(1 / task.classes, color="#888888", linestyle=":")
    panel.axvline(longest, color="#888888", linestyle="--")
    panel.set(title=f"{name} ({task.level})", xlabel="side" if task.level == "grid" else "length", ylim=(0, 1.03))
    panel.set_xticks(lengths)
