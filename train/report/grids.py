"""The figure of accuracy by depth and length: a map for each task and scheme."""

import math
from collections.abc import Sequence
from typing import Any

from train.report import style
from train.report.formats import spoken
from train.report.numbers import Row, at_depth, depths, is_above_chance, labels, lengths, tasks

_COLUMNS, _MOST = 4, 5
_WIDE = 3.2  # inches of a map, if there are few
_LIGHT = 0.55  # from this accuracy a cell is dark and its number light


def draw(rows: Sequence[Row]) -> bytes:
    """Maps of every task that has depths and that some scheme has learned: length to the right, depth downwards, as in
    reading. With few schemes each task has its own row of maps.

    The more answers are right, the darker the cell, which shows the share in %. A cell without a number is white.
    """
    found = {name: mine for name, mine in tasks(rows).items() if depths(mine) and is_above_chance(mine)}
    maps = [(name, mine, label) for name, mine in found.items() for label in labels(mine)]
    schemes = len({label for *_, label in maps})
    columns = schemes if 1 < schemes <= _MOST else min(_COLUMNS, len(maps))
    high = math.ceil(len(maps) / columns)
    figure = style.new_figure(min(style.WIDTH, 0.8 + _WIDE * columns), 0.3 + 2.7 * high)
    panels = figure.subplots(high, columns, squeeze=False).ravel()
    for panel, (name, mine, label) in zip(panels, maps, strict=False):
        _draw_map(panel, mine, label)
        panel.set_title(f"{spoken(name)}\n{label}", fontsize=9)
    for panel in panels[len(maps) :]:
        panel.set_axis_off()
    return style.png(figure)


def _draw_map(panel: Any, rows: Sequence[Row], label: str) -> None:
    across, down, cells = lengths(rows), depths(rows), at_depth(rows, label)
    values = [[cells.get((depth, length), math.nan) for length in across] for depth in down]
    panel.imshow(values, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            text = "-" if math.isnan(value) else f"{100 * value:.0f}"
            colour = "white" if value > _LIGHT else "black"
            panel.text(x, y, text, ha="center", va="center", fontsize=8, color=colour)
    panel.set_xticks(range(len(across)), [str(length) for length in across], fontsize=8)
    panel.set_yticks(range(len(down)), [f"{depth:.2f}" for depth in down], fontsize=8)
    panel.set_xlabel("length in tokens", fontsize=8)
    panel.set_ylabel("depth", fontsize=8)
