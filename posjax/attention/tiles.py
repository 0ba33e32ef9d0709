"""Which tiles of the logits are visited, in which order, and what each needs; calls lengthened to whole tiles.

The logits of a head are cut into tiles of ``q`` queries and ``k`` keys. A backend computes the rows of tiles in turn
(forward: a block of queries; backward: a block of keys) and in each row only the tiles with an allowed pair, sorted by
kind, so that each kind has its own code. Causal attention in 4 x 4 tiles (``.`` is never visited, ``#`` is full, ``m``
is masked), the same with a window of two tiles, and with remapped pairs:

    m . . .        m . . .        pairs remapped (ReRoPE) beyond one    m . . .
    # m . .        m m . .        tile: ``r`` is scored by the remapped b m . .
    # # m .        . m m .        features, ``b`` by both, the rest by  r b m .
    # # # m        . . m m        the near ones                         r r b m

If positions and masks are known when tracing, the plan is made then, in NumPy. Otherwise it is computed from the bounds
of the blocks before the first tile.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posjax._axes import Names, each
from posjax._numbers import LARGEST
from posjax.attention.call import Call
from posjax.attention.rows import PerQuery
from posjax.masks import BlockBounds, Mask, Segments, block_bounds
from posjax.positions import Positions, Range, as_array

NEAR, BEHIND, AHEAD = "near", "behind", "ahead"
"""How a bias by distance behaves within a tile: it varies, or it is constant, for keys far behind or far ahead."""


class Blocks(NamedTuple):
    """Tokens of a tile along the queries and along the keys.

    A kernel cuts a tile further: ``part`` is the number of keys (forward) or queries (backward) of one matrix product.
    """

    q: int
    k: int
    part: int | None = None


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is needed to compute the logits of a tile.

    Args:
        pairs: the pairs of features that compute some of its scores.
        masked: whether some of its pairs of tokens are forbidden.
        reach: ``NEAR``, ``BEHIND`` or ``AHEAD``.
    """

    pairs: tuple[int, ...]
    masked: bool
    reach: str = NEAR


class TilePlan(NamedTuple):
    """The kinds that occur, and for every tile the index of its kind plus 1, or 0 if it is not visited.

    ``grid`` is ``[batch or 1, q blocks, k blocks]``.
    """

    kinds: tuple[Kind, ...]
    grid: np.ndarray | jax.Array

    @property
    def transposed(self) -> "TilePlan":
        """The plan whose rows are blocks of keys."""
        return TilePlan(self.kinds, self.grid.swapaxes(-1, -2))

    @property
    def with_every_query(self) -> "TilePlan":
        """The plan with a masked tile for every block of queries that sees no key.

        Without a tile the gradient of such a block would not be written.
        """
        xp = np if isinstance(self.grid, np.ndarray) else jnp
        added = xp.concatenate([xp.zeros_like(self.grid[..., 1:], bool), ~(self.grid > 0).any(-1, keepdims=True)], -1)
        masked = [n for n, kind in enumerate(self.kinds, start=1) if kind.masked]
        if not masked and isinstance(added, np.ndarray) and not added.any():
            return self
        kinds = self.kinds if masked else (*self.kinds, Kind((0,), True))
        return TilePlan(kinds, xp.where(added, masked[0] if masked else len(kinds), self.grid))


def plan_tiles(
    x: Call, blocks: Blocks, *, constant_from: int | None = None, ahead=0, together: bool = False
) -> TilePlan:
    """The kinds of all tiles.

    Args:
        x: the call, its lengths multiples of the blocks.
        blocks: sizes of the tiles.
        constant_from: the distance from which on a bias by distance is constant, or None.
        ahead: distance of the first query from the first key, for a bias by distance.
        together: whether all batch rows visit the same tiles, those that any of them needs.
    """
    bounds = block_bounds(x.q_positions, blocks.q), block_bounds(x.kv_positions, blocks.k)
    some, every = _some_and_every(x.mask, *bounds, together)
    reach = np.zeros((), int) if constant_from is None else _reach(x, blocks, constant_from, ahead)
    reaches = (NEAR,) if constant_from is None else (NEAR, BEHIND, AHEAD)
    choices = [(n,) for n in range(len(x.pairs))] + ([tuple(range(len(x.pairs)))] if x.remap else [])
    kinds = tuple(Kind(*each) for each in ((p, m, r) for m in (False, True) for p in choices for r in reaches))
    pair = _pairs(x, *bounds, together)
    return _compact(kinds, some * (1 + (~every * len(choices) + pair) * len(reaches) + reach))


def _compact(kinds: tuple[Kind, ...], grid) -> TilePlan:
    """The plan without kinds that do not occur, if that is known."""
    if not isinstance(grid, np.ndarray):
        return TilePlan(kinds, grid.astype(jnp.int32))
    # A mask that allows nothing still has one kind, without tiles.
    kept, index = np.unique(np.append([0, 1] if not grid.any() else [0], grid), return_inverse=True)
    return TilePlan(tuple(kinds[n - 1] for n in kept[1:]), index[-grid.size :].reshape(grid.shape).astype(np.int32))


