"""Attention with the whole matrix of logits: quadratic memory, short code, the reference for the other backends."""

import dataclasses

import jax
import jax.numpy as jnp

from posjax._slots import with_head_axis
from posjax.attention.call import Call
from posjax.attention.logits import capped, decay_factors, decayed, group_mask, mix, mix_transposed, scores, with_bias
from posjax.attention.rows import PerQuery, Rows, finished, normalised
from posjax.positions import as_array


def dense(x: Call) -> Rows:
    """``softmax(softcap(q k^T + bias) where allowed) v``, and the log-sum-exp of every row.

    A query that may see no key gives exactly 0, with zero gradients, and a log-sum-exp of minus infinity.

    Args:
        x: the call.

    Returns:
        ``Rows``: the output in the dtype of ``v``, numbers of each query in float32 (float64 for float64 inputs).
    """
    logits = _logits(x)
    highest = logits.max(-1)
    highest = jnp.where(jnp.isneginf(highest), 0, highest)
    weights = jnp.exp(logits - highest[..., None])
    total = weights.sum(-1)
    return finished(mix(normalised(weights, total), x.v, logits.dtype), highest, total, x.v.dtype)


def dense_gradients(x: Call, per_query: PerQuery) -> Call:
    """The cotangent of a call: ``P = exp(z - L)``, ``dz = P (dO V^T - D)``, ``dV = P^T dO``.

    If the keys are only part of a sequence, these are the gradients from this part.
    """
    logits, transpose = jax.vjp(_logits, x)
    weights = jnp.exp(logits - per_query.lse[..., None])
    gradients = transpose(weights * (scores(per_query.d_out, x.v) - per_query.correction[..., None]))[0]
    d_v = jnp.swapaxes(mix_transposed(per_query.d_out, weights, logits.dtype), -1, -2)
    return dataclasses.replace(gradients, v=d_v.astype(x.v.dtype))


def _logits(x: Call):
    positions = with_head_axis(as_array(x.q_positions)), with_head_axis(as_array(x.kv_positions))
    logits = capped(x.softcap, with_bias(x.bias, _scores(x, *positions), *positions))
    if x.mask is None:
        return logits
    return jnp.where(group_mask(x.mask.allowed(*positions), *x.q.shape[1:3]), logits, -jnp.inf)


def _scores(x: Call, q_positions, kv_positions):
    """Scores of the first pair of features; where the mask of a branch is true, the scores of that branch instead."""
    q, k = x.q, x.k
    if x.decay is not None:
        q_factor, k_factor = decay_factors(x.decay, q_positions, kv_positions)
        q, k = decayed(q, q_factor), decayed(k, k_factor)
    logits = scores(q, k)
    for branch in x.remap:
        remapped = group_mask(branch.mask.allowed(q_positions, kv_positions), *q.shape[1:3])
        logits = jnp.where(remapped, scores(branch.q, branch.k), logits)
    return logits
