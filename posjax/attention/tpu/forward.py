"""The forward kernel: one row of tiles after the other, with a running maximum.

For a block of queries it computes, over the tiles of its list,

    S = Q K^T + bias,   m' = max(m, rowmax S),   P = 2^(S - m'),   l = l 2^(m - m') + rowsum P,   O = O 2^(m - m') + P V

and at the end ``O / l`` and ``L = m + log2 l``, in two numbers (Milakov and Gimelshein, arXiv 1805.02867; Dao et al.,
arXiv 2205.14135). Logits are in base 2: ``log2 e`` is part of the queries' scale and of the bias.

    queries   . . . . . .      . . . . . .      . . . . . .        a row of tiles is finished before the next starts;
              # # m . . .  ->  # # m . . .  ->  # # m . . .        while ``x`` is computed, ``o``, the next tile of the
              # # # m . .      # # # m . .      # # # m . .        list, is fetched, at the end of a row too
    x . . . . ^ o              x o              .   x o

Keys and values stay in main memory. A tile is computed in parts of a few hundred keys, without a loop, so that the
matrix product of one part overlaps the exponentials of another. The sums ``l`` are kept for each of 128 lanes and added
at the end.
"""

import dataclasses
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from posjax._numbers import rounded_sum
from posjax.attention.tiles import Kind
from posjax.attention.tpu import terms
from posjax.attention.tpu.dma import (
    CurrentTile,
    KernelArrays,
    block_spec,
    feature_spec,
    specs,
    start,
    wait,
    wait_for,
    walk,
)
from posjax.attention.tpu.forward_dma import ForwardSums, QueryRow, arrays_of, scratch
from posjax.attention.tpu.inputs import Inputs, KernelConfig, product, times_factor, work
from posjax.attention.tpu.terms import LANES, PIECES, SUBLANES
from posjax.attention.tpu.tile_lists import tile_of

LOWEST = float(jnp.finfo(jnp.float32).min)
"""Initial running maximum: no finite logit is below it, so that a row without keys needs no special case."""

_UP_BY = 2.0**-7
"""Twice the largest relative error of rounding to bfloat16."""
_UP = 1 + _UP_BY

SMALLEST = 2.0**-100
"""Least accepted sum of weights with a bound: weights that underflow, below ``2^-126``, are below ``2^-26`` of it."""


@partial(jax.jit, static_argnums=0)
def forward(config: KernelConfig, x: Inputs, so_far: tuple | None = None):
    """Output in the layout of ``merge_heads``, and base-2 log-sum-exp without the bias's constant of each query.

    The log-sum-exp is float32, ``[batch, heads, 2, queries]``: rounded, and what rounding lost (see
    ``posjax.attention.rows``). With ``so_far``, output (float32 too) and log-sum-exp of other keys, the results are
    merged into these, in place.
    """
    batch, _, _, queries, _ = x.q.shape
    heads = config.heads
    size = config.value_size
    tiling = config.tilings[0]
    arrays = arrays_of(config, x, so_far)
    block = tiling.blocks.q
    shape = partial(jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(x.q).manual_axis_type)
    out = shape(
        (batch, heads, queries, size) if size % LANES else (batch, 1, queries, heads * size),
        x.v.dtype if so_far is None else jnp.float32,
    )
    lse = shape((batch, heads, 2, queries), jnp.float32)
    return pl.pallas_call(
        partial(_kernel, config),
        grid=(batch, heads, tiling.rows),
        in_specs=list(specs(arrays, 0, block, q=config.size, out=size)),
        out_specs=[feature_spec(out.shape, size, block), block_spec(lse.shape, -1, block)],
        out_shape=[out, lse],
        scratch_shapes=scratch(config, arrays),
        input_output_aliases=arrays.aliases(out=0, lse=1),
        compiler_params=config.compiler_params,
        cost_estimate=work(config, x, 1, 1),
        interpret=config.interpret,
        name="posjax_attention_forward",
    )(*arrays)


