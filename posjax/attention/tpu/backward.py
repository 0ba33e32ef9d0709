"""The backward kernel: one row of tiles after the other, all gradients in one pass over the tiles.

For a block of keys, over the tiles of its list and the query heads that share the keys, with keys along the sublanes,

    S^T = K Q^T + bias,   P^T = 2^(S^T - L),   dS^T = P^T * (V dO^T - D),   D = rowsum(dO * O) - dL / ln 2
    dV += P^T dO,   dK += dS^T Q,   dQ += dS K

(Dao et al., arXiv 2205.14135, appendix B). Five matrix products, none of whose factors but ``dS`` is ever transposed.

    keys      .  .  .  .       ``dK`` and ``dV`` of a row of tiles stay in fast memory until it ends;
              #  #  m  .       ``dQ`` of a tile is fetched (f), added to while the tile is computed (x),
              w  x  f  .       and written back (w), in float32 and in place

Each array of the queries has two places, the tile's and the next one's; ``dQ`` has three, so that its fetch never waits
for a write that has only just begun. Within a row every tile is of another block of ``dQ``, and a row ends when all
its writes have landed, so no fetch overtakes a write.
"""

from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from posjax.attention.tiles import AHEAD, NEAR, Kind
from posjax.attention.tpu import terms
from posjax.attention.tpu.backward_moves import (
    Arrays,
    Row,
    Saved,
    arrays_of,
    bias_outputs,
    scratch,
    specs,
    start,
    wait,
    wait_written,
    window_of,
    write,
)
from posjax.attention.tpu.call import Call, Inputs, anywhere, at, compiler_params, product, work
from posjax.attention.tpu.schedule import tile_of
from posjax.attention.tpu.terms import LANES, Axis

LN2 = float(np.log(2))


