"""Attention in linear memory on any platform: tiles of logits, an online softmax, a backward pass that recomputes them.

The forward pass keeps, for each block of queries, a running maximum ``m``, a running sum ``l`` and an accumulator
(Milakov and Gimelshein, arXiv 1805.02867; Rabe and Staats, arXiv 2112.05682); it saves only the output and the
log-sum-exp ``L``. The backward pass recomputes each tile's weights ``P = exp(S - L)`` and, with
``D = rowsum(dO * O) - dL``,

    dV = P^T dO,   dS = P * (dO V^T - D),   dQ = dS K,   dK = dS^T Q,   d(bias) = the bias' own transpose of dS

(Dao et al., arXiv 2205.14135, appendix B; ``dL`` is the gradient of the log-sum-exp itself). Empty tiles of the mask
are never visited, and full tiles are never masked. With several pairs of features (see ``posjax.remap``) a tile
computes only those that it needs. For this, the tiles of every block are listed by kind in advance.
"""

import dataclasses
import math
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp

from posjax._axes import names_of, narrowed, sizes_of
from posjax._lowered import full_varying_like, no_gradient
from posjax._numbers import at_least_float32, is_array_number
from posjax._slots import with_head_axis
from posjax.attention.call import Call
from posjax.attention.logits import (
    capped,
    decay_factors,
    decayed,
    group_mask,
    mix,
    mix_transposed,
    scores,
    statistics_dtype,
    with_bias,
)
from posjax.attention.online import OnlineSoftmax
from posjax.attention.rows import PerQuery, Rows
from posjax.attention.tiles import Blocks, Kind, Visits, lengthened_rows, pad, plan_tiles, visits
from posjax.positions import Range, as_array


@dataclasses.dataclass(frozen=True)
class TileLimits:
    """How large tiles may be.

    Args:
        logits: the most logits of a tile, over batch and heads, as long as it has more than ``_SMALLEST_BLOCK`` tokens.
        block: the most queries of a tile, and the most keys unless it has fewer queries.
    """

    logits: int
    block: int


IN_CACHE = TileLimits(2**21, 512)
"""Tiles that stay in the cache of a CPU."""
FEW_LAUNCHES = TileLimits(2**24, 1024)
"""Tiles for GPUs, where a loop starts several small kernels for each tile, which takes longer than to compute a tile of
``IN_CACHE``. Their size is chosen by reasoning, not measured."""
_SMALLEST_BLOCK = 64


def blockwise(x: Call, blocks: Blocks | None = None, limits: TileLimits = IN_CACHE) -> Rows:
    """The same function as ``dense`` in memory linear in the length.

    Batch rows that are computed together visit the same tiles: every tile that any of these rows needs. Therefore, if
    masks or positions differ between rows, long rows are computed a few at a time, and the longest ones one at a time.

    Args:
        x: the call.
        blocks: tile sizes; chosen from the shapes when left out.
        limits: those of tiles that are chosen.
    """
    rows = x.q.shape[0]
    size = _rows_of_a_plan(x, limits)
    if size == rows:
        return _one_plan(x, blocks, limits)
    results = jax.lax.map(
        lambda start: _one_plan(narrowed(x, batch=(start, size)), blocks, limits), jnp.arange(0, rows, size)
    )
    return Rows(*(array.reshape(rows, *array.shape[2:]) for array in results))


def blockwise_gradients(
    x: Call, per_query: PerQuery, blocks: Blocks | None = None, limits: TileLimits = IN_CACHE
) -> Call:
    """``dense_gradients`` in memory linear in the length."""
    rows = x.q.shape[0]
    size = _rows_of_a_plan(x, limits)
    if size == rows:
        return _gradients_of_one_plan(x, per_query, blocks, limits)
    zeros, rebuild = _inexact_leaves(jax.tree.map(no_gradient, x))
    named = zip(jax.tree.leaves(x), names_of(x), strict=True)
    names = [axis_names for leaf, axis_names in named if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    axes = [axis_names.index("batch") if "batch" in axis_names else None for axis_names in names]
    axes = [axis if axis is not None and a.shape[axis] == rows else None for a, axis in zip(zeros, axes, strict=True)]

    def add_rows(so_far, start):
        part_per_query = jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, start, size), per_query)
        part = narrowed(x, batch=(start, size))
        more = _inexact_leaves(_gradients_of_one_plan(part, part_per_query, blocks, limits))[0]
        return [_put(a, b, start, axis) for a, b, axis in zip(so_far, more, axes, strict=True)], None

    return rebuild(jax.lax.scan(add_rows, zeros, jnp.arange(0, rows, size))[0])


def _put(whole, part, start, axis: int | None):
    """``whole`` with ``part`` written at ``start``, or added if all batch rows share the array."""
    return whole + part if axis is None else jax.lax.dynamic_update_slice_in_dim(whole, part, start, axis)


