"""The backward kernel: one row of tiles after the other, all gradients in one pass over the tiles.

For a block of keys it computes, over the tiles of its list and the query heads that share the keys, with keys along the
sublanes,

    S^T = K Q^T + bias,   P^T = 2^(S^T - L),   dS^T = P^T * (V dO^T - D),   D = rowsum(dO * O) - dL / ln 2
    dV += P^T dO,   dK += dS^T Q,   dQ += dS K

(Dao et al., arXiv 2205.14135, appendix B). These are five matrix products. Of their factors only ``dS`` is ever
transposed. The factor of the queries multiplies the keys of a row of tiles for ``S``, and the sums of ``dK`` and
``dQ``.

    keys      .  .  .  .       ``dK`` and ``dV`` of a row of tiles stay in fast memory until it ends;
              #  #  m  .       ``dQ`` of a tile is fetched (f), added to while the tile is computed (x),
              w  x  f  .       and written back (w), in float32 and in place; the first tile of a block of queries
                               starts at zero instead, and the last one writes the final gradient

Each array of the queries has two slots, for this tile and the next; ``dQ`` has three, so that its fetch never waits for
a write that has just started. Within a row every tile has a different block of ``dQ``, and a row ends when all its
writes are done, so no fetch overtakes a write.
"""

from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from posjax.attention.formulas import LN2
from posjax.attention.rows import PerQuery
from posjax.attention.tiles import Kind
from posjax.attention.tpu.backward_dma import (
    PENDING,
    KeyRow,
    arrays_of,
    scratch,
    start_sums,
    wait_finished,
    wait_sums,
    wait_written,
    write,
)
from posjax.attention.tpu.dma import (
    CurrentTile,
    KernelArrays,
    anywhere,
    block_spec,
    feature_spec,
    specs,
    start,
    wait,
    walk,
)
from posjax.attention.tpu.inputs import Inputs, KernelConfig, product, times_factor, work
from posjax.attention.tpu.tile_lists import tile_of