class Gradients(NamedTuple):
    """In base 2, ``ln 2`` short of the true ones but for ``v``: ``bias`` is what the kernel sums up for its form.

    ``"linear"``: ``[batch, kv heads, group, 1, 128]``. ``"gates"``: of the keys' gates, ``[.., 1, keys]``.
    ``"relative"``: the skewed vector ``[.., rows, 8, 128]`` and the edges ``[.., 2, 128]``.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: tuple


@partial(jax.jit, static_argnums=0, static_argnames="of_bias")
def backward(call: Call, x: Inputs, saved: Saved, *, of_bias: bool) -> Gradients:
    """All gradients; those of the bias only if wanted."""
    batch, kv_heads, pairs, keys, size = x.k.shape
    arrays, varying = arrays_of(call, x, saved), jax.typeof(x.q).manual_axis_type
    block = call.backward.k

    def of_keys(*shape):
        index = (lambda b, h, j: (b, h, 0, j, 0)) if len(shape) == 2 else (lambda b, h, j: (b, h, j, 0))
        return pl.BlockSpec((None, None, *shape[:-1], block, shape[-1]), index)

    bias = bias_outputs(call, arrays, block) if of_bias else []
    found = pl.pallas_call(
        partial(_kernel, call, len(bias)),
        grid=(batch, kv_heads, keys // block),
        in_specs=list(specs(arrays, block)),
        out_specs=[anywhere, of_keys(pairs, size), of_keys(x.v.shape[-1]), *(spec for _, spec in bias)],
        out_shape=[
            jax.ShapeDtypeStruct(arrays.dq.shape, jnp.float32, manual_axis_type=varying),
            jax.ShapeDtypeStruct(x.k.shape, x.k.dtype, manual_axis_type=varying),
            jax.ShapeDtypeStruct(x.v.shape, x.v.dtype, manual_axis_type=varying),
            *(shape for shape, _ in bias),
        ],
        scratch_shapes=scratch(call, arrays, bool(bias)),
        input_output_aliases={len(jax.tree.leaves(arrays)) - 1: 0},
        compiler_params=compiler_params(call),
        cost_estimate=work(x, 3, 2),
        interpret=call.interpret,
        name="posjax_attention_backward",
    )(*arrays)
    return Gradients(found[0].reshape(x.q.shape), *found[1:3], tuple(found[3:]))


def _kernel(call: Call, bias_outputs: int, *refs):
    x, refs = Arrays(*refs[: len(Arrays._fields)]), refs[len(Arrays._fields) :]
    (dq_ref, dk_ref, dv_ref, *d_bias), scratch = refs[: 3 + bias_outputs], refs[3 + bias_outputs :]
    b, h, j = (pl.program_id(n) for n in range(3))
    row = Row(call, x._replace(dq=dq_ref), *scratch, b, h, j, tuple(d_bias))
    order, ends = x.visits
    kinds = call.backward_kinds
    count, group = ends[0, len(kinds) - 1], x.q.shape[2]

    @pl.when(count > 0)
    def _():
        start(row, order[0, 0], 0, 0)

    _begin(row)

    def visit(kind: Kind, g, n, _):
        step = g * count + n
        last = n + 1 == count
        upcoming = order[0, jnp.where(last, 0, n + 1)]

        @pl.when(step >= 2)
        def _():
            wait_written(row, jax.lax.rem(step + 1, 3))

        @pl.when(step + 1 < group * count)
        def _():
            start(row, upcoming, jnp.where(last, g + 1, g), step + 1)

        wait(row, kind, step)
        _tile(row, kind, g, tile_of(order[0, n]), step)
        write(row, kind, g, order[0, n], step)

    def head(g, _):
        _begin_head(row, g)
        begin = 0
        for n, kind in enumerate(kinds):
            jax.lax.fori_loop(begin, ends[0, n], partial(visit, kind, g), None)
            begin = ends[0, n]
        _finish_head(row, g)

    jax.lax.fori_loop(0, group, head, None)
    for back in (1, 2):

        @pl.when(group * count >= back)
        def _(back=back):
            wait_written(row, jax.lax.rem(group * count - back, 3))

    dk_ref[...] = (row.sums.dk[...] * LN2).astype(dk_ref.dtype)
    dv_ref[...] = row.sums.dv[...].astype(dv_ref.dtype)


def _begin(row: Row) -> None:
    sums = row.sums
    sums.dk[...] = jnp.zeros_like(sums.dk)
    sums.dv[...] = jnp.zeros_like(sums.dv)
    for source, target in zip(row.x.k_rows[: row.call.k_numbers], sums.columns, strict=False):
        target[...] = terms.column(source[0])
    if row.d_bias and row.call.bias != "gates":

        @pl.when(row.block == 0)
        def _():
            for ref in row.d_bias:
                ref[...] = jnp.zeros_like(ref)


def _begin_head(row: Row, g) -> None:
    """The bias of each key, as a column; it differs between the heads."""
    call, sums = row.call, row.sums
    if call.bias == "linear":
        sums.bias[...] = row.x.scalars["slopes"][_head(row, g)] * -_keys_ahead(row)
    if call.bias == "gates":
        sums.bias[...] = row.x.origins[1][_group(row, g), 0, row.block] - terms.column(row.x.k_rows[-1][g])
    if row.d_bias and call.bias != "relative":
        sums.d_bias[...] = jnp.zeros_like(sums.d_bias)


def _finish_head(row: Row, g) -> None:
    if not row.d_bias:
        return
    if row.call.bias == "gates":
        row.d_bias[0][g] = -terms.row(row.sums.d_bias[...])
    if row.call.bias == "linear":
        row.d_bias[0][g] -= jnp.sum(row.sums.d_bias[...] * _keys_ahead(row), axis=0, keepdims=True)


def _head(row: Row, g):
    return row.kv_head * row.x.q.shape[2] + g


def _group(row: Row, g):
    """The index of a head along the group axis of the origins."""
    return at(g, row.x.origins[1].shape[0])


def _keys_ahead(row: Row):
    """Distance of the keys from the origin of their block, a float32 column."""
    call, shape = row.call, (row.call.backward.k, LANES)
    if call.ranged[1]:
        return jax.lax.broadcasted_iota(jnp.int32, shape, 0).astype(jnp.float32)
    return (row.sums.columns[0][...] - row.x.origins[1][0, 0, row.block]).astype(jnp.float32)


def _tile(row: Row, kind: Kind, g, tile, step) -> None:
    """Adds a tile to the gradients, part by part."""
    call, place = row.call, step & 1
    varies = call.bias == "relative" and kind.reach == NEAR
    if varies and row.d_bias:
        row.sums.d_bias[...] = jnp.zeros_like(row.sums.d_bias)
    level, (queries, keys, part) = _level(row, kind, g, tile), call.backward
    for first in range(0, queries, part):
        if varies:
            rows = terms.new_rows(first, part, keys, queries)
            terms.toeplitz(row.arriving.window.at[place], row.sums.matrix, *rows)
        _part(row, kind, g, tile, first, step, level)
    if varies and row.d_bias:
        first = window_of(row, tile).start
        for n, eight in enumerate(terms.untoeplitz(row.sums.d_bias)):
            row.d_bias[0][g, first + n] += eight


def _level(row: Row, kind: Kind, g, tile):
    """What the bias adds to the whole tile, or None."""
    call, scalars = row.call, row.x.scalars
    if call.bias == "relative" and kind.reach != NEAR:
        return scalars["edges"][_head(row, g), int(kind.reach == AHEAD)]
    if call.bias not in ("linear", "gates"):
        return None
    q, k = row.x.origins
    apart = q[_group(row, g), 0, tile] - k[_group(row, g), 0, row.block]
    return apart if call.bias == "gates" else scalars["slopes"][_head(row, g)] * apart.astype(jnp.float32)


def _part(row: Row, kind: Kind, g, tile, first: int, step, level) -> None:
    call, sums, place = row.call, row.sums, step & 1
    part = call.backward.part
    queries = pl.ds(first, part)
    d_out = row.arriving.saved.d_out[place, queries, :]
    lse, correction = (x[place, :, queries] for x in row.arriving.saved[1:])
    q = [row.arriving.q[place, n, queries, :] for n in range(len(kind.pairs))]
    scores = [product(row.x.k[pair], q[n], (1, 1)) for n, pair in enumerate(kind.pairs)]
    seen, takes = _pattern(row, kind, tile, first, place)
    logits = reduce(
        lambda found, other: jnp.where(other[1], other[0], found), zip(scores[1:], takes, strict=True), scores[0]
    )
    logits = _biased(row, kind, logits, first)
    if call.softcap is not None:
        logits = call.softcap * jnp.tanh((logits if level is None else logits + level) / call.softcap)
    elif level is not None:
        lse = lse - level
    slope = None if call.softcap is None else 1 - jnp.square(logits / call.softcap)
    weights = jnp.exp2((logits if seen is None else jnp.where(seen, logits, -jnp.inf)) - lse)
    d_logits = weights * (product(row.x.v[...], d_out, (1, 1)) - correction)
    d_scores = d_logits if slope is None else d_logits * slope
    sums.dv[...] += product(weights.astype(d_out.dtype), d_out, (1, 0))
    for n, pair in enumerate(kind.pairs):
        own = _own(d_scores, takes, n).astype(q[n].dtype)
        sums.dk[pair] += product(own, q[n], (1, 0))
        row.dq[jax.lax.rem(step, 3), n, queries, :] += product(own, row.x.k[pair], (0, 0))
    if row.d_bias:
        _add_bias(row, kind, g, tile, first, place, d_scores)


def _own(d_scores, takes: tuple, n: int):
    """The gradient of the scores of the ``n``-th pair of features of a tile."""
    if not takes:
        return d_scores
    taken = takes[n - 1] if n else ~reduce(jnp.logical_or, takes)
    return jnp.where(taken, d_scores, 0)


def _pattern(row: Row, kind: Kind, tile, first: int, place) -> tuple:
    """Which pairs of a part are allowed, and which branch's they are."""
    call, (queries, keys, part) = row.call, row.call.backward
    far = len(kind.pairs) > 1
    if not (kind.masked or far):
        return None, ()
    starts, (q_ranged, k_ranged) = row.x.starts, call.ranged
    q_rows = tuple(x[place, :, pl.ds(first, part)] for x in row.arriving.rows)
    k_columns = tuple(column[...] for column in row.sums.columns[: call.k_numbers])
    q = Axis(1, starts[0] + tile * queries + first, q_rows, q_ranged)
    k = Axis(0, starts[1] + row.block * keys, k_columns, k_ranged)
    return call.pattern.on(q, k, (keys, part), masked=kind.masked, far=far)


