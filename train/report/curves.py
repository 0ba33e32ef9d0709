"""Figures of lines: perplexity against position, accuracy on tasks against length."""

import math
from collections.abc import Sequence
from typing import Any

from train.report import style
from train.report.numbers import Estimate, Row, accuracies, held_out, labels, lengths, positions, tasks, trainings
from train.report.tables import spoken

_COLUMNS = 3
_LARGEST_NLL = 700.0  # exp of more is no float64


def draw_positions(rows: Sequence[Row]) -> bytes:
    """Perplexity of tokens against how many stand before them in the window, as a PNG of 1800 x 825 pixels or higher.

    A part of several positions is drawn at the middle of its range, on the logarithmic axis.
    """
    rows = held_out(rows)
    figure = style.new_figure(12, max(5.5, 0.9 + 0.17 * len(labels(rows))))
    panel = figure.subplots()
    points = {label: _by_position(rows, label) for label in labels(rows)}
    for label, line in style.lines(rows).items():
        style.plot(panel, label, line, points[label], low=1.0)
    style.length_axis(panel, _powers(lengths(rows)[-1]), rows[0]["train_length"])
    style.value_axis(panel, *style.limits([point.mean for each in points.values() for point in each.values()]))
    panel.set_title("By position in windows of the longest length", fontsize=11)
    panel.set_xlabel("tokens before, in the window (times the training length)")
    panel.set_ylabel("perplexity per token on held-out text")
    style.legend(figure, panel, any(row["base"] for row in rows))
    style.lay_out(figure)
    return style.png(figure)


def draw_training(rows: Sequence[Row]) -> bytes:
    """The held-out loss while the schemes trained, against the tokens that they had seen."""
    figure = style.new_figure(10, 5.5)
    panel = figure.subplots()
    looks = style.lines(held_out(rows))
    for label, points in trainings(rows).items():
        style.plot(panel, label, looks[label], points)
    panel.set_xlabel("training tokens")
    panel.set_ylabel("held-out loss, nats per token")
    panel.set_title("While they trained", fontsize=11)
    panel.grid(True, color="#dddddd", linewidth=0.7)
    panel.set_axisbelow(True)
    style.legend(figure, panel, False)
    style.lay_out(figure)
    return style.png(figure)


def _by_position(rows: Sequence[Row], label: str) -> dict[float, Estimate]:
    """Perplexity by the middle of the range of tokens before; its spread is that of exp(NLL), to first order."""
    ends, parts = positions(rows, label)
    starts = [1, *(end + 1 for end in ends)]
    middles = [math.sqrt(start * end) for start, end in zip(starts, ends, strict=False)]
    measured = [(middle, part) for middle, part in zip(middles, parts, strict=True) if part is not None]
    perplexities = [math.exp(min(part.mean, _LARGEST_NLL)) for _, part in measured]
    return {
        middle: Estimate(perplexity, part.spread and part.spread * perplexity)
        for (middle, part), perplexity in zip(measured, perplexities, strict=True)
    }


def _powers(longest: int) -> list[int]:
    return [2**n for n in range(longest.bit_length())]


def draw_tasks(rows: Sequence[Row]) -> bytes:
    """Accuracy against length, one panel for each task, three in a row."""
    found = tasks(rows)
    columns, high = min(_COLUMNS, len(found)), math.ceil(len(found) / _COLUMNS)
    figure = style.new_figure(2.6 + 4.2 * columns, max(0.5 + 3.6 * high, 0.9 + 0.17 * len(labels(rows))))
    panels = figure.subplots(high, columns, squeeze=False).ravel()
    lines = style.lines(rows)
    for number, (panel, (name, mine)) in enumerate(zip(panels, found.items(), strict=False)):
        _draw_task(panel, name, mine, lines)
        panel.set_ylabel("" if number % columns else "right answers")
    for panel in panels[len(found) :]:
        panel.set_axis_off()
    style.legend(figure, panels[0], any(row["base"] for row in rows))
    style.lay_out(figure)
    return style.png(figure)


def _draw_task(panel: Any, name: str, rows: Sequence[Row], lines: dict[str, style.Look]) -> None:
    for label in labels(rows):
        style.plot(panel, label, lines[label], accuracies(rows, label))
    style.length_axis(panel, lengths(rows), rows[0]["train_length"])
    if rows[0]["chance"]:
        panel.axhline(rows[0]["chance"], color="#888888", linestyle=":", linewidth=1.0, label="_guess")
    panel.set_ylim(-0.03, 1.03)
    panel.set_title(spoken(name), fontsize=11)
    panel.set_xlabel("length in tokens (times the training length)")
