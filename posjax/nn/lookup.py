"""Rows of a table for tokens, with a gradient that does not lose its small parts."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from posjax._numbers import at_least_float32


def lookup(table: Float[Array, "vocab embed"], tokens: Int[Array, "*b"]) -> Float[Array, "*b embed"]:
    """``table[tokens]``, in the dtype of the table, which may be narrow so that little travels between devices.

    The gradient of row ``v`` is ``sum_i d_i [tokens_i = v]``. It is summed in float32 at least and rounded once: summed
    in bfloat16, equal parts stop counting at 256 of them.
    """
    wide = at_least_float32(table.dtype)
    return _rows(table, tokens) if table.dtype == wide else _narrow_lookup(table, tokens)


def _rows(table, tokens):
    return table[tokens]


@jax.custom_vjp
def _narrow_lookup(table, tokens):
    return _rows(table, tokens)


def _forward(table, tokens):
    return _rows(table, tokens), (table, tokens)


def _backward(saved, d_rows):
    table, tokens = saved
    # The values of the table are not read: they only say where the sums go, and how they lie over the devices.
    _, transpose = jax.vjp(lambda wide: _rows(wide, tokens), table.astype(jnp.float32))
    return transpose(d_rows.astype(jnp.float32))[0].astype(table.dtype), None


_narrow_lookup.defvjp(_forward, _backward)
