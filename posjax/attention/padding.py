"""Padding: tokens that a batch carries along, and those that lengthen operands to whole tiles."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool

from posjax.attention.operands import Operands
from posjax.bias import Bias
from posjax.far import Branch
from posjax.masks import Mask, padding_of
from posjax.positions import Range, as_array

_LARGEST_POSITION = 2**31 - 1


def without_padding(mask: Mask | None, q: Array, *keys: Array) -> tuple[Array, ...]:
    """Queries and arrays over keys, ``[batch, tokens, ...]``, with zeros for the tokens that are padding by their mask.

    Padding may hold anything, NaN too, and ``0 * NaN`` is NaN: what is hidden must be gone before anything multiplies
    it. A selection is; its transpose gives padding gradients of exactly zero.
    """
    found = padding_of(mask)
    return (q, *keys) if found is None else (_blank(found[0], q), *(_blank(found[1], x) for x in keys))


def without_padded_scale(mask: Mask | None, scale, q: Array):
    """Factors of the queries with zeros for those that are padding by their mask."""
    found = padding_of(mask)
    of_tokens = found is not None and scale is not None and jnp.shape(scale)[:-1] == q.shape[:2]
    return _blank(found[0], jnp.asarray(scale)) if of_tokens else scale


def without_padded_gates(mask: Mask | None, bias: Bias | None) -> Bias | None:
    """A bound bias with zeros for what it holds of tokens that are padding by their mask: FoX's gates."""
    found = padding_of(mask)
    if found is None or bias is None or not bias.batched or bias.of_pairs:
        return bias
    # The tokens are the last axis, and the rows the first.
    return bias.map_tokens(*(lambda x, hidden=hidden: _blank(hidden, x, axis=-1) for hidden in found))


def _blank(hidden: Bool[Array, "batch tokens"], x: Array, axis: int = 1) -> Array:
    """Zeros for the hidden tokens, which lie along ``axis``."""
    sizes = [1] * x.ndim
    sizes[0], sizes[axis] = hidden.shape
    return jnp.where(hidden.reshape(sizes), jnp.zeros((), x.dtype), x)


def pad(x: Operands, q_block: int, k_block: int, present: Callable[[int, int, int], Mask]) -> Operands:
    """Lengthens everything to whole blocks; keys that were added are masked out, queries are cut off again later.

    ``present(queries, keys, true keys)`` is the mask of the true keys among those of lengthened operands.
    """
    keys = x.k.shape[2]
    more_q, more_k = -x.q.shape[3] % q_block, -keys % k_block
    if not more_q and not more_k:
        return x
    total_q, total_k = x.q.shape[3] + more_q, keys + more_k
    mask = x.mask if x.mask is None else x.mask.pad(total_q, total_k)
    if more_k:
        true = present(total_q, total_k, keys)
        mask = true if mask is None else mask & true
    return dataclasses.replace(
        x,
        q=lengthen(x.q, more_q, axis=3),
        k=lengthen(x.k, more_k, axis=2),
        v=lengthen(x.v, more_k, axis=2),
        bias=x.bias if x.bias is None else x.bias.pad(total_q, total_k),
        mask=mask,
        q_positions=_lengthen_positions(x.q_positions, more_q),
        kv_positions=_lengthen_positions(x.kv_positions, more_k),
        far=tuple(
            Branch(
                lengthen(branch.q, more_q, axis=3),
                lengthen(branch.k, more_k, axis=2),
                branch.where.pad(total_q, total_k),
            )
            for branch in x.far
        ),
    )


def lengthen(x, more: int, axis: int, mode: str = "constant"):
    """``x`` with ``more`` entries at the end of an axis, zeros or another mode of ``jnp.pad``."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, more)
    return jnp.pad(x, widths, mode=mode)


def _lengthen_positions(positions, more: int):
    if isinstance(positions, Range):
        if not positions.is_static or positions.start + positions.length + more - 1 <= _LARGEST_POSITION:
            return Range(positions.start, positions.length + more)
        positions = as_array(positions)
    return lengthen(positions, more, axis=positions.ndim - 1, mode="edge")
