"""Attention under a contextual bias (CoPE): dense, and tile by tile in linear memory.

Position ``p_ij`` sums the gates of keys ``j`` to ``i``, so the tiles of a block of queries are visited from the last
key to the first, and the carry is the count and the online softmax. Keys must be in the order of their positions (no
ring buffer).

It costs more than plain attention. No tile is skipped, even if the mask hides it, and the tiles are strictly
sequential. Every query needs a product with the table, as wide as ``max_position`` keys. Every pair needs a sigmoid, a
cumulative sum and two reads from the products with the table. The backward pass is autodiff with two levels of
checkpoints, one per block of queries and one per tile, so every tile's logits are computed three times.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from posjax._axes import narrowed
from posjax._checks import check, check_count
from posjax._lowered import full_varying_like
from posjax._shapes import in_blocks, joined
from posjax._slots import with_head_axis
from posjax.attention.call import Call
from posjax.attention.logits import capped, group_mask, scores, statistics_dtype
from posjax.attention.online import OnlineSoftmax
from posjax.attention.rows import Rows
from posjax.attention.tiles import pad
from posjax.bias import ContextualBias
from posjax.positions import as_array

_BLOCK = 256


class _Carry(NamedTuple):
    """The carry over the tiles of a block of queries."""

    count: Float[Array, "batch kv_heads group q"]
    softmax: OnlineSoftmax


class _Keys(NamedTuple):
    """The keys and values of a tile, and which of its pairs are allowed."""

    k: Float[Array, "batch kv_heads k size"]
    v: Float[Array, "batch kv_heads k value_size"]
    allowed: Bool[Array, "*#b q k"]


def dense_contextual(x: Call) -> Rows:
    """``softmax(softcap(z + interpolate(q . table, p)) where allowed) v`` with the whole matrix of logits.

    Gates read the scaled scores ``z``; the product with the table has the queries before the scale.

    Args:
        x: the call; its bias is a ``ContextualBias``.

    Returns:
        ``Rows``, as from ``posjax.attention.dense.dense``. For a query that may see no key the output is
        exactly 0, with zero gradients, and the log-sum-exp is minus infinity.

    Raises:
        ValueError: for another bias, a table of another head size, or several pairs of features.
    """
    _check(x)
    q, x = x.q, x.scaled
    blocks = x.q.shape[3], x.k.shape[2]
    keys = _Keys(x.k, x.v, _allowed(x, 0, 0, blocks))
    return _tile(x, x.q, x.bias.levels(q), _start(x.q, x.v), keys).softmax.finished(x.v.dtype)


def blockwise_contextual(x: Call, block: int = _BLOCK) -> Rows:
    """The same function as ``dense_contextual`` in memory linear in the length, forward and backward.

    Args:
        x: the call.
        block: tokens of a tile along each side.

    Raises:
        ValueError: as ``dense_contextual``, and for an empty block.
    """
    _check(x)
    check_count("block", block)
    queries = x.q.shape[3]
    blocks = (min(block, x.q.shape[3]), min(block, x.k.shape[2]))
    x = pad(x, *blocks)
    q, x = x.q, x.scaled
    k, v = in_blocks(x.k, 2, blocks[1]), in_blocks(x.v, 2, blocks[1])

    def rows(part):
        i, scaled, raw = part
        levels = x.bias.levels(raw)

        def step(carry, part):
            j, k_tile, v_tile = part
            tile = _Keys(k_tile, v_tile, _allowed(x, i, j, blocks))
            return _tile(x, scaled, levels, carry, tile), None

        step = jax.checkpoint(step, prevent_cse=False)
        carry, _ = jax.lax.scan(step, _start(scaled, x.v), (jnp.arange(k.shape[0]), k, v), reverse=True)
        return carry.softmax.finished(x.v.dtype)

    parts = in_blocks(x.q, 3, blocks[0]), in_blocks(q, 3, blocks[0])
    results = jax.lax.map(jax.checkpoint(rows, prevent_cse=False), (jnp.arange(parts[0].shape[0]), *parts))
    return Rows(*(joined(array, 3)[:, :, :, :queries] for array in results))


def _check(x: Call) -> None:
    check(isinstance(x.bias, ContextualBias), f"bias must be a ContextualBias, found {type(x.bias).__name__}")
    shape = x.bias.table.shape
    size = x.q.shape[-1]
    check(shape[1] == size, f"table must have the head size of q, {size}, found shape {shape}")
    single = not x.remap and x.decay is None
    check(single, "a contextual bias counts along one score: it supports no remapped branches and no decaying features")


def _allowed(x: Call, i, j, blocks: tuple[int, int]) -> Bool[Array, "*#b q k"]:
    """Allowed pairs of query block ``i`` and key block ``j``."""
    if x.mask is None:
        return jnp.ones(blocks, bool)
    part = narrowed(x, queries=(i * blocks[0], blocks[0]), keys=(j * blocks[1], blocks[1]))
    positions = (with_head_axis(as_array(p)) for p in (part.q_positions, part.kv_positions))
    return group_mask(part.mask.allowed(*positions), *x.q.shape[1:3])


def _start(q: Array, v: Array) -> _Carry:
    shape = q.shape[:-1]
    return _Carry(full_varying_like(shape, statistics_dtype(q), q), OnlineSoftmax.empty(shape, v.shape[-1], q))


def _tile(x: Call, q: Array, levels: Array, carry: _Carry, keys: _Keys) -> _Carry:
    """The carry after a tile: the count at its first key, and one step of the online softmax."""
    logits, count = x.bias.add(scores(q, keys.k), keys.allowed, levels, carry.count)
    logits = jnp.where(keys.allowed, capped(x.softcap, logits), -jnp.inf)
    return _Carry(count, carry.softmax.added(logits, keys.v))
