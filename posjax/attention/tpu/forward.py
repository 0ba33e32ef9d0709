"""The forward kernel: one row of tiles after the other, with a running maximum.

For a block of queries, over the tiles of its list,

    S = Q K^T + bias,   m' = max(m, rowmax S),   P = 2^(S - m'),   l = l 2^(m - m') + rowsum P,   O = O 2^(m - m') + P V

and at the end ``O / l`` and ``L = m + log2 l`` (Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv
2205.14135). Logits are in base 2: ``log2 e`` is part of the queries' scale and of the bias.

    queries   . . . . . .      . . . . . .      . . . . . .        a row of tiles is finished before the next begins;
              # # m . . .  ->  # # m . . .  ->  # # m . . .        while ``x`` is computed, ``o``, the next tile of the
              # # # m . .      # # # m . .      # # # m . .        list, is on its way, at the end of a row too
    x . . . . ^ o              x o              .   x o

Keys and values stay in main memory. A tile is computed in parts of a few hundred keys, without a loop, so that the
matrix product of one part runs beside the exponentials of another. The sums ``l`` are kept for each of 128 lanes and
added up at the end.
"""

from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from posjax.attention.tiles import AHEAD, NEAR, Kind
from posjax.attention.tpu import terms
from posjax.attention.tpu.call import Call, Inputs, compiler_params, product, work
from posjax.attention.tpu.forward_moves import Arrays, Row, Sums, arrays_of, scratch, specs, start, wait
from posjax.attention.tpu.schedule import tile_of
from posjax.attention.tpu.terms import LANES, SUBLANES, Axis

LOWEST = -1e30
"""Where a running maximum starts: below every real logit but finite, so that a row without keys needs no care."""

SMALLEST = 2.0**-100
"""Least sum of weights under a bound: what float32 drops of them, below ``2^-126``, is then below ``2^-26`` of it."""


