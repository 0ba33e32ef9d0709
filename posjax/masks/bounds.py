"""The lowest and highest position of each block of tokens, from which a mask classifies tiles."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from posjax._numbers import LARGEST
from posjax._slots import with_head_axis
from posjax.positions import Positions, Range, as_array


class BlockBounds(NamedTuple):
    """Smallest and largest position of each block of ``size`` tokens; ``low`` and ``high`` are ``[..., blocks]``."""

    low: Array | np.ndarray
    high: Array | np.ndarray
    size: int


def block_bounds(positions: Positions, block: int) -> BlockBounds:
    """The bounds of every block of ``block`` tokens; the length must be a multiple of ``block``.

    For a ``Range`` with a static start they are computed in NumPy, so they are known when tracing.
    """
    if isinstance(positions, Range):
        low = positions.start + np.arange(0, positions.length, block, dtype=np.int32)
        high = low + (block - 1)
        # With a traced start, positions of padding may pass the largest int32 and wrap; the token itself is below it.
        return BlockBounds(low, high if positions.is_static else jnp.where(high < low, LARGEST, high), block)
    return BlockBounds(*block_range(with_head_axis(as_array(positions)), block), block)


def block_range(x, block: int):
    """Smallest and largest number of each block along the last axis, two arrays ``[..., n / block]``."""
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    return blocks.min(-1), blocks.max(-1)
