"""The kind of every tile of a mask, from the bounds of its blocks."""

import jax.numpy as jnp

from posjax.masks import block_bounds

EMPTY, MIXED, FULL = 0, 1, 2


def tile_kinds(mask, q_positions, kv_positions, block_q: int, block_k: int):
    """``EMPTY``, ``MIXED`` or ``FULL`` for every tile of ``block_q`` queries and ``block_k`` keys.

    A mixed tile may in fact be empty or full, because only the bounds of blocks are used; the other kinds are certain.
    """
    some, every = mask.tiles(block_bounds(q_positions, block_q), block_bounds(kv_positions, block_k))
    return jnp.where(every, FULL, jnp.where(some, MIXED, EMPTY)).astype(jnp.int8)