def _biased(row: Row, kind: Kind, logits, first: int):
    """The logits with what of the bias differs within a tile."""
    call, (queries, keys, part) = row.call, row.call.backward
    if call.bias in ("linear", "gates"):
        return logits + jnp.tile(row.sums.bias[...], (1, part // LANES))
    if call.bias == "relative" and kind.reach == NEAR:
        slabs = [terms.slab(row.sums.matrix, first + n, keys, queries) for n in range(0, part, LANES)]
        return logits + jnp.concatenate(slabs, axis=1)
    return logits


def _add_bias(row: Row, kind: Kind, g, tile, first: int, place, d_logits) -> None:
    """Sums of the gradient of the logits, as the form of the bias needs them."""
    call, (queries, keys, part), sums = row.call, row.call.backward, row.sums
    slabs = [d_logits[:, n : n + LANES] for n in range(0, part, LANES)]
    if call.bias == "relative" and kind.reach == NEAR:
        for n, slab in enumerate(slabs):
            start = queries - LANES - first - n * LANES
            sums.d_bias[start : start + keys, :] += slab
        return
    if call.bias == "relative":
        row.d_bias[1][g, int(kind.reach == AHEAD)] += jnp.sum(reduce(jnp.add, slabs), axis=0)
        return
    sums.d_bias[...] += reduce(jnp.add, slabs)
    if call.bias == "linear":
        row.d_bias[0][g] += _folded(jnp.sum(d_logits, axis=0, keepdims=True) * _queries_ahead(row, tile, first, place))


def _folded(numbers):
    """``[1, n]`` as ``[1, 128]``, the sum of its parts."""
    return reduce(jnp.add, [numbers[:, n : n + LANES] for n in range(0, numbers.shape[1], LANES)])


def _queries_ahead(row: Row, tile, first: int, place):
    """Distance of some queries of a tile from the origin of the block of keys, a float32 row."""
    part, origin = row.call.backward.part, row.x.origins[1][0, 0, row.block]
    if row.call.ranged[0]:
        start = row.x.origins[0][0, 0, tile] + first - origin
        return (start + jax.lax.broadcasted_iota(jnp.int32, (1, part), 1)).astype(jnp.float32)
    return (row.arriving.rows[0][place, :, pl.ds(first, part)] - origin).astype(jnp.float32)
