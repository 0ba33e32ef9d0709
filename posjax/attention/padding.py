"""Padding: the tokens of a batch that hold nothing, replaced by zeros before they meet any product."""

import jax.numpy as jnp
from jaxtyping import Array

from posjax._axes import Names, each
from posjax._shapes import zeros_at
from posjax.bias import Bias
from posjax.masks import Mask, padding_of


def without_padding(mask: Mask | None, q: Array, *keys: Array) -> tuple[Array, ...]:
    """Queries and arrays over keys, ``[batch, tokens, ...]``, with zeros for tokens that the mask marks as padding.

    Padding may hold NaN, and ``0 * NaN`` is NaN: it must be replaced before any product, by ``where``. The transpose
    gives padding gradients of exactly zero.
    """
    hidden = padding_of(mask)
    return (q, *keys) if hidden is None else (zeros_at(hidden[0], q), *(zeros_at(hidden[1], x) for x in keys))


def without_padded_scale(mask: Mask | None, scale, q: Array):
    """Factors of the queries with zeros for queries that the mask marks as padding."""
    hidden = padding_of(mask)
    of_tokens = hidden is not None and scale is not None and jnp.shape(scale)[:-1] == q.shape[:2]
    return zeros_at(hidden[0], jnp.asarray(scale)) if of_tokens else scale


def without_padded_gates(mask: Mask | None, bias: Bias | None) -> Bias | None:
    """A bound bias with zeros, in its arrays over tokens (FoX's gates), for tokens that the mask marks as padding."""
    padding = padding_of(mask)
    if padding is None:
        return bias
    hidden = dict(zip(("queries", "keys"), padding, strict=True))

    def with_zeros(array, names: Names):
        sides = [name for name in names if name in hidden]
        # Padding differs between batch rows, so it does not apply to an array without a batch axis.
        applies = len(sides) == 1 and "batch" in names
        return zeros_at(hidden[sides[0]], array, names.index("batch"), names.index(sides[0])) if applies else array

    return each(bias, with_zeros)
