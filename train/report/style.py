"""How lines and axes look, the same in every figure."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from train.report.numbers import Estimate, Row, texts

WIDTH = 12.0  # inches, of every figure of lines: the width of a page, so that text keeps its size
# Okabe and Ito's palette, distinguishable with any colour vision; a dark red replaces its yellow, too pale for lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#882255")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h")
_DASHES = ("--", ":", "-.")  # of extensions
_REFERENCE, _GRID, _DOTTED = "#8c8c8c", "#dddddd", "#666666"
_MARKED = 12  # lines with up to this many points have markers
_APART = 0.25  # above this ratio of standard deviation to mean a band would hide the single seeds
_CLIP, _CLIP_TEXTS = 40.0, 5.0  # perplexities above this multiple of the lowest one are outside the figure
_ROOM = 1.5  # range in nats of an axis of losses

Points = Mapping[float, Estimate]
Look = Mapping[str, Any]
"""How the line of one scheme is drawn: options of matplotlib."""


def looks(rows: Sequence[Row], labels: Sequence[str], reference: str | None = None) -> dict[str, Look]:
    """How each scheme of a panel is drawn. Extensions are dashed, with open markers.

    Extensions have the colour of their trained scheme if there are enough dashes to distinguish them, else their own.
    The reference of all panels is grey.
    """
    base = {row["label"]: row["base"] for row in rows}
    siblings = {name: [other for other in labels if base[other] == base[name]] for name in labels if base[name]}

    def leader(name: str) -> str:
        root = base[name]
        follows = root in labels and root not in (name, reference) and len(siblings[name]) <= len(_DASHES)
        return root if follows else name

    leaders = list(dict.fromkeys(leader(name) for name in labels if name != reference))
    found: dict[str, Look] = {}
    for name in labels:
        index = leaders.index(leader(name)) if name != reference else 0
        colour = COLOURS[index % len(COLOURS)] if name != reference else _REFERENCE
        found[name] = {"color": colour, "marker": MARKERS[index % len(MARKERS)]}
        if name in siblings:
            dashes = _DASHES[siblings[name].index(name) % len(_DASHES)]
            found[name] |= {"linestyle": dashes, "markerfacecolor": "white", "zorder": 2.5}
    return found


def new_figure(width: float, height: float) -> Any:
    """An empty figure of this size in inches, with 150 pixels per inch; its layout fits all texts, with a margin."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(width, height), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))


def png(figure: Any) -> bytes:
    """The figure as a file, with a legend beside every panel that has lines with names."""
    for panel in figure.axes:
        _name_lines(panel)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def _name_lines(panel: Any) -> None:
    """The names of lines right of the panel, in the order of their ends, which is that of the eye.

    A line that leaves the panel at the top or the bottom has an arrow beside its name.
    """
    lines = panel.get_legend_handles_labels()[0]
    (low, high), last = panel.get_ylim(), {line: line.get_ydata()[-1] for line in lines}
    lines.sort(key=lambda line: -last[line])
    arrows = [" ↑" if last[line] > high else " ↓" if last[line] < low else "" for line in lines]
    names = [line.get_label() + arrow for line, arrow in zip(lines, arrows, strict=True)]
    if lines:
        panel.legend(
            lines, names, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8.5, handlelength=2.3,
            handletextpad=0.5, borderaxespad=0.2,
        )  # fmt: skip


def _is_wide(point: Estimate) -> bool:
    return (point.spread or 0.0) > _APART * point.mean


def plot(
    panel: Any,
    label: str,
    look: Look,
    points: Points,
    threads: Sequence[Points] = (),
    wide: Callable[[Estimate], bool] = _is_wide,
    **options: Any,
) -> None:
    """One scheme's line, with a band of one standard deviation when there are several seeds.

    If seeds differ so much at a point, by `wide`, that a band would hide them, each of `threads`, the lines of single
    seeds, is thin instead. Other options are matplotlib's.
    """
    xs, means = list(points), [point.mean for point in points.values()]
    spreads = [point.spread or 0.0 for point in points.values()]
    marker = look["marker"] if len(xs) <= _MARKED else ""
    shape = {"linewidth": 1.8, "markersize": 5, "markeredgewidth": 1.4, "zorder": 3}
    panel.plot(xs, means, label=label, **{**shape, **look, "marker": marker, **options})
    if any(map(wide, points.values())):
        for thread in threads:
            seed = [point.mean for point in thread.values()]
            panel.plot(list(thread), seed, color=look["color"], linewidth=0.7, alpha=0.55, label="_seed")
    elif any(spreads):
        below, above = zip(*((mean - s, mean + s) for mean, s in zip(means, spreads, strict=True)), strict=True)
        panel.fill_between(xs, below, above, color=look["color"], alpha=0.15, linewidth=0)


# --- axes -------------------------------------------------------------------------------------------------------------


def grid(panel: Any) -> None:
    """Thin lines at the ticks, behind everything else."""
    panel.grid(True, color=_GRID, linewidth=0.7)
    panel.set_axisbelow(True)


def length_axis(panel: Any, what: str, lengths: Sequence[int], own: int | None) -> None:
    """A logarithmic axis with ticks at the lengths, as multiples of the own one, and a dotted line at that one if it is
    in their range."""
    own = own or math.inf
    marked = min(lengths) <= own <= max(lengths)
    names = [f"{n}\n({n / own:.3g}x)" if n >= own else str(n) for n in lengths]
    panel.set_xscale("log", base=2)
    panel.set_xticks(lengths, names)
    panel.minorticks_off()
    dotted = ", dotted" if marked else ""
    panel.set_xlabel(f"{what}\n(times the training length{dotted})" if own < math.inf else what)
    if marked:
        panel.axvline(own, color=_DOTTED, linestyle=":", linewidth=1.3, zorder=1, label="_training length")


def perplexity_axis(panel: Any, low: float, top: float) -> None:
    """A logarithmic axis of perplexity between two limits."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    steps = (1, 2, 5) if top > 20 * low else (1, 1.5, 2, 3, 4, 5, 6, 8)
    panel.set_yscale("log")
    panel.set_ylim(low, top)
    panel.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]) if top < 4 * low else LogLocator(subs=steps))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.minorticks_off()


def perplexity_limits(values: Sequence[float], rows: Sequence[Row]) -> tuple[float, float]:
    """An axis for these perplexities of rows, whose top does not depend on exploding values.

    In a study of a released model it is lower, because the extensions that work differ by little.
    """
    values = values or [1.0]
    clip = _CLIP_TEXTS if texts(rows) else _CLIP
    return min(values) / 1.08, min(max(values) * 1.12, min(values) * clip)


def loss_axis(panel: Any, values: Sequence[float]) -> None:
    """An axis of these losses in nats, that ends `1.5` nats above the lowest."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    panel.set_ylim(low - 0.05, min(high + 0.05, low + _ROOM))


def share_axis(panel: Any) -> None:
    """An axis from 0 to 1."""
    panel.set_ylim(-0.03, 1.03)
