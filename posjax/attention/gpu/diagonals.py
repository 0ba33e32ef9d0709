"""The gradient of a bias by distance: the gradients of the logits, summed along the diagonals of all tiles.

The tiles on one diagonal of tiles hold the same distances at the same places. So a block of threads walks along such a
diagonal and adds up ``dS`` tile by tile, in registers; at the end it writes one tile of sums, and the diagonals of
these few tiles are summed outside. Nothing is added in memory, so the result does not depend on the order of blocks.
Scores and weights are computed again: two matrix products.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from posjax.attention.gpu import mosaic
from posjax.attention.gpu.inputs import Inputs, KernelConfig, Lists, Tiling, Walk
from posjax.attention.gpu.ring import (
    OfQueries,
    Ring,
    feed,
    keys_at,
    queries_at,
    ring_of_keys,
    ring_of_queries,
)
from posjax.attention.gpu.tile import Tile, axis, vectors_of
from posjax.attention.tiles import NEAR, Blocks, Kind, TilePlan, visits


class Diagonals(NamedTuple):
    """The diagonals of tiles that are summed.

    Args:
        tiling: the rows of its lists are diagonals; the columns to visit are blocks of queries.
        first: the first diagonal: the distance, in blocks of keys, of the first query from the first key of its tiles.
    """

    tiling: Tiling
    first: int

    @property
    def count(self) -> int:
        """The number of diagonals."""
        return self.tiling.lists.ends.shape[1]


def diagonals(plan: TilePlan, blocks: Blocks, constant_from: int | None, ahead) -> Diagonals:
    """The diagonals of a plan on which a bias by distance varies.

    The tiles are those of the kernel for the queries, which sums up the tiles where the bias is constant.
    """
    grid = plan.grid
    xp = np if isinstance(grid, np.ndarray) else jnp
    _, rows, columns = grid.shape
    step = blocks.q // blocks.k
    which = np.arange(1 - columns, step * (rows - 1) + 1)
    if constant_from is not None and isinstance(ahead, int):
        distance = ahead + which * blocks.k
        near = (distance - blocks.k + 1 < constant_from) & (distance + blocks.q - 1 > -constant_from)
        which = which[near] if near.any() else which[:1]
    near = np.array([False, *(kind.reach == NEAR for kind in plan.kinds)])
    column = step * np.arange(rows) - which[:, None]
    inside = (column >= 0) & (column < columns)
    along = grid[:, np.arange(rows), np.clip(column, 0, columns - 1)]
    along = along * (inside & xp.asarray(near)[along])
    if isinstance(along, np.ndarray):
        (visited,) = np.nonzero(along.any((0, 2)))
        part = slice(visited[0], visited[-1] + 1) if visited.size else slice(1)
        which = which[part]
        along = along[:, part]
    lists = Lists(*(jnp.asarray(array, jnp.int32) for array in visits(along, len(plan.kinds))))
    return Diagonals(Tiling(blocks, plan.kinds, lists), int(which[0]))


class _Scratch(NamedTuple):
    """The rings of queries and of keys."""

    queries: Ring
    keys: Ring


def sums_by_distance(config: KernelConfig, x: Inputs, rows: OfQueries, along: Diagonals) -> jax.Array:
    """``dS`` summed over all pairs of each distance from ``-keys`` to ``queries - 1``, ``[heads, queries + keys]``."""
    tiling = along.tiling
    batch, _, heads, _ = x.q.shape

    def body(inputs, sums_ref, scratch):
        x, rows, lists = inputs
        _kernel(config, along._replace(tiling=tiling._replace(lists=lists)), x, rows, sums_ref, scratch)

    (sums,) = mosaic.run(
        body,
        (x, rows, tiling.lists),
        out_type=[jax.ShapeDtypeStruct((batch, heads, along.count, tiling.blocks.q, tiling.blocks.k), jnp.float32)],
        scratch=_Scratch(
            ring_of_queries(x, rows, tokens=tiling.blocks.q, tile=tiling.blocks.q, stages=config.sizes.stages),
            ring_of_keys(config, x, tokens=tiling.blocks.k, tile=tiling.blocks.q, stages=config.sizes.stages),
        ),
        grid={"head": heads, "diagonal": along.count, "batch": batch},
        name="posjax_attention_backward_distances",
        interpret=config.interpret,
    )
    return _summed(sums.sum(0), along.first, x.q.shape[1], x.k.shape[1])


def _summed(tiles, first: int, queries: int, keys: int):
    """The sums along the diagonals of tiles of neighbouring diagonals, ``[heads, diagonals, q, k]``."""
    heads, count, q, k = tiles.shape
    # Rows of q + k numbers, flattened and cut into rows of one number less, move by one place from row to row.
    reversed_keys = jnp.pad(tiles[..., ::-1], ((0, 0), (0, 0), (0, 0), (0, q)))
    skewed = reversed_keys.reshape(heads, count, -1)[..., : q * (q + k - 1)].reshape(heads, count, q, q + k - 1)
    of_tiles = jnp.pad(skewed.sum(2), ((0, 0), (0, 0), (0, 1)))
    # The n-th number of a tile is that of the distance n - (k - 1) from that of its first query and first key.
    parts = (q + k) // k
    places = jnp.zeros((heads, count + parts - 1, k), jnp.float32)
    for n in range(parts):
        places = places.at[:, n : n + count].add(of_tiles.reshape(heads, count, parts, k)[:, :, n])
    line = places.reshape(heads, -1)
    start = keys + first * k - (k - 1)
    whole = jnp.zeros((heads, k + queries + keys + q), jnp.float32)
    whole = lax.dynamic_update_slice_in_dim(whole, line, start + k, axis=1)
    return whole[:, k : k + queries + keys]


def _kernel(config: KernelConfig, along: Diagonals, x: Inputs, rows: OfQueries, sums_ref, scratch: _Scratch) -> None:
    batch, head, diagonal = (lax.axis_index(name) for name in ("batch", "head", "diagonal"))
    blocks = along.tiling.blocks
    ahead = (along.first + diagonal) * blocks.k
    walk = Walk.of(along.tiling.kinds, along.tiling.lists, batch, diagonal, blocks.q)
    kv_head = lax.div(head, jnp.int32(config.group))

    def compute(group):
        start = mosaic.full((mosaic.ROWS_OF_GROUP, blocks.k), 0, mosaic.TILE)
        sums = walk.run(partial(_plus_tile, config, walk, x, scratch, batch, head, group, ahead), start)
        sums_ref[batch, head, diagonal, pl.ds(group * mosaic.ROWS_OF_GROUP, mosaic.ROWS_OF_GROUP)] = sums

    def queries(n):
        return queries_at(x, rows, batch, head, pl.ds(walk.place(n), blocks.q))

    def keys(n):
        return keys_at(config, x, batch, head, kv_head, pl.ds(walk.place(n) - ahead, blocks.k))

    def copy():
        feed(walk.count, [(scratch.queries, queries), (scratch.keys, keys)], config.interpret)

    mosaic.in_roles(compute, copy)


def _plus_tile(config, walk: Walk, x: Inputs, scratch: _Scratch, batch, head, group, ahead, kind: Kind, n, sums):
    """The sums plus ``dS`` of a tile."""
    block = mosaic.ROWS_OF_GROUP
    first = group * block
    own = pl.ds(first, block)
    queries = scratch.queries.at(n)
    keys = scratch.keys.at(n)
    place = walk.place(n)
    for ring in scratch:
        ring.wait(0, n)
        ring.wait(1, n)
    products = (queries.first.at[own], keys.first), (queries.second.at[own], keys.second)
    scores, d_weights = mosaic.products_transposed(*products)
    ints = () if queries.ints is None else mosaic.load_all(queries.ints.at[:, own], mosaic.ROWS, config.interpret)
    lse, correction = mosaic.load_all(queries.floats.at[:, own], mosaic.ROWS, config.interpret)
    q_axis = axis(config, x, 0, 0, place + first, ints)
    k_axis = axis(config, x, 1, 1, place - ahead, *vectors_of(keys, config, mosaic.COLUMNS))
    for ring in scratch:
        ring.release(0, n)
        ring.release(1, n)
    logits = Tile(config, x, batch, head, q_axis, k_axis, scores.shape).logits(scores, kind)
    weights = logits.weights(mosaic.rows(lse, scores.shape))
    d_scores = weights * (d_weights - mosaic.rows(correction, scores.shape))
    return sums + (d_scores if logits.slope is None else d_scores * logits.slope)