def _kernel(config: KernelConfig, *refs):
    fields = len(KernelArrays._fields)
    x = KernelArrays(*refs[:fields])
    out_ref, lse_ref, buffers, sums, state, arrived = refs[fields:]
    b, h, i = (pl.program_id(n) for n in range(3))
    kinds = len(config.tilings[0].kinds)
    count, following = (x.visits.ends[0, n] for n in (kinds - 1, kinds))
    row = QueryRow(config, x, buffers, sums, arrived, b, h, jax.lax.div(h, config.heads // config.kv_heads), i, count)
    # The slot of this row's first tile, and whether its copy was started already.
    slot, under_way = (jnp.where(i == 0, 0, state[n]) for n in range(2))

    @pl.when((count > 0) & (under_way == 0))
    def _():
        start(row, x.visits.order[0, 0], slot)

    @pl.when(i == 0)
    def _():
        _clear(sums)
        _append_to_keys(row)

    _begin(row)
    _sweep(row, following, slot, bounded=config.bounded)
    slot = (slot + count) & 1
    state[0] = slot
    state[1] = ((count > 0) & (following >= 0)).astype(jnp.int32)
    _settle(row, bounded=config.bounded)
    if config.bounded:
        _check_bound(row, state, following, slot)
    _finish(row, out_ref, lse_ref)


def _sweep(row: QueryRow, following, slot, *, bounded: bool) -> None:
    """Visits the tiles of the row, the first of which is fetched to ``slot``, and starts to fetch ``following``."""
    order = row.x.visits.order

    def visit(kind: Kind, n, _):
        current = (slot + n) & 1
        has_next = n + 1 < row.count
        upcoming = jnp.where(has_next, order[0, jnp.where(has_next, n + 1, 0)], following)

        @pl.when(upcoming >= 0)
        def _():
            block = jnp.where(has_next, row.block, row.block + 1)
            start(dataclasses.replace(row, block=block), upcoming, 1 - current)

        wait(row, kind, current)
        _tile(row, CurrentTile(kind, tile_of(order[0, n]), current), bounded=bounded)

    walk(row, visit)


def _settle(row: QueryRow, *, bounded: bool) -> None:
    """Writes the sums of the weights over all lanes, and the running maximum, as rows."""
    row.sums.totals[...] = terms.row(row.sums.total[...])
    if not bounded:
        row.sums.tops[...] = row.sums.highest[...].T[:1]


def _check_bound(row: QueryRow, state, following, slot) -> None:
    """Computes the row again with a running maximum if its weights vanish under the bound.

    It first waits for the copies that were started for the next row, and fetches them again.
    """

    @pl.when((row.count > 0) & (jnp.min(row.sums.totals[...]) < SMALLEST))
    def _():
        @pl.when(following >= 0)
        def _():
            wait_for(row, following, slot)

        _clear(row.sums)
        _resume(row, bounded=False)
        _append_to_queries(row, bounded=False)
        start(row, row.x.visits.order[0, 0], 0)
        _sweep(row, -1, 0, bounded=False)
        _settle(row, bounded=False)
        state[1] = 0


def _begin(row: QueryRow) -> None:
    """Initialises the row. The sums are clear: the previous row cleared them."""
    config = row.config
    row.make_columns()
    if row.sums.q is not None:
        row.sums.q[:, :, : config.size] = times_factor(config, row.x.q[...])
    if config.bounded:
        row.sums.tops[...] = _bound(row)
    _resume(row, bounded=config.bounded)
    if config.bounded and not config.bound_in_features:
        row.sums.highest[...] = terms.column(row.sums.tops[...])
    _append_to_queries(row, bounded=config.bound_in_features)


def _resume(row: QueryRow, *, bounded: bool) -> None:
    """Initialises sums from other keys' ``O`` and ``L``: with the maximum ``m``, ``2^(L - m)`` and ``O 2^(L - m)``.

    A row without tiles uses no bound, because its sums might vanish under it.
    """
    if row.x.lse is None:
        return
    sums = row.sums
    lse = row.x.lse[:1]
    rest = row.x.lse[1:]
    seen = lse > -jnp.inf
    top = jnp.where(seen, lse, LOWEST)
    if bounded:
        top = jnp.where(row.count > 0, _rounded_up(jnp.maximum(sums.tops[...], top)), top)
        sums.tops[...] = top
    else:
        sums.highest[...] = terms.column(top)
    weight = terms.column(jnp.where(seen, jnp.exp2(lse - top + rest), 0.0))
    lane = jax.lax.broadcasted_iota(jnp.int32, weight.shape, 1)
    sums.total[...] = jnp.where(lane == 0, weight, 0.0)
    sums.out[...] = row.x.out[...] * _wide(weight, sums.out.shape[1])


def _bound(row: QueryRow):
    """A bound of each query's logits, as a row: the largest ``|q| max |k|`` of the pairs of features, plus the bias.

    The first part is by Cauchy-Schwarz; the second is the most that the bias adds, without what it adds to all logits
    of a query. The bound replaces a running maximum, which costs time. It may be so far above the logits that all
    weights vanish; then the row is computed again. Any larger number is a bound too, so it is rounded up to bfloat16.
    """
    config, numbers = row.config, row.x.bound
    if config.softcap is not None:
        return _rounded_up(jnp.full_like(row.sums.tops, config.softcap))
    lengths = [jnp.sqrt(_squares(q)) * numbers[0, n] for n, q in enumerate(_queries(row))]
    bound = reduce(jnp.maximum, lengths) * _UP + numbers[0, len(lengths)]
    query_constant = config.bias.own(row)
    return _rounded_up(bound if query_constant is None else bound - query_constant)


def _rounded_up(x):
    return (x + _UP_BY * jnp.abs(x)).astype(jnp.bfloat16).astype(jnp.float32)


def _squares(q):
    """``|q|^2`` of every query, as a row: the matrix unit sums the squares."""
    ones = jnp.ones((SUBLANES, q.shape[1]), q.dtype)
    return product(ones, jnp.square(q.astype(jnp.float32)).astype(q.dtype), (1, 1))[:1]


def _queries(row: QueryRow) -> list:
    """The scaled queries of every pair of features."""
    source = row.x.q if row.sums.q is None else row.sums.q
    return [source[n, :, : row.config.size] for n in range(source.shape[0])]


def _append_to_queries(row: QueryRow, *, bounded: bool) -> None:
    """Appends columns to the queries: ones, which multiply the numbers of the keys, and the bounds of the queries."""
    if row.sums.q is None or row.sums.q.shape[-1] == row.config.size:
        return
    bound = row.sums.tops[...] if bounded else jnp.zeros_like(row.sums.tops)
    rows = terms.columns([jnp.ones_like(bound)] * PIECES + [-bound]).astype(row.sums.q.dtype)
    for n in range(row.sums.q.shape[0]):
        row.sums.q[n, :, row.config.size :] = rows


def _append_to_keys(row: QueryRow) -> None:
    """Appends columns to the keys in both slots: their bias, the same in every block, and ones for the bounds."""
    size = row.config.size
    if row.buffers.k.shape[-1] == size:
        return
    one = jnp.ones((1, row.blocks.k), jnp.float32)
    bias = row.config.bias
    # The numbers are the same in every tile, so any tile will do.
    numbers = bias.of_keys(row, CurrentTile(None, 0, 0)) if bias.in_features else jnp.zeros_like(one)
    rows = terms.columns([*terms.pieces(numbers), one]).astype(row.buffers.k.dtype)
    for slot in range(2):
        for n in range(row.buffers.k.shape[1]):
            row.buffers.k[slot, n, :, size:] = rows


def _clear(sums: ForwardSums) -> None:
    sums.highest[...] = jnp.full_like(sums.highest, LOWEST)
    sums.total[...] = jnp.zeros_like(sums.total)
    sums.out[...] = jnp.zeros_like(sums.out)


def _tile(row: QueryRow, tile: CurrentTile, *, bounded: bool) -> None:
    """Adds a tile to the sums, part by part."""
    config, part = row.config, row.blocks.part
    bias = config.bias
    level = config.bias.level(row, tile)
    # A soft cap applies to whole logits; without one, the level is added to the maximum of each query.
    within, level = (None, level) if config.softcap is None else (level, None)
    bias.begin_tile(row, tile)
    for first in range(0, row.blocks.k, part):
        bias.begin_part(row, tile, first)
        logits = _logits(row, tile, first, within)
        v = row.buffers.v[tile.slot, pl.ds(first, part), :]
        if bounded:
            _add_bounded(row.sums, logits, v, level, subtracted=config.bound_in_features)
        else:
            _add(row.sums, logits, v, level)


def _logits(row: QueryRow, tile: CurrentTile, first: int, level):
    """Logits of some keys of a tile, with its level unless that is None."""
    config = row.config
    queries, _, part = row.blocks
    kind = tile.kind
    keys = pl.ds(first, part)
    shape = (queries, part)
    q = row.x.q if row.sums.q is None else row.sums.q
    scores = [product(q[n], row.buffers.k[tile.slot, m, keys, :], (1, 1)) for m, n in enumerate(kind.pairs)]
    logits = scores[0]
    seen = None
    if kind.masked or len(scores) > 1:
        seen, remapped_masks = config.pattern.on(
            *row.axes(tile, first), shape, masked=kind.masked, remap=len(scores) > 1
        )
        for other, remapped in zip(scores[1:], remapped_masks, strict=True):
            logits = jnp.where(remapped, other, logits)
    logits = config.bias.add(row, tile, first, logits)
    if level is not None:
        logits = logits + level
    if config.softcap is not None:
        logits = config.softcap * jnp.tanh(logits / config.softcap)
    return logits if seen is None else jnp.where(seen, logits, -jnp.inf)


def _add(sums: ForwardSums, logits, v, level) -> None:
    """One step of the online softmax."""
    old = sums.highest[...]
    top = jnp.max(logits, axis=1, keepdims=True)
    new = jnp.maximum(old, top if level is None else top + level)
    weights = _weights(logits, new, level)
    shrink = jnp.exp2(old - new)
    sums.highest[...] = new
    sums.total[...] = sums.total[...] * shrink + reduce(jnp.add, weights)
    sums.out[...] = sums.out[...] * _wide(shrink, v.shape[1]) + _mixed(weights, v)


def _add_bounded(sums: ForwardSums, logits, v, level, *, subtracted: bool) -> None:
    """``_add`` with a fixed maximum, which may have been subtracted from the logits already."""
    weights = _weights(logits, None if subtracted else sums.highest[...], level)
    sums.total[...] += reduce(jnp.add, weights)
    sums.out[...] += _mixed(weights, v)


def _weights(logits, highest, level) -> list:
    """``2^(logits + level - highest)``, in parts of 128 keys; None counts as 0."""
    if highest is not None:
        logits = logits - jnp.tile(highest if level is None else highest - level, (1, logits.shape[1] // LANES))
    elif level is not None:
        logits = logits + level
    return [jnp.exp2(logits[:, n : n + LANES]) for n in range(0, logits.shape[1], LANES)]


def _mixed(weights: list, v):
    return product(jnp.concatenate([w.astype(v.dtype) for w in weights], axis=1), v, (1, 0))


def _wide(column, size: int):
    """``[n, 128]`` with equal lanes as ``[n, size]``."""
    return jnp.tile(column, (1, pl.cdiv(size, LANES)))[:, :size]


def _finish(row: QueryRow, out_ref, lse_ref) -> None:
    """Divides by the sums. Numbers of each query are computed as rows, 128 lanes at a time."""
    sums = row.sums
    total = sums.totals[...]
    seen = total > 0
    total = jnp.where(seen, total, 1)
    out_ref[...] = (sums.out[...] * _wide(terms.column(1 / total), sums.out.shape[1])).astype(out_ref.dtype)
    lse, rest = rounded_sum(sums.tops[...], jnp.log2(total))
    lse_ref[...] = jnp.concatenate([jnp.where(seen, lse, -jnp.inf), rest], axis=0)
    # Here, next to the transpositions above, the stores cost no time.
    _clear(sums)
