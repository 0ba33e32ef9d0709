"""The results of attention for each query, what a backward pass needs of them, and how those of two parts are merged.

The log-sum-exp ``L`` of a query is kept in two numbers, whose sum holds what one float32 cannot: ``-1e30 + log(16)``,
of 16 keys under an additive mask, rounds to -1e30, and weights ``exp(z - L)`` would be 1 in place of 1/16.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from posjax._numbers import rounded_sum

ATTENDED = "posjax_attended"
"""Checkpoint name of the results of attention, for policies of ``jax.checkpoint``: see ``mark_for_checkpoint``."""


class Rows(NamedTuple):
    """The results of a backend for each query.

    Args:
        out: the output; exactly 0 for a query that sees no key.
        lse: the log-sum-exp ``L``, rounded; minus infinity for a query that sees no key.
        rest: ``L - lse``, what rounding lost. It has no gradient: that of ``L`` is the gradient of ``lse``.
        subtracted: ``lse`` in base 2, if a kernel computed it, else ``lse``. The backward kernel subtracts it
            from its logits: a large number would not survive the way to base e and back. It has no gradient.
    """

    out: Float[Array, "batch kv_heads group queries value_size"]
    lse: Float[Array, "batch kv_heads group queries"] | None = None
    rest: Float[Array, "batch kv_heads group queries"] | None = None
    subtracted: Float[Array, "batch kv_heads group queries"] | None = None


class PerQuery(NamedTuple):
    """The inputs of a backward pass for each query.

    With the weights ``P = exp(z - L)`` the gradients are ``dV = P^T dO`` and ``dz = P (dO V^T - D)``. Here they are
    computed with ``exp(z - lse)``, so the gradients of the query are divided by ``exp(rest)`` instead: see ``Rows``.

    Args:
        d_out: the gradient of the query's output, times ``exp(-rest)``; 0 for a query that sees no key.
        lse: the log-sum-exp, in a kernel ``Rows.subtracted`` without the constant that the bias adds to all logits of
            the query; infinity, which makes its weights 0, if the query sees no key.
        correction: ``D = sum(dO * O) - dL``, where ``dL`` is the gradient of the log-sum-exp, times ``exp(-rest)``.
        d_lse: ``dL``, the sum of the gradients of all logits of the query; 0 if ``dL`` is counted with another part of
            the keys, and None within a kernel.
    """

    d_out: Array
    lse: Array
    correction: Array
    d_lse: Array | None = None


def normalised(sums: Array, total: Array) -> Array:
    """``sums / total``, and ``sums`` for a query that sees no key."""
    return sums / jnp.where(total == 0, 1, total)[..., None]


def finished(out: Array, highest: Array, total: Array, dtype) -> Rows:
    """The results in base e from outputs and from the sums of weights relative to the weight ``exp(highest)``."""
    blind = total == 0
    # By ``where``, so that a NaN in the gradient of a query that sees no key reaches nothing.
    out = jnp.where(blind[..., None], 0, out).astype(dtype)
    lse, rest = rounded_sum(jnp.where(blind, 0, highest), jnp.log(jnp.where(blind, 1, total)))
    lse = jnp.where(blind, -jnp.inf, lse)
    return Rows(out, lse, *map(jax.lax.stop_gradient, (rest, lse)))


def merged(first: Rows, second: Rows) -> Rows:
    """The results over two parts of the keys: ``O = (O_1 e^L_1 + O_2 e^L_2) / e^L``, ``L = log(e^L_1 + e^L_2)``."""
    highest = jax.lax.stop_gradient(jnp.maximum(first.lse, second.lse))
    highest = jnp.where(jnp.isneginf(highest), 0, highest)
    weights = [jnp.exp(rows.lse - highest + rows.rest) for rows in (first, second)]
    parts = zip((first, second), weights, strict=True)
    sums = sum(rows.out.astype(highest.dtype) * weight[..., None] for rows, weight in parts)
    total = sum(weights)
    return finished(normalised(sums, total), highest, total, highest.dtype)


def row_sums(a: Array, b: Array, dtype) -> Array:
    """``rowsum(a * b)``."""
    return (a.astype(dtype) * b.astype(dtype)).sum(-1)


def per_query_of(rows: Rows, lse: Array, cotangents: Rows, summed: Callable[..., Array] = row_sums) -> PerQuery:
    """``PerQuery`` from the results and their cotangents.

    Args:
        rows: the results.
        lse: those of their log-sum-exps that are in the base of the backend's logits.
        cotangents: the cotangents; only those of ``out`` and ``lse`` are read. A query that sees no key has a constant
            output: its cotangents may be NaN and are replaced by 0.
        summed: an implementation of ``row_sums``.
    """
    factor = jnp.where(jnp.isneginf(lse), 0, jnp.exp(-rows.rest))
    # One array with an axis of features, in the dtype of the cotangents: on TPUs a second one costs a pass over memory.
    wide = factor[..., None].astype(cotangents.out.dtype)
    cotangents = cotangents._replace(out=jnp.where(wide == 0, 0, cotangents.out * wide))
    return plain_per_query_of(rows, lse, cotangents, summed, factor)


def plain_per_query_of(
    rows: Rows, lse: Array, cotangents: Rows, summed: Callable[..., Array], factor: Array | float = 1.0
) -> PerQuery:
    """``per_query_of`` for cotangents of outputs that are multiplied by ``exp(-rest)`` already, or need not be."""
    blind = jnp.isneginf(lse)
    d_lse = jnp.where(blind, 0, cotangents.lse)
    correction = summed(cotangents.out, rows.out, lse.dtype) - factor * d_lse
    return PerQuery(cotangents.out, jnp.where(blind, jnp.inf, lse), correction, d_lse)


def mark_for_checkpoint(rows: Sequence[Array]) -> Rows:
    """The results with the checkpoint name ``ATTENDED``.

    The backward pass of a kernel needs only these and its call. So if a policy of ``jax.checkpoint`` saves this
    name, the forward kernel does not run again.
    """
    return Rows(*(checkpoint_name(array, ATTENDED) for array in rows))
