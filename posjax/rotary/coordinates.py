"""Positions with several axes: image grids, and the ids of sequences of text and images (M-RoPE, RoPE-Tie).

A data pipeline computes coordinates ``[n, axes]`` once, on the host, in NumPy. Whole coordinates are int32, so that
their angles are exact; others are float32, which holds half-integers up to 2^23.
"""

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from posjax._checks import check, check_choice, check_count
from posjax.positions import Positions, Range

TIE_SPACINGS = ("tie", "equal-tokens", "centred")

Span = int | tuple[int, ...]
Coordinates = Int[np.ndarray, "n axes"] | Float[np.ndarray, "n axes"]


class SpanPositions(NamedTuple):
    """Coordinates of every token ``[n, axes]``, and ``end``, the position of the next text token."""

    coordinates: Coordinates
    end: int


def by_axis(positions: Positions | Array, num_axes: int) -> list[Any]:
    """The positions on each axis, in the form ``[n]`` or ``[batch, n]``; a list of one if all axes share them.

    positions: coordinates ``[n, axes]`` or ``[batch, n, axes]``; or the ids of text, the same on every axis, as a
        ``Range``, ``[n]``, ``[batch, n]`` or ``[batch, n, 1]``. An array ``[m, axes]`` is read as coordinates: write
        a batch of text rows with exactly ``num_axes`` tokens as ``[batch, n, 1]``.

    Raises ValueError for a last axis of another length.
    """
    if isinstance(positions, Range):
        return [positions]
    array = positions if isinstance(positions, jax.Array) else np.asarray(positions)
    if array.ndim < 2 or (array.ndim == 2 and array.shape[-1] != num_axes):
        return [array]
    check(
        array.ndim <= 3 and array.shape[-1] in (1, num_axes),
        f"positions of {num_axes} axes must be [n, {num_axes}] or [batch, n, {num_axes}], found shape {array.shape}",
    )
    return [array[..., a] for a in range(array.shape[-1])]


def grid_coordinates(*sizes: int) -> Int[np.ndarray, "n axes"]:
    """Index of every cell of a grid, row-major: ``(row, column)`` for ``(h, w)``, ``(time, row, column)`` for three.

    Raises ValueError for a size that is not positive.
    """
    for size in sizes:
        check_count("grid size", size)
    return np.indices(sizes, dtype=np.int32).reshape(len(sizes), -1).T


def patch_centres(*sizes: int) -> Float[np.ndarray, "n axes"]:
    """Centres of the cells of a grid that fills [-1, 1] on every axis: ``2 (i + 1/2) / size - 1``, float32 (DINOv3)."""
    return ((2 * grid_coordinates(*sizes) + 1) / np.array(sizes) - 1).astype(np.float32)


def mrope_positions(spans: Sequence[Span], start: int = 0) -> SpanPositions:
    """(time, row, column) ids of text and images for M-RoPE (Qwen2-VL, arXiv:2409.12191, section 2.1), int32.

    spans: in order, a number of text tokens, ``(h, w)`` for an image, ``(t, h, w)`` for a video; grid sizes are those
        that the language model sees (after merging patches).

    Text has the same id on all axes. A grid starts at the next text position. Text after it starts at the largest id
    of the grid on any axis, plus 1. (transformers 5.23 ignores the time axis in that maximum, so text after a video
    with more frames than rows and columns repeats ids of the video.) ``end - n`` is the rope delta of Qwen's code.
    """

    def grid(sizes):
        sizes = (1, *sizes) if len(sizes) == 2 else sizes
        return grid_coordinates(*sizes) + 1, max(sizes) + 1

    return _lay_out(spans, 3, grid, start, np.int32)


def tie_positions(spans: Sequence[Span], spacing: str = "tie", *, num_axes: int = 2, start: int = 0) -> SpanPositions:
    """Ids that treat text and images symmetrically: RoPE-Tie (kexue.fm 10040; 10352 for "centred").

    spans: as in :func:`mrope_positions`, each grid with ``num_axes`` sizes n_a. L is the last position before the
        grid, N = prod n_a the number of its cells, K the position of the next text token. On axis a, cell
        i_a = 1 .. n_a has the position
    spacing:
        ``"tie"``            L + i_a prod_{b != a} (n_b + 1),   K = L + prod_b (n_b + 1); int32. For an image of h rows
                             and w columns: steps of w + 1 down and h + 1 across.
        ``"equal-tokens"``   L + i_a (N + 1) / (n_a + 1),       K = L + N + 1: an image counts as N tokens; float32.
        ``"centred"``        L + i_a + (N - n_a) / 2,           K = L + N + 1: steps of 1; half-integers, float32 (RoPE-
                             Tie-v2, and with three axes RoPE-TV; the offsets are derived from symmetry).

    In all three the first cell is as far from the last text token as the next text token is from the last cell.
    """
    check_choice("spacing", spacing, TIE_SPACINGS)

    def grid(sizes):
        check(len(sizes) == num_axes, f"spans: a grid of {num_axes} axes has {num_axes} sizes, found {sizes}")
        cells = grid_coordinates(*sizes) + 1
        number = math.prod(sizes)
        sizes = np.array(sizes)
        if spacing == "tie":
            area = int(np.prod(sizes + 1))
            return cells * (area // (sizes + 1)), area
        if spacing == "equal-tokens":
            return cells * ((number + 1) / (sizes + 1)), number + 1
        return cells + (number - sizes) / 2, number + 1

    return _lay_out(spans, num_axes, grid, start, np.int32 if spacing == "tie" else np.float32)


def _lay_out(spans: Sequence[Span], num_axes: int, grid: Callable, start: int, dtype: Any) -> SpanPositions:
    """The spans one after another; ``grid(sizes)`` gives a grid's offsets from the position before it, and K - L."""
    parts = [np.zeros((0, num_axes))]
    last = start - 1
    for span in spans:
        if isinstance(span, numbers.Integral):
            check_count("spans: a number of text tokens", span)
            offsets = np.repeat(np.arange(1, span + 1)[:, None], num_axes, axis=1)
            advance = span + 1
        else:
            check(1 < len(span) < 4, f"spans: a number of tokens, (h, w) or (t, h, w), found {span!r}")
            offsets, advance = grid(tuple(span))
        parts.append(last + offsets)
        last += int(advance) - 1
    return SpanPositions(np.concatenate(parts).astype(dtype), last + 1)
