"""The figure of perplexity against length."""

import textwrap
from collections.abc import Sequence
from typing import Any

from train.report import style
from train.report.numbers import Row, curve, held_out, labels, last_length, lengths, measures, notes
from train.report.tables import number

_TITLES = {
    "window": "Whole window",
    "last": "Last {length} tokens only, context growing",
    "sliding": "Sliding window",
}


def draw(rows: Sequence[Row], title: str, text: str) -> bytes:
    """Perplexity against length, as a PNG of 1800 x 900 pixels, wider with sliding windows, higher for many schemes."""
    rows = held_out(rows)
    found, length = measures(rows), rows[0]["train_length"]
    figure = style.new_figure(12 + 4 * (len(found) - 2), max(6, 0.9 + 0.17 * len(labels(rows))))
    panels = figure.subplots(1, len(found), sharey=True)
    low, top = _limits(rows)
    for panel, measure in zip(panels, found, strict=True):
        for label, line in style.lines(rows).items():
            style.plot(panel, label, line, curve(rows, label, measure), low=1.0)
        style.length_axis(panel, lengths(rows), length)
        style.value_axis(panel, low, top)
        panel.set_title(_TITLES[measure].format(length=last_length(rows)), fontsize=11)
        panel.set_xlabel("evaluation length in tokens (times the training length)")
    panels[0].set_ylabel("perplexity per token on held-out text")
    _around(figure, panels, rows, title, text)
    return style.png(figure)


def _means(rows: Sequence[Row]) -> list[tuple[float, str, int, str]]:
    """(perplexity, scheme, length, measure) of every point of the figure."""
    every = [(label, measure) for label in labels(rows) for measure in measures(rows)]
    return [
        (point.mean, label, length, measure)
        for label, measure in every
        for length, point in curve(rows, label, measure).items()
    ]


def _limits(rows: Sequence[Row]) -> tuple[float, float]:
    return style.limits([mean for mean, *_ in _means(rows)])


def _around(figure: Any, panels: Sequence[Any], rows: Sequence[Row], title: str, text: str) -> None:
    """Title above, legend beside, notes below; the panels take what room is left."""
    above = textwrap.wrap(text, 165)
    below = [line for note in _clipped(rows) + notes(rows) for line in textwrap.wrap(note, 185)]
    figure.text(0.01, 0.985, title, fontsize=13, fontweight="bold", va="top")
    figure.text(0.01, 0.935, "\n".join(above), fontsize=9, color="#444444", va="top")
    figure.text(0.01, 0.015, "\n".join(below), fontsize=8, color="#444444", va="bottom")
    style.legend(figure, panels[0], any(row["base"] for row in rows))
    top, bottom = 0.915 - 0.03 * len(above), 0.02 + 0.026 * len(below)
    figure.set_layout_engine("constrained", rect=(0.006, bottom, 0.99, top - bottom), wspace=0.04)


def _clipped(rows: Sequence[Row]) -> list[str]:
    """One line naming what lies above the top of the figure, if anything does."""
    top = _limits(rows)[1]
    above: dict[str, tuple[float, str, int, str]] = {}
    for point in _means(rows):
        if point[0] > top:
            above[point[1]] = max(point, above.get(point[1], point))
    reached = ", ".join(f"{label} {number(mean)} at {length}" for mean, label, length, _ in above.values())
    return [f"Above the top of the figure: {reached}."] if above else []
