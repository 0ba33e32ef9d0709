"""Names at the ends of lines, in place of a legend."""

from collections.abc import Sequence
from typing import Any

_GID = "end of a line"
_SIZE = 8.5
_GAP = 1.25  # distance between names, in lines of text
_LEFT = 1.03  # where names begin, as a fraction of the panel's width


def name(panel: Any, label: str, colour: str, xs: Sequence[float], ys: Sequence[float]) -> None:
    """The name of a line to the right of the panel, with a thin connection to its last point."""
    connection = {"arrowstyle": "-", "linestyle": ":", "color": colour, "linewidth": 1.0, "relpos": (0, 0.5)}
    panel.annotate(
        label, (xs[-1], ys[-1]), xytext=(_LEFT, 0.5), textcoords="axes fraction", va="center", fontsize=_SIZE,
        color=darker(colour), annotation_clip=False, gid=_GID, arrowprops={**connection, "shrinkA": 1, "shrinkB": 3},
    )  # fmt: skip


def darker(colour: str) -> str:
    """A darker colour for text, which is thinner than lines."""
    parts = (int(colour[n : n + 2], 16) for n in (1, 3, 5))
    return "#" + "".join(f"{round(0.75 * part):02x}" for part in parts)


def place(figure: Any) -> None:
    """Moves the names of every panel to the height of their lines, without overlap.

    A line that leaves the panel at the top or the bottom is named there, with an arrow.
    """
    named = {panel: [text for text in panel.texts if text.get_gid() == _GID] for panel in figure.axes}
    if not any(named.values()):
        return
    for panel, texts in named.items():
        for text in texts:
            _hold(panel, text)
    figure.get_layout_engine().execute(figure)  # computes the height of panels
    for panel, texts in named.items():
        _set_apart(panel, texts, figure.dpi)


def _hold(panel: Any, text: Any) -> None:
    """Moves the end of a line that is outside the panel to the panel's edge."""
    (x, y), (low, high) = text.xy, panel.get_ylim()
    text.xy = (x, min(max(y, low), high))
    text.set_text(text.get_text() + (" ↑" if y > high else " ↓" if y < low else ""))


def _set_apart(panel: Any, texts: Sequence[Any], dpi: float) -> None:
    height = panel.get_window_extent().height
    ends = [panel.transAxes.inverted().transform(panel.transData.transform(text.xy))[1] for text in texts]
    gap = _GAP * _SIZE * dpi / 72 / height
    for text, y in zip(texts, spread(ends, gap), strict=True):
        text.set_position((_LEFT, y))


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Heights in 0 to 1, each as near to the wanted one as a distance of `gap` between neighbours allows.

    The order is kept. If there are too many for the gap, it shrinks. Names that are too close are moved as blocks, so
    that the mean distance to the wanted heights is 0.
    """
    gap = min(gap, 1 / len(wanted)) if wanted else gap
    blocks: list[list[int]] = []
    for index in sorted(range(len(wanted)), key=wanted.__getitem__):
        blocks.append([index])
        while len(blocks) > 1 and _lowest(blocks[-1], wanted, gap) < _lowest(blocks[-2], wanted, gap) + gap * len(
            blocks[-2]
        ):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    heights = dict.fromkeys(range(len(wanted)), 0.0)
    for block in blocks:
        low = _lowest(block, wanted, gap)
        heights |= {index: low + gap * n for n, index in enumerate(block)}
    return list(heights.values())


def _lowest(block: Sequence[int], wanted: Sequence[float], gap: float) -> float:
    """The height of a block's lowest name, so that the whole block is inside, with half a gap to the edges."""
    mean = sum(wanted[index] for index in block) / len(block)
    extent = gap * (len(block) - 1)
    return min(max(mean - extent / 2, gap / 2), 1 - gap / 2 - extent)
