"""Attention in linear memory on any backend: tiles of logits, an online softmax, and a backward that recomputes.

The forward pass keeps, for each block of queries, a running maximum ``m``, a running sum ``l`` and an accumulator
(Milakov and Gimelshein, arXiv 1805.02867; Rabe and Staats, arXiv 2112.05682); it saves the output and the log-sum-exp
``L`` alone. The backward pass recomputes each tile's weights ``P = exp(S - L)`` and, with ``D = rowsum(dO * O) - dL``,

    dV = P^T dO,   dS = P * (dO V^T - D),   dQ = dS K,   dK = dS^T Q,   d(bias) = the bias' own transpose of dS

(Dao et al., arXiv 2205.14135, appendix B; ``dL`` is the gradient that reaches the log-sum-exp itself). Tiles that the
mask empties are never visited, tiles that it leaves whole are never masked: for every block the tiles are listed
beforehand, the full ones first.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posjax._slots import with_head_axis
from posjax.attention.operands import (
    Operands,
    gather,
    group_bias,
    group_mask,
    mix,
    scores,
    statistics_dtype,
)
from posjax.masks import EMPTY, FULL, MIXED, Extent, Mask, extent
from posjax.positions import Range, as_array

_TILE_ELEMENTS = 2**21
_LARGEST_BLOCK, _SMALLEST_BLOCK = 512, 64
_LARGEST_POSITION = 2**31 - 1


class Blocks(NamedTuple):
    """Tokens per tile along the queries and along the keys."""

    q: int
    k: int


def blockwise(x: Operands, blocks: Blocks | None = None) -> tuple:
    """The same function as ``dense`` in memory linear in the length, forward and backward.

    Where the mask or the positions differ between the rows of a batch, the rows are taken one after the other, so that
    each skips its own empty tiles.

    Args:
        x: the operands.
        blocks: tile sizes; chosen from the shapes when left out.
    """
    batched = any(part is not None and part.batched for part in (x.mask, x.bias)) or any(
        not isinstance(p, Range) and p.ndim == 2 for p in (x.q_positions, x.kv_positions)
    )
    rows = x.q.shape[0]
    if not batched or rows == 1:
        return _one_plan(x, blocks)
    out, lse = jax.lax.map(lambda index: _one_plan(_row(x, index), blocks), jnp.arange(rows))
    return out[:, 0], lse[:, 0]


def _row(x: Operands, index) -> Operands:
    pick = partial(jax.lax.dynamic_slice_in_dim, start_index=index, slice_size=1, axis=0)
    narrow = {name: pick(getattr(x, name)) for name in ("q", "k", "v")}
    for name in ("bias", "mask"):
        part = getattr(x, name)
        narrow[name] = part if part is None else part.row(index)
    for name in ("q_positions", "kv_positions"):
        part = getattr(x, name)
        narrow[name] = pick(part) if not isinstance(part, Range) and part.ndim == 2 else part
    return dataclasses.replace(x, **narrow)


def _one_plan(x: Operands, blocks: Blocks | None) -> tuple:
    queries = x.q.shape[3]
    blocks = blocks or _choose_blocks(x)
    out, lse = _attend(blocks, _pad(x, blocks))
    return out[..., :queries, :], lse[..., :queries]


def _choose_blocks(x: Operands) -> Blocks:
    """Square tiles, of ``_TILE_ELEMENTS`` logits over all rows and heads at most, so that a tile stays in cache."""
    batch, kv_heads, group, queries, _ = x.q.shape
    block = _LARGEST_BLOCK
    while block > _SMALLEST_BLOCK and batch * kv_heads * group * block * block > _TILE_ELEMENTS:
        block //= 2
    return Blocks(min(block, queries), min(block, x.k.shape[2]))


def _pad(x: Operands, blocks: Blocks) -> Operands:
    """Lengthens everything to whole tiles; keys that were added are masked out, queries are cut off again later."""
    keys = x.k.shape[2]
    more_q, more_k = -x.q.shape[3] % blocks.q, -keys % blocks.k
    if not more_q and not more_k:
        return x
    total_q, total_k = x.q.shape[3] + more_q, keys + more_k
    mask = x.mask if x.mask is None else x.mask.pad(total_q, total_k)
    if more_k:
        present = _Present(jnp.arange(total_k) < keys)
        mask = present if mask is None else mask & present
    return Operands(
        q=_lengthen(x.q, more_q, axis=3),
        k=_lengthen(x.k, more_k, axis=2),
        v=_lengthen(x.v, more_k, axis=2),
        bias=x.bias if x.bias is None else x.bias.pad(total_q, total_k),
        mask=mask,
        q_positions=_lengthen_positions(x.q_positions, more_q),
        kv_positions=_lengthen_positions(x.kv_positions, more_k),
        softcap=x.softcap,
    )


def _lengthen(x, more: int, axis: int, mode: str = "constant"):
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, more)
    return jnp.pad(x, widths, mode=mode)


def _lengthen_positions(positions, more: int):
    if isinstance(positions, Range):
        if not positions.is_static or positions.start + positions.length + more - 1 <= _LARGEST_POSITION:
            return Range(positions.start, positions.length + more)
        positions = as_array(positions)
    return _lengthen(positions, more, axis=positions.ndim - 1, mode="edge")


@partial(jax.tree_util.register_dataclass, data_fields=["present"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class _Present(Mask):
    """Hides the keys that padding to whole tiles has added; ``present`` is ``[keys]``."""

    present: jax.Array

    def allowed(self, q_positions, kv_positions):
        return jnp.broadcast_to(self.present, (q_positions.shape[-1], self.present.shape[0]))

    def tiles(self, q: Extent, k: Extent):
        by_block = self.present.reshape(-1, k.size)
        return by_block.any(-1)[None, :], by_block.all(-1)[None, :]

    def keys(self, start, size):
        return _Present(jax.lax.dynamic_slice_in_dim(self.present, start, size))


class Visits(NamedTuple):
    """For every block along one axis, the tiles to visit: first ``full`` whole ones, up to ``some`` in all."""

    order: jax.Array
    full: jax.Array
    some: jax.Array


def _kinds(x: Operands, blocks: Blocks):
    """EMPTY, MIXED or FULL for every tile ``[query blocks, key blocks]``, in NumPy where it is known when tracing."""
    q, k = extent(x.q_positions, blocks.q), extent(x.kv_positions, blocks.k)
    grid = (q.low.shape[-1], k.low.shape[-1])
    if x.mask is None:
        return np.full(grid, FULL, np.int32)
    some, every = x.mask.tiles(q, k)
    xp = np if isinstance(some, np.ndarray) and isinstance(every, np.ndarray) else jnp
    some, every = (xp.broadcast_to(a, (*a.shape[:-2], *grid)).reshape(-1, *grid) for a in (some, every))
    return xp.where(every.all(0), FULL, xp.where(some.any(0), MIXED, EMPTY)).astype(np.int32)


def _visits(kinds) -> Visits:
    xp = np if isinstance(kinds, np.ndarray) else jnp
    order = xp.argsort(-kinds, axis=-1).astype(np.int32)
    counts = (kinds == FULL).sum(-1), (kinds != EMPTY).sum(-1)
    return Visits(*(jnp.asarray(part, jnp.int32) for part in (order, *counts)))


def _visit(visits: Visits, block, tile, carry):
    """Folds ``tile(masked, other_block, carry)`` over the tiles listed for ``block``."""
    order, full, some = visits.order[block], visits.full[block], visits.some[block]
    carry = jax.lax.fori_loop(0, full, lambda n, c: tile(False, order[n], c), carry)
    return jax.lax.fori_loop(full, some, lambda n, c: tile(True, order[n], c), carry)


def _zeros(shape, dtype, like, fill=0.0):
    """A constant that varies over the same mesh axes as ``like``, as a loop's carry must inside ``shard_map``."""
    axes = tuple(jax.typeof(like).manual_axis_type.varying)
    constant = jnp.full(shape, fill, dtype)
    return jax.lax.pcast(constant, axes, to="varying") if axes else constant


