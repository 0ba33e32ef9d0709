"""Padding: padding tokens of a batch, and tokens that lengthen operands to whole tiles."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from posjax._axes import Names, each
from posjax._numbers import LARGEST
from posjax._shapes import zeros_at
from posjax.attention.operands import Operands
from posjax.attention.rows import PerQuery
from posjax.bias import Bias
from posjax.masks import Mask, Segments, padding_of
from posjax.positions import Positions, Range, as_array


def without_padding(mask: Mask | None, q: Array, *keys: Array) -> tuple[Array, ...]:
    """Queries and arrays over keys, ``[batch, tokens, ...]``, with zeros for tokens that the mask marks as padding.

    Padding may hold NaN, and ``0 * NaN`` is NaN: it must be replaced before any product, by ``where``. The transpose
    gives padding gradients of exactly zero.
    """
    found = padding_of(mask)
    return (q, *keys) if found is None else (zeros_at(found[0], q), *(zeros_at(found[1], x) for x in keys))


def without_padded_scale(mask: Mask | None, scale, q: Array):
    """Factors of the queries with zeros for queries that the mask marks as padding."""
    found = padding_of(mask)
    of_tokens = found is not None and scale is not None and jnp.shape(scale)[:-1] == q.shape[:2]
    return zeros_at(found[0], jnp.asarray(scale)) if of_tokens else scale


def without_padded_gates(mask: Mask | None, bias: Bias | None) -> Bias | None:
    """A bound bias with zeros, in its arrays over tokens (FoX's gates), for tokens that the mask marks as padding."""
    found = padding_of(mask)
    if found is None:
        return bias
    hidden = dict(zip(("queries", "keys"), found, strict=True))

    def with_zeros(array, names: Names):
        sides = [name for name in names if name in hidden]
        # Padding differs between batch rows, so it does not apply to an array without a batch axis.
        applies = len(sides) == 1 and "batch" in names
        return zeros_at(hidden[sides[0]], array, names.index("batch"), names.index(sides[0])) if applies else array

    return each(bias, with_zeros)


def pad(x: Operands, q_block: int, k_block: int) -> Operands:
    """The operands, lengthened to whole blocks. The mask hides added keys; the caller cuts off added queries.

    Queries, keys and values, whose last axis is ``"size"``, get zeros, all other arrays their last entries.
    """
    queries, keys = x.q.shape[3], x.k.shape[2]
    whole = queries + -queries % q_block, keys + -keys % k_block
    if whole == (queries, keys):
        return x
    found = lengthened(x, queries=(queries, whole[0]), keys=(keys, whole[1]))
    if whole[1] == keys:
        return found
    hides_added = _true_keys(*whole, keys)
    return dataclasses.replace(found, mask=hides_added if found.mask is None else found.mask & hides_added)


def lengthened(tree, **sizes: tuple[int, int]):
    """The tree with more entries of every array that has an axis: ``lengthened(x, queries=(before, after))``."""

    def longer(array, names: Names):
        for name, (before, after) in sizes.items():
            if name in names and before != after:
                array = _longer(array, names.index(name), before, after - before, "size" in names)
        return array

    return each(tree, longer)


def lengthened_rows(per_query: PerQuery, queries: int) -> PerQuery:
    """``per_query`` lengthened to ``queries`` queries; the added queries have weights of 0 for any logits."""
    more = queries - per_query.lse.shape[3]
    infinite = lengthen(per_query.lse, more, axis=3, constant_values=jnp.inf)
    return PerQuery(*(lengthen(array, more, axis=3) for array in per_query))._replace(lse=infinite)


def _longer(array, axis: int, before: int, more: int, projected: bool):
    if isinstance(array, Range):
        return _longer_range(array, more)
    return lengthen(array, more, axis, "constant" if projected else "edge") if array.shape[axis] == before else array


def _longer_range(positions: Range, more: int) -> Positions:
    if not positions.is_static or positions.start + positions.length + more - 1 <= LARGEST:
        return Range(positions.start, positions.length + more)
    return lengthen(as_array(positions), more, axis=0, mode="edge")


def _true_keys(queries: int, keys: int, true: int) -> Mask:
    """A mask that hides the keys from ``true`` on. In NumPy, so that the tiles it hides are known when tracing."""
    ids = np.where(np.arange(keys) < true, 0, -1).astype(np.int32)
    return Segments(np.zeros((1, queries), np.int32), ids[None])


def lengthen(x, more: int, axis: int, mode: str = "constant", **options):
    """``x`` with ``more`` entries at the end of an axis, zeros or another mode of ``jnp.pad``."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, more)
    return jnp.pad(x, widths, mode=mode, **options)
