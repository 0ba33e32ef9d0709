"""The backward pass in two kernels: one for the gradient of the queries, one for those of keys and values.

From the weights ``P = 2^(S - L)`` and ``D = rowsum(dO * O) - dL`` each tile adds

    dS = P * (dO V^T - D),   dQ += dS K      (a block of queries over tiles of keys)
    dV += P^T dO,   dK += dS^T Q             (a block of keys over tiles of queries, and over the heads that share it)

(Dao et al., arXiv 2205.14135, appendix B). Each kernel computes the weights again, so there are seven matrix products;
no sum is shared between blocks, so the results do not depend on the order in which blocks run. The gradient of a bias
is summed up beside these: that of a number for each key over the queries, that of a slope over the pairs of each query.
"""

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
    """The gradient of the queries, in float32 if ``wide``, and with ``of_bias`` the sums of the bias over their pairs.

    The sums, ``KernelBias.sums`` for each query, are float32 ``[batch, heads, n, queries]``, or None.
    """
    sums = config.bias.sums if of_bias else 0
    batch, queries, heads, size = x.q.shape
    block = mosaic.ROWS_OF_GROUP
    features = partial(mosaic.features, dtype=x.q.dtype)

    def body(inputs, dq_ref, sums_ref, scratch):
        x, rows, lists = inputs
        _queries_kernel(config, tiling._replace(lists=lists), x, rows, dq_ref, sums_ref, scratch)

    return mosaic.run(
        body,
        (x, rows, tiling.lists),
        out_type=[
            jax.ShapeDtypeStruct(x.q.shape, jnp.float32 if wide else x.q.dtype),
            jax.ShapeDtypeStruct((batch, heads, sums, queries), jnp.float32) if sums else None,
        ],
        scratch=_Scratch(
            first=features((mosaic.GROUPS, block, size)),
            second=features((mosaic.GROUPS, block, x.v.shape[-1])),
            floats=plgpu.SMEM((mosaic.GROUPS, sums, block), jnp.float32) if sums else None,
            ready=plgpu.Barrier(num_arrivals=2, num_barriers=mosaic.GROUPS),
            ring=ring_of_keys(config, x, tokens=tiling.blocks.k),
            copy=features((mosaic.GROUPS, block, tiling.blocks.k)) if config.interpret else None,
        ),
        grid={"head": heads, "row": queries // tiling.blocks.q, "batch": batch},
        name="posjax_attention_backward_queries",
        interpret=config.interpret,
    )


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


def _queries_kernel(config, tiling: Tiling, x: Inputs, rows: OfQueries, dq_ref, sums_ref, scratch) -> None:
    batch, head = (lax.axis_index(name) for name in ("batch", "head"))
    row = x.q.shape[1] // tiling.blocks.q - 1 - lax.axis_index("row")
    walk = Walk.of(tiling.kinds, tiling.lists, batch, row, tiling.blocks.k)

    def compute(group):
        first = row * tiling.blocks.q + group * mosaic.ROWS_OF_GROUP
        _of_queries(config, walk, x, rows, dq_ref, sums_ref, scratch.of_group(group), batch, head, first)

    mosaic.in_roles(compute, lambda: feed_keys(config, x, walk, scratch.ring, batch, head))


def _of_queries(config, walk: Walk, x: Inputs, rows: OfQueries, dq_ref, sums_ref, scratch, batch, head, first):
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
        if sums_ref is not None:
            sums = config.bias.summed(tile, kind.reach, d_scores, sums)
        mosaic.add_product(dq, d_scores.astype(x.k.dtype), keys.first, scratch.copy)
        plgpu.wgmma_wait(0)
        ring.release(0, n)
        return sums

    def run(dq):
        number = 0 if sums_ref is None else sums_ref.shape[2]
        sums = walk.run(partial(step, dq), (mosaic.full((block,), 0, mosaic.ROWS),) * number)
        return dq[...], sums

    dq, sums = pl.run_scoped(run, mosaic.accumulator((block, x.q.shape[-1])))
    dq *= config.factor * LN2
    mosaic.write(dq, dq_ref.at[batch, queries, head], scratch.first)
    if sums_ref is not None:
        for n, each in enumerate(sums):
            scratch.floats[n] = each
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch.floats, sums_ref.at[batch, head, :, queries])
    plgpu.wait_smem_to_gmem(0)


class OfKeys(NamedTuple):
    """The gradients of keys and values, and of a number of each key, float32 ``[batch, heads, keys]``, or None."""

    k: jax.Array
    v: jax.Array
    numbers: jax.Array | None