def _some_and_every(mask: Mask | None, q: BlockBounds, k: BlockBounds, together: bool):
    """Whether some and whether every pair is allowed, ``[batch or 1, q blocks, k blocks]``, over all heads."""
    grid = q.low.shape[-1], k.low.shape[-1]
    if mask is None:
        return np.ones((1, *grid), bool), np.ones((1, *grid), bool)
    some, every = (_with_rows(x, grid) for x in mask.tiles(q, k))
    some, every = some.any(1), every.all(1)
    return (some.any(0, keepdims=True), every.all(0, keepdims=True)) if together else (some, every)


def _with_rows(x, grid):
    xp = np if isinstance(x, np.ndarray) else jnp
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    return xp.broadcast_to(x, (*x.shape[:2], *grid))


def _pairs(x: Call, q: BlockBounds, k: BlockBounds, together: bool):
    """Index of the pair of features that scores a tile; the number of pairs if it needs all of them."""
    pair, whole = 0, True
    for n, branch in enumerate(x.remap, start=1):
        some, every = _some_and_every(branch.mask, q, k, together)
        pair = pair + n * every
        whole = whole & (every | ~some)
    return pair * whole + len(x.pairs) * (1 - whole)


def _reach(x: Call, blocks: Blocks, constant_from: int, ahead):
    """0 where a bias by distance varies, 1 where it is constant behind the queries, 2 ahead of them."""
    q, k = (np.arange(0, size, block) for size, block in ((x.q.shape[3], blocks.q), (x.k.shape[2], blocks.k)))
    lowest = ahead + q[:, None] - (k[None, :] + blocks.k - 1)
    highest = ahead + q[:, None] + blocks.q - 1 - k[None, :]
    return ((lowest >= constant_from) + 2 * (highest <= -constant_from))[None]


class Visits(NamedTuple):
    """For every row of tiles the columns to visit, sorted by kind, ``[..., rows, columns]``.

    ``ends``, ``[..., rows, kinds]``, is where the list of each kind ends. Tiles that are not visited come last.
    """

    order: np.ndarray | jax.Array
    ends: np.ndarray | jax.Array


def visits(grid, kinds: int) -> Visits:
    """The visits of a plan's grid, or of its transpose; in NumPy if it is known when tracing."""
    xp = np if isinstance(grid, np.ndarray) else jnp
    order = xp.argsort(xp.where(grid == 0, kinds + 1, grid), axis=-1, stable=True)
    return Visits(order, (grid[..., None] == np.arange(1, kinds + 1)).sum(-2).cumsum(-1))


def pad(x: Call, q_block: int, k_block: int) -> Call:
    """The call, lengthened to whole blocks. The mask hides added keys; the caller cuts off added queries.

    Queries, keys and values, whose last axis is ``"size"``, get zeros, all other arrays their last entries.
    """
    queries, keys = x.q.shape[3], x.k.shape[2]
    whole = queries + -queries % q_block, keys + -keys % k_block
    if whole == (queries, keys):
        return x
    longer = lengthened(x, queries=(queries, whole[0]), keys=(keys, whole[1]))
    if whole[1] == keys:
        return longer
    hides_added = _true_keys(*whole, keys)
    return dataclasses.replace(longer, mask=hides_added if longer.mask is None else longer.mask & hides_added)


def lengthened(tree, **sizes: tuple[int, int]):
    """The tree with more entries of every array that has an axis: ``lengthened(x, queries=(before, after))``."""

    def longer(array, names: Names):
        for name, (before, after) in sizes.items():
            if name in names and before != after:
                array = _longer(array, names.index(name), before, after - before, "size" in names)
        return array

    return each(tree, longer)


def lengthened_rows(per_query: PerQuery, queries: int) -> PerQuery:
    """``per_query`` lengthened to ``queries`` queries; the added queries have weights of 0 for any logits."""
    more = queries - per_query.lse.shape[3]
    infinite = lengthen(per_query.lse, more, axis=3, constant_values=jnp.inf)
    return PerQuery(*(lengthen(array, more, axis=3) for array in per_query))._replace(lse=infinite)


def _longer(array, axis: int, before: int, more: int, projected: bool):
    if isinstance(array, Range):
        return _longer_range(array, more)
    return lengthen(array, more, axis, "constant" if projected else "edge") if array.shape[axis] == before else array


def _longer_range(positions: Range, more: int) -> Positions:
    if not positions.is_static or positions.start + positions.length + more - 1 <= LARGEST:
        return Range(positions.start, positions.length + more)
    return lengthen(as_array(positions), more, axis=0, mode="edge")


def _true_keys(queries: int, keys: int, true: int) -> Mask:
    """A mask that hides the keys from ``true`` on. In NumPy, so that the tiles it hides are known when tracing."""
    ids = np.where(np.arange(keys) < true, 0, -1).astype(np.int32)
    return Segments(np.zeros((1, queries), np.int32), ids[None])


def lengthen(x, more: int, axis: int, mode: str = "constant", **options):
    """``x`` with ``more`` entries at the end of an axis, zeros or another mode of ``jnp.pad``."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, more)
    return jnp.pad(x, widths, mode=mode, **options)
