"""The lists of tiles that a kernel visits: see ``posjax.attention.tiles`` for which tiles these are.

The list of a row of tiles costs 4 bytes a tile in main memory; a kernel holds the list of its current row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posjax.attention.tiles import Kind, TilePlan, visits

_TILE_BITS, _PAIR_BITS = 20, 8
"""An entry of a list is ``tile + (pair << _TILE_BITS)``, so a row may have over a million tiles."""

_FIRST, _LAST = 1 << (_TILE_BITS + _PAIR_BITS), 2 << (_TILE_BITS + _PAIR_BITS)
"""Added to an entry if its row is the first, or the last, to visit its column."""


class Lists(NamedTuple):
    """The tiles of every row, sorted by kind.

    Args:
        order: ``[batch or 1, rows, 1, columns]``, the entries of a row, then those of tiles that are not visited.
        ends: ``[batch or 1, rows, 1, kinds + 1]``, where the list of each kind ends, and then the first entry of the
            next row, or -1 if the next row is empty or there is none.
    """

    order: jax.Array
    ends: jax.Array


def lists(plan: TilePlan) -> Lists:
    """The lists of the rows of a plan."""
    kinds, grid = plan
    xp = np if isinstance(grid, np.ndarray) else jnp
    order, ends = visits(grid, len(kinds))
    choices = np.array([0, *map(_choice, kinds)])
    flags = (xp.asarray(choices)[grid] << _TILE_BITS) + _ends_of_columns(grid)
    entries = order + xp.take_along_axis(flags, order, axis=-1)
    first = xp.where(ends[..., -1:] > 0, entries[..., :1], -1)
    following = xp.concatenate([first[:, 1:], xp.full_like(first[:, :1], -1)], 1)
    ends = xp.concatenate([ends, following], -1)
    return Lists(*(jnp.asarray(a[:, :, None], jnp.int32) for a in (entries, ends)))


def _ends_of_columns(grid):
    """``_FIRST`` and ``_LAST`` for every tile."""
    visited = grid > 0
    count = visited.cumsum(-2)
    return visited * ((count == 1) * _FIRST + (count == count[..., -1:, :]) * _LAST)


def _choice(kind: Kind) -> int:
    """The index of the pair of features that a kind needs; the number of pairs if it needs all."""
    return kind.pairs[0] if len(kind.pairs) == 1 else len(kind.pairs)


def tile_of(entry):
    """The number of the tile of an entry."""
    return entry & ((1 << _TILE_BITS) - 1)


def choice_of(entry):
    """The pair of features that an entry needs; the number of pairs if it needs all."""
    return (entry >> _TILE_BITS) & ((1 << _PAIR_BITS) - 1)


def is_first(entry):
    """Whether no earlier row of tiles visits the column of an entry."""
    return entry & _FIRST != 0


def is_last(entry):
    """Whether no later row of tiles visits the column of an entry."""
    return entry & _LAST != 0
