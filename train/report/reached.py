"""Trainings that end at a loss (``train.stop_loss``): how many updates each took, as a table and as survival curves.

Rows of such trainings have, in addition to the columns of `train.report.numbers`,

    stop_loss         the loss in nats per token;  updates: how many updates were allowed
    updates_to_loss   after how many it was reached; None if it was not
"""

import statistics
from collections.abc import Sequence
from typing import Any

from train.report import ends, panels, style
from train.report.groups import groups
from train.report.numbers import Row, labels, perplexity_rows
from train.report.tables import Table


def times(rows: Sequence[Row]) -> dict[str, list[int | None]]:
    """The updates that every seed of a trained scheme took; None if the loss was not reached."""
    found = {label: _of_seeds([row for row in rows if row["label"] == label]) for label in labels(rows)}
    return {label: mine for label, mine in found.items() if mine}


def _of_seeds(rows: Sequence[Row]) -> list[int | None]:
    mine = [row for row in perplexity_rows(rows) if row.get("stop_loss") and row["base"] is None]
    return list({row["seed"]: row["updates_to_loss"] for row in mine}.values())


def survival(updates: Sequence[int | None], most: int) -> list[tuple[int, float]]:
    """Corners of the step curve of the share of trainings that have not reached the loss, from update 0 to the last.

    ``S(u) = #{trainings that need more than u updates} / #{trainings}``, the Kaplan-Meier estimate if all are observed
    to the same end.
    """
    reached = sorted(each for each in updates if each is not None)
    falls = [(each, 1 - (n + 1) / len(updates)) for n, each in enumerate(reached)]
    return [(0, 1.0), *falls, (most, 1 - len(reached) / len(updates))]


def updates_to_loss(rows: Sequence[Row]) -> list[Table]:
    """The updates of every seed, with the median first; empty if trainings do not end at a loss."""
    found = times(rows)
    if not found:
        return []
    title = f"Updates until the loss was below {_loss(rows):g} nats per token, of {_most(rows):,}"
    header = ("scheme", "reached", "median", "every seed")
    body = tuple((label, f"{_count(mine)} of {len(mine)}", _median(mine), _each(mine)) for label, mine in found.items())
    return [Table(title, header, body)]


def note(rows: Sequence[Row]) -> list[str]:
    """A line that says how many seeds count in the tasks; empty if all do."""
    short = {label: mine for label, mine in times(rows).items() if None in mine}
    counts = ", ".join(f"{label} {_count(mine)} of {len(mine)}" for label, mine in short.items())
    if not counts:
        return []
    return [f"Accuracy on tasks is that of trainings whose loss fell below {_loss(rows):g}: {counts}."]


def draw(rows: Sequence[Row]) -> bytes:
    """The share of seeds that have not reached the loss, against updates: a PNG 1800 pixels wide."""
    found, most = times(rows), _most(rows)
    trained = [row for row in perplexity_rows(rows) if row["label"] in found]
    shown = groups(trained)
    figure, drawn = panels.new(len(shown))
    for panel, group in zip(drawn, shown, strict=True):
        looks = style.lines(trained, group.labels, group.reference)
        for label, look in looks.items():
            _draw_line(panel, label, look.colour, survival(found[label], most))
        panel.set_title(group.title, fontsize=11, loc="left")
        panel.set_ylim(-0.03, 1.03)
        panel.grid(True, color="#dddddd", linewidth=0.7)
        panel.set_axisbelow(True)
    panels.around(figure, drawn, "updates", f"share of seeds not below {_loss(rows):g}")
    return style.png(figure)


def _draw_line(panel: Any, label: str, colour: str, corners: Sequence[tuple[int, float]]) -> None:
    xs, ys = zip(*corners, strict=True)
    panel.step(xs, ys, where="post", color=colour, linewidth=1.8, label=label)
    ends.name(panel, label, colour, xs, ys)


def _loss(rows: Sequence[Row]) -> float:
    return next(row["stop_loss"] for row in rows if row.get("stop_loss"))


def _most(rows: Sequence[Row]) -> int:
    return max(row["updates"] for row in rows if row.get("stop_loss"))


def _count(updates: Sequence[int | None]) -> int:
    return sum(each is not None for each in updates)


def _median(updates: Sequence[int | None]) -> str:
    """The median over all seeds; unknown if half of them or more have not reached the loss."""
    middle = statistics.median_high(float("inf") if each is None else each for each in updates)
    return "-" if middle == float("inf") else f"{middle:,.0f}"


def _each(updates: Sequence[int | None]) -> str:
    known = sorted(each for each in updates if each is not None)
    return ", ".join([*map(str, known), *["-"] * (len(updates) - len(known))])
