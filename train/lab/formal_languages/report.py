"""Every scheme on every language: the numbers, tables for the terminal, and a figure."""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from train.lab.formal_languages.config import LanguagesConfig
from train.lab.formal_languages.generators import LANGUAGES
from train.lab.formal_languages.trainer import check_fit, train_and_test
from train.report import style
from train.runtime.paths import path, write_rows


def run(config: LanguagesConfig) -> list[dict[str, Any]]:
    """Trains and tests everything, prints a table for each language, and writes ``results.jsonl`` and ``figure.png``.

    A row of results is the accuracy of one scheme on one language at one length. Raises ValueError for what cannot be
    built, before anything is trained.
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
    for name, entry in pairs:
        start = time.perf_counter()
        found = train_and_test(LANGUAGES[name], entry, config)
        console.print(f"[dim]{name}: {entry.label}, {time.perf_counter() - start:.0f} s[/dim]")
        about = {"language": name, "level": LANGUAGES[name].level, "label": entry.label, "seed": config.seed}
        rows += [about | {"length": length, "accuracy": accuracy} for length, accuracy in found.items()]
        write_rows(directory / "results.jsonl", rows)
    for name in config.languages:
        console.print(table(name, rows, config))
    (directory / "figure.png").write_bytes(draw(rows, config))
    console.print(f"numbers: {directory / 'results.jsonl'} · figure: {directory / 'figure.png'}")
    return rows


def curves(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """The accuracies of one language, by scheme and length."""
    found: dict[str, dict[int, float]] = {}
    for row in (row for row in rows if row["language"] == name):
        found.setdefault(row["label"], {})[row["length"]] = row["accuracy"]
    return found


def table(name: str, rows: Sequence[dict[str, Any]], config: LanguagesConfig) -> Table:
    """The accuracies of one language in percent, one row a scheme, one column a length."""
    language = LANGUAGES[name]
    longest, lengths = config.lengths(language)
    guessing = f"guessing {100 / language.classes:.0f}"
    title = f"{name} ({language.level}): accuracy in %, {guessing}, trained up to length {longest}"
    grid = Table("scheme", *map(str, lengths), title=title, min_width=len(title))
    for label, points in curves(name, rows).items():
        grid.add_row(label, *(f"{100 * accuracy:.1f}" for accuracy in points.values()))
    return grid


def draw(rows: Sequence[dict[str, Any]], config: LanguagesConfig) -> bytes:
    """A panel for each language, as a PNG: accuracy against length.

    The dashed line is the training length, the dotted one the level of guessing.
    """
    columns = min(2, len(config.languages))
    figure = style.new_figure(style.WIDTH, 3.7 * -(-len(config.languages) // columns))
    for n, name in enumerate(config.languages, 1):
        _panel(figure.add_subplot(-(-len(config.languages) // columns), columns, n), name, rows, config)
    figure.supylabel("accuracy")
    return style.png(figure)


def _panel(panel: Any, name: str, rows: Sequence[dict[str, Any]], config: LanguagesConfig) -> None:
    language = LANGUAGES[name]
    longest, lengths = config.lengths(language)
    for n, (label, points) in enumerate(curves(name, rows).items()):
        colour, marker = style.COLOURS[n % len(style.COLOURS)], style.MARKERS[n % len(style.MARKERS)]
        panel.plot(list(points), list(points.values()), color=colour, marker=marker, label=label)
    panel.axhline(1 / language.classes, color="#888888", linestyle=":")
    panel.axvline(longest, color="#888888", linestyle="--")
    panel.set(
        title=f"{name} ({language.level})", xlabel="side" if language.level == "grid" else "length", ylim=(0, 1.03)
    )
    panel.set_xticks(lengths)
