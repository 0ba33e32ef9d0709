"""Bias matrices and masks of a tile, evaluated inside a kernel.

The *outer* axis of a tile is the block of the current row of tiles and lies along the sublanes. The *inner* axis, the
tiles of that row, lies along the lanes. So a tile is queries by keys in the forward kernel, keys by queries in the
backward one. Numbers of the inner axis are rows ``[1, n]``, which a chip broadcasts over the sublanes at no cost. Those
of the outer axis are transposed to columns once for a row of tiles and stored repeated over the lanes, ``[n, 128]``.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from posjax.attention.formulas import Formula, allowed
from posjax.attention.logits import LANES

SUBLANES = 8

PIECES = 3
"""How many bfloat16 numbers must be added for the precision of float32."""


class Axis(NamedTuple):
    """One axis of a tile: its dimension, its first position, and the numbers of its tokens.

    Args:
        dimension: 0 for the outer axis, 1 for the inner one.
        first: position of its first token, if positions are a range.
        numbers: int32, ``[n, 128]`` outer or ``[1, n]`` inner: positions first, unless they are a range.
        ranged: whether positions are a range.
    """

    dimension: int
    first: Any
    numbers: tuple
    ranged: bool

    def whole(self, numbers, shape):
        """The numbers of the tokens, repeated over a tile."""
        if self.dimension == 0:
            return jnp.tile(numbers, (1, shape[1] // LANES))
        return jnp.broadcast_to(numbers, shape)

    def positions(self, shape):
        """Positions of the tokens, repeated over a tile."""
        if self.ranged:
            return self.first + jax.lax.broadcasted_iota(jnp.int32, shape, self.dimension)
        return self.whole(self.numbers[0], shape)

    def of_masks(self, shape):
        """Iterates over the numbers that masks of tokens compare, repeated over a tile."""
        return (self.whole(x, shape) for x in self.numbers[0 if self.ranged else 1 :])


class Pattern(NamedTuple):
    """The mask, and the mask of each branch, as formulas over one list of numbers."""

    mask: Formula
    branches: tuple[Formula, ...]

    def on(self, q: Axis, k: Axis, shape, *, masked: bool, remap: bool) -> tuple:
        """Whether each pair of a tile is allowed (None: all are), and the mask of each branch."""
        i, j = q.positions(shape), k.positions(shape)
        q_numbers, k_numbers = q.of_masks(shape), k.of_masks(shape)
        # The mask takes its numbers from the iterators even if it is not wanted, because those of the branches follow.
        # Mosaic removes its unused result.
        seen = None if self.mask is None else allowed(self.mask, i, j, q_numbers, k_numbers)
        branches = [allowed(formula, i, j, q_numbers, k_numbers) for formula in self.branches] if remap else []
        return seen if masked else None, tuple(branches)


def column(row):
    """``[1, n]`` as ``[n, 128]``, the number of a row in each of its lanes."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def columns(rows: list):
    """Up to eight rows ``[1, n]`` as the first lanes of ``[n, 128]``, the other lanes 0."""
    size = rows[0].shape[1]
    which = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, size), 0)
    eight = sum(jnp.where(which == n, row, 0.0) for n, row in enumerate(rows))
    return jnp.concatenate([eight, jnp.zeros((LANES - SUBLANES, size), jnp.float32)], axis=0).T


def pieces(x) -> list:
    """``PIECES`` bfloat16 numbers, as float32, whose sum is ``x``."""
    summands = []
    for _ in range(PIECES):
        summands.append(x.astype(jnp.bfloat16).astype(jnp.float32))
        x = x - summands[-1]
    return summands


def row(column):
    """``[n, 128]`` summed over the lanes, as ``[1, n]``."""
    return jnp.sum(column.T, axis=0, keepdims=True)


def skewed(values, rows: int):
    """``U[t, b, y] = u[128 t + y - b]`` of a vector ``u``, ``[heads, rows, 8, 128]``, the input of ``toeplitz``.

    Each sublane has a copy of the vector, shifted by the number of the sublane; ``u`` is extended by its end values.
    """
    more = rows * LANES - values.shape[-1]
    longer = jnp.pad(values, ((0, 0), (SUBLANES - 1, more)), mode="edge")
    shifted = [longer[:, SUBLANES - 1 - b :][:, : rows * LANES] for b in range(SUBLANES)]
    return jnp.stack([x.reshape(-1, rows, LANES) for x in shifted], axis=2)


def unskewed(sums, size: int):
    """The transpose of ``skewed``: sums over ``[heads, rows, 8, 128]`` as a vector of ``size`` numbers."""
    vector = jnp.zeros_like(sums, shape=(sums.shape[0], size))
    return jax.vjp(lambda u: skewed(u, sums.shape[1]), vector)[1](sums)[0]


def toeplitz(window_ref, matrix_ref, first: int, stop: int) -> None:
    """Writes rows of ``W[x, c] = u[n + c - x]`` from a window of the skewed vector with ``n + 128`` lanes.

    A tile that depends only on the difference of its indices is cut into slabs of 128 lanes, and each slab is a range
    of rows of ``W``, which is computed once for all of them (``slab``). From row to row of ``W`` the numbers are
    shifted by one. Eight rows of the window already have these shifts, so one rotation of the lanes gives eight rows.

    Args:
        window_ref: ``[m, 8, 128]``, ``U`` from the row of the tile's smallest index.
        matrix_ref: ``W``, ``[128 (m - 1), 128]``.
        first: the first row to write, a multiple of 128, and ``stop`` the one after the last.
    """
    lane = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)
    last = window_ref.shape[0] - 1
    chunks = range(first // LANES, stop // LANES)
    for a in range(0, LANES, SUBLANES):
        shifted = {n: _rotated(window_ref[n], a) for n in range(last - chunks[-1] - 1, last - chunks[0] + 1)}
        for x in chunks:
            eight = jnp.where(lane >= a, shifted[last - x], shifted[last - x - 1]) if a else shifted[last - x]
            matrix_ref[x * LANES + a : x * LANES + a + SUBLANES, :] = eight


def _rotated(x, by: int):
    return pltpu.roll(x, by, axis=1) if by else x


def new_rows(first: int, part: int, outer: int, inner: int) -> tuple[int, int]:
    """The rows of ``W`` that a part of a tile, ``part`` lanes from ``first``, needs beyond those of earlier parts."""
    return inner - first - part, inner - first - LANES + outer if first == 0 else inner - first


def slab(matrix_ref, lanes_before: int, outer: int, inner: int):
    """The 128 lanes of a tile from ``lanes_before`` on, of ``outer`` rows; the tile has ``inner`` lanes in all."""
    first = inner - LANES - lanes_before
    return matrix_ref[first : first + outer, :]


def untoeplitz(matrix_ref) -> list:
    """The transpose of ``toeplitz``: the gradient of each ``[8, 128]`` of the window from a matrix of gradients."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)
    last = matrix_ref.shape[0] // LANES
    window = [jnp.zeros((SUBLANES, LANES), jnp.float32) for _ in range(last + 1)]
    for x in range(last):
        for a in range(0, LANES, SUBLANES):
            eight = matrix_ref[x * LANES + a : x * LANES + a + SUBLANES, :]
            back = _rotated(eight, (LANES - a) % LANES)
            window[last - x] += jnp.where(lane < LANES - a, back, 0)
            window[last - x - 1] += jnp.where(lane < LANES - a, 0, back)
    return window
