"""What every attention backend takes, in one canonical form."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from posjax._checks import check
from posjax.bias import Bias
from posjax.masks import Mask
from posjax.positions import Positions


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["q", "k", "v", "bias", "mask", "q_positions", "kv_positions"],
    meta_fields=["softcap"],
)
@dataclasses.dataclass(frozen=True)
class Operands:
    """Checked and bound inputs of one attention call; query heads are grouped by the key head they use.

    Args:
        q: ``[batch, kv heads, group, queries, size]``, already multiplied by the scale.
        k: ``[batch, kv heads, keys, size]``.
        v: ``[batch, kv heads, keys, value size]``.
        bias: a bound bias or None.
        mask: a mask or None.
        q_positions: ``Range``, ``[queries]`` or ``[batch, queries]``.
        kv_positions: ``Range``, ``[keys]`` or ``[batch, keys]``.
        softcap: ``c`` in ``c tanh(logit / c)``, or None.
    """

    q: Float[Array, "batch kv_heads group queries size"]
    k: Float[Array, "batch kv_heads keys size"]
    v: Float[Array, "batch kv_heads keys value_size"]
    bias: Bias | None
    mask: Mask | None
    q_positions: Positions
    kv_positions: Positions
    softcap: float | None = None


def statistics_dtype(x: Array) -> jnp.dtype:
    """Dtype of logits, softmax statistics and accumulators: at least float32."""
    return jnp.promote_types(x.dtype, jnp.float32)


def group_bias(tile: Float[Array, "*b heads q k"], kv_heads: int, group: int) -> Float[Array, "*b kv_heads group q k"]:
    """Splits the head axis of a bias tile like that of the queries.

    Raises:
        ValueError: if the bias was bound for another number of heads.
    """
    *batch, heads, q, k = tile.shape
    check(heads == kv_heads * group, f"bias is bound for {heads} heads, but q has {kv_heads * group}")
    return tile.reshape(*batch, kv_heads, group, q, k)


def group_mask(tile: Bool[Array, "*b q k"], kv_heads: int) -> Bool[Array, "*b q k"]:
    """Splits the head axis of a mask tile, if it has one, like that of the queries."""
    if tile.ndim == 2:
        return tile
    batch, heads, q, k = tile.shape
    return tile[:, :, None] if heads == 1 else tile.reshape(batch, kv_heads, heads // kv_heads, q, k)


def scores(
    q: Float[Array, "batch kv_heads group q size"], k: Float[Array, "batch kv_heads k size"]
) -> Float[Array, "batch kv_heads group q k"]:
    """``q k^T`` for every head, accumulated in the dtype of the statistics.

    The group is folded into the rows, here and below, so that each is one plain matrix product per key head, which
    every compiler runs without a transposed copy.
    """
    out = jnp.einsum("bkrd,bksd->bkrs", _fold(q), k, preferred_element_type=statistics_dtype(q))
    return out.reshape(*q.shape[:-1], k.shape[2])


def mix(
    weights: Float[Array, "batch kv_heads group q k"], v: Float[Array, "batch kv_heads k size"], dtype: jnp.dtype
) -> Float[Array, "batch kv_heads group q size"]:
    """``weights v`` for every head, in ``dtype``."""
    out = jnp.einsum("bkrs,bksd->bkrd", _fold(weights.astype(v.dtype)), v, preferred_element_type=dtype)
    return out.reshape(*weights.shape[:-1], v.shape[-1])


def gather(
    x: Float[Array, "batch kv_heads group q size"], weights: Float[Array, "batch kv_heads group q k"], dtype: jnp.dtype
) -> Float[Array, "batch kv_heads size k"]:
    """``x^T weights``, summed over the query heads of each key head, in ``dtype``.

    The transpose of ``weights^T x``: of the two factors only the small one is ever transposed.
    """
    narrow = jnp.swapaxes(_fold(x), -1, -2)
    return jnp.einsum("bkdr,bkrs->bkds", narrow, _fold(weights.astype(x.dtype)), preferred_element_type=dtype)


def _fold(x: Array) -> Array:
    batch, kv_heads, group, rows, columns = x.shape
    return x.reshape(batch, kv_heads, group * rows, columns)
