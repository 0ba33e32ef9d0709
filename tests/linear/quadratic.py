"""Linear attention with the whole matrix of weights: the reference of the other forms."""

import jax
import jax.numpy as jnp


def quadratic(
    phi, psi, v, *, causal=True, log_scale=None, q_numerator=None, k_numerator=None, segment_ids=None
) -> jax.Array:
    """``o_i = sum_j w_ij v_j / sum_j w_ij``, ``w_ij = phi_i . psi_j exp(c_j)``; arguments as in ``linear.chunked``."""
    allowed = _allowed(phi.shape[1], psi.shape[1], causal, segment_ids)
    scale = jnp.zeros(psi.shape[:3]) if log_scale is None else log_scale
    scale = jnp.where(allowed, scale.swapaxes(1, 2)[:, :, None], -jnp.inf)
    highest = jax.lax.stop_gradient(jnp.nan_to_num(scale.max(-1, keepdims=True), neginf=0))
    factor = jnp.exp(scale - highest)
    denominator = _scores(phi, psi, factor)
    numerator = denominator if q_numerator is None else _scores(q_numerator, k_numerator, factor)
    total = denominator.sum(-1, keepdims=True)
    weights = jnp.where(total > 0, numerator / jnp.where(total > 0, total, 1), 0)
    return jnp.einsum("bhij,bjhv->bihv", weights, _repeated(v, phi.shape[2])).astype(v.dtype)


def _allowed(queries, keys, causal, segment_ids):
    """``[batch or 1, 1, queries, keys]``: the keys that each query may see."""
    allowed = jnp.ones((1, queries, keys), bool)
    if segment_ids is not None:
        ids = jnp.asarray(segment_ids)
        allowed = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None]
    return (jnp.tril(allowed) if causal else allowed)[:, None]


def _scores(phi, psi, factor):
    heads = phi.shape[2]
    scores = jnp.einsum("bihm,bjhm->bhij", phi, _repeated(psi, heads))
    return scores * jnp.repeat(factor, heads // psi.shape[2], axis=1)


def _repeated(x, heads):
    """Key heads repeated for the query heads that share them."""
    return jnp.repeat(x, heads // x.shape[2], axis=2)
