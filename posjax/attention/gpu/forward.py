"""The forward kernel: a block of 128 queries over the tiles of its list, with a running maximum.

Two warpgroups compute 64 queries each, and take turns on the matrix unit: while one multiplies, the other computes
exponentials. A third one copies keys and values to shared memory, ahead of the tiles that are computed (Shah et al.,
arXiv 2407.08608). Each tile adds, in base 2,

    S = scale Q K^T + bias,   m' = max(m, rowmax S),   P = 2^(S - m'),   l = l 2^(m - m') + rowsum P,
    O = O 2^(m - m') + P V

and the results are ``O / l``, ``m`` and ``l``.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from posjax.attention.gpu import mosaic
from posjax.attention.gpu.inputs import Inputs, KernelConfig, Tiling, Walk
from posjax.attention.gpu.ring import Ring, feed_keys, ring_of_keys
from posjax.attention.gpu.tile import Axis, Tile, axis, numbers_at, vectors_of
from posjax.attention.tiles import Kind

LOWEST = float(jnp.finfo(jnp.float32).min)
"""Initial running maximum: no finite logit is below it, so that a row without keys needs no special case."""


class Results(NamedTuple):
    """The results of a kernel for each query.

    Args:
        out: ``[batch, queries, heads, value size]``; 0 for a query that sees no key.
        top: ``m``, the largest logit in base 2, ``[batch, heads, queries]``.
        total: ``l``, the sum of the weights ``2^(z - m)``; 0 for a query that sees no key.
    """

    out: jax.Array
    top: jax.Array
    total: jax.Array


class _Scratch(NamedTuple):
    """Shared memory and barriers.

    Args:
        q: the queries of both groups.
        out: their outputs; None if these fit in ``q``, or are float32 and written from registers.
        statistics: ``m`` and ``l`` of both groups.
        q_ready: arrived at when the queries of a group are copied.
        turn: both groups arrive when one hands the matrix unit to the other.
        ring: of keys and values.
    """

    q: Any
    out: Any
    statistics: Any
    q_ready: Any
    turn: Any
    ring: Ring


def forward(config: KernelConfig, x: Inputs, tiling: Tiling, *, shares: int, wide: bool) -> Results:
    """The results; the output in float32 if ``wide``, otherwise in the dtype of the values.

    The tiles of each block of queries are computed in equal shares, side by side. The results of each share are
    separate: the first axis of the arrays is ``shares * batch``.
    """
    batch, queries, heads, size = x.q.shape
    value_size = x.v.shape[-1]
    rows = mosaic.ROWS_OF_GROUP
    out = jax.ShapeDtypeStruct((shares * batch, queries, heads, value_size), jnp.float32 if wide else x.v.dtype)
    of_queries = jax.ShapeDtypeStruct((shares * batch, heads, queries), jnp.float32)
    features = partial(mosaic.features, tile=tiling.blocks.k)

    def body(inputs, *refs):
        x, lists = inputs
        *results, scratch = refs
        _kernel(config, tiling._replace(lists=lists), x, Results(*results), scratch, shares)

    results = mosaic.run(
        body,
        (x, tiling.lists),
        out_type=[out, of_queries, of_queries],
        scratch=_Scratch(
            q=features((mosaic.GROUPS, rows, size), x.q.dtype),
            out=None if wide or value_size == size else features((mosaic.GROUPS, rows, value_size), x.v.dtype),
            statistics=plgpu.SMEM((mosaic.GROUPS, 2, rows), jnp.float32),
            q_ready=plgpu.Barrier(num_barriers=mosaic.GROUPS),
            turn=plgpu.Barrier(num_arrivals=mosaic.GROUPS),
            ring=ring_of_keys(config, x, tokens=tiling.blocks.k, tile=tiling.blocks.k),
        ),
        grid={"head": heads, "share": shares, "row": queries // tiling.blocks.q, "batch": batch},
        name="posjax_attention_forward",
        interpret=config.interpret,
    )
    return Results(*results)


def _kernel(config, tiling: Tiling, x: Inputs, results: Results, scratch: _Scratch, shares: int) -> None:
    batch, head, share = (lax.axis_index(name) for name in ("batch", "head", "share"))
    # The last block of queries first: with a causal mask its row of tiles is the longest.
    row = x.q.shape[1] // tiling.blocks.q - 1 - lax.axis_index("row")
    walk = Walk.of(tiling.kinds, tiling.lists, batch, row, tiling.blocks.k).share(share, shares)
    place = share * x.q.shape[0] + batch

    def compute(group):
        queries = row * tiling.blocks.q + group * mosaic.ROWS_OF_GROUP
        _Group(config, x, walk, results, scratch, batch, head, group, queries, place).run()

    mosaic.in_roles(compute, lambda: feed_keys(config, x, walk, scratch.ring, batch, head))


class _Sums(NamedTuple):
    """The carry of the walk over tiles: ``O``, ``m`` and ``l``."""

    out: jax.Array
    top: jax.Array
    total: jax.Array


@dataclasses.dataclass(frozen=True)
class _Group:
    """What one warpgroup computes: 64 queries of one head, from ``first`` on; ``place``: of its results."""

    config: KernelConfig
    x: Inputs
    walk: Walk
    results: Results
    scratch: _Scratch
    batch: Any
    head: Any
    group: Any
    first: Any
    place: Any

    @property
    def queries(self):
        """The queries of this group."""
        return pl.ds(self.first, mosaic.ROWS_OF_GROUP)

    def take_turn(self) -> None:
        """Hands the matrix unit to the other group, and waits until that hands it back."""
        plgpu.barrier_arrive(self.scratch.turn)
        plgpu.barrier_wait(self.scratch.turn)

    def run(self) -> None:
        """Walks over the tiles, and writes the results."""
        scratch, walk, ring = self.scratch, self.walk, self.scratch.ring
        q = scratch.q.at[self.group]
        plgpu.copy_gmem_to_smem(self.x.q.at[self.batch, self.queries, self.head], q, scratch.q_ready.at[self.group])
        numbers = numbers_at(self.x, 0, self.batch, self.queries, mosaic.ROWS)
        plgpu.barrier_wait(scratch.q_ready.at[self.group])
        pl.when(walk.count > 0)(lambda: ring.wait(0, jnp.int32(0)))
        pl.when(self.group == 1)(self.take_turn)
        q_axis = axis(self.config, self.x, 0, 0, self.first, numbers)
        rows = mosaic.ROWS_OF_GROUP
        start = _Sums(
            mosaic.full((rows, self.x.v.shape[-1]), 0, mosaic.TILE),
            mosaic.full((rows,), LOWEST, mosaic.ROWS),
            mosaic.full((rows,), 0, mosaic.ROWS),
        )
        sums = walk.run(partial(self._step, q, q_axis), start)
        pl.when(self.group == 0)(self.take_turn)
        self._write(sums)

    def _step(self, q, q_axis: Axis, kind: Kind, n, sums: _Sums) -> _Sums:
        """Adds the ``n``-th tile, whose keys are ready."""
        config, ring = self.config, self.scratch.ring
        keys = ring.at(n)
        first_key = self.walk.place(n)
        scores = mosaic.product_transposed(q, keys.first, self.take_turn)
        k_axis = axis(config, self.x, 1, 1, first_key, *vectors_of(keys, config, mosaic.COLUMNS))
        ring.release(0, n)
        tile = Tile(config, self.x, self.batch, self.head, q_axis, k_axis, scores.shape)
        logits = tile.logits(scores, kind)
        top = jnp.maximum(sums.top, logits.highest())
        shrink = jnp.exp2(sums.top - top)
        weights = logits.weights(mosaic.rows(top, scores.shape))
        out = sums.out * mosaic.rows(shrink, sums.out.shape)
        total = sums.total * shrink
        narrow = weights.astype(self.x.v.dtype)
        total += weights.sum(axis=1)
        out, total, top, narrow = lax.optimization_barrier((out, total, top, narrow))
        plgpu.barrier_arrive(self.scratch.turn)
        ring.wait(1, n)
        plgpu.barrier_wait(self.scratch.turn)

        def wait_for_next():
            pl.when(n + 1 < self.walk.count)(lambda: ring.wait(0, n + 1))

        out = mosaic.plus_product(out, narrow, keys.second, wait_for_next, config.interpret)
        ring.release(1, n)
        return _Sums(out, top, total)

    def _write(self, sums: _Sums) -> None:
        scratch, results, group = self.scratch, self.results, self.group
        blind = sums.total == 0
        out = sums.out * mosaic.rows(1 / jnp.where(blind, 1.0, sums.total), sums.out.shape)
        out_ref = results.out.at[self.place, self.queries, self.head]
        mosaic.write(out, out_ref, scratch.q.at[group] if scratch.out is None else scratch.out.at[group])
        scratch.statistics[group, 0] = sums.top
        scratch.statistics[group, 1] = sums.total
        plgpu.commit_smem()
        for n, statistic in enumerate((results.top, results.total)):
            plgpu.copy_smem_to_gmem(scratch.statistics.at[group, n], statistic.at[self.place, self.head, self.queries])
        plgpu.wait_smem_to_gmem(0)
