"""Plots of the results of ``posjax.diagnostics``. Each function draws into the given axes and returns them.

If no axes are given, new ones are made on a new figure, ``axes.figure``, without pyplot.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from posjax._checks import check, check_choice
from posjax.diagnostics.anomaly import Anomaly
from posjax.diagnostics.rotation import Exactness
from posjax.diagnostics.weights import Curve

Axes = Any
"""``matplotlib.axes.Axes``; matplotlib is imported on first use."""

# How each kind of line and text looks.
_CURVE = {"linewidth": 1.4, "markersize": 4}
_BOUND = {"color": "0.4", "linestyle": ":", "linewidth": 1.2}
_ZERO = {"color": "0.6", "linewidth": 0.8, "zorder": 0}
_BORDER = {"color": "white", "linestyle": "--", "linewidth": 1.5}
_NOTE = {"xytext": (2, 3), "textcoords": "offset points", "fontsize": 8, "color": "0.3"}
_GRID = {"color": "0.9", "linewidth": 0.6}
_LEGEND = {"frameon": False, "fontsize": 8}
_FIGURE = {"figsize": (6.4, 4), "layout": "constrained"}


def plot_decay(
    distances: Int[np.ndarray, "n"],
    curves: Mapping[str, Float[np.ndarray, "n"]],
    axes: Axes | None = None,
    *,
    ylabel: str = "mean score, as a share of distance 0",
) -> Axes:
    """Labelled curves against distance, from ``mean_score`` or ``decay_indicator``."""
    axes = _axes(axes)
    for color, (label, values) in zip(_colors(len(curves)), curves.items(), strict=True):
        axes.plot(distances, values, label=label, color=color, **_CURVE)
    if min(np.min(values) for values in curves.values()) < 0:
        axes.axhline(0, **_ZERO)
    return _finish(axes, "distance (tokens)", ylabel, legend=len(curves) > 1)


def plot_weights(curve: Curve, axes: Axes | None = None, *, logits: bool = False) -> Axes:
    """The attention weight of every head against distance, on a logarithmic axis; or its logits, 0 at the highest.

    If all heads are equal, one line is drawn.
    """
    axes = _axes(axes)
    order = np.argsort(curve.distances)
    distances = curve.distances[order]
    values = (curve.logits if logits else curve.weights)[:, order]
    same = np.allclose(values, values[:1], rtol=1e-4, atol=1e-7)
    shown = values[:1] if same else values
    for head, (color, row) in enumerate(zip(_colors(len(shown)), shown, strict=True), start=1):
        row = row - row.max() if logits else np.where(row > 0, row, np.nan)
        axes.plot(distances, row, label=f"head {head}", color=color, **_CURVE)
    if not logits:
        axes.set_yscale("log")
        axes.set_ylim(max(1e-9, values[values > 0].min() / 2), 2 * values.max())
    axes.set_xlim(distances[0], distances[-1])
    ylabel = "logit, relative to the highest" if logits else "attention weight"
    return _finish(axes, "distance (tokens)", ylabel, legend=not same)


_STATISTICS = {
    "fraction": "share of pairs in the anomaly",
    "weighted": "share of score strength in the anomaly",
    "in_zone": "share of pairs inside the zone",
    "in_zone_weighted": "share of score strength inside the zone",
    "zone": "mean zone (tokens)",
    "strength": "mean strength of a pair, |z|",
}


def plot_anomaly(
    anomaly: Anomaly,
    axes: Axes | None = None,
    *,
    statistic: str = "in_zone_weighted",
    turns: Float[np.ndarray, "planes"] | None = None,
) -> Axes:
    """Heat map of one statistic of the anomaly: a row for each layer, a column for each plane, fastest first.

    Args:
        anomaly: statistics ``[layers, planes]``, such as ``pooled(measured, axis=-2)`` of ``[layers, heads, planes]``.
        axes: where to draw.
        statistic: the field of ``Anomaly``.
        turns: turns of each plane in training (``turns``); a line then marks the first plane without a full turn.
    """
    check_choice("statistic", statistic, tuple(_STATISTICS))
    values = getattr(anomaly, statistic)
    check(values.ndim == 2, f"anomaly must be [layers, planes]; pool the heads first, found shape {values.shape}")
    axes = _axes(axes)
    layers, planes = values.shape
    image = axes.pcolormesh(np.arange(planes + 1) - 0.5, np.arange(layers + 1) + 0.5, values, cmap="viridis", vmin=0)
    axes.figure.colorbar(image, ax=axes, label=_STATISTICS[statistic])
    axes.invert_yaxis()
    axes.set_yticks(_whole(1, layers))
    axes.set_xticks(_whole(0, planes - 1))
    first = 0 if turns is None else int((np.asarray(turns) >= 1).sum())
    if 0 < first < planes:
        axes.axvline(first - 0.5, **_BORDER)
        axes.annotate("no full turn in training →", (first - 0.5, 0.5), **_NOTE)
    axes.set_xlabel("plane (fastest first)")
    axes.set_ylabel("layer")
    return axes


def plot_entropy(
    lengths: Int[np.ndarray, "n"], curves: Mapping[str, Float[np.ndarray, "n"]], axes: Axes | None = None
) -> Axes:
    """Labelled curves of entropy against the number of visible keys, with the bound ``log n`` of uniform attention."""
    axes = _axes(axes)
    lengths = np.asarray(lengths)
    axes.plot(lengths, np.log(lengths), label="log n (uniform)", **_BOUND)
    for color, (label, values) in zip(_colors(len(curves)), curves.items(), strict=True):
        axes.plot(lengths, values, label=label, color=color, marker="o", **_CURVE)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    return _finish(axes, "visible keys", "entropy of attention (nats)", legend=True)


def plot_exactness(exactness: Exactness, axes: Axes | None = None) -> Axes:
    """The largest error of an angle against position, both axes logarithmic, in three arithmetics."""
    axes = _axes(axes)
    lines = (
        ("positions in bfloat16", exactness.bfloat16, "s"),
        ("float32 product", exactness.float32, "o"),
        ("posjax, exact", exactness.exact, "^"),
    )
    for color, (label, errors, marker) in zip(_colors(len(lines)), lines, strict=True):
        axes.plot(exactness.positions, errors, label=label, color=color, marker=marker, **_CURVE)
    axes.axhline(np.pi, **_BOUND)
    axes.annotate("π: the angle is lost", (exactness.positions[0], np.pi), **_NOTE)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(top=20)
    return _finish(axes, "position", "largest error of an angle (radians)", legend=True)


def _axes(axes: Axes | None) -> Axes:
    if axes is not None:
        return axes
    from matplotlib.figure import Figure

    return Figure(**_FIGURE).subplots()


def _colors(count: int) -> list:
    """Colours whose order is visible, also in grey."""
    from matplotlib import colormaps

    return list(colormaps["viridis"](np.linspace(0, 0.85, count)))


def _whole(first: int, last: int) -> np.ndarray:
    """At most about ten whole-number ticks."""
    return np.arange(first, last + 1, -(-(last - first + 1) // 10))


def _finish(axes: Axes, xlabel: str, ylabel: str, *, legend: bool) -> Axes:
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(**_GRID)
    axes.set_axisbelow(True)
    if legend:
        outside = {"loc": "center left", "bbox_to_anchor": (1, 0.5)} if len(axes.get_lines()) > 5 else {}
        axes.legend(**_LEGEND, **outside)
    return axes
