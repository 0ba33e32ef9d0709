"""The backward pass in two kernels: one for the gradient of the queries, one for those of keys and values.

From the weights ``P = 2^(S - L)`` and ``D = rowsum(dO * O) - dL`` each tile adds

    dS = P * (dO V^T - D),   dQ += dS K      (a block of queries over tiles of keys)
    dV += P^T dO,   dK += dS^T Q             (a block of keys over tiles of queries, and over the heads that share it)

(Dao et al., arXiv 2205.14135, appendix B). Each kernel computes the weights again, so there are seven matrix products;
no sum is shared between blocks, so the results do not depend on the order in which blocks run. The gradient of a bias
is summed up beside these: that of a number for each key over the queries, that of a slope over the pairs of each query.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from posjax.attention.formulas import LN2
from posjax.attention.gpu import mosaic
from posjax.attention.gpu.inputs import Inputs, KernelConfig, Tiling, Walk, own
from posjax.attention.gpu.ring import (
    OfQueries,
    Ring,
    Step,
    feed,
    feed_keys,
    queries_at,
    ring_of_keys,
    ring_of_queries,
)
from posjax.attention.gpu.tile import Tile, axis, numbers_at, vectors_of
from posjax.attention.tiles import Kind


def backward_queries(
    config: KernelConfig, x: Inputs, rows: OfQueries, tiling: Tiling, *, wide: bool, of_bias: bool
) -> tuple:
    """The gradient of the queries, in float32 if ``wide``, and with ``of_bias`` what the bias needs of their pairs.

    That is ``KernelBias.sums`` for each query, float32 ``[batch, heads, n, queries]``, or None; and the gradient ``dS``
    of all pairs, float32 ``[batch, heads, queries, keys]``, or None. ``dS`` is written in the tiles that are visited.
    """
    sums = config.bias.sums if of_bias else 0
    of_pairs = of_bias and config.bias.of_pairs
    batch, queries, heads, size = x.q.shape
    block = mosaic.ROWS_OF_GROUP
    features = partial(mosaic.features, dtype=x.q.dtype, tile=tiling.blocks.k)

    def body(inputs, *refs):
        x, rows, lists = inputs
        *results, scratch = refs
        _queries_kernel(config, tiling._replace(lists=lists), x, rows, _OfQueries(*results), scratch)

    return mosaic.run(
        body,
        (x, rows, tiling.lists),
        out_type=[
            jax.ShapeDtypeStruct(x.q.shape, jnp.float32 if wide else x.q.dtype),
            jax.ShapeDtypeStruct((batch, heads, sums, queries), jnp.float32) if sums else None,
            jax.ShapeDtypeStruct((batch, heads, queries, x.k.shape[1]), jnp.float32) if of_pairs else None,
        ],
        scratch=_Scratch(
            first=features((mosaic.GROUPS, block, size)),
            second=features((mosaic.GROUPS, block, x.v.shape[-1])),
            floats=plgpu.SMEM((mosaic.GROUPS, sums, block), jnp.float32) if sums else None,
            ready=plgpu.Barrier(num_arrivals=2, num_barriers=mosaic.GROUPS),
            ring=ring_of_keys(config, x, tokens=tiling.blocks.k, tile=tiling.blocks.k),
            copy=features((mosaic.GROUPS, block, tiling.blocks.k)) if config.interpret else None,
        ),
        grid={"head": heads, "row": queries // tiling.blocks.q, "batch": batch},
        name="posjax_attention_backward_queries",
        interpret=config.interpret,
    )


class _OfQueries(NamedTuple):
    """The results of the kernel for the queries: see ``backward_queries``."""

    q: Any
    sums: Any
    pairs: Any


class _Scratch(NamedTuple):
    """Shared memory and barriers.

    Args:
        first: the features of each group's own block: queries, or keys.
        second: gradients of its outputs, or its values.
        floats: for sums of each token of its block, or None.
        ready: arrived at when both are copied.
        ring: of the tokens that it walks over.
        copy: for a factor of a product, in the interpreter.
    """

    first: Any
    second: Any
    floats: Any
    ready: Any
    ring: Ring
    copy: Any

    def of_group(self, group) -> "_Scratch":
        """The buffers of one group; the ring is common to all."""
        fields = {name: getattr(self, name) for name in ("first", "second", "floats", "ready", "copy")}
        return self._replace(**{name: None if each is None else each.at[group] for name, each in fields.items()})


def _queries_kernel(config, tiling: Tiling, x: Inputs, rows: OfQueries, results: _OfQueries, scratch) -> None:
    batch, head = (lax.axis_index(name) for name in ("batch", "head"))
    row = x.q.shape[1] // tiling.blocks.q - 1 - lax.axis_index("row")
    walk = Walk.of(tiling.kinds, tiling.lists, batch, row, tiling.blocks.k)

    def compute(group):
        first = row * tiling.blocks.q + group * mosaic.ROWS_OF_GROUP
        _of_queries(config, walk, x, rows, results, scratch.of_group(group), batch, head, first)

    mosaic.in_roles(compute, lambda: feed_keys(config, x, walk, scratch.ring, batch, head))


def _of_queries(config, walk: Walk, x: Inputs, rows: OfQueries, results: _OfQueries, scratch, batch, head, first):
    """The gradients of 64 queries of one head."""
    block = mosaic.ROWS_OF_GROUP
    queries = pl.ds(first, block)
    ring = scratch.ring
    plgpu.copy_gmem_to_smem(x.q.at[batch, queries, head], scratch.first, scratch.ready)
    plgpu.copy_gmem_to_smem(rows.d_out.at[batch, queries, head], scratch.second, scratch.ready)
    q_axis = axis(config, x, 0, 0, first, numbers_at(x, 0, batch, queries, mosaic.ROWS))
    lse, correction = (mosaic.load(rows.numbers.at[batch, head, n, queries], mosaic.ROWS) for n in range(2))
    plgpu.barrier_wait(scratch.ready)
    shape = (block, walk.tokens)

    def step(dq, kind: Kind, n, sums):
        keys = ring.at(n)
        place = walk.place(n)
        ring.wait(0, n)
        ring.wait(1, n)
        scores, d_weights = mosaic.products_transposed((scratch.first, keys.first), (scratch.second, keys.second))
        ring.release(1, n)
        k_axis = axis(config, x, 1, 1, place, *vectors_of(keys, config, mosaic.COLUMNS))
        tile = Tile(config, x, batch, head, q_axis, k_axis, shape)
        logits = tile.logits(scores, kind)
        d_scores = logits.weights(mosaic.rows(lse, shape)) * (d_weights - mosaic.rows(correction, shape))
        if logits.slope is not None:
            d_scores *= logits.slope
        if results.pairs is not None:
            results.pairs[batch, head, queries, pl.ds(place, walk.tokens)] = d_scores
        if results.sums is not None:
            sums = config.bias.summed(tile, kind.reach, d_scores, sums)
        mosaic.add_product(dq, d_scores.astype(x.k.dtype), keys.first, scratch.copy)
        plgpu.wgmma_wait(0)
        ring.release(0, n)
        return sums

    def run(dq):
        number = 0 if results.sums is None else results.sums.shape[2]
        sums = walk.run(partial(step, dq), (mosaic.full((block,), 0, mosaic.ROWS),) * number)
        return dq[...], sums

    dq, sums = pl.run_scoped(run, mosaic.accumulator((block, x.q.shape[-1])))
    dq *= config.factor * LN2
    mosaic.write(dq, results.q.at[batch, queries, head], scratch.first)
    if results.sums is not None:
        for n, each in enumerate(sums):
            scratch.floats[n] = each
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch.floats, results.sums.at[batch, head, :, queries])
    plgpu.wait_smem_to_gmem(0)


class OfKeys(NamedTuple):
    """The gradients of keys and values, and of a number of each key, float32 ``[batch, heads, keys]``.

    What is None is not computed.
    """

    k: jax.Array | None
    v: jax.Array | None
    numbers: jax.Array | None


def backward_keys(
    config: KernelConfig, x: Inputs, rows: OfQueries, tiling: Tiling, *, wide: bool, of_bias: bool
) -> OfKeys:
    """The gradients of keys and values, in float32 if ``wide``; and ``-sum_i dS`` for each key if the bias needs it.

    Large heads have a kernel for each of the two, since the registers hold one sum only.
    """

    def result(array):
        return jax.ShapeDtypeStruct(array.shape, jnp.float32 if wide else array.dtype)

    batch, keys, kv_heads, _ = x.k.shape
    numbers = jax.ShapeDtypeStruct((batch, kv_heads * config.group, keys), jnp.float32)
    wanted = OfKeys(result(x.k), result(x.v), numbers if of_bias and config.bias.of_tokens else None)
    if config.sizes.together:
        return _of_all_keys(config, x, rows, tiling, wanted)
    of_keys = _of_all_keys(config, x, rows, tiling, wanted._replace(v=None))
    return of_keys._replace(v=_of_all_keys(config, x, rows, tiling, OfKeys(None, wanted.v, None)).v)


def _of_all_keys(config: KernelConfig, x: Inputs, rows: OfQueries, tiling: Tiling, wanted: OfKeys) -> OfKeys:
    """The gradients whose types are given, from one kernel."""
    batch, keys, kv_heads, size = x.k.shape
    block = mosaic.ROWS_OF_GROUP
    features = partial(mosaic.features, dtype=x.q.dtype, tile=tiling.blocks.q)

    def body(inputs, *refs):
        x, rows, lists = inputs
        *results, scratch = refs
        _keys_kernel(config, tiling._replace(lists=lists), x, rows, OfKeys(*results), scratch)

    has_numbers = wanted.numbers is not None
    results = mosaic.run(
        body,
        (x, rows, tiling.lists),
        out_type=list(wanted),
        scratch=_Scratch(
            first=features((mosaic.GROUPS, block, size)),
            second=features((mosaic.GROUPS, block, x.v.shape[-1])),
            floats=plgpu.SMEM((mosaic.GROUPS, config.group, block), jnp.float32) if has_numbers else None,
            ready=plgpu.Barrier(num_arrivals=2, num_barriers=mosaic.GROUPS),
            ring=ring_of_queries(x, rows, tokens=tiling.blocks.q, tile=tiling.blocks.q),
            copy=features((mosaic.GROUPS, block, tiling.blocks.q)) if config.interpret else None,
        ),
        grid={"kv_head": kv_heads, "row": keys // tiling.blocks.k, "batch": batch},
        name="posjax_attention_backward_keys",
        interpret=config.interpret,
    )
    return OfKeys(*results)


def _keys_kernel(config, tiling: Tiling, x: Inputs, rows: OfQueries, results: OfKeys, scratch: _Scratch) -> None:
    batch, kv_head, row = (lax.axis_index(name) for name in ("batch", "kv_head", "row"))
    walk = Walk.of(tiling.kinds, tiling.lists, batch, row, tiling.blocks.q)

    def compute(group):
        first = row * tiling.blocks.k + group * mosaic.ROWS_OF_GROUP
        _Keys(config, walk, x, results, scratch.of_group(group), batch, kv_head, first).run()

    def queries(step):
        # The heads of a tile one after the other: one loop over all, for two nested ones take more registers.
        head = kv_head * config.group + lax.rem(step, jnp.int32(config.group))
        place = walk.place(lax.div(step, jnp.int32(config.group)))
        return queries_at(x, rows, batch, head, pl.ds(place, walk.tokens))

    def copy():
        feed(walk.count * config.group, [(scratch.ring, queries)], config.interpret)

    mosaic.in_roles(compute, copy)


@dataclasses.dataclass(frozen=True)
class _Keys:
    """What one warpgroup computes: the gradients of 64 keys, from ``first`` on, from all heads that share them."""

    config: KernelConfig
    walk: Walk
    x: Inputs
    results: OfKeys
    scratch: _Scratch
    batch: Any
    kv_head: Any
    first: Any

    @property
    def keys(self):
        """The keys of this group."""
        return pl.ds(self.first, mosaic.ROWS_OF_GROUP)

    def run(self) -> None:
        """Walks over the tiles, and writes the results."""
        x, results, scratch, batch = self.x, self.results, self.scratch, self.batch
        block = mosaic.ROWS_OF_GROUP
        plgpu.copy_gmem_to_smem(x.k.at[batch, self.keys, self.kv_head], scratch.first, scratch.ready)
        plgpu.copy_gmem_to_smem(x.v.at[batch, self.keys, self.kv_head], scratch.second, scratch.ready)
        numbers = numbers_at(x, 1, batch, self.keys, mosaic.ROWS)
        plgpu.barrier_wait(scratch.ready)
        start = () if results.numbers is None else (mosaic.full((block,), 0, mosaic.ROWS),) * self.config.group

        def walked(dk=None, dv=None):
            step = partial(self._add_queries, numbers, dk, dv)
            d_numbers = self.walk.run(step, start, times=self.config.group)
            return *(None if sums is None else sums[...] for sums in (dk, dv)), d_numbers

        sizes = {"dk": (results.k, x.k.shape[-1]), "dv": (results.v, x.v.shape[-1])}
        sums = {name: mosaic.accumulator((block, size)) for name, (ref, size) in sizes.items() if ref is not None}
        dk, dv, d_numbers = pl.run_scoped(walked, **sums)
        if dk is not None:
            dk *= self.config.factor * LN2
            mosaic.write(dk, results.k.at[batch, self.keys, self.kv_head], scratch.first)
        if dv is not None:
            mosaic.write(dv, results.v.at[batch, self.keys, self.kv_head], scratch.second)
        if d_numbers:
            for n, each in enumerate(d_numbers):
                scratch.floats[n] = each
            plgpu.commit_smem()
            heads = pl.ds(self.kv_head * self.config.group, self.config.group)
            plgpu.copy_smem_to_gmem(scratch.floats, results.numbers.at[batch, heads, self.keys])
        plgpu.wait_smem_to_gmem(0)

    def _add_queries(self, numbers: tuple, dk, dv, kind: Kind, step, d_numbers: tuple) -> tuple:
        """Adds a tile of one head to the gradients."""
        config, scratch, ring = self.config, self.scratch, self.scratch.ring
        queries = ring.at(step)
        ring.wait(0, step)
        scores = mosaic.product_transposed(scratch.first, queries.first)
        lse = mosaic.load(queries.floats.at[0], mosaic.COLUMNS, config.interpret)
        logits = self._tile(numbers, queries, step, scores.shape).logits(scores, kind)
        weights = logits.weights(mosaic.columns(lse, scores.shape))
        ring.wait(1, step)
        narrow = weights.astype(self.x.v.dtype)
        if dk is None:
            mosaic.add_product(dv, narrow, queries.second, scratch.copy)
            plgpu.wgmma_wait(0)
        else:

            def products(d_weights):
                plgpu.wgmma(d_weights, scratch.second, queries.second.transpose((1, 0)))
                if dv is not None:
                    mosaic.add_product(dv, narrow, queries.second, scratch.copy)
                return mosaic.current(d_weights, int(dv is not None), config.interpret)

            d_weights = pl.run_scoped(products, mosaic.accumulator(scores.shape))
            # Not loaded before: registers are scarce while the weights are computed.
            correction = mosaic.load(queries.floats.at[1], mosaic.COLUMNS, config.interpret)
            d_scores = weights * (d_weights - mosaic.columns(correction, scores.shape))
            if logits.slope is not None:
                d_scores *= logits.slope
            d_numbers = self._plus_tile(d_numbers, step, d_scores)
            mosaic.add_product(dk, d_scores.astype(self.x.q.dtype), queries.first, scratch.copy)
            plgpu.wgmma_wait(1)
        ring.release(1, step)
        plgpu.wgmma_wait(0)
        ring.release(0, step)
        return d_numbers

    def _in_group(self, step):
        """Which of the heads that share the keys a step is about."""
        return lax.rem(step, jnp.int32(self.config.group))

    def _tile(self, numbers: tuple, queries: Step, step, shape) -> Tile:
        """The tile of a step: keys by queries."""
        config, x, batch = self.config, self.x, self.batch
        head = self.kv_head * config.group + self._in_group(step)
        of_bias = None
        if config.bias.of_tokens:
            gates = x.bias["k"]
            of_bias = mosaic.load(gates.at[own(gates, batch), head, 0, self.keys], mosaic.ROWS)
        ints = () if queries.ints is None else mosaic.load_all(queries.ints, mosaic.COLUMNS, config.interpret)
        q_axis = axis(config, x, 0, 1, self.walk.place(lax.div(step, jnp.int32(config.group))), ints)
        k_axis = axis(config, x, 1, 0, self.first, numbers, of_bias)
        return Tile(config, x, batch, head, q_axis, k_axis, shape)

    def _plus_tile(self, d_numbers: tuple, step, d_scores) -> tuple:
        """The gradients of the numbers of the keys, for each head of the group, plus those of a tile of one head."""
        if not d_numbers:
            return d_numbers
        of_tile = d_scores.sum(axis=1)
        in_group = self._in_group(step)
        return tuple(each - of_tile * (in_group == n).astype(jnp.float32) for n, each in enumerate(d_numbers))
