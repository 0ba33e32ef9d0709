"""The figures of a report: lines in panels, with at most `MOST` schemes in each, and maps of accuracy by depth."""

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from train.report import numbers, style
from train.report.numbers import Estimate, Row

MOST = 8
"""The maximal number of lines in a panel."""
_OWN = 4  # a training with at least this many schemes gets panels of its own, in a family of several panels
_LARGEST_NLL = 700.0  # exp of more exceeds float64
_APART = 0.1  # above this standard deviation of accuracy a band would hide the single seeds
_TICKS = 10  # of the axis of positions


# --- which schemes share a panel --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """The schemes of a panel, and the reference that all panels share; the title is empty if there is one panel
    only."""

    title: str
    labels: tuple[str, ...]
    reference: str | None = None


def groups(rows: Sequence[Row]) -> list[Group]:
    """One group of all schemes if they are at most `MOST`; otherwise groups of at most that size, with a reference.

    Families are read from the column `family`. A scheme and its extensions stay together, in panels of their own if
    they are many. Rows without that column form one family.
    """
    names, reference = numbers.labels(rows), numbers.baseline(rows)
    if len(names) <= MOST:
        return [Group("", tuple(names))]
    found = [
        Group(title, tuple(dict.fromkeys([reference, *part])), reference)
        for title, part in _parts(rows)
        if part != [reference]
    ]
    titles = [group.title for group in found]
    return [replace(group, title=_numbered(titles, n)) for n, group in enumerate(found)]


def _parts(rows: Sequence[Row]) -> Iterator[tuple[str, list[str]]]:
    """The schemes of each panel without the reference, with a title: by family, then by trained scheme."""
    units: dict[str, list[str]] = {}
    for label, base in {row["label"]: row["base"] for row in rows}.items():
        units.setdefault(base or label, []).append(label)
    family = {row["base"] or row["label"]: row["family"] for row in rows if row.get("family")}
    for name in dict.fromkeys([*numbers.FAMILIES, *family.values(), ""]):
        mine = {root: unit for root, unit in units.items() if family.get(root, "") == name}
        many = _OWN if sum(map(len, mine.values())) > MOST - 1 else MOST
        for part in _packed([unit for unit in mine.values() if len(unit) < many], MOST - 1):
            yield name[:1].upper() + name[1:] or "Schemes", part
        for root, unit in [each for each in mine.items() if len(each[1]) >= many]:
            for part in _packed([[label] for label in unit if label != root], MOST - 2):
                yield f"{root}, extended", [*([root] if root in unit else []), *part]


def _packed(units: Sequence[list[str]], room: int) -> list[list[str]]:
    """The fewest panels that hold the units without splitting them, about equally full."""
    count = sum(map(len, units))
    full = -(-count // max(1, -(-count // room)))
    parts: list[list[str]] = []
    for unit in units:
        if not parts or len(parts[-1]) >= full or len(parts[-1]) + len(unit) > room:
            parts.append([])
        parts[-1] += unit
    return parts


def _numbered(titles: Sequence[str], n: int) -> str:
    """The n-th title, numbered among equal titles."""
    times = titles.count(titles[n])
    return titles[n] + (f" ({titles[: n + 1].count(titles[n])} of {times})" if times > 1 else "")


# --- panels -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """The lines of a group of schemes.

    Args:
        title: the title.
        rows: the rows of these schemes, and of others.
        group: the schemes.
        points: the points of one scheme, from rows of one seed or of all.
        axes: sets the axes of the panel.
    """

    title: str
    rows: Sequence[Row]
    group: Group
    points: Callable[[Sequence[Row], str], style.Points]
    axes: Callable[[Any], object]

    def plot_lines(self, panel: Any, **options: Any) -> None:
        """Draws the lines, with options of `style.plot`."""
        for label, look in style.looks(self.rows, self.group.labels, self.group.reference).items():
            mine = numbers.of(self.rows, label)
            if found := self.points(mine, label):
                threads = [self.points(seed, label) for seed in numbers.grouped(mine, "seed").values()]
                style.plot(panel, label, look, found, threads, **options)
        style.grid(panel)
        self.axes(panel)
        panel.set_title(self.title, fontsize=11, loc="left")


def draw_groups(
    rows: Sequence[Row], up: str, points: Callable[..., style.Points], axes: Callable, **options: Any
) -> bytes:
    """A panel for each group of schemes, with the same points and axes; see `Panel` and `draw_panels`."""
    return draw_panels([Panel(group.title, rows, group, points, axes) for group in groups(rows)], up, **options)


def draw_panels(
    panels: Sequence[Panel],
    up: str,
    *,
    title: str = "",
    text: Sequence[str] = (),
    **options: Any,
) -> bytes:
    """Panels with the same axes in two columns, as a PNG 1800 pixels wide; a single panel is larger.

    Args:
        panels: the panels, row by row.
        up: the title of the vertical axes.
        title, text: above and below the panels.
        options: those of `style.plot`.
    """
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    below = [line for each in text for line in textwrap.wrap(each, 170)]
    high = (5.0 if len(panels) == 1 else 4.6 if rows == 1 else 0.4 + 2.6 * rows) + 0.35 * bool(title)
    figure = style.new_figure(style.WIDTH, high + 0.16 * len(below))
    drawn = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    for axes, panel in zip(drawn, panels, strict=False):
        panel.plot_lines(axes, **options)
        axes.tick_params(labelleft=True, labelbottom=True)
    for axes in drawn[::columns]:
        axes.set_ylabel(up)
    for axes in drawn[: len(panels) - columns]:
        axes.set_xlabel("")
    for axes in drawn[len(panels) :]:
        axes.set_axis_off()
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    if below:
        figure.supxlabel("\n".join(below), x=0.01, ha="left", fontsize=8, color="#444444")
    return style.png(figure)


# --- perplexity -------------------------------------------------------------------------------------------------------

_MEASURES = {
    "window": "whole window",
    "last": "last {length} tokens only, context growing",
    "sliding": "sliding window",
    "key": "tokens that need a long context",
}


def draw_by_length(rows: Sequence[Row], title: str, text: str) -> bytes:
    """Perplexity against length. Two measurements of a group are side by side; of more, each is shown apart."""
    rows = numbers.perplexity_rows(rows)
    found, ticks, own = numbers.shown_measures(rows), numbers.lengths(rows), numbers.train_length(rows)
    curves = [numbers.curve(rows, label, measure) for label in numbers.labels(rows) for measure in found]
    low, top = style.perplexity_limits([point.mean for curve in curves for point in curve.values()], rows)

    def axes(panel: Any) -> None:
        style.length_axis(panel, "evaluation length in tokens", ticks, own)
        style.perplexity_axis(panel, low, top)

    names = {measure: _MEASURES[measure].format(length=numbers.last_length(rows)) for measure in found}
    order = [(group, measure) for group in groups(rows) for measure in found]
    if len(found) > 2:
        order.sort(key=lambda pair: found.index(pair[1]))
    panels = []
    for group, measure in order:
        what = f"{group.title}: {names[measure]}" if group.title else names[measure].capitalize()
        panels.append(Panel(what, rows, group, partial(numbers.curve, measure=measure), axes))
    return draw_panels(panels, "perplexity per token", title=title, text=[text, *numbers.notes(rows)])


def draw_by_position(rows: Sequence[Row]) -> bytes:
    """Perplexity of tokens against the number of tokens before them in the window.

    A part with several positions is drawn at the middle of its range on the logarithmic axis.
    """
    points = {
        label: found for label in numbers.labels(numbers.perplexity_rows(rows)) if (found := _by_position(rows, label))
    }
    rows = [row for row in numbers.perplexity_rows(rows) if row["label"] in points]
    longest, own = max(numbers.positions(rows, label)[0][-1] for label in points), numbers.train_length(rows)
    low, top = style.perplexity_limits([point.mean for each in points.values() for point in each.values()], rows)

    def axes(panel: Any) -> None:
        style.length_axis(panel, "tokens before, in the window", powers(longest), own)
        style.perplexity_axis(panel, low, top)
        panel.set_xlim(0.9 * min(map(min, points.values())), 1.1 * longest)

    return draw_groups(rows, "perplexity per token", _by_position, axes)


def _by_position(rows: Sequence[Row], label: str) -> dict[float, Estimate]:
    """Perplexity by the middle of the range of tokens before; its spread is that of exp(NLL) to first order."""
    ends, parts = numbers.positions(rows, label)
    starts, found = [1, *(end + 1 for end in ends)], {}
    for start, end, part in zip(starts, ends, parts, strict=False):
        if part is not None:
            mean = math.exp(min(part.mean, _LARGEST_NLL))
            found[math.sqrt(start * end)] = Estimate(mean, part.spread and part.spread * mean)
    return found


def powers(longest: int) -> list[int]:
    """Powers of two up to a length: all, every second or every third, so that labels are readable."""
    count = longest.bit_length()
    return [2**n for n in range(0, count, -(-count // _TICKS))]


# --- training ---------------------------------------------------------------------------------------------------------


def draw_training(rows: Sequence[Row]) -> bytes:
    """The held-out loss during training against the tokens seen."""
    points = numbers.trainings(rows)
    losses = [point.mean for each in points.values() for point in each.values()]
    rows = [row for row in numbers.perplexity_rows(rows) if row["label"] in points]

    def axes(panel: Any) -> None:
        from matplotlib.ticker import EngFormatter

        style.loss_axis(panel, losses)
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        panel.set_xlabel("training tokens")

    def training(mine: Sequence[Row], label: str) -> style.Points:
        return numbers.trainings(mine).get(label, {})

    return draw_groups(rows, "held-out loss, nats per token", training, axes)


def draw_reached(rows: Sequence[Row]) -> bytes:
    """The share of seeds that have not reached the loss, against updates."""
    (loss, most), found = numbers.stop(rows), numbers.updates(rows)
    rows = [row for row in numbers.perplexity_rows(rows) if row["label"] in found]

    def axes(panel: Any) -> None:
        style.share_axis(panel)
        panel.set_xlabel("updates")

    def share(_: Sequence[Row], label: str) -> style.Points:
        return survival(found[label], most)

    steps = {"drawstyle": "steps-post", "marker": "", "linestyle": "-"}
    return draw_groups(rows, f"share of seeds not below {loss:g}", share, axes, **steps)


def survival(updates: Sequence[int | None], most: int) -> dict[int, Estimate]:
    """The share of trainings that have not reached the loss, at update 0, where it falls, and at the last update.

    ``S(u) = #{trainings that need more than u updates} / #{trainings}``, the Kaplan-Meier estimate if all are observed
    to the same end.
    """
    reached = sorted(each for each in updates if each is not None)
    return {n: Estimate(sum(each is None or each > n for each in updates) / len(updates)) for n in [0, *reached, most]}


# --- tasks ------------------------------------------------------------------------------------------------------------


def learned(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of every task that some scheme has learned."""
    return {name: mine for name, mine in numbers.tasks(rows).items() if numbers.is_above_chance(mine)}


