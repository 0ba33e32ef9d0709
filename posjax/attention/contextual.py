"""Attention under a contextual bias (CoPE, PaTH): dense, and tile by tile in linear memory.

Such a bias reads the queries and keys themselves, from the query backwards: position ``p_ij`` of CoPE sums the gates of
keys ``j`` to ``i``, and PaTH multiplies the query by a matrix for each of these keys. So the tiles of a block of
queries are visited from the last key to the first, and the carry is that of the bias and the online softmax. Keys must
be in the order of their positions (no ring buffer).

It costs more than plain attention. No tile is skipped, even if the mask hides it, and the tiles are strictly
sequential. For CoPE, every query needs a product with the table, as wide as ``max_position`` keys, and every pair a
sigmoid, a cumulative sum and two reads from the products with the table. For PaTH, every tile of keys needs the inverse
of a triangular matrix, and every pair three more products. The backward pass is autodiff with two levels of
checkpoints, one per block of queries and one per tile, so every tile's logits are computed three times.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from posjax._axes import narrowed
from posjax._checks import check, check_count
from posjax._shapes import in_blocks, joined
from posjax._slots import with_head_axis
from posjax.attention.call import Call
from posjax.attention.logits import capped, group_mask, scores
from posjax.attention.online import OnlineSoftmax
from posjax.attention.rows import Rows
from posjax.attention.tiles import pad
from posjax.bias import Contextual
from posjax.positions import as_array

_BLOCK = 256


class _Carry(NamedTuple):
    """The carry over the tiles of a block of queries."""

    bias: Any
    softmax: OnlineSoftmax


class _Keys(NamedTuple):
    """What the bias needs of the keys of a tile, their values, and which of its pairs are allowed."""

    tile: Any
    v: Float[Array, "batch kv_heads k value_size"]
    allowed: Bool[Array, "*#b q k"]


def dense_contextual(x: Call) -> Rows:
    """``softmax(softcap(z + b) where allowed) v`` with the whole matrix of logits, in one tile.

    Args:
        x: the call; its bias is a ``Contextual`` one, which gets the scaled queries and those before the scale.

    Returns:
        ``Rows``, as from ``posjax.attention.dense.dense``. For a query that may see no key the output is
        exactly 0, with zero gradients, and the log-sum-exp is minus infinity.

    Raises:
        ValueError: for another bias, one for another head size, or several pairs of features.
    """
    _check(x)
    q, x = x.q, x.scaled
    blocks = x.q.shape[3], x.k.shape[2]
    tile = jax.tree.map(lambda each: each[0], x.bias.tiles(x.k, blocks[1]))
    fixed, carry = _start(x, q, x.q)
    return _tile(x, fixed, carry, _Keys(tile, x.v, _allowed(x, 0, 0, blocks))).softmax.finished(x.v.dtype)


def blockwise_contextual(x: Call, block: int = _BLOCK) -> Rows:
    """The same function as ``dense_contextual`` in memory linear in the length, forward and backward.

    Args:
        x: the call.
        block: the most tokens of a tile along each side; a bias may want fewer keys.

    Raises:
        ValueError: as ``dense_contextual``, and for an empty block.
    """
    _check(x)
    check_count("block", block)
    queries = x.q.shape[3]
    blocks = (min(block, x.q.shape[3]), min(block, x.bias.most_keys, x.k.shape[2]))
    x = pad(x, *blocks)
    q, x = x.q, x.scaled
    tiles = jax.checkpoint(lambda bias, k: bias.tiles(k, blocks[1]))(x.bias, x.k)
    v = in_blocks(x.v, 2, blocks[1])

    def rows(part):
        i, scaled, raw = part
        fixed, carry = _start(x, raw, scaled)

        def step(carry, part):
            j, tile, v_tile = part
            return _tile(x, fixed, carry, _Keys(tile, v_tile, _allowed(x, i, j, blocks))), None

        step = jax.checkpoint(step, prevent_cse=False)
        carry, _ = jax.lax.scan(step, carry, (jnp.arange(v.shape[0]), tiles, v), reverse=True)
        return carry.softmax.finished(x.v.dtype)

    parts = in_blocks(x.q, 3, blocks[0]), in_blocks(q, 3, blocks[0])
    results = jax.lax.map(jax.checkpoint(rows, prevent_cse=False), (jnp.arange(parts[0].shape[0]), *parts))
    return Rows(*(joined(array, 3)[:, :, :, :queries] for array in results))


def _check(x: Call) -> None:
    check(isinstance(x.bias, Contextual), f"bias must be a Contextual one, found {type(x.bias).__name__}")
    x.bias.check_size(x.q.shape[-1])
    single = not x.remap and x.decay is None
    check(single, "a contextual bias counts along one score: it supports no remapped branches and no decaying features")


def _allowed(x: Call, i, j, blocks: tuple[int, int]) -> Bool[Array, "*#b q k"]:
    """Allowed pairs of query block ``i`` and key block ``j``."""
    if x.mask is None:
        return jnp.ones(blocks, bool)
    part = narrowed(x, queries=(i * blocks[0], blocks[0]), keys=(j * blocks[1], blocks[1]))
    positions = (with_head_axis(as_array(p)) for p in (part.q_positions, part.kv_positions))
    return group_mask(part.mask.allowed(*positions), *x.q.shape[1:3])


def _start(x: Call, raw: Array, scaled: Array) -> tuple[Any, _Carry]:
    """What stays for a block of queries, and the carry before its last tile."""
    fixed, carry = x.bias.start(raw, scaled)
    return fixed, _Carry(carry, OnlineSoftmax.empty(scaled.shape[:-1], x.v.shape[-1], scaled))


def _tile(x: Call, fixed: Any, carry: _Carry, keys: _Keys) -> _Carry:
    """The carry after a tile: that of the bias, and one step of the online softmax."""
    logits, of_bias = x.bias.step(fixed, carry.bias, keys.tile, keys.allowed, scores)
    logits = jnp.where(keys.allowed, capped(x.softcap, logits), -jnp.inf)
    return _Carry(of_bias, carry.softmax.added(logits, keys.v))