def _slice(x, block, size: int, axis: int):
    return jax.lax.dynamic_slice_in_dim(x, block * size, size, axis)


def _add_slice(x, update, block, size: int, axis: int):
    return jax.lax.dynamic_update_slice_in_dim(x, _slice(x, block, size, axis) + update, block * size, axis)


def _tile_positions(positions, block, size: int):
    if isinstance(positions, Range):
        return positions.start + block * size + jnp.arange(size, dtype=jnp.int32)
    return with_head_axis(_slice(positions, block, size, positions.ndim - 1))


def _tile(x: Operands, blocks: Blocks, i, j) -> Operands:
    """The operands of the tile of query block ``i`` and key block ``j``."""

    def narrow(part):
        return part if part is None else part.queries(i * blocks.q, blocks.q).keys(j * blocks.k, blocks.k)

    return Operands(
        q=_slice(x.q, i, blocks.q, 3),
        k=_slice(x.k, j, blocks.k, 2),
        v=_slice(x.v, j, blocks.k, 2),
        bias=narrow(x.bias),
        mask=narrow(x.mask),
        q_positions=_tile_positions(x.q_positions, i, blocks.q),
        kv_positions=_tile_positions(x.kv_positions, j, blocks.k),
        softcap=x.softcap,
    )


def _tile_bias(tile: Operands):
    return group_bias(tile.bias.values(tile.q_positions, tile.kv_positions), *tile.q.shape[1:3])


