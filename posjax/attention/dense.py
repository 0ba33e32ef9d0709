"""Attention with the whole matrix of logits: quadratic memory, short enough to check by eye, the oracle of the rest."""

import jax
import jax.numpy as jnp

from posjax._slots import with_head_axis
from posjax.attention.operands import (
    Operands,
    capped,
    decay_factors,
    decayed,
    group_mask,
    mix,
    scores,
    statistics_dtype,
    with_bias,
)
from posjax.positions import as_array


def dense(x: Operands, given: tuple | None = None) -> tuple:
    """``softmax(softcap(q k^T + bias) where allowed) v``, and the log-sum-exp of every row.

    A row that may see no key gives exactly 0, with zero gradients, and a log-sum-exp of minus infinity.

    Args:
        x: the operands.
        given: output and log-sum-exp of rows of which these keys are only a part. They come back as they are, and the
            gradients are the part's share: of ``out = P v`` and ``lse`` with ``P = exp(z - lse)``,
            ``dz = P (d_out v^T - d_out out + d_lse)``.

    Returns:
        Output ``[batch, kv heads, group, queries, value size]`` in the dtype of ``v``, and float32 log-sum-exp
        ``[batch, kv heads, group, queries]`` (float64 for float64 inputs).
    """
    dtype = statistics_dtype(x.q)
    positions = with_head_axis(as_array(x.q_positions)), with_head_axis(as_array(x.kv_positions))
    logits = capped(x.softcap, with_bias(x.bias, _scores(x, *positions), *positions))
    if x.mask is not None:
        logits = jnp.where(group_mask(x.mask.allowed(*positions), *x.q.shape[1:3]), logits, -jnp.inf)
    if given is not None:
        return _part(logits, x.v, *map(jax.lax.stop_gradient, given))
    highest = logits.max(-1, keepdims=True)
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(highest), highest, 0))
    total = weights.sum(-1)
    seen = total > 0
    total = jnp.where(seen, total, 1)
    out = mix(weights / total[..., None], x.v, dtype).astype(x.v.dtype)
    return out, jnp.where(seen, highest[..., 0] + jnp.log(total), -jnp.inf)


def _part(logits, v, out, lse) -> tuple:
    """``out`` and ``lse`` as they are, with gradients as if the logits of this part had gone into both."""
    dtype = logits.dtype
    # A row that sees nothing at all has an infinite log-sum-exp; any finite one keeps its weights at 0.
    weights = jnp.exp(logits - jnp.where(jnp.isneginf(lse), 0, lse)[..., None])
    total = weights.sum(-1)
    share = mix(weights, v, dtype) - total[..., None] * out.astype(dtype)
    return out + (share - jax.lax.stop_gradient(share)).astype(out.dtype), lse + total - jax.lax.stop_gradient(total)


def _scores(x: Operands, q_positions, kv_positions):
    """Scores of the first pair of features, and of the branches where they hold."""
    q, k = x.q, x.k
    if x.decay is not None:
        q_factor, k_factor = decay_factors(x.decay, q_positions, kv_positions)
        q, k = decayed(q, q_factor), decayed(k, k_factor)
    logits = scores(q, k)
    for branch in x.far:
        where = group_mask(branch.where.allowed(q_positions, kv_positions), *q.shape[1:3])
        logits = jnp.where(where, scores(branch.q, branch.k), logits)
    return logits
