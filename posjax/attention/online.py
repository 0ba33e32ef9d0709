"""Online softmax: attention to keys that come tile by tile (Milakov and Gimelshein, arXiv 1805.02867)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from posjax._lowered import full_varying_like
from posjax.attention.logits import mix, statistics_dtype
from posjax.attention.rows import Rows, finished, normalised


class OnlineSoftmax(NamedTuple):
    """For each query the largest logit so far, and the sums of weights and of weighted values relative to it."""

    highest: Float[Array, "batch kv_heads group q"]
    total: Float[Array, "batch kv_heads group q"]
    out: Float[Array, "batch kv_heads group q value_size"]

    @staticmethod
    def empty(shape: tuple[int, ...], value_size: int, q: Array) -> "OnlineSoftmax":
        """The state before the first key, for queries ``[batch, kv_heads, group, q] = shape``.

        The dtype and the mesh axes over which the state varies follow from ``q``.
        """
        dtype = statistics_dtype(q)
        # No finite logit is below it, so that a tile without an allowed key needs no special case.
        highest = full_varying_like(shape, dtype, q, float(jnp.finfo(dtype).min))
        return OnlineSoftmax(
            highest, full_varying_like(shape, dtype, q), full_varying_like((*shape, value_size), dtype, q)
        )

    def added(self, logits, v) -> "OnlineSoftmax":
        """The state after the keys of a tile."""
        # The result, and so its gradient, does not depend on the maximum that is subtracted.
        highest = jax.lax.stop_gradient(jnp.maximum(self.highest, logits.max(-1)))
        weights = jnp.exp(logits - highest[..., None])
        shrink = jnp.exp(self.highest - highest)
        out = self.out * shrink[..., None] + mix(weights, v, self.out.dtype)
        return OnlineSoftmax(highest, self.total * shrink + weights.sum(-1), out)

    def finished(self, dtype) -> Rows:
        """The results, with the output in ``dtype``."""
        return finished(normalised(self.out, self.total), self.highest, self.total, dtype)
