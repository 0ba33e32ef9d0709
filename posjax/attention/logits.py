"""What all backends compute from a tile of queries and keys: scores, biases, caps, masks, decay and their products."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from posjax._checks import check
from posjax._numbers import align_ranks, at_least_float32
from posjax.bias import Bias
from posjax.positions import difference

LANES = 128
"""Lanes of a TPU register."""

_LARGEST_EXPONENT = 40.0


def merge_heads(x):
    """``[batch, *heads, tokens, size]`` as ``[batch, 1, tokens, heads x size]`` if a head fills whole TPU lanes.

    Otherwise as ``[batch, heads, tokens, size]``.
    """
    batch, *_, tokens, size = x.shape
    if size % LANES:
        return x.reshape(batch, -1, tokens, size)
    return jnp.moveaxis(x, -2, 1).reshape(batch, 1, tokens, -1)


def split_heads(x, heads: tuple[int, ...]):
    """The inverse of ``merge_heads``."""
    batch, head_axis, tokens, _ = x.shape
    if head_axis == math.prod(heads):
        return x.reshape(batch, *heads, tokens, -1)
    return jnp.moveaxis(x.reshape(batch, tokens, *heads, -1), 1, -2)


def statistics_dtype(x: Array) -> jnp.dtype:
    """Dtype of logits, softmax statistics and accumulators: at least float32."""
    return at_least_float32(x.dtype)


def with_bias(
    bias: Bias | None, tile: Float[Array, "batch kv_heads group q k"], q_positions, kv_positions
) -> Float[Array, "batch kv_heads group q k"]:
    """The logits of a tile of scaled scores with a bias, which is applied with all heads on one axis."""
    if bias is None:
        return tile
    batch, kv_heads, group, q, k = tile.shape
    return bias.apply(tile.reshape(batch, kv_heads * group, q, k), q_positions, kv_positions).reshape(tile.shape)


def capped(softcap, logits: Float[Array, "*b q k"]) -> Float[Array, "*b q k"]:
    """``c tanh(z / c)``, or ``z`` without a soft cap ``c``."""
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def decay_factors(
    decay: Float[Array, "size"], q_positions: Int[Array, "*b q"], kv_positions: Int[Array, "*b k"]
) -> tuple[Float[Array, "*b q size"], Float[Array, "*b k size"]]:
    """Factors of the queries and keys of a tile, in their layouts, whose product is ``exp(-a (i - j))``.

    Both are relative to the tile's last key, so the factors of keys are at most 1. The factor of a query exceeds 1 only
    if the last key is ahead of the query. The bound on its exponent is never reached if the tile has a key behind the
    query that is less than ``_LARGEST_EXPONENT / max(a)`` positions from the last key (16,000 in xPos).
    """
    q_positions, kv_positions = align_ranks(q_positions, kv_positions)
    last = kv_positions.max(-1, keepdims=True)
    behind, ahead = (
        difference(last, positions)[..., None].astype(decay.dtype) for positions in (kv_positions, q_positions)
    )
    decay = decay.reshape((1,) * (behind.ndim - 1) + decay.shape)
    q_factor = jnp.exp(jnp.minimum(ahead * decay, _LARGEST_EXPONENT))
    return (q_factor if q_factor.ndim == 2 else q_factor[:, None]), jnp.exp(-behind * decay)


def decayed(x: Array, factor: Array) -> Array:
    """Features times the factors of their decay, in the dtype of the features."""
    x, factor = align_ranks(x, factor)
    return (x.astype(factor.dtype) * factor).astype(x.dtype)


def group_mask(tile: Bool[Array, "*b q k"], kv_heads: int, group: int) -> Bool[Array, "*b q k"]:
    """Splits the head axis of a mask tile, if it has one, into key heads and groups.

    Raises:
        ValueError: for a mask whose heads are not those of the queries.
    """
    if tile.ndim == 2:
        return tile
    batch, heads, q, k = tile.shape
    if heads == 1:
        return tile[:, :, None]
    wanted = kv_heads * group
    check(heads == wanted, f"mask: it has one pattern for each of {heads} heads, but q has {wanted}")
    return tile.reshape(batch, kv_heads, group, q, k)


def scores(
    q: Float[Array, "batch kv_heads group q size"], k: Float[Array, "batch kv_heads k size"]
) -> Float[Array, "batch kv_heads group q k"]:
    """``q k^T`` for every head, accumulated in the dtype of the statistics.

    The group is folded into the rows of the matrix, here and below, so that this is one plain matrix product per key
    head, which every compiler runs without a transposed copy.
    """
    out = jnp.einsum("bkrd,bksd->bkrs", _fold(q), k, preferred_element_type=statistics_dtype(q))
    return out.reshape(*q.shape[:-1], k.shape[2])


def mix(
    weights: Float[Array, "batch kv_heads group q k"], v: Float[Array, "batch kv_heads k size"], dtype: jnp.dtype
) -> Float[Array, "batch kv_heads group q size"]:
    """``weights v`` for every head, in ``dtype``."""
    out = jnp.einsum("bkrs,bksd->bkrd", _fold(weights.astype(v.dtype)), v, preferred_element_type=dtype)
    return out.reshape(*weights.shape[:-1], v.shape[-1])


def mix_transposed(
    x: Float[Array, "batch kv_heads group q size"], weights: Float[Array, "batch kv_heads group q k"], dtype: jnp.dtype
) -> Float[Array, "batch kv_heads size k"]:
    """``x^T weights``, summed over the query heads of each key head, in ``dtype``.

    This is the transpose of ``weights^T x``, so that only the smaller factor is ever transposed.
    """
    narrow = jnp.swapaxes(_fold(x), -1, -2)
    return jnp.einsum("bkdr,bkrs->bkds", narrow, _fold(weights.astype(x.dtype)), preferred_element_type=dtype)


def flat_heads(x: Array) -> Array:
    """``[batch, kv heads, group, ...]`` with all query heads on one axis."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _fold(x: Array) -> Array:
    batch, kv_heads, group, rows, columns = x.shape
    return x.reshape(batch, kv_heads, group * rows, columns)