class KernelGradients(NamedTuple):
    """Gradients of queries, keys and values, and the sums for the form of the bias, in base 2.

    The sums for the bias lack a factor ``ln 2``. With sums so far, ``q``, ``k`` and ``v`` are sums in float32, and
    ``q`` is ``dS K``, the gradient of scaled queries.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: tuple


@partial(jax.jit, static_argnums=0, static_argnames="of_bias")
def backward(
    config: KernelConfig, x: Inputs, per_query: PerQuery, so_far: tuple | None = None, *, of_bias: bool
) -> KernelGradients:
    """All gradients; that of the bias only with ``of_bias``.

    ``so_far``: float32 sums of the gradients of ``q``, ``k``, ``v``.
    """
    arrays = arrays_of(config, x, per_query, so_far)
    block = config.tilings[1].blocks.k
    shape = partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(x.q).manual_axis_type)
    sums = config.bias.outputs(config.heads // config.kv_heads, x.k.shape[3]) if of_bias else []
    of_sums = [shape((x.k.shape[0], config.kv_heads, *each.shape), jnp.float32) for each in sums]
    of_queries = shape(x.q.shape, jnp.float32)
    is_final = arrays.dq is None
    of_keys = [shape(a.shape, a.dtype if so_far is None else jnp.float32) for a in (x.k, x.v)]
    sizes = {"k": config.size, "v": config.value_size, "dk": config.size, "dv": config.value_size}
    gradients = pl.pallas_call(
        partial(_kernel, config, len(sums)),
        grid=(x.k.shape[0], config.kv_heads, config.tilings[1].rows),
        in_specs=list(specs(arrays, 1, block, **sizes)),
        out_specs=[
            anywhere,
            feature_spec(of_keys[0].shape, config.size, block),
            feature_spec(of_keys[1].shape, config.value_size, block),
            *(block_spec(o.shape, -1 if each.of_keys else None, block) for o, each in zip(of_sums, sums, strict=True)),
            *[anywhere] * is_final,
        ],
        out_shape=[
            shape(x.q.shape, x.q.dtype) if is_final else of_queries,
            *of_keys,
            *of_sums,
            *[of_queries] * is_final,
        ],
        scratch_shapes=scratch(config, arrays, bool(sums)),
        input_output_aliases=arrays.aliases(dq=0, dk=1, dv=2),
        compiler_params=config.compiler_params,
        cost_estimate=work(config, x, 3, 2),
        interpret=config.interpret,
        name="posjax_attention_backward",
    )(*arrays)
    dq = gradients[0]
    if so_far is None and not is_final:
        dq = (dq * (LN2 * config.factor)).astype(x.q.dtype)
    return KernelGradients(dq, *gradients[1:3], tuple(gradients[3 : 3 + len(sums)]))


def _kernel(config: KernelConfig, sums_of_bias: int, *refs):
    fields = len(KernelArrays._fields)
    x = KernelArrays(*refs[:fields])
    dq_ref, dk_ref, dv_ref, *more = refs[fields:]
    d_bias = tuple(more[:sums_of_bias])
    *sums_ref, buffers, sums, dq, arrived = more[sums_of_bias:]
    if sums_ref:
        x = x._replace(dq=sums_ref[0])
        dq = dq._replace(result=dq_ref)
    else:
        x = x._replace(dq=dq_ref)
    b, h, j = (pl.program_id(n) for n in range(3))
    count = x.visits.ends[0, len(config.tilings[1].kinds) - 1]
    row = KeyRow(config, x, buffers, sums, arrived, b, None, h, j, count, dq, None, d_bias).at_head(0)

    @pl.when(count > 0)
    def _():
        start(row, x.visits.order[0, 0], 0)
        start_sums(row, x.visits.order[0, 0], 0)

    _begin(row)
    jax.lax.fori_loop(0, row.group, lambda g, _: _head(row.at_head(g)), None)
    _end(row)
    dk = sums.dk[...] * (LN2 * config.factor)
    dv = sums.dv[...]
    dk_ref[...] = (dk if x.dk is None else x.dk[...] + dk).astype(dk_ref.dtype)
    dv_ref[...] = (dv if x.dv is None else x.dv[...] + dv).astype(dv_ref.dtype)


def _end(row: KeyRow) -> None:
    """Waits until all writes of the row are done."""
    steps = row.group * row.count
    for back in (1, 2):

        @pl.when(steps >= back)
        def _(back=back):
            wait_written(row, jax.lax.rem(steps - back, 3))

    if row.dq.result is not None:
        wait_finished(row)


def _begin(row: KeyRow) -> None:
    sums = row.sums
    sums.dk[...] = jnp.zeros_like(sums.dk)
    sums.dv[...] = jnp.zeros_like(sums.dv)
    row.dq.choices[PENDING] = 0
    if sums.k is not None:
        sums.k[...] = times_factor(row.config, row.x.k[...])
    row.make_columns()
    if row.d_bias:

        @pl.when(row.block == 0)
        def _():
            for ref in row.d_bias:
                ref[...] = jnp.zeros_like(ref)


def _head(row: KeyRow) -> None:
    """The tiles of the row for one of the heads that share the keys."""
    bias = row.config.bias
    bias.begin_head(row)
    walk(row, partial(_visit, row))
    if row.d_bias:
        bias.finish_head(row)


def _visit(row: KeyRow, kind: Kind, n, _) -> None:
    """Starts to fetch the next tile, and adds this one to the gradients."""
    order = row.x.visits.order
    step = row.group_head * row.count + n
    last = n + 1 == row.count
    upcoming = order[0, jnp.where(last, 0, n + 1)]

    @pl.when(step >= 2)
    def _():
        wait_written(row, jax.lax.rem(step + 1, 3))

    @pl.when(step + 1 < row.group * row.count)
    def _():
        following = row.at_head(jnp.where(last, row.group_head + 1, row.group_head))
        start(following, upcoming, step + 1)
        start_sums(following, upcoming, step + 1)

    wait(row, kind, step)
    wait_sums(row, kind, order[0, n], step)
    tile = CurrentTile(kind, tile_of(order[0, n]), row.slot(step))
    _tile(row, tile, row.dq.slots.at[jax.lax.rem(step, 3)])
    write(row, tile, order[0, n], step)


def _tile(row: KeyRow, tile: CurrentTile, dq) -> None:
    """Adds a tile to the gradients, part by part."""
    bias = row.config.bias
    level = row.config.bias.level(row, tile)
    if row.d_bias:
        bias.begin_sums(row, tile)
    for first in range(0, row.blocks.q, row.blocks.part):
        bias.begin_part(row, tile, first)
        _part(row, tile, first, level, dq)
    if row.d_bias:
        bias.finish_tile(row, tile)


def _part(row: KeyRow, tile: CurrentTile, first: int, level, dq) -> None:
    """Adds the queries of a tile from ``first`` on to the gradients."""
    pairs = tile.kind.pairs
    queries = pl.ds(first, row.blocks.part)
    d_out = row.buffers.per_query.d_out[tile.slot, queries, :]
    q = [row.buffers.q[tile.slot, n, queries, :] for n in range(len(pairs))]
    scores = [product(row.scaled_keys[pair], q[n], (1, 1)) for n, pair in enumerate(pairs)]
    seen, remapped_masks = _pattern(row, tile, first)
    weights, d_scores = _weights(row, tile, first, level, _chosen(scores, remapped_masks), seen, d_out)
    row.sums.dv[...] += product(weights.astype(d_out.dtype), d_out, (1, 0))
    for n, pair in enumerate(pairs):
        d_pair = _d_scores_of_pair(d_scores, remapped_masks, n).astype(q[n].dtype)
        row.sums.dk[pair] += product(d_pair, q[n], (1, 0))
        dq[n, queries, :] += product(d_pair, row.x.k[pair], (0, 0))
    if row.d_bias:
        row.config.bias.sum_up(row, tile, first, d_scores)


def _weights(row: KeyRow, tile: CurrentTile, first: int, level, scores, seen, d_out) -> tuple:
    """The weights of a part of a tile, and the gradient of its scores."""
    softcap = row.config.softcap
    queries = pl.ds(first, row.blocks.part)
    lse, correction = (x[tile.slot, :, queries] for x in row.buffers.per_query[1:3])
    logits = row.config.bias.add_transposed(row, tile, first, scores)
    slope = None
    if softcap is not None:
        logits = softcap * jnp.tanh((logits if level is None else logits + level) / softcap)
        slope = 1 - jnp.square(logits / softcap)
    elif level is not None:
        lse = lse - level
    weights = jnp.exp2((logits if seen is None else jnp.where(seen, logits, -jnp.inf)) - lse)
    d_logits = weights * (product(row.x.v[...], d_out, (1, 1)) - correction)
    return weights, d_logits if slope is None else d_logits * slope


def _chosen(scores: list, remapped_masks: tuple):
    """The scores of each pair of tokens, from the features of its branch."""
    chosen = scores[0]
    for other, remapped in zip(scores[1:], remapped_masks, strict=True):
        chosen = jnp.where(remapped, other, chosen)
    return chosen


def _d_scores_of_pair(d_scores, remapped_masks: tuple, n: int):
    """The gradient of the scores of the ``n``-th pair of features of a tile."""
    if not remapped_masks:
        return d_scores
    computed_here = remapped_masks[n - 1] if n else ~reduce(jnp.logical_or, remapped_masks)
    return jnp.where(computed_here, d_scores, 0)


def _pattern(row: KeyRow, tile: CurrentTile, first: int) -> tuple:
    """Which pairs of a part are allowed, and the mask of each branch."""
    masked = tile.kind.masked
    remap = len(tile.kind.pairs) > 1
    if not (masked or remap):
        return None, ()
    return row.config.pattern.on(*row.axes(tile, first), (row.blocks.k, row.blocks.part), masked=masked, remap=remap)