def draw_tasks(rows: Sequence[Row]) -> bytes:
    """Accuracy against length: a panel for each task that some scheme has learned and each group of schemes."""
    found = learned(rows)
    every = [row for mine in found.values() for row in mine]

    def axes(panel: Any, chance: float | None) -> None:
        style.length_axis(panel, "length in tokens", numbers.lengths(every), numbers.train_length(every))
        style.share_axis(panel)
        if chance:
            panel.axhline(chance, color="#888888", linestyle=":", linewidth=1.0, label="_guess")

    panels = [
        Panel(
            f"{numbers.spoken(name)}: {group.title}".removesuffix(": "),
            mine,
            group,
            numbers.accuracies,
            partial(axes, chance=mine[0]["chance"]),
        )
        for name, mine in found.items()
        for group in groups(mine)
    ]
    return draw_panels(panels, "right answers", wide=lambda point: (point.spread or 0.0) > _APART)


_ACROSS, _MOST_ACROSS = 4, 5  # maps side by side: of many, and at most where each task has its own row
_WIDE = 3.2  # inches of a map, if there are few
_LIGHT = 0.55  # from this accuracy a cell is dark and its number light


def draw_depths(rows: Sequence[Row]) -> bytes:
    """Maps of every task that has depths and that some scheme has learned: length to the right, depth downwards, as in
    reading. With few schemes each task has its own row of maps.

    The more answers are right, the darker the cell, which shows the share in %. A cell without a number is white.
    """
    found = {name: mine for name, mine in learned(rows).items() if numbers.depths(mine)}
    maps = [(name, mine, label) for name, mine in found.items() for label in numbers.labels(mine)]
    schemes = len({label for *_, label in maps})
    columns = schemes if 1 < schemes <= _MOST_ACROSS else min(_ACROSS, len(maps))
    high = math.ceil(len(maps) / columns)
    figure = style.new_figure(min(style.WIDTH, 0.8 + _WIDE * columns), 0.3 + 2.7 * high)
    panels = list(figure.subplots(high, columns, squeeze=False).flat)
    for panel, (name, mine, label) in zip(panels, maps, strict=False):
        _draw_map(panel, mine, label)
        panel.set_title(f"{numbers.spoken(name)}\n{label}", fontsize=9)
    for panel in panels[len(maps) :]:
        panel.set_axis_off()
    return style.png(figure)


def _draw_map(panel: Any, rows: Sequence[Row], label: str) -> None:
    across, down, cells = numbers.lengths(rows), numbers.depths(rows), numbers.at_depth(rows, label)
    values = [[cells.get((depth, length), math.nan) for length in across] for depth in down]
    panel.imshow(values, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            text = "-" if math.isnan(value) else f"{100 * value:.0f}"
            colour = "white" if value > _LIGHT else "black"
            panel.text(x, y, text, ha="center", va="center", fontsize=8, color=colour)
    panel.set_xticks(range(len(across)), map(str, across), fontsize=8)
    panel.set_yticks(range(len(down)), [f"{depth:.2f}" for depth in down], fontsize=8)
    panel.set_xlabel("length in tokens", fontsize=8)
    panel.set_ylabel("depth", fontsize=8)