@partial(jax.jit, static_argnums=0)
def forward(call: Call, x: Inputs):
    """Output ``[batch, heads, queries, value size]`` and base-2 log-sum-exp ``[batch, heads, 1, queries]``, float32."""
    batch, heads, _, queries, _ = x.q.shape
    block, value_size = call.forward.q, x.v.shape[-1]
    arrays, varying = arrays_of(call, x), jax.typeof(x.q).manual_axis_type
    return pl.pallas_call(
        partial(_kernel, call, heads // x.k.shape[1], queries),
        grid=(batch, heads, queries // block),
        in_specs=list(specs(arrays, block)),
        out_specs=[
            pl.BlockSpec((None, None, block, value_size), lambda b, h, i: (b, h, i, 0)),
            pl.BlockSpec((None, None, 1, block), lambda b, h, i: (b, h, 0, i)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, queries, value_size), x.v.dtype, manual_axis_type=varying),
            jax.ShapeDtypeStruct((batch, heads, 1, queries), jnp.float32, manual_axis_type=varying),
        ],
        scratch_shapes=scratch(call, arrays),
        compiler_params=compiler_params(call),
        cost_estimate=work(x, 1, 1),
        interpret=call.interpret,
        name="posjax_attention_forward",
    )(*arrays)


def _kernel(call: Call, group: int, queries: int, *refs):
    x, refs = Arrays(*refs[: len(Arrays._fields)]), refs[len(Arrays._fields) :]
    out_ref, lse_ref, arriving, sums, state, arrived = refs
    b, h, i = (pl.program_id(n) for n in range(3))
    row = Row(call, x, arriving, sums, arrived, b, h, jax.lax.div(h, group), i, queries)
    order, ends = x.visits
    count, following = ends[0, len(call.forward_kinds) - 1], ends[0, len(call.forward_kinds)]
    # The place where this row's first tile arrives, and whether it is on its way already.
    place = jnp.where(i == 0, 0, state[0])
    under_way = jnp.where(i == 0, 0, state[1])

    @pl.when((count > 0) & (under_way == 0))
    def _():
        start(row, i, order[0, 0], place)

    @pl.when(i == 0)
    def _():
        _clear(sums)
        _ride_on_keys(row)

    _begin(row)
    _sweep(row, count, following, place, bounded=call.bounded)
    place, ahead = (place + count) & 1, (count > 0) & (following >= 0)
    state[0], state[1] = place, ahead.astype(jnp.int32)
    sums.totals[...] = terms.row(sums.total[...])
    if not call.bounded:
        sums.tops[...] = sums.highest[...].T[:1]
    else:

        @pl.when((count > 0) & (jnp.min(sums.totals[...]) < SMALLEST))
        def _():
            _again(row, count, place, ahead)
            state[1] = 0

    _finish(row, out_ref, lse_ref)


def _sweep(row: Row, count, following, place, *, bounded: bool) -> None:
    """Visits the tiles of the row, kind after kind, the first of which is under way to ``place``."""
    order, ends = row.x.visits

    def visit(kind: Kind, n, _):
        here, more = (place + n) & 1, n + 1 < count
        upcoming = jnp.where(more, order[0, jnp.where(more, n + 1, 0)], following)

        @pl.when(upcoming >= 0)
        def _():
            start(row, jnp.where(more, row.block, row.block + 1), upcoming, 1 - here)

        wait(row, kind, here)
        _tile(row, kind, tile_of(order[0, n]), here, bounded=bounded)

    begin = 0
    for n, kind in enumerate(row.call.forward_kinds):
        jax.lax.fori_loop(begin, ends[0, n], partial(visit, kind), None)
        begin = ends[0, n]


def _again(row: Row, count, place, ahead) -> None:
    """Computes the row with a running maximum, after what is under way for the next one has arrived."""

    @pl.when(ahead)
    def _():
        wait(row, row.call.forward_kinds[0], place)

    _clear(row.sums)
    _ride_on_queries(row, bounded=False)
    start(row, row.block, row.x.visits.order[0, 0], 0)
    _sweep(row, count, -1, 0, bounded=False)
    row.sums.totals[...] = terms.row(row.sums.total[...])
    row.sums.tops[...] = row.sums.highest[...].T[:1]


def _begin(row: Row) -> None:
    """What the rows bring along, as columns. The sums are clear: whoever is done with them leaves them so."""
    sums = row.sums
    for source, target in zip(row.x.q_rows, sums.columns, strict=True):
        target[...] = terms.column(source[...])
    if row.call.bounded:
        sums.tops[...] = row.x.bound[...]
    if row.call.bounded and not row.call.bound_rides:
        sums.highest[...] = terms.column(row.x.bound[...])
    _ride_on_queries(row, bounded=row.call.bound_rides)


def _ride_on_queries(row: Row, *, bounded: bool) -> None:
    """The queries with their bound beside them, and ones for the numbers of the keys."""
    if row.sums.q is None:
        return
    row.sums.q[:, :, :LANES] = row.x.q[...]
    bound = row.x.bound[...] if bounded else jnp.zeros((1, row.call.forward.q), jnp.float32)
    ones = jnp.ones_like(bound)
    rows = terms.columns([ones, ones, ones, *terms.pieces(-bound)]).astype(row.sums.q.dtype)
    for n in range(row.sums.q.shape[0]):
        row.sums.q[n, :, LANES:] = rows


def _ride_on_keys(row: Row) -> None:
    """Beside the keys of either place: the bias of each, the same in every block, and ones."""
    if row.sums.q is None:
        return
    numbers = jnp.zeros((1, row.call.forward.k), jnp.float32)
    ones = jnp.ones_like(numbers)
    if row.call.bias_rides:
        numbers = _of_keys(row, 0, 0)
    rows = terms.columns([*terms.pieces(numbers), ones, ones, ones]).astype(row.sums.q.dtype)
    for place in range(2):
        for n in range(row.sums.q.shape[0]):
            row.arriving.k[place, n, :, LANES:] = rows


def _clear(sums: Sums) -> None:
    sums.highest[...] = jnp.full_like(sums.highest, LOWEST)
    sums.total[...] = jnp.zeros_like(sums.total)
    sums.out[...] = jnp.zeros_like(sums.out)


def _tile(row: Row, kind: Kind, tile, place, *, bounded: bool) -> None:
    """Adds a tile to the sums, part by part."""
    keys, part = row.call.forward.k, row.call.forward.part
    level = _level(row, kind, tile)
    if row.call.adds_of_keys:
        row.sums.of_keys[...] = jnp.broadcast_to(_of_keys(row, tile, place), row.sums.of_keys.shape)
    for first in range(0, keys, part):
        if row.call.bias == "relative" and kind.reach == NEAR:
            rows = terms.new_rows(first, part, row.call.forward.q, keys)
            terms.toeplitz(row.arriving.window.at[place], row.sums.matrix, *rows)
        logits = _logits(row, kind, tile, first, place)
        v = row.arriving.v[place, pl.ds(first, part), :]
        if bounded:
            _add_bounded(row.sums, logits, v, level, subtracted=row.call.bound_rides)
        else:
            _add(row.sums, logits, v, level)


def _of_keys(row: Row, tile, place):
    """What a linear bias or gates add to the logits of each key of a tile, from the origin of its block, as a row."""
    call, keys, origin = row.call, row.call.forward.k, row.x.origins[1][0, tile]
    if call.bias == "gates":
        return origin - row.arriving.rows[-1][place]
    if call.ranged[1]:
        ahead = jax.lax.broadcasted_iota(jnp.int32, (1, keys), 1)
    else:
        ahead = row.arriving.rows[0][place] - origin
    return row.x.scalars["slopes"][row.head] * -ahead.astype(jnp.float32)


def _level(row: Row, kind: Kind, tile):
    """A number that the logits of the tile still lack: the bias between the origins of its blocks, or a constant."""
    call, scalars = row.call, row.x.scalars
    if call.bias == "relative" and kind.reach != NEAR and call.softcap is None:
        return scalars["edges"][row.head, int(kind.reach == AHEAD)]
    if call.bias not in ("linear", "gates"):
        return None
    q, k = row.x.origins
    apart = q[0, row.block] - k[0, tile]
    return apart if call.bias == "gates" else scalars["slopes"][row.head] * apart.astype(jnp.float32)


def _logits(row: Row, kind: Kind, tile, first: int, place):
    """Logits of some keys of a tile, less its level."""
    call, (queries, _, part) = row.call, row.call.forward
    keys = pl.ds(first, part)
    q = row.x.q if row.sums.q is None else row.sums.q
    found = [product(q[n], row.arriving.k[place, m, keys, :], (1, 1)) for m, n in enumerate(kind.pairs)]
    shape = (queries, part)
    logits = found[0]
    seen = None
    if kind.masked or len(found) > 1:
        axes = _axes(row, tile, first, place)
        seen, takes = call.pattern.on(*axes, shape, masked=kind.masked, far=len(found) > 1)
        for other, where in zip(found[1:], takes, strict=True):
            logits = jnp.where(where, other, logits)
    logits = _biased(row, kind, logits, first)
    if call.softcap is not None:
        logits = call.softcap * jnp.tanh(logits / call.softcap)
    return logits if seen is None else jnp.where(seen, logits, -jnp.inf)


def _axes(row: Row, tile, first: int, place) -> tuple[Axis, Axis]:
    """The queries of the row, and some keys of a tile."""
    (queries, keys, part), (q_ranged, k_ranged) = row.call.forward, row.call.ranged
    q_columns = tuple(column[...] for column in row.sums.columns[: row.call.q_numbers])
    k_rows = tuple(x[place, :, pl.ds(first, part)] for x in row.arriving.rows[: row.call.k_numbers])
    q_first = row.x.starts[0] + row.block * queries
    k_first = row.x.starts[1] + tile * keys + first
    return Axis(0, q_first, q_columns, q_ranged), Axis(1, k_first, k_rows, k_ranged)


def _biased(row: Row, kind: Kind, logits, first: int):
    """The logits with what of the bias differs within a tile; a constant of each query is left to ``_finish``."""
    call, (queries, keys, part) = row.call, row.call.forward
    if call.bias == "relative" and kind.reach == NEAR:
        slabs = [terms.slab(row.sums.matrix, first + n, queries, keys) for n in range(0, part, LANES)]
        return logits + jnp.concatenate(slabs, axis=1)
    if call.bias == "relative" and call.softcap is not None:
        return logits + row.x.scalars["edges"][row.head, int(kind.reach == AHEAD)]
    if call.adds_of_keys:
        return logits + jnp.tile(row.sums.of_keys[:, first : first + part], (queries // SUBLANES, 1))
    return logits


def _add(sums: Sums, logits, v, level) -> None:
    """One step of the online softmax."""
    old = sums.highest[...]
    top = jnp.max(logits, axis=1, keepdims=True)
    new = jnp.maximum(old, top if level is None else top + level)
    weights = _weights(logits, new, level)
    shrink = jnp.exp2(old - new)
    sums.highest[...] = new
    sums.total[...] = sums.total[...] * shrink + reduce(jnp.add, weights)
    sums.out[...] = sums.out[...] * _wide(shrink, v.shape[1]) + _mixed(weights, v)


def _add_bounded(sums: Sums, logits, v, level, *, subtracted: bool) -> None:
    """The same under a maximum that stays, which the logits may lack already."""
    weights = _weights(logits, None if subtracted else sums.highest[...], level)
    sums.total[...] += reduce(jnp.add, weights)
    sums.out[...] += _mixed(weights, v)


def _weights(logits, highest, level) -> list:
    """``2^(logits + level - highest)``, 128 keys each; what is None is 0."""
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


def _finish(row: Row, out_ref, lse_ref) -> None:
    """Divides by the sums. What is one number for each query is computed along the lanes, 128 at a time."""
    sums = row.sums
    total = sums.totals[...]
    seen = total > 0
    total = jnp.where(seen, total, 1)
    out_ref[...] = (sums.out[...] * _wide(terms.column(1 / total), sums.out.shape[1])).astype(out_ref.dtype)
    lse = jnp.where(seen, sums.tops[...] + jnp.log2(total), -jnp.inf)
    lse_ref[...] = lse + _row_constant(row)
    # In the same breath as the transpositions above, which leave the stores idle.
    _clear(sums)


def _row_constant(row: Row):
    """What a linear bias or gates add to all logits of a query, relative to the origin of its block, as ``[1, n]``."""
    call, x = row.call, row.x
    if call.bias == "gates":
        return x.q_rows[-1][...] - x.origins[0][0, row.block]
    if call.bias != "linear":
        return 0.0
    block = call.forward.q
    if call.ranged[0]:
        ahead = jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)
    else:
        ahead = x.q_rows[0][...] - x.origins[0][0, row.block]
    return x.scalars["slopes"][row.head] * ahead.astype(jnp.float32)
