"""Panels of lines, side by side and below each other."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from train.report import ends, style
from train.report.groups import Group
from train.report.numbers import Estimate, Row, each_seed

Points = Mapping[float, Estimate]

COLUMNS = 2  # side by side
_APART = 0.25  # above this ratio of standard deviation to mean a band would hide the single seeds


def new(count: int, columns: int = COLUMNS, *, above: float = 0.0) -> tuple[Any, list[Any]]:
    """A figure as wide as a page, with `count` panels that share their axes; a single panel is larger.

    `above` is the height in inches for everything around the panels.
    """
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = style.new_figure(style.WIDTH, above + (5.0 if count == 1 else 0.4 + rows * (4.2 if rows == 1 else 2.6)))
    found = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel())
    for panel in found:
        panel.tick_params(labelleft=True, labelbottom=True)
    for panel in found[count:]:
        panel.set_axis_off()
    return figure, found[:count]


def _is_wide(point: Estimate) -> bool:
    return (point.spread or 0.0) > _APART * point.mean


def draw(
    panel: Any,
    rows: Sequence[Row],
    group: Group,
    curve: Callable[[Sequence[Row], str], Points],
    low: float = -math.inf,
    differ: Callable[[Estimate], bool] = _is_wide,
) -> None:
    """The lines of a group, with their names.

    Args:
        curve: the points of one scheme, from rows of one seed or of all.
        low: the lower limit of bands.
        differ: whether seeds differ so much at a point that a band would hide them; then each seed is a thin line.
    """
    for label, look in style.lines(rows, group.labels, group.reference).items():
        mine = [row for row in rows if row["label"] == label]
        points = curve(mine, label)
        threads = [curve(seed, label) for seed in each_seed(mine)] if any(map(differ, points.values())) else []
        style.plot(panel, label, look, points, low=low, threads=threads)
        if points:
            ends.name(panel, label, look.colour, list(points), [point.mean for point in points.values()])


def around(
    figure: Any,
    panels: Sequence[Any],
    across: str,
    up: str,
    *,
    top: str = "",
    above: Sequence[str] = (),
    below: Sequence[str] = (),
) -> None:
    """Adds the titles of the axes, at the outer panels only; a title and text above the panels; and text below them."""
    for panel in panels:
        spec = panel.get_subplotspec()
        is_lowest = spec.rowspan.stop == spec.get_gridspec().nrows or panel in panels[-spec.get_gridspec().ncols :]
        panel.set_xlabel(across if is_lowest else "")
        panel.set_ylabel(up if spec.is_first_col() else "")
    high = figure.get_figheight()
    figure.text(0.01, 1 - 0.1 / high, top, fontsize=13, fontweight="bold", va="top")
    figure.text(0.01, 1 - 0.42 / high, "\n".join(above), fontsize=9, color="#444444", va="top")
    figure.text(0.01, 0.1 / high, "\n".join(below), fontsize=8, color="#444444", va="bottom")
    ceiling, floor = (0.42 * bool(top) + 0.19 * len(above)) / high, (0.05 + 0.16 * len(below)) / high
    room = (0.004, floor, 0.992, 1 - ceiling - floor)
    figure.set_layout_engine("constrained", rect=room, w_pad=0.08, h_pad=0.08, hspace=0.02, wspace=0.02)


def of_lengths(what: str, ticks: Sequence[int], train_length: int | None) -> str:
    """The title of an axis of lengths, which explains the values in brackets and the dotted line."""
    dotted = ", dotted" if style.is_marked(ticks, train_length) else ""
    return f"{what}\n(times the training length{dotted})" if train_length else what
