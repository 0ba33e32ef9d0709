"""Figures of lines: perplexity against position, loss during training, accuracy on tasks against length."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from train.report import panels, style
from train.report.formats import spoken
from train.report.groups import groups
from train.report.numbers import (
    Estimate,
    Row,
    accuracies,
    is_above_chance,
    labels,
    lengths,
    perplexity_rows,
    positions,
    tasks,
    train_length,
    trainings,
)

_LARGEST_NLL = 700.0  # exp of more exceeds float64
_TICKS = 10  # of the axis of positions
_ROOM = 1.5  # range in nats of the figure of training
_APART = 0.1  # above this standard deviation of accuracy a band would hide the single seeds


def draw_by_position(rows: Sequence[Row]) -> bytes:
    """Perplexity of tokens against the number of tokens before them in the window, as a PNG 1800 pixels wide.

    A part with several positions is drawn at the middle of its range on the logarithmic axis.
    """
    points = {label: found for label in labels(perplexity_rows(rows)) if (found := _by_position(rows, label))}
    rows = [row for row in perplexity_rows(rows) if row["label"] in points]
    longest = max(positions(rows, label)[0][-1] for label in points)
    ticks, own = _powers(longest), train_length(rows)
    limits = style.limits([point.mean for each in points.values() for point in each.values()])
    figure, drawn = _grid(rows, _by_position, low=1.0)
    for panel in drawn:
        style.length_axis(panel, ticks, own)
        style.value_axis(panel, *limits)
        panel.set_xlim(0.9 * min(min(each) for each in points.values()), 1.1 * longest)
    panels.around(figure, drawn, panels.of_lengths("tokens before, in the window", ticks, own), "perplexity per token")
    return style.png(figure)


def draw_training(rows: Sequence[Row]) -> bytes:
    """The held-out loss during training against the tokens seen, from the lowest value to 1.5 nats above it."""
    from matplotlib.ticker import EngFormatter

    points = trainings(rows)
    losses = [point.mean for each in points.values() for point in each.values()]
    rows = [row for row in perplexity_rows(rows) if row["label"] in points]
    figure, drawn = _grid(rows, lambda mine, label: trainings(mine).get(label, {}))
    for panel in drawn:
        panel.grid(True, color="#dddddd", linewidth=0.7)
        panel.set_axisbelow(True)
        panel.set_ylim(min(losses) - 0.05, min(max(losses) + 0.05, min(losses) + _ROOM))
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
    panels.around(figure, drawn, "training tokens", "held-out loss, nats per token")
    return style.png(figure)


def _grid(
    rows: Sequence[Row], curve: Callable[[Sequence[Row], str], panels.Points], low: float = -math.inf
) -> tuple[Any, list[Any]]:
    """A panel for each group of schemes."""
    found = groups(rows)
    figure, drawn = panels.new(len(found))
    for panel, group in zip(drawn, found, strict=True):
        panels.draw(panel, rows, group, curve, low)
        panel.set_title(group.title, fontsize=11, loc="left")
    return figure, drawn


def _by_position(rows: Sequence[Row], label: str) -> dict[float, Estimate]:
    """Perplexity by the middle of the range of tokens before; its spread is that of exp(NLL) to first order."""
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
    """Powers of two up to a length: all, every second or every third, so that labels are readable."""
    count = longest.bit_length()
    return [2**n for n in range(0, count, -(-count // _TICKS))]


def draw_tasks(rows: Sequence[Row]) -> bytes:
    """Accuracy against length: a panel for each task that some scheme has learned and each group of schemes."""
    found = {name: mine for name, mine in tasks(rows).items() if is_above_chance(mine)}
    shown = [(name, mine, group) for name, mine in found.items() for group in groups(mine)]
    figure, drawn = panels.new(len(shown))
    every = [row for mine in found.values() for row in mine]
    ticks, own = lengths(every), train_length(every)
    for panel, (name, mine, group) in zip(drawn, shown, strict=True):
        panels.draw(panel, mine, group, accuracies, differ=lambda point: (point.spread or 0.0) > _APART)
        style.length_axis(panel, ticks, own)
        if mine[0]["chance"]:
            panel.axhline(mine[0]["chance"], color="#888888", linestyle=":", linewidth=1.0, label="_guess")
        panel.set_ylim(-0.03, 1.03)
        panel.set_title(": ".join(filter(None, (spoken(name), group.title))), fontsize=11, loc="left")
    panels.around(figure, drawn, panels.of_lengths("length in tokens", ticks, own), "right answers")
    return style.png(figure)
