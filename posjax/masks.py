"""Typed, lazy, composable masks: which key each query may see.

A mask is a value, never an ``n x n`` array, until a tile of it is asked for. Two kinds exist:

* position masks (``Causal``, ``Window``, ``Sinks``, ``Chunked``, ``Prefix``) are pure functions of the two integer
  positions;
* ``Segments`` carries the segment ids of the tokens.

They compose with ``&`` and ``|``. Every mask is a registered pytree: hyper-parameters are static metadata, arrays are
leaves. Every mask can also say for a tile, from the extent of its positions alone, whether it is empty, full or mixed,
so that an attention loop never visits an empty tile and never masks a full one.

Shapes. Positions arrive as ``[n]`` (shared by the batch) or ``[batch, 1, n]``; a tile is ``[queries, keys]`` or
``[batch, heads or 1, queries, keys]``. Positions are those of the tokens, not of the buffer, so left padding, packing,
decoding and reordered sequences need nothing special.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int8

from posjax._checks import check, check_count, check_rank
from posjax._slots import Blockwise, with_head_axis
from posjax.positions import Positions, Range, as_array

EMPTY, MIXED, FULL = 0, 1, 2


class Extent(NamedTuple):
    """Smallest and largest position of each block of ``size`` tokens; ``low`` and ``high`` are ``[..., blocks]``."""

    low: Array | np.ndarray
    high: Array | np.ndarray
    size: int


class Mask(Blockwise):
    """Base of all masks: composition, the tile of a mask, and what its extent tells."""

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, _checked(other))

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, _checked(other))

    def allowed(self, q_positions: Int[Array, "*b q"], kv_positions: Int[Array, "*b k"]) -> Bool[Array, "*b q k"]:
        """The tile: true where the query may see the key."""
        return self.pairs(q_positions[..., :, None], kv_positions[..., None, :])

    def tiles(self, q: Extent, k: Extent) -> tuple[Bool[Array, "*b nq nk"], Bool[Array, "*b nq nk"]]:
        """For every pair of blocks: whether some pair of tokens may be allowed, and whether all surely are.

        Both answers are safe: ``some`` is never false for a tile with an allowed pair, ``all`` never true for a tile
        with a forbidden one.
        """
        rows = (q.low[..., :, None], q.high[..., :, None])
        columns = (k.low[..., None, :], k.high[..., None, :])
        return self.bounds(*rows, *columns)

    def pairs(self, i, j):
        """Allowed pairs for query positions ``i`` and key positions ``j`` that broadcast against each other."""
        raise TypeError(f"{type(self).__name__} is not a function of positions")

    def visible(self, count: Int[Array, "*b q"], positions: Int[Array, "*b q"], causal: bool) -> Int[Array, "*b q"]:
        """How many of ``count`` contiguous keys the mask leaves to each query, for scales that count them.

        The keys are those up to the query's position if ``causal``. Where masks are joined by ``|`` keys that both
        allow are counted twice, though never beyond ``count``.
        """
        return count

    def bounds(self, i_low, i_high, j_low, j_high):
        """``(some, all)`` for positions anywhere in ``[i_low, i_high]`` and ``[j_low, j_high]``."""
        raise TypeError(f"{type(self).__name__} is not a function of positions")


def _checked(mask: Mask) -> Mask:
    check(isinstance(mask, Mask), f"a mask composes with masks only, found {type(mask).__name__}")
    return mask


_static = partial(jax.tree_util.register_dataclass, data_fields=[])


@partial(_static, meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """``j <= i``: a query sees the keys up to and including its own position."""

    def pairs(self, i, j):
        return j <= i

    def bounds(self, i_low, i_high, j_low, j_high):
        return j_low <= i_high, j_high <= i_low


@partial(_static, meta_fields=["size"])
@dataclasses.dataclass(frozen=True)
class Window(Mask):
    """``|i - j| < size``: with ``Causal`` the last ``size`` keys, the query's own included.

    Without ``Causal`` it is the symmetric band of ``2 * size - 1`` keys that encoders use.
    """

    size: int

    def __post_init__(self):
        check_count("Window size", self.size)

    def pairs(self, i, j):
        return (i - j < self.size) & (j - i < self.size)

    def bounds(self, i_low, i_high, j_low, j_high):
        some = (i_low - j_high < self.size) & (j_low - i_high < self.size)
        return some, (i_high - j_low < self.size) & (j_high - i_low < self.size)

    def visible(self, count, positions, causal):
        return jnp.minimum(count, self.size if causal else 2 * self.size - 1)


@partial(_static, meta_fields=["count"])
@dataclasses.dataclass(frozen=True)
class Sinks(Mask):
    """``j < count``: every query sees the first ``count`` positions.

    ``Causal() & (Window(w) | Sinks(n))`` is the lambda-shaped mask of StreamingLLM (arXiv 2309.17453) and LM-Infinite.
    """

    count: int

    def __post_init__(self):
        check_count("Sinks count", self.count)

    def pairs(self, i, j):
        # ``i == i`` gives the tile its queries' shape.
        return (j < self.count) & (i == i)

    def bounds(self, i_low, i_high, j_low, j_high):
        return (j_low < self.count) & (i_low == i_low), (j_high < self.count) & (i_low == i_low)

    def visible(self, count, positions, causal):
        return jnp.minimum(count, self.count)

    @property
    def shift_invariant(self) -> bool:
        return False


@partial(_static, meta_fields=["length"])
@dataclasses.dataclass(frozen=True)
class Prefix(Mask):
    """``i < length and j < length``: the first ``length`` positions see each other both ways.

    ``Causal() | Prefix(n)`` is the mask of a prefix language model.
    """

    length: int

    def __post_init__(self):
        check_count("Prefix length", self.length)

    def pairs(self, i, j):
        return (i < self.length) & (j < self.length)

    def bounds(self, i_low, i_high, j_low, j_high):
        return (i_low < self.length) & (j_low < self.length), (i_high < self.length) & (j_high < self.length)

    @property
    def shift_invariant(self) -> bool:
        return False


@partial(_static, meta_fields=["size"])
@dataclasses.dataclass(frozen=True)
class Chunked(Mask):
    """``floor(i / size) == floor(j / size)``: attention inside chunks of ``size`` positions (Llama 4)."""

    size: int

    def __post_init__(self):
        check_count("Chunked size", self.size)

    def pairs(self, i, j):
        return i // self.size == j // self.size

    def bounds(self, i_low, i_high, j_low, j_high):
        i_first, i_last, j_first, j_last = (x // self.size for x in (i_low, i_high, j_low, j_high))
        one = (i_first == i_last) & (j_first == j_last) & (i_first == j_first)
        return (i_first <= j_last) & (j_first <= i_last), one

    def visible(self, count, positions, causal):
        return jnp.minimum(count, positions % self.size + 1 if causal else self.size)

    @property
    def shift_invariant(self) -> bool:
        return False


@partial(jax.tree_util.register_dataclass, data_fields=["q_ids", "kv_ids"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Segments(Mask):
    """Query and key belong to one segment, and neither is padding: ``q_ids[i] == kv_ids[j] >= 0``.

    Negative ids are padding and match nothing, not even each other.

    Args:
        q_ids: int32 ``[batch, q]``, the segment of every query.
        kv_ids: int32 ``[batch, k]``, the segment of every key; that of the queries when left out.
    """

    q_ids: Int[Array, "batch q"]
    kv_ids: Int[Array, "batch k"] | None = None

    def __post_init__(self):
        if self.kv_ids is None:
            object.__setattr__(self, "kv_ids", self.q_ids)

    def allowed(self, q_positions, kv_positions):
        q, k = self.q_ids[:, None, :, None], self.kv_ids[:, None, None, :]
        return (q == k) & (q >= 0)

    def tiles(self, q: Extent, k: Extent):
        q_low, q_high = _block_extent(self.q_ids, q.size)
        k_low, k_high = _block_extent(self.kv_ids, k.size)
        q_low, q_high = q_low[:, None, :, None], q_high[:, None, :, None]
        k_low, k_high = k_low[:, None, None, :], k_high[:, None, None, :]
        some = (q_high >= 0) & (k_high >= 0) & (q_low <= k_high) & (k_low <= q_high)
        return some, (q_low >= 0) & (q_low == q_high) & (k_low == k_high) & (q_low == k_low)

    def queries(self, start, size):
        return Segments(jax.lax.dynamic_slice_in_dim(self.q_ids, start, size, axis=1), self.kv_ids)

    def keys(self, start, size):
        return Segments(self.q_ids, jax.lax.dynamic_slice_in_dim(self.kv_ids, start, size, axis=1))

    def row(self, index):
        pick = partial(jax.lax.dynamic_slice_in_dim, start_index=index, slice_size=1, axis=0)
        return Segments(pick(self.q_ids), pick(self.kv_ids))

    def pad(self, queries, keys):
        return Segments(_pad_ids(self.q_ids, queries), _pad_ids(self.kv_ids, keys))

    def check(self, batch, queries, keys):
        for name, ids, length in (("q_ids", self.q_ids, queries), ("kv_ids", self.kv_ids, keys)):
            found = jnp.shape(ids)
            check(found == (batch, length), f"Segments {name} must have shape {(batch, length)}, found {found}")
            integers = jnp.issubdtype(ids.dtype, jnp.integer)
            check(integers, f"Segments {name} must be integers, found {ids.dtype}")

    @property
    def batched(self):
        return True


def _pad_ids(ids, length: int):
    return jnp.pad(ids, ((0, 0), (0, length - ids.shape[1])), constant_values=-1)


def padding(valid: Bool[Array, "batch length"]) -> Segments:
    """The mask that hides padding: tokens where ``valid`` is false see nothing and are seen by nothing."""
    check_rank("valid", valid, 2, "[batch, length]")
    return Segments(jnp.where(valid, 0, -1).astype(jnp.int32))


class _Pair(Mask):
    """Two masks combined; what And and Or share."""

    left: Mask
    right: Mask

    def _map(self, method: str, *arguments):
        left, right = (getattr(part, method)(*arguments) for part in (self.left, self.right))
        return type(self)(left, right)

    def queries(self, start, size):
        return self._map("queries", start, size)

    def keys(self, start, size):
        return self._map("keys", start, size)

    def row(self, index):
        return self._map("row", index)

    def pad(self, queries, keys):
        return self._map("pad", queries, keys)

    def check(self, batch, queries, keys):
        self.left.check(batch, queries, keys)
        self.right.check(batch, queries, keys)

    @property
    def batched(self):
        return self.left.batched or self.right.batched

    @property
    def shift_invariant(self):
        return self.left.shift_invariant and self.right.shift_invariant


_pair = partial(jax.tree_util.register_dataclass, data_fields=["left", "right"], meta_fields=[])


@_pair
@dataclasses.dataclass(frozen=True)
class And(_Pair):
    """Allowed where both masks allow."""

    left: Mask
    right: Mask

    def visible(self, count, positions, causal):
        return jnp.minimum(*(part.visible(count, positions, causal) for part in (self.left, self.right)))

    def allowed(self, q_positions, kv_positions):
        return self.left.allowed(q_positions, kv_positions) & self.right.allowed(q_positions, kv_positions)

    def tiles(self, q, k):
        (some_l, all_l), (some_r, all_r) = self.left.tiles(q, k), self.right.tiles(q, k)
        return some_l & some_r, all_l & all_r


@_pair
@dataclasses.dataclass(frozen=True)
class Or(_Pair):
    """Allowed where at least one mask allows."""

    left: Mask
    right: Mask

    def visible(self, count, positions, causal):
        return jnp.minimum(count, sum(part.visible(count, positions, causal) for part in (self.left, self.right)))

    def allowed(self, q_positions, kv_positions):
        return self.left.allowed(q_positions, kv_positions) | self.right.allowed(q_positions, kv_positions)

    def tiles(self, q, k):
        (some_l, all_l), (some_r, all_r) = self.left.tiles(q, k), self.right.tiles(q, k)
        return some_l | some_r, all_l | all_r


def extent(positions: Positions, block: int) -> Extent:
    """The extent of every block of ``block`` tokens; the length must be a multiple of ``block``.

    For a ``Range`` with a static start it is computed in NumPy, hence known when tracing.
    """
    if isinstance(positions, Range):
        low = positions.start + np.arange(0, positions.length, block, dtype=np.int32)
        return Extent(low, low + (block - 1), block)
    return Extent(*_block_extent(with_head_axis(as_array(positions)), block), block)


def _block_extent(x, block: int):
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    return blocks.min(-1), blocks.max(-1)


def materialise(mask: Mask, q_positions: Positions, kv_positions: Positions) -> Bool[Array, "*b q k"]:
    """The whole mask as an array, ``[q, k]`` or ``[batch, heads or 1, q, k]``: quadratic, for tests and for the eye."""
    return mask.allowed(with_head_axis(as_array(q_positions)), with_head_axis(as_array(kv_positions)))


def tile_kinds(
    mask: Mask, q_positions: Positions, kv_positions: Positions, block_q: int, block_k: int
) -> Int8[Array, "*b nq nk"]:
    """``EMPTY``, ``MIXED`` or ``FULL`` for every tile of ``block_q`` queries and ``block_k`` keys.

    A tile that is called mixed may in truth be empty or full (only extents are looked at); the other two are certain.

    Raises:
        ValueError: if the lengths are not multiples of the blocks.
    """
    for name, positions, block in (("q_positions", q_positions, block_q), ("kv_positions", kv_positions, block_k)):
        length = as_array(positions).shape[-1]
        check(length % block == 0, f"{name} has length {length}, not a multiple of its block {block}")
    some, every = mask.tiles(extent(q_positions, block_q), extent(kv_positions, block_k))
    return jnp.where(every, FULL, jnp.where(some, MIXED, EMPTY)).astype(jnp.int8)
