"""How schemes are drawn, the same in every figure."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from train.report import ends
from train.report.numbers import Estimate, Row

WIDTH = 12.0  # inches, of every line figure: the width of a page, so that text keeps its size
# Okabe and Ito's palette, distinguishable with any colour vision; a dark red replaces its yellow, too pale for lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#882255")
_REFERENCE = "#8c8c8c"
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h")
DASHES = ((4, 1.5), (1.2, 1.2), (6, 1.5, 1.2, 1.5))
# Perplexities above this multiple of the lowest one are outside the figure; the note below names them.
_CLIP = 40.0
_MARKED = 12  # lines with up to this many points have markers


@dataclass(frozen=True)
class Look:
    """How one scheme is drawn: a colour and a marker, and dashes for an extension of a trained scheme."""

    colour: str
    marker: str
    dashes: tuple[float, ...] | None


def lines(rows: Sequence[Row], labels: Sequence[str] = (), reference: str | None = None) -> dict[str, Look]:
    """How each scheme of a panel is drawn, by its label; all of the rows unless `labels` names them.

    Extensions have the colour of their trained scheme if there are enough dashes to distinguish them, else their own.
    The reference of all panels is grey.
    """
    base = {row["label"]: row["base"] for row in rows}
    names = list(labels or base)
    siblings = {name: [other for other in names if base[other] == base[name]] for name in names if base[name]}

    def leader(name: str) -> str:
        root = base[name]
        follows = root in names and root not in (name, reference) and len(siblings[name]) <= len(DASHES)
        return root if follows else name

    leaders = list(dict.fromkeys(leader(name) for name in names if name != reference))
    looks: dict[str, Look] = {}
    for name in names:
        index = leaders.index(leader(name)) if name != reference else 0
        colour = _REFERENCE if name == reference else COLOURS[index % len(COLOURS)]
        dashes = DASHES[siblings[name].index(name) % len(DASHES)] if name in siblings else None
        looks[name] = Look(colour, MARKERS[index % len(MARKERS)], dashes)
    return looks


def new_figure(width: float, height: float) -> Any:
    """An empty figure of this size in inches, with 150 pixels per inch; its layout fits all texts, with a margin."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(width, height), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))


def png(figure: Any) -> bytes:
    """The figure as a file, with the names at the ends of lines, moved so that they do not overlap."""
    ends.place(figure)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def plot(
    panel: Any,
    label: str,
    style: Look,
    points: Mapping[float, Estimate],
    low: float = -math.inf,
    threads: Sequence[Mapping[float, Estimate]] = (),
) -> None:
    """One scheme's line, with a band of one standard deviation, not below `low`, when there are several seeds.

    If `threads` has a line for each seed, these are drawn instead of the band.
    """
    xs, means = list(points), [point.mean for point in points.values()]
    spreads = [point.spread or 0.0 for point in points.values()]
    extended = style.dashes is not None
    (line,) = panel.plot(
        xs, means, color=style.colour, marker=style.marker if len(xs) <= _MARKED else None, label=label, linewidth=1.8,
        markersize=5, markerfacecolor="white" if extended else style.colour, markeredgewidth=1.4, zorder=3 - extended,
    )  # fmt: skip
    if extended:
        line.set_dashes(style.dashes)
    for thread in threads:
        seed = [point.mean for point in thread.values()]
        panel.plot(list(thread), seed, color=style.colour, linewidth=0.7, alpha=0.55, label="_seed", zorder=2)
    if any(spreads) and not threads:
        below = [max(mean - spread, low) for mean, spread in zip(means, spreads, strict=True)]
        above = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
        panel.fill_between(xs, below, above, color=style.colour, alpha=0.15, linewidth=0)


def length_axis(panel: Any, lengths: Sequence[int], train_length: int | None) -> None:
    """A logarithmic axis with ticks at the lengths, and a dotted line at the training length if it is in their
    range."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    def written(length: float, _: int) -> str:
        times = f"\n({length / train_length:.3g}x)" if train_length and length >= train_length else ""
        return f"{length:.0f}{times}"

    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_locator(FixedLocator(lengths))
    panel.xaxis.set_major_formatter(FuncFormatter(written))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.grid(True, which="major", color="#dddddd", linewidth=0.7)
    panel.set_axisbelow(True)
    if is_marked(lengths, train_length):
        panel.axvline(train_length, color="#555555", linestyle=":", linewidth=1.3, zorder=1, label="_training length")


def is_marked(lengths: Sequence[int], train_length: int | None) -> bool:
    """Whether there is one training length, and it is on an axis of these lengths."""
    return train_length is not None and min(lengths) <= train_length <= max(lengths)


def value_axis(panel: Any, low: float, top: float) -> None:
    """A logarithmic axis of perplexity between two limits."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    panel.set_yscale("log")
    panel.set_ylim(low, top)
    panel.yaxis.set_major_locator(FixedLocator(_ticks(low, top)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    panel.yaxis.set_minor_locator(NullLocator())
    panel.tick_params(labelleft=True)


def limits(values: Sequence[float]) -> tuple[float, float]:
    """An axis for these perplexities, whose top does not depend on exploding values."""
    values = values or [1.0]
    return min(values) / 1.08, min(max(values) * 1.12, min(values) * _CLIP)


def _ticks(low: float, top: float) -> list[float]:
    """Round numbers between the limits, at most about a dozen."""
    steps = (1, 1.5, 2, 3, 4, 5, 6, 8) if top / low < 20 else (1, 2, 5)
    if top / low < 4:
        steps = (1, 1.2, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9)
    if top / low < 2:
        steps = tuple(tenths / 10 for tenths in range(10, 100, 2))
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(top)) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    return [tick for tick in ticks if low <= tick <= top]
