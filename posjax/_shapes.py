"""Arrays in other shapes: query heads grouped by key head, tokens in blocks, zeros for hidden tokens."""

import jax.numpy as jnp
from jaxtyping import Array, Bool


def grouped(x: Array, kv_heads: int) -> Array:
    """``[batch, tokens, heads, size]`` as ``[batch, kv heads, group, tokens, size]``: a group shares a key head."""
    batch, tokens, heads, size = x.shape
    return jnp.transpose(x.reshape(batch, tokens, kv_heads, heads // kv_heads, size), (0, 2, 3, 1, 4))


def ungrouped(x: Array) -> Array:
    """``[batch, kv heads, group, tokens, ...]`` as ``[batch, tokens, heads, ...]``: the inverse of ``grouped``."""
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])


def in_blocks(x: Array, axis: int, size: int) -> Array:
    """The blocks of ``size`` entries along an axis; the new first axis counts them."""
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)


def joined(x: Array, axis: int) -> Array:
    """The inverse of ``in_blocks``."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def zeros_at(hidden: Bool[Array, "batch tokens"], x: Array, rows: int = 0, tokens: int = 1) -> Array:
    """``x`` with zeros for the hidden tokens; ``rows`` is the batch axis of ``x`` and ``tokens`` its token axis."""
    others = [axis for axis in range(x.ndim) if axis not in (rows, tokens)]
    hidden = jnp.expand_dims(hidden if rows < tokens else hidden.T, others)
    return jnp.where(hidden, jnp.zeros((), x.dtype), x)
