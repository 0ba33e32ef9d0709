"""The independent oracle: attention in NumPy and float64, one logit at a time, short enough to check by eye."""

import numpy as np


def attention(q, k, v, *, bias=None, allowed=None, scale=None, sinks=None, softcap=None, remap=(), decay=None):
    """Output ``[batch, queries, heads, value size]`` and log-sum-exp ``[batch, queries, heads]`` in float64.

    Args:
        q, k, v: ``[batch, length, heads, size]``.
        bias: ``[heads, q, k]`` or ``[batch, heads, q, k]``.
        allowed: bool, broadcastable to ``[batch, heads, q, k]``.
        remap: ``(q, k, where)``, other features for the pairs in ``where``, bool ``[batch or 1, 1, q, k]``.
        decay: ``[batch or 1, 1, q, k, size]``, a factor for the term of every feature in a score.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (batch, queries, heads, size), keys = q.shape, k.shape[1]
    bias = np.broadcast_to(0.0 if bias is None else np.asarray(bias, np.float64), (batch, heads, queries, keys))
    allowed = np.broadcast_to(True if allowed is None else allowed, (batch, heads, queries, keys))
    out, lse = np.zeros((batch, queries, heads, v.shape[-1])), np.full((batch, queries, heads), -np.inf)
    for b, i, h in np.ndindex(batch, queries, heads):
        group = h // (heads // k.shape[2])
        z = (k[b, :, group] * q[b, i, h] * (1 if decay is None else decay[b % len(decay), 0, i])).sum(-1)
        for other_q, other_k, where in remap:
            z = np.where(where[b % len(where), 0, i], np.asarray(other_k)[b, :, group] @ other_q[b, i, h], z)
        z = z * (size**-0.5 if scale is None else scale) + bias[b, h, i]
        z = z if softcap is None else softcap * np.tanh(z / softcap)
        z = np.where(allowed[b, h, i], z, -np.inf)
        z = z if sinks is None else np.append(z, sinks[h])
        if np.isneginf(z).all():
            continue
        weights = np.exp(z - z.max())
        out[b, i, h] = (weights / weights.sum())[:keys] @ v[b, :, group]
        lse[b, i, h] = z.max() + np.log(weights.sum())
    return out, lse
