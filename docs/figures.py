"""Plots of the pages: the weight that a method gives to each distance, and the frequencies of a rule."""

import functools
import io
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.figure import Figure
from methods import REACH, TRAINED, Method, numbered, subject

import posjax as pj
from posjax.diagnostics import Curve, weight_curve, weights
from posjax.diagnostics.rotation import radians
from posjax.linear import gated_delta

HEADS = 4
CONTENTS = (
    "In each head a random query meets keys that are all equal to it (or all alike, where keys are narrower), so that "
    "position alone decides. Parameters are as initialised."
)
_STYLE = {
    "svg.hashsalt": "posjax",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_DISTANCES = np.arange(REACH)


def figure(method: Method) -> tuple[str, str]:
    """The figure of a page as SVG, and a sentence on what it shows."""
    about = subject(method)
    if about == "training_positions":
        return _svg(1, lambda axes: _draw_positions(axes, method)), "Positions that the rule draws in training, by row."
    if _is_rule(method) and method.scheme.features.frequencies.num_axes == 1:
        caption = f"Left: each pair's frequency over that of plain RoPE. {_caption()} {CONTENTS}"
        return _svg(2, lambda axes: _draw_rule(axes, method)), caption
    if about == "embedding":
        curves = {method.name: _embedded(method.scheme, method.head_dim)}
        caption = f"{_caption()} The embeddings attend to each other, without projections."
        return _svg(1, lambda axes: _draw_weights(axes, curves)), caption
    curves = {label: _curve(scheme, method.head_dim) for label, scheme in _lines(method).items()}
    has_several_axes = getattr(getattr(method.scheme, "features", None), "num_axes", 1) > 1
    caption = f"{_caption()} {CONTENTS}" + " Positions move along all axes at once." * has_several_axes
    return _svg(1, lambda axes: _draw_weights(axes, curves)), caption


def _is_rule(method: Method) -> bool:
    """Whether a page is about a frequency rule other than that of RoPE."""
    features = getattr(method.scheme, "features", None)
    rotates = subject(method) == "features" and type(features) is pj.rotary.Rotary
    return subject(method) == "frequencies" or (rotates and type(features.frequencies) is not pj.rotary.Plain)


def _caption() -> str:
    return f"The attention weights of the last of {REACH} tokens; heads that differ are thin lines around their mean."


def _lines(method: Method) -> Mapping[str, pj.Scheme]:
    """The schemes that a figure compares, by label: the method over RoPE, or the layers of a recipe."""
    if isinstance(method.scheme, pj.Layers):
        return {f"layer{'s' * (',' in n)} {n}": scheme for scheme, n in numbered(method.scheme).items()}
    rope = pj.scheme("rope")
    return {method.name: method.scheme} | ({} if method.scheme == rope else {"rope": rope})


def draw_ahead(methods: Sequence[Method]) -> None:
    """Computes the curves of all figures in parallel, because compiling one curve uses only one core."""
    with_curves = [method for method in methods if subject(method) not in ("training_positions", "embedding")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        lines = {(scheme, method.head_dim) for method in with_curves for scheme in _lines(method).values()}
        list(pool.map(lambda line: _curve(*line), lines))


@functools.cache
def _curve(scheme: pj.Scheme, head_dim: int) -> Curve:
    if scheme.is_delta:
        return _of_delta()
    options = {} if scheme.linear else {"implementation": "dense"}
    # Without jit an operation is compiled once for all schemes: faster than compiling every scheme as a whole.
    common = type(scheme.features) is pj.rotary.Rotary and scheme.bias is None and scheme.linear is None
    with jax.disable_jit(common), np.errstate(invalid="ignore"):
        return weight_curve(scheme, _DISTANCES, draws=1, num_heads=HEADS, head_dim=head_dim, **options)


def _of_delta() -> Curve:
    """The weights of Gated DeltaNet for a rate of 1/2, and decays from the range of a new layer's heads."""
    q = jnp.ones((1, REACH, HEADS, 1))
    v = jnp.broadcast_to(jnp.eye(REACH)[None, :, None], (1, REACH, HEADS, REACH))
    log_decay = jnp.broadcast_to(-8 * jnp.geomspace(1e-3, 1e-1, HEADS), v.shape[:3])
    out, _ = gated_delta(q, q, v, log_decay, jnp.full(v.shape[:3], 0.5))
    found = np.asarray(out[0, -1])[:, ::-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        return Curve(_DISTANCES, found, np.log(found))


def _embedded(scheme: pj.Scheme, width: int) -> Curve:
    """Weights of the scheme's embeddings as queries and keys of one head, as wide as the model."""
    spec = scheme.embedding
    e = spec.embed(spec.init(jax.random.key(0), width), jnp.arange(REACH), width)
    found = weights(pj.Scheme(), REACH, q=e[-1:], k=e[:, None], head_dim=width)[:, ::-1]
    return Curve(_DISTANCES, found, np.log(found))


def _draw_weights(axes, curves: Mapping[str, Curve]) -> None:
    """Weights against distance, both axes logarithmic, with uniform attention for comparison."""
    axes.axhline(1 / REACH, color="0.5", linestyle=":", linewidth=1, label="uniform")
    for color, (label, curve) in reversed(list(zip(("C0", "0.65", "C1", "C2"), curves.items(), strict=False))):
        if not np.allclose(curve.weights, curve.weights[:1], rtol=0.05):
            heads = np.where(curve.weights > 0, curve.weights, np.nan)
            axes.plot(_DISTANCES, heads.T, color=color, linewidth=0.6, alpha=0.5)
        mean = curve.weights.mean(0)
        axes.plot(_DISTANCES, np.where(mean > 0, mean, np.nan), color=color, linewidth=1.6, label=label)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(0, REACH - 1)
    ticks = [0, *(2**power for power in range(7))]
    axes.set_xticks(ticks, labels=map(str, ticks), minor=False)
    axes.set_xticks([], minor=True)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(max(min(low, 0.1 / REACH), 1e-6), max(high, 10 / REACH))
    _finish(axes, "distance (tokens)", "attention weight")


def _draw_rule(axes, method: Method) -> None:
    """The multipliers of the frequencies, and the weights."""
    rule = method.scheme.features.frequencies
    plain = pj.rotary.Plain()
    multipliers = radians(rule, method.head_dim, REACH) / radians(plain, method.head_dim)
    axes[0].plot(multipliers, marker=".", markersize=4, linewidth=1, label=method.name)
    axes[0].axhline(1, color="0.65", linewidth=1, zorder=0, label="rope")
    axes[0].set_ylim(bottom=0)
    _finish(axes[0], "pair t, fastest first", "frequency / that of RoPE")
    _draw_weights(axes[1], {label: _curve(scheme, method.head_dim) for label, scheme in _lines(method).items()})


def _draw_positions(axes, method: Method) -> None:
    """The positions that a rule draws for a few rows of the training length."""
    length = method.options.get("original_length", TRAINED)
    for row in range(4):
        drawn = method.scheme.training_positions.draw(jax.random.key(row), 1, length)
        places = drawn.positions if drawn.coordinates is None else drawn.coordinates[..., 0]
        axes.plot(np.arange(length), np.ravel(places), linewidth=1.2, label=f"row {row + 1}")
    axes.plot(np.arange(length), np.arange(length), color="0.5", linestyle=":", linewidth=1, label="0, 1, 2, ...")
    _finish(axes, "token", "position")


def _finish(axes, xlabel: str, ylabel: str) -> None:
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(color="0.92", linewidth=0.6)
    axes.legend(frameon=False, fontsize=8)


def _svg(columns: int, draw) -> str:
    with matplotlib.rc_context(_STYLE):
        made = Figure(figsize=(5 * columns, 3.1))
        draw(made.subplots(1, columns))
        made.subplots_adjust(0.13 / columns, 0.15, 0.99, 0.96)
        return as_svg(made)


def as_svg(made: Figure) -> str:
    """The SVG text of a figure; equal figures give equal text."""
    with matplotlib.rc_context(_STYLE):
        out = io.StringIO()
        made.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
