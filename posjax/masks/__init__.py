"""Typed, lazy, composable masks: which key each query may see.

A mask is a value; it becomes an array only tile by tile. Three kinds exist:

* position masks are pure functions of the two integer positions: ``Causal``, ``Window``, ``Band``, ``Dilated``,
  ``FirstTokens``, ``GlobalFirst``, ``Chunked``, ``Prefix``, and those that select the pairs of ``posjax.remap``,
  ``Beyond`` and ``ChunksApart``;
* ``Segments`` holds the segment ids of the tokens, ``Globals`` their flags;
* ``ArrayMask`` is a boolean array; ``attention(mask=)`` and the operators below convert a plain array to it.

Masks compose with ``&``, ``|`` and ``~``. Every mask is a registered pytree: hyper-parameters are static metadata,
arrays are leaves. From the bounds of a tile's positions a mask computes whether the tile is empty, full or mixed, so
that attention skips empty tiles and does not mask full ones.

Shapes. Positions are ``[n]`` (shared by the batch) or ``[batch, 1, n]``; a tile is ``[queries, keys]`` or
``[batch or 1, heads or 1, queries, keys]``. Positions are those of the tokens, not of the buffer, so left padding,
packing, decoding and reordered sequences need nothing special.
"""

from posjax.masks.base import And, ArrayMask, Mask, Not, Or, Pair, as_mask, materialise
from posjax.masks.bounds import BlockBounds, block_bounds
from posjax.masks.by_position import (
    Band,
    Beyond,
    Causal,
    Chunked,
    ChunksApart,
    Dilated,
    FirstTokens,
    GlobalFirst,
    Prefix,
    Window,
    hides_ahead,
    traced_sizes,
)
from posjax.masks.by_token import Globals, OfTokens, Segments, padding, padding_of

__all__ = [
    "And",
    "ArrayMask",
    "Band",
    "Beyond",
    "BlockBounds",
    "Causal",
    "Chunked",
    "ChunksApart",
    "Dilated",
    "FirstTokens",
    "GlobalFirst",
    "Globals",
    "Mask",
    "Not",
    "OfTokens",
    "Or",
    "Pair",
    "Prefix",
    "Segments",
    "Window",
    "as_mask",
    "block_bounds",
    "hides_ahead",
    "materialise",
    "padding",
    "padding_of",
    "traced_sizes",
]