def _tile_logits(tile: Operands, masked: bool):
    """Logits of a tile after bias, soft cap and, where the tile is mixed, the mask."""
    logits = scores(tile.q, tile.k)
    if tile.bias is not None:
        logits = logits + _tile_bias(tile).astype(logits.dtype)
    if tile.softcap is not None:
        logits = tile.softcap * jnp.tanh(logits / tile.softcap)
    if masked and tile.mask is not None:
        allowed = group_mask(tile.mask.allowed(tile.q_positions, tile.kv_positions), tile.k.shape[1])
        logits = jnp.where(allowed, logits, -jnp.inf)
    return logits


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(blocks: Blocks, x: Operands):
    return _forward(blocks, x)


def _forward(blocks: Blocks, x: Operands):
    dtype = statistics_dtype(x.q)
    visits = _visits(_kinds(x, blocks))
    batch = x.q.shape[:3]
    # Below every real logit but finite, so that a tile without an allowed key needs no special case.
    lowest = float(jnp.finfo(dtype).min) / 4

    def tile(i, masked, j, carry):
        part = _tile(x, blocks, i, j)
        total, highest, out = carry
        logits = _tile_logits(part, masked)
        new_highest = jnp.maximum(highest, logits.max(-1))
        weights = jnp.exp(logits - new_highest[..., None])
        shrink = jnp.exp(highest - new_highest)
        out = out * shrink[..., None] + mix(weights, part.v, dtype)
        return total * shrink + weights.sum(-1), new_highest, out

    def row(i, results):
        start = (
            _zeros((*batch, blocks.q), dtype, x.q),
            _zeros((*batch, blocks.q), dtype, x.q, lowest),
            _zeros((*batch, blocks.q, x.v.shape[-1]), dtype, x.q),
        )
        total, highest, out = _visit(visits, i, partial(tile, i), start)
        seen = total > 0
        total = jnp.where(seen, total, 1)
        out = (out / total[..., None]).astype(x.v.dtype)
        lse = jnp.where(seen, highest + jnp.log(total), -jnp.inf)
        store = partial(jax.lax.dynamic_update_slice_in_dim, start_index=i * blocks.q, axis=3)
        return store(results[0], out), store(results[1], lse)

    length = x.q.shape[3]
    results = (
        _zeros((*batch, length, x.v.shape[-1]), x.v.dtype, x.q),
        _zeros((*batch, length), dtype, x.q),
    )
    return jax.lax.fori_loop(0, length // blocks.q, row, results)


def _attend_forward(blocks: Blocks, x: Operands):
    out, lse = _forward(blocks, x)
    return (out, lse), (x, out, lse)


class _Saved(NamedTuple):
    """What the backward pass reads of each row: its gradient, its log-sum-exp, and ``D = rowsum(dO * O) - dL``."""

    d_out: jax.Array
    lse: jax.Array
    correction: jax.Array


def _backward_tile(x: Operands, blocks: Blocks, saved: _Saved, j, masked: bool, i, carry):
    """Adds what the tile of query block ``i`` and key block ``j`` gives to every gradient."""
    d_k, d_v, d_q, d_bias = carry
    dtype = statistics_dtype(x.q)
    part = _tile(x, blocks, i, j)
    rows = _Saved(*(_slice(a, i, blocks.q, 3) for a in saved))
    logits = _tile_logits(part, masked)
    weights = jnp.exp(logits - rows.lse[..., None])
    d_logits = weights * (scores(rows.d_out, part.v) - rows.correction[..., None])
    if x.softcap is not None:
        capped = jnp.where(jnp.isneginf(logits), 0, logits)
        d_logits = d_logits * (1 - jnp.square(capped / x.softcap))
    d_v += gather(rows.d_out, weights, dtype)
    d_k += gather(part.q, d_logits, dtype)
    d_q = _add_slice(d_q, mix(d_logits, part.k, dtype), i, blocks.q, 3)
    d_bias = [a + b for a, b in zip(d_bias, _bias_gradient(x, blocks, i, j, d_logits), strict=True)]
    return d_k, d_v, d_q, d_bias


def _attend_backward(blocks: Blocks, residuals, cotangents):
    x, out, lse = residuals
    d_out, d_lse = cotangents
    dtype = statistics_dtype(x.q)
    visits = _visits(_kinds(x, blocks).T)
    # A row that sees nothing is constant. Any finite log-sum-exp keeps its weights at exp(-inf) = 0, and what reaches
    # its own log-sum-exp, perhaps NaN, must not be multiplied by them.
    blind = jnp.isneginf(lse)
    lse, d_lse = jnp.where(blind, 0, lse), jnp.where(blind, 0, d_lse)
    correction = (d_out.astype(dtype) * out.astype(dtype)).sum(-1) - d_lse
    saved = _Saved(d_out, lse, correction)

    def column(j, carry):
        d_k, d_v, d_q, d_bias = carry
        start = (
            _zeros((*x.k.shape[:2], x.k.shape[-1], blocks.k), dtype, x.q),
            _zeros((*x.v.shape[:2], x.v.shape[-1], blocks.k), dtype, x.q),
            d_q,
            d_bias,
        )
        d_k_j, d_v_j, d_q, d_bias = _visit(visits, j, partial(_backward_tile, x, blocks, saved, j), start)

        def store(whole, part):
            part = jnp.swapaxes(part, -1, -2).astype(whole.dtype)
            return jax.lax.dynamic_update_slice_in_dim(whole, part, j * blocks.k, axis=2)

        return store(d_k, d_k_j), store(d_v, d_v_j), d_q, d_bias

    start = (
        _zeros(x.k.shape, x.k.dtype, x.q),
        _zeros(x.v.shape, x.v.dtype, x.q),
        _zeros(x.q.shape, dtype, x.q),
        [_zeros(leaf.shape, jnp.promote_types(leaf.dtype, dtype), x.q) for leaf in _inexact_leaves(x.bias)[0]],
    )
    d_k, d_v, d_q, d_bias = jax.lax.fori_loop(0, x.k.shape[2] // blocks.k, column, start)
    return (_cotangent(x, d_q.astype(x.q.dtype), d_k, d_v, d_bias),)


def _inexact_leaves(tree):
    """The differentiable leaves of a tree, and the function that puts others in their place."""
    leaves, structure = jax.tree.flatten(tree)
    which = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

    def rebuild(inexact):
        inexact = iter(inexact)
        return structure.unflatten([next(inexact) if w else leaf for w, leaf in zip(which, leaves, strict=True)])

    return [leaf for w, leaf in zip(which, leaves, strict=True) if w], rebuild


def _bias_gradient(x: Operands, blocks: Blocks, i, j, d_logits) -> list:
    """Transpose of the bias' tile: what a gradient of the logits means for the parameters of the bias."""
    if x.bias is None:
        return []
    leaves, rebuild = _inexact_leaves(x.bias)

    def values(leaves):
        return _tile_bias(_tile(dataclasses.replace(x, bias=rebuild(leaves)), blocks, i, j))

    tile, transpose = jax.vjp(values, leaves)
    extra = d_logits.ndim - tile.ndim
    gradient = d_logits.sum(tuple(range(extra))) if extra else d_logits
    return transpose(gradient.astype(tile.dtype))[0]


def _cotangent(x: Operands, d_q, d_k, d_v, d_bias) -> Operands:
    """Gradients in the form of the operands, with the ``float0`` zeros of everything that is not differentiable."""
    zeros = jax.tree.map(_no_gradient, x)
    leaves, rebuild = _inexact_leaves(zeros.bias)
    bias = rebuild([a.astype(leaf.dtype) for a, leaf in zip(d_bias, leaves, strict=True)])
    return dataclasses.replace(zeros, q=d_q, k=d_k, v=d_v, bias=bias)


def _no_gradient(leaf):
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.zeros(leaf.shape, leaf.dtype)
    return np.zeros(leaf.shape, jax.dtypes.float0)


_attend.defvjp(_attend_forward, _attend_backward)
