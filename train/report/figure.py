"""The figure of perplexity against length."""

import textwrap
from collections.abc import Sequence
from functools import partial

from train.report import panels, style
from train.report.formats import number
from train.report.groups import groups
from train.report.numbers import (
    FEW,
    Row,
    curve,
    endings,
    labels,
    last_length,
    lengths,
    measures,
    notes,
    perplexity_rows,
    train_length,
)

_TITLES = {
    "window": "whole window",
    "last": "last {length} tokens only, context growing",
    "sliding": "sliding window",
}


def draw(rows: Sequence[Row], title: str, text: str) -> bytes:
    """Perplexity against length, as a PNG 1800 pixels wide. Several measurements of a group are side by side."""
    rows = perplexity_rows(rows)
    found, limits = shown_measures(rows), _limits(rows)
    ticks, own = lengths(rows), train_length(rows)
    shown = [(group, measure) for group in groups(rows) for measure in found]
    above, below = textwrap.wrap(text, 165), _below(rows)
    columns = max(len(found), panels.COLUMNS)
    figure, drawn = panels.new(len(shown), columns, above=0.55 + 0.19 * len(above) + 0.16 * len(below))
    for panel, (group, measure) in zip(drawn, shown, strict=True):
        panels.draw(panel, rows, group, partial(curve, measure=measure), low=1.0)
        style.length_axis(panel, ticks, own)
        style.value_axis(panel, *limits)
        name = _TITLES[measure].format(length=last_length(rows))
        panel.set_title(f"{group.title}: {name}" if group.title else name.capitalize(), fontsize=11, loc="left")
    axis = panels.of_lengths("evaluation length in tokens", ticks, own)
    panels.around(figure, drawn, axis, "perplexity per token", top=title, above=above, below=below)
    return style.png(figure)


def shown_measures(rows: Sequence[Row]) -> list[str]:
    """The measurements with enough windows to be drawn."""
    return [name for name in measures(rows) if name != "last" or endings(perplexity_rows(rows)) >= FEW]


def _means(rows: Sequence[Row]) -> list[tuple[float, str, int, str]]:
    """(perplexity, scheme, length, measure) of every point of the figure."""
    every = [(label, measure) for label in labels(rows) for measure in shown_measures(rows)]
    return [
        (point.mean, label, length, measure)
        for label, measure in every
        for length, point in curve(rows, label, measure).items()
    ]


def _limits(rows: Sequence[Row]) -> tuple[float, float]:
    return style.limits([mean for mean, *_ in _means(rows)])


def _below(rows: Sequence[Row]) -> list[str]:
    """The lines of the notes below the panels."""
    return [line for note in _clipped(rows) + notes(rows) for line in textwrap.wrap(note, 185)]


def _clipped(rows: Sequence[Row]) -> list[str]:
    """One line that names the values above the top of the figure, if there are any."""
    top = _limits(rows)[1]
    above: dict[str, tuple[float, str, int, str]] = {}
    for point in _means(rows):
        if point[0] > top:
            above[point[1]] = max(point, above.get(point[1], point))
    reached = ", ".join(f"{label} {number(mean)} at {length}" for mean, label, length, _ in above.values())
    return [f"Above the top of the figure: {reached}."] if above else []