def backward_keys(
    config: KernelConfig, x: Inputs, rows: OfQueries, tiling: Tiling, *, wide: bool, of_bias: bool
) -> OfKeys:
    """The gradients of keys and values, in float32 if ``wide``; and ``-sum_i dS`` for each key if the bias needs it."""
    of_numbers = of_bias and config.bias.of_tokens
    batch, keys, kv_heads, size = x.k.shape
    value_size = x.v.shape[-1]
    block = mosaic.ROWS_OF_GROUP
    features = partial(mosaic.features, dtype=x.q.dtype)

    def body(inputs, *refs):
        x, rows, lists = inputs
        *results, scratch = refs
        _keys_kernel(config, tiling._replace(lists=lists), x, rows, OfKeys(*results), scratch)

    results = mosaic.run(
        body,
        (x, rows, tiling.lists),
        out_type=[
            jax.ShapeDtypeStruct(x.k.shape, jnp.float32 if wide else x.k.dtype),
            jax.ShapeDtypeStruct(x.v.shape, jnp.float32 if wide else x.v.dtype),
            jax.ShapeDtypeStruct((batch, kv_heads * config.group, keys), jnp.float32) if of_numbers else None,
        ],
        scratch=_Scratch(
            first=features((mosaic.GROUPS, block, size)),
            second=features((mosaic.GROUPS, block, value_size)),
            floats=plgpu.SMEM((mosaic.GROUPS, config.group, block), jnp.float32) if of_numbers else None,
            ready=plgpu.Barrier(num_arrivals=2, num_barriers=mosaic.GROUPS),
            ring=ring_of_queries(x, rows, tokens=tiling.blocks.q),
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
        _of_keys(config, walk, x, results, scratch.of_group(group), batch, kv_head, first)

    def queries(step):
        # The heads of a tile one after the other: one loop over all, for two nested ones take more registers.
        head = kv_head * config.group + lax.rem(step, jnp.int32(config.group))
        place = walk.place(lax.div(step, jnp.int32(config.group)))
        return queries_at(x, rows, batch, head, pl.ds(place, walk.tokens))

    def copy():
        feed(walk.count * config.group, [(scratch.ring, queries)], config.interpret)

    mosaic.in_roles(compute, copy)


def _of_keys(config, walk: Walk, x: Inputs, results: OfKeys, scratch: _Scratch, batch, kv_head, first) -> None:
    """The gradients of 64 keys, from all heads that share them."""
    block = mosaic.ROWS_OF_GROUP
    keys = pl.ds(first, block)
    plgpu.copy_gmem_to_smem(x.k.at[batch, keys, kv_head], scratch.first, scratch.ready)
    plgpu.copy_gmem_to_smem(x.v.at[batch, keys, kv_head], scratch.second, scratch.ready)
    numbers = numbers_at(x, 1, batch, keys, mosaic.ROWS)
    plgpu.barrier_wait(scratch.ready)

    start = () if results.numbers is None else (mosaic.full((block,), 0, mosaic.ROWS),) * config.group

    def run(dk, dv):
        step = partial(_add_queries, config, walk, x, scratch, dk, dv, batch, kv_head, first, numbers)
        d_numbers = walk.run(step, start, times=config.group)
        return dk[...], dv[...], d_numbers

    sizes = x.k.shape[-1], x.v.shape[-1]
    dk, dv, d_numbers = pl.run_scoped(run, *(mosaic.accumulator((block, size)) for size in sizes))
    mosaic.write(dk * (config.factor * LN2), results.k.at[batch, keys, kv_head], scratch.first)
    mosaic.write(dv, results.v.at[batch, keys, kv_head], scratch.second)
    if results.numbers is not None:
        for n, each in enumerate(d_numbers):
            scratch.floats[n] = each
        plgpu.commit_smem()
        heads = pl.ds(kv_head * config.group, config.group)
        plgpu.copy_smem_to_gmem(scratch.floats, results.numbers.at[batch, heads, keys])
    plgpu.wait_smem_to_gmem(0)


def _add_queries(
    config,
    walk: Walk,
    x: Inputs,
    scratch: _Scratch,
    dk,
    dv,
    batch,
    kv_head,
    first,
    numbers,
    kind: Kind,
    step,
    d_numbers,
):
    """Adds a tile of one head to the gradients of 64 keys."""
    ring = scratch.ring
    in_group = lax.rem(step, jnp.int32(config.group))
    head = kv_head * config.group + in_group
    place = walk.place(lax.div(step, jnp.int32(config.group)))
    of_bias = None
    if config.bias.of_tokens:
        gates = x.bias["k"]
        keys = pl.ds(first, mosaic.ROWS_OF_GROUP)
        of_bias = mosaic.load(gates.at[own(gates, batch), head, 0, keys], mosaic.ROWS)
    k_axis = axis(config, x, 1, 0, first, numbers, of_bias)
    queries = ring.at(step)
    shape = (mosaic.ROWS_OF_GROUP, walk.tokens)
    ring.wait(0, step)
    scores = mosaic.product_transposed(scratch.first, queries.first)
    ints = () if queries.ints is None else mosaic.load_all(queries.ints, mosaic.COLUMNS, config.interpret)
    lse, correction = mosaic.load_all(queries.floats, mosaic.COLUMNS, config.interpret)
    q_axis = axis(config, x, 0, 1, place, ints)
    logits = Tile(config, x, batch, head, q_axis, k_axis, shape).logits(scores, kind)
    weights = logits.weights(mosaic.columns(lse, shape))
    ring.wait(1, step)

    def products(d_weights):
        plgpu.wgmma(d_weights, scratch.second, queries.second.transpose((1, 0)))
        mosaic.add_product(dv, weights.astype(x.v.dtype), queries.second, scratch.copy)
        return mosaic.current(d_weights, 1, config.interpret)

    d_weights = pl.run_scoped(products, mosaic.accumulator(shape))
    d_scores = weights * (d_weights - mosaic.columns(correction, shape))
    if logits.slope is not None:
        d_scores *= logits.slope
    if d_numbers:
        of_tile = d_scores.sum(axis=1)
        d_numbers = tuple(each - of_tile * (in_group == n).astype(jnp.float32) for n, each in enumerate(d_numbers))
    mosaic.add_product(dk, d_scores.astype(x.q.dtype), queries.first, scratch.copy)
    plgpu.wgmma_wait(1)
    ring.release(1, step)
    plgpu.wgmma_wait(0)
    ring.release(0, step)
    return d_numbers