def _differ(x: Call) -> bool:
    """Whether masks or positions differ between the rows of the batch."""
    masks_differ = any(size != 1 for size in sizes_of(x.masks, "batch"))
    return masks_differ or any(not isinstance(p, Range) and p.ndim == 2 for p in (x.q_positions, x.kv_positions))


def _rows_of_a_plan(x: Call, limits: TileLimits) -> int:
    """How many batch rows share a plan of tiles: all of them if they do not differ."""
    rows = x.q.shape[0]
    return _rows_at_once(x, limits) if isinstance(rows, int) and rows and _differ(x) else rows


def _rows_at_once(x: Call, limits: TileLimits) -> int:
    """How many batch rows share tiles: the largest divisor of their number that keeps tiles within the limits.

    The side of a tile is a quarter of the keys, but at least ``_SMALLEST_BLOCK`` tokens and at most those of the
    limits.
    """
    rows, kv_heads, group, queries, _ = x.q.shape
    block = min(limits.block, max(_SMALLEST_BLOCK, x.k.shape[2] // 4))
    most = limits.logits // (kv_heads * group * min(block, queries) * block)
    return max(n for n in range(1, rows + 1) if rows % n == 0 and n <= max(1, most))


def _one_plan(x: Call, blocks: Blocks | None, limits: TileLimits) -> Rows:
    queries = x.q.shape[3]
    blocks = blocks or _choose_blocks(x, limits)
    return Rows(*(array[:, :, :, :queries] for array in _forward(blocks, pad(x, blocks.q, blocks.k))))


def _gradients_of_one_plan(x: Call, per_query: PerQuery, blocks: Blocks | None, limits: TileLimits) -> Call:
    blocks = blocks or _choose_blocks(x, limits)
    padded, transpose = jax.vjp(lambda x: pad(x, blocks.q, blocks.k), x)
    return transpose(_gradients(blocks, padded, lengthened_rows(per_query, padded.q.shape[3])))[0]


def _choose_blocks(x: Call, limits: TileLimits) -> Blocks:
    """Square tiles within the limits.

    With fewer queries than a block, a tile has more keys, as long as neither its logits nor the numbers in its keys
    exceed ``limits.logits``. A symbolic batch counts as one row.
    """
    batch, kv_heads, group, queries, features = x.q.shape
    kv_heads *= batch if isinstance(batch, int) else 1
    heads = kv_heads * group
    keys = x.k.shape[2]
    block = limits.block
    while block > _SMALLEST_BLOCK and heads * block * block > limits.logits:
        block //= 2
    if x.run is not None:
        block = math.gcd(block, x.run)
        return Blocks(min(block, queries), min(block, keys))
    wide = block
    largest = max(heads * queries, kv_heads * features)
    while queries < block and wide < keys and 2 * largest * wide <= limits.logits:
        wide *= 2
    return Blocks(min(block, queries), min(wide, keys))


def _visits(grid, kinds: tuple[Kind, ...]) -> Visits:
    return Visits(*(jnp.asarray(a, jnp.int32) for a in visits(grid, len(kinds))))


def _visit(tiles: Visits, kinds: tuple[Kind, ...], block, tile, carry):
    """Folds ``tile(kind, other_block, carry)`` over the tiles listed for ``block``."""
    order = tiles.order[block]
    start = 0
    for n, kind in enumerate(kinds):
        end = tiles.ends[block, n]
        carry = jax.lax.fori_loop(start, end, lambda m, c, kind=kind: tile(kind, order[m], c), carry)
        start = end
    return carry


def _slice(x, block, size: int, axis: int):
    return jax.lax.dynamic_slice_in_dim(x, block * size, size, axis)


def _add_slice(x, update, block, size: int, axis: int):
    return jax.lax.dynamic_update_slice_in_dim(x, _slice(x, block, size, axis) + update, block * size, axis)


def _tile(x: Call, blocks: Blocks, i, j) -> Call:
    """The call of the tile of query block ``i`` and key block ``j``."""
    part = narrowed(x, queries=(i * blocks.q, blocks.q), keys=(j * blocks.k, blocks.k))
    q_positions, kv_positions = (with_head_axis(as_array(p)) for p in (part.q_positions, part.kv_positions))
    return dataclasses.replace(part, q_positions=q_positions, kv_positions=kv_positions)


def _decayed(tile: Call) -> tuple[Call, tuple]:
    """The tile with the decay multiplied into its queries and keys, and the factors."""
    if tile.decay is None:
        return tile, (None, None)
    factors = decay_factors(tile.decay, tile.q_positions, tile.kv_positions)
    q, k = (decayed(*pair) for pair in zip((tile.q, tile.k), factors, strict=True))
    return dataclasses.replace(tile, q=q, k=k), factors


def _pair_masks(tile: Call, kind: Kind) -> list:
    """For each pair of features of the kind, the mask of the scores that the pair computes; None for all scores."""
    if len(kind.pairs) == 1:
        return [None]
    remap = [
        group_mask(branch.mask.allowed(tile.q_positions, tile.kv_positions), *tile.q.shape[1:3])
        for branch in tile.remap
    ]
    return [~reduce(jnp.logical_or, remap), *remap]


def _tile_scores(tile: Call, kind: Kind, masks: list):
    """Scores of a tile, each from the pair of features that computes it."""
    of_pairs = [scores(*tile.pairs[n]) for n in kind.pairs]
    return reduce(
        lambda so_far, more: jnp.where(more[1], more[0], so_far), zip(of_pairs[1:], masks[1:], strict=True), of_pairs[0]
    )


def _finish(tile: Call, kind: Kind, logits):
    """The logits with the mask, if the tile needs it."""
    if kind.masked and tile.mask is not None:
        allowed = group_mask(tile.mask.allowed(tile.q_positions, tile.kv_positions), *tile.q.shape[1:3])
        logits = jnp.where(allowed, logits, -jnp.inf)
    return logits


def _tile_logits(tile: Call, kind: Kind):
    """Logits of a tile, in the order of every backend: bias, soft cap, mask."""
    tile_scores = _tile_scores(tile, kind, _pair_masks(tile, kind))
    biased = with_bias(tile.bias, tile_scores, tile.q_positions, tile.kv_positions)
    return _finish(tile, kind, capped(tile.softcap, biased))


def _forward(blocks: Blocks, x: Call) -> Rows:
    kinds, (grid,) = plan_tiles(x, blocks, together=True)
    tiles = _visits(grid, kinds)
    *batch, length, _ = x.q.shape
    value_size = x.v.shape[-1]

    def tile(i, kind, j, softmax: OnlineSoftmax) -> OnlineSoftmax:
        part, _ = _decayed(_tile(x, blocks, i, j))
        return softmax.added(_tile_logits(part, kind), part.v)

    def row(i, results):
        start = OnlineSoftmax.empty((*batch, blocks.q), value_size, x.q)
        rows = _visit(tiles, kinds, i, partial(tile, i), start).finished(x.v.dtype)
        store = partial(jax.lax.dynamic_update_slice_in_dim, start_index=i * blocks.q, axis=3)
        return Rows(*map(store, results, rows))

    of_queries = [full_varying_like((*batch, length), statistics_dtype(x.q), x.q) for _ in Rows._fields[1:]]
    results = Rows(full_varying_like((*batch, length, value_size), x.v.dtype, x.q), *of_queries)
    return jax.lax.fori_loop(0, length // blocks.q, row, results)


class _TileGradients(NamedTuple):
    """Gradients of the queries and keys of every pair of features, of the values, and of ``_learned``."""

    q: list
    k: list
    v: jax.Array
    learned: list


def _backward_tile(
    x: Call, blocks: Blocks, per_query: PerQuery, j, kind: Kind, i, so_far: _TileGradients
) -> _TileGradients:
    """The gradients ``so_far`` plus the contribution of the tile of query block ``i`` and key block ``j``."""
    dtype = statistics_dtype(x.q)
    part, factors = _decayed(_tile(x, blocks, i, j))
    rows = PerQuery(*(_slice(a, i, blocks.q, 3) for a in per_query))
    masks = _pair_masks(part, kind)
    found_logits, transpose = _transpose(part, _tile_scores(part, kind, masks))
    logits = _finish(part, kind, found_logits)
    weights = jnp.exp(logits - rows.lse[..., None])
    d_logits = weights * (scores(rows.d_out, part.v) - rows.correction[..., None])
    d_scores, d_learned = transpose(d_logits)
    d_q, d_k = list(so_far.q), list(so_far.k)
    for n, mask in zip(kind.pairs, masks, strict=True):
        q, k = part.pairs[n]
        d = d_scores if mask is None else jnp.where(mask, d_scores, 0)
        more_q, more_k = mix(d, k, dtype), mix_transposed(q, d, dtype)
        if x.decay is not None:
            more_q = decayed(more_q, factors[0])
            more_k = decayed(more_k, jnp.swapaxes(factors[1], -1, -2))
        d_q[n], d_k[n] = _add_slice(d_q[n], more_q, i, blocks.q, 3), d_k[n] + more_k
    d_v = so_far.v + mix_transposed(rows.d_out, weights, dtype)
    return _TileGradients(d_q, d_k, d_v, _add_learned(x, blocks, i, j, so_far.learned, d_learned))


def _gradients(blocks: Blocks, x: Call, per_query: PerQuery) -> Call:
    dtype = statistics_dtype(x.q)
    kinds, (grid,) = plan_tiles(x, blocks, together=True)
    tiles = _visits(grid.T, kinds)

    def column(j, whole: _TileGradients) -> _TileGradients:
        blank = [full_varying_like((*k.shape[:2], k.shape[-1], blocks.k), dtype, x.q) for _, k in x.pairs]
        start = whole._replace(k=blank, v=full_varying_like((*x.v.shape[:2], x.v.shape[-1], blocks.k), dtype, x.q))
        part = _visit(tiles, kinds, j, partial(_backward_tile, x, blocks, per_query, j), start)

        def store(whole, part):
            part = jnp.swapaxes(part, -1, -2).astype(whole.dtype)
            return jax.lax.dynamic_update_slice_in_dim(whole, part, j * blocks.k, axis=2)

        return part._replace(k=[store(*pair) for pair in zip(whole.k, part.k, strict=True)], v=store(whole.v, part.v))

    start = _TileGradients(
        [full_varying_like(q.shape, dtype, x.q) for q, _ in x.pairs],
        [full_varying_like(k.shape, k.dtype, x.q) for _, k in x.pairs],
        full_varying_like(x.v.shape, x.v.dtype, x.q),
        [
            full_varying_like(leaf.shape, at_least_float32(leaf.dtype, dtype), x.q)
            for leaf in _inexact_leaves(_learned(x))[0]
        ],
    )
    return _cotangent(x, jax.lax.fori_loop(0, x.k.shape[2] // blocks.k, column, start))


def _inexact_leaves(tree):
    """The differentiable leaves of a tree, and a function that rebuilds the tree with other leaves in their place."""
    leaves, structure = jax.tree.flatten(tree)
    which = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

    def rebuild(inexact):
        inexact = iter(inexact)
        return structure.unflatten([next(inexact) if w else leaf for w, leaf in zip(which, leaves, strict=True)])

    return [leaf for w, leaf in zip(which, leaves, strict=True) if w], rebuild


def _learned(x: Call) -> tuple:
    """The inputs of the logits, besides scores, that may be learned: the bias, and the soft cap if it is an array."""
    return x.bias, x.softcap if is_array_number(x.softcap) else None


def _transpose(part: Call, tile_scores):
    """Logits of a tile with bias and soft cap, and the function from their gradients to those of the inputs.

    The inputs are the scores and ``_learned``.
    """
    if part.bias is None and part.softcap is None:
        return tile_scores, lambda d_logits: (d_logits, [])
    leaves, rebuild = _inexact_leaves(_learned(part))

    def logits(tile_scores, leaves):
        bias, softcap = rebuild(leaves)
        biased = with_bias(bias, tile_scores, part.q_positions, part.kv_positions)
        return capped(part.softcap if softcap is None else softcap, biased)

    return jax.vjp(logits, tile_scores, leaves)


def _add_learned(x: Call, blocks: Blocks, i, j, so_far: list, more: list) -> list:
    """The gradients of ``_learned`` plus those of a tile, which are added at the indices of the tile."""
    first = {"queries": i * blocks.q, "keys": j * blocks.k}
    learned = _learned(x)
    named = zip(jax.tree.leaves(learned), names_of(learned), strict=True)
    names = [axes for leaf, axes in named if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return [
        _added(*pair, [first.get(name, 0) for name in axes]) for *pair, axes in zip(so_far, more, names, strict=True)
    ]


def _added(whole, part, first: list):
    part = part.astype(whole.dtype)
    if part.shape == whole.shape:
        return whole + part
    first = [start if part.shape[n] < whole.shape[n] else 0 for n, start in enumerate(first)]
    return jax.lax.dynamic_update_slice(whole, jax.lax.dynamic_slice(whole, first, part.shape) + part, first)


def _cotangent(x: Call, gradients: _TileGradients) -> Call:
    """The cotangent of a call, with ``float0`` zeros for leaves that are not differentiable."""
    zeros = jax.tree.map(no_gradient, x)
    leaves, rebuild = _inexact_leaves(_learned(zeros))
    bias, softcap = rebuild([a.astype(leaf.dtype) for a, leaf in zip(gradients.learned, leaves, strict=True)])
    d_q = [d.astype(q.dtype) for d, (q, _) in zip(gradients.q, x.pairs, strict=True)]
    remap = tuple(
        dataclasses.replace(branch, q=q, k=k)
        for branch, q, k in zip(zeros.remap, d_q[1:], gradients.k[1:], strict=True)
    )
    softcap = zeros.softcap if softcap is None else softcap
    return dataclasses.replace(
        zeros, q=d_q[0], k=gradients.k[0], v=gradients.v, bias=bias, remap=remap, softcap=softcap
    )
