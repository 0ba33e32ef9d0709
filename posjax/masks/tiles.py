"""A mask as a whole array, and the kind of each of its tiles."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int8

from posjax._checks import check
from posjax._slots import with_head_axis
from posjax.masks.base import Mask
from posjax.masks.bounds import block_bounds
from posjax.positions import Positions, as_array

EMPTY, MIXED, FULL = 0, 1, 2


def materialise(mask: Mask, q_positions: Positions, kv_positions: Positions) -> Bool[Array, "*b q k"]:
    """The whole mask as an array, ``[q, k]`` or ``[batch, heads or 1, q, k]``: quadratic, for tests and plots."""
    return mask.allowed(with_head_axis(as_array(q_positions)), with_head_axis(as_array(kv_positions)))


def tile_kinds(
    mask: Mask, q_positions: Positions, kv_positions: Positions, block_q: int, block_k: int
) -> Int8[Array, "*b nq nk"]:
    """``EMPTY``, ``MIXED`` or ``FULL`` for every tile of ``block_q`` queries and ``block_k`` keys.

    A mixed tile may in fact be empty or full, because only the bounds of blocks are used; the other kinds are certain.

    Raises:
        ValueError: if the lengths are not multiples of the blocks.
    """
    for name, positions, block in (("q_positions", q_positions, block_q), ("kv_positions", kv_positions, block_k)):
        length = as_array(positions).shape[-1]
        check(length % block == 0, f"{name} has length {length}, not a multiple of its block {block}")
    some, every = mask.tiles(block_bounds(q_positions, block_q), block_bounds(kv_positions, block_k))
    return jnp.where(every, FULL, jnp.where(some, MIXED, EMPTY)).astype(jnp.int8)
