"""Which tiles a kernel visits, in which order, and what each of them needs.

The logits of a head are cut into tiles of ``q`` queries and ``k`` keys. A kernel takes the rows of tiles one after the
other (forward: a block of queries; backward: a block of keys) and in each row only the tiles where the mask lets
something through, sorted by what they need, so that the code for one kind of tile knows nothing of the others. Causal
attention in 4 x 4 tiles, ``.`` never visited, ``#`` whole, ``m`` masked, and with a window of two tiles:

    m . . .        m . . .        far pairs (ReRoPE) beyond one tile:   m . . .
    # m . .        m m . .        ``f`` is scored by the far features,  b m . .
    # # m .        . m m .        ``b`` by both, the rest by the near   f b m .
    # # # m        . . m m                                              f f b m

The order list of a row is the list of its tiles; a list costs 4 bytes a tile in main memory, and a kernel holds those
of the row it is at. Where positions and masks are known when tracing, so are the lists; otherwise they are computed
from the extents of the blocks before the kernel runs.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posjax.attention.operands import Operands
from posjax.masks import Extent, Mask, extent

NEAR, BEHIND, AHEAD = "near", "behind", "ahead"
"""What a bias by distance is within a tile: different numbers, or one number for all keys far behind or far ahead."""

_TILE_BITS = 20
"""An entry of a list is ``tile + (pair << _TILE_BITS)``: over a million tiles in a row."""


class Blocks(NamedTuple):
    """Tokens of a tile along the queries and keys, and the keys (forward) or queries (backward) of a matrix product."""

    q: int
    k: int
    part: int


@dataclasses.dataclass(frozen=True)
class Kind:
    """What the logits of a tile need.

    Args:
        pairs: the pairs of features that score some of it.
        masked: whether some of its pairs are forbidden.
        reach: ``NEAR``, ``BEHIND`` or ``AHEAD``.
    """

    pairs: tuple[int, ...]
    masked: bool
    reach: str = NEAR


class Visits(NamedTuple):
    """The tiles of every row, kind after kind: the tables a kernel walks along.

    Args:
        order: ``[batch or 1, rows, 1, columns]``, the entries of a row, then those of tiles that are not visited.
        ends: ``[batch or 1, rows, 1, kinds + 1]``, where the list of each kind ends; last the first entry of the next
            row, or -1 where the next row is empty or there is none.
    """

    order: jax.Array
    ends: jax.Array


class TilePlan(NamedTuple):
    """The kinds that occur, and that of every tile, ``[batch or 1, q blocks, k blocks]``: its index plus 1, or 0."""

    kinds: tuple[Kind, ...]
    grid: np.ndarray | jax.Array

    @property
    def by_queries(self) -> Visits:
        """Rows are blocks of queries."""
        return _visits(self.grid, self.kinds)

    @property
    def by_keys(self) -> Visits:
        """Rows are blocks of keys."""
        return _visits(self.grid.swapaxes(-1, -2), self.kinds)


def plan(x: Operands, blocks: Blocks, constant_from: int | None = None, ahead=0) -> TilePlan:
    """The kinds of all tiles.

    Args:
        x: the operands, their lengths multiples of the blocks.
        blocks: sizes of the tiles.
        constant_from: the distance from which on a bias by distance is constant, or None.
        ahead: distance of the first query from the first key, for a bias by distance.
    """
    q, k = extent(x.q_positions, blocks.q), extent(x.kv_positions, blocks.k)
    grid = (q.low.shape[-1], k.low.shape[-1])
    some, every = _bounds(x.mask, q, k, grid)
    pair = _pairs(x, q, k, grid)
    reach = np.zeros((), int) if constant_from is None else _reach(x, blocks, constant_from, ahead)
    choices = [(n,) for n in range(len(x.pairs))]
    choices += [tuple(range(len(x.pairs)))] if x.far else []
    kinds = tuple(
        Kind(pairs, masked, r)
        for masked in (False, True)
        for pairs in choices
        for r in ((NEAR, BEHIND, AHEAD) if constant_from is not None else (NEAR,))
    )
    reaches = len(kinds) // (2 * len(choices))
    code = some * (1 + (~every * len(choices) + pair) * reaches + reach)
    if not isinstance(code, np.ndarray):
        return TilePlan(kinds, code.astype(jnp.int32))
    # A mask that allows nothing still has one kind, of which there is no tile.
    found, compact = np.unique(np.append([0, 1] if not code.any() else [0], code), return_inverse=True)
    grid = compact[-code.size :].reshape(code.shape).astype(np.int32)
    return TilePlan(tuple(kinds[n - 1] for n in found[1:]), grid)


def _bounds(mask: Mask | None, q: Extent, k: Extent, grid):
    """Whether something and whether everything is allowed, ``[batch or 1, *grid]``, over all heads."""
    if mask is None:
        return np.ones((1, *grid), bool), np.ones((1, *grid), bool)
    some, every = (_with_rows(x, grid) for x in mask.tiles(q, k))
    return some.any(1), every.all(1)


def _with_rows(x, grid):
    xp = np if isinstance(x, np.ndarray) else jnp
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    return xp.broadcast_to(x, (*x.shape[:2], *grid))


def _pairs(x: Operands, q: Extent, k: Extent, grid):
    """Index of the pair of features that scores a tile; the number of pairs where it takes all of them."""
    pair, whole = 0, True
    for n, branch in enumerate(x.far, start=1):
        some, every = _bounds(branch.where, q, k, grid)
        pair, whole = pair + n * every, whole & (every | ~some)
    return pair * whole + len(x.pairs) * (1 - whole)


def _reach(x: Operands, blocks: Blocks, constant_from: int, ahead):
    """0 where a bias by distance varies, 1 where it is constant behind the queries, 2 ahead of them."""
    q, k = (np.arange(0, size, block) for size, block in ((x.q.shape[3], blocks.q), (x.k.shape[2], blocks.k)))
    lowest = ahead + q[:, None] - (k[None, :] + blocks.k - 1)
    highest = ahead + q[:, None] + blocks.q - 1 - k[None, :]
    return ((lowest >= constant_from) + 2 * (highest <= -constant_from))[None]


def _visits(grid, kinds: tuple[Kind, ...]) -> Visits:
    xp = np if isinstance(grid, np.ndarray) else jnp
    numbers = np.arange(1, len(kinds) + 1)
    # Tiles that are not visited, whose kind is 0, go last.
    order = xp.argsort(xp.where(grid == 0, len(kinds) + 1, grid), axis=-1, stable=True)
    several = np.array([0, *(max(0, _choice(kind)) for kind in kinds)])
    pair = xp.take_along_axis(xp.asarray(several)[grid], order, axis=-1)
    ends = (grid[..., None] == numbers).sum(-2).cumsum(-1)
    entries = order + (pair << _TILE_BITS)
    first = xp.where(ends[..., -1:] > 0, entries[..., :1], -1)
    following = xp.concatenate([first[:, 1:], xp.full_like(first[:, :1], -1)], 1)
    ends = xp.concatenate([ends, following], -1)
    return Visits(*(jnp.asarray(a[:, :, None], jnp.int32) for a in (entries, ends)))


def _choice(kind: Kind) -> int:
    """What an entry says of its pairs: the one to fetch, or how many there are where all are needed."""
    return kind.pairs[0] if len(kind.pairs) == 1 else len(kind.pairs)


def tile_of(entry):
    """The number of the tile an entry names."""
    return entry & ((1 << _TILE_BITS) - 1)


def choice_of(entry):
    """Which pair of features an entry asks for; the number of pairs where it asks for all."""
    return entry >> _TILE_BITS
