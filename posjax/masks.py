"""Typed, lazy, composable masks: which key each query may see.

A mask is a value, never an ``n x n`` array, until a tile of it is asked for. Two kinds exist:

* position masks are pure functions of the two integer positions: ``Causal``, ``Window``, ``Band``, ``Dilated``,
  ``Sinks``, ``GlobalFirst``, ``Chunked``, ``Prefix``, and those that select the far pairs of ``posjax.far``, ``Beyond``
  and ``ChunksApart``;
* ``Segments`` carries the segment ids of the tokens, ``Globals`` their flags.

They compose with ``&`` and ``|``. Every mask is a registered pytree: hyper-parameters are static metadata, arrays are
leaves. Every mask can also say for a tile, from the extent of its positions alone, whether it is empty, full or mixed,
so that an attention loop never visits an empty tile and never masks a full one.

Shapes. Positions arrive as ``[n]`` (shared by the batch) or ``[batch, 1, n]``; a tile is ``[queries, keys]`` or
``[batch or 1, heads or 1, queries, keys]``. Positions are those of the tokens, not of the buffer, so left padding,
packing, decoding and reordered sequences need nothing special.
"""

import dataclasses
import operator
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
        allow are counted twice, though never beyond ``count``: exact for ``Window(w) | Sinks(n)`` if ``causal``. Where
        queries see both sides, those near an end are counted as if the keys went on.
        """
        return count

    @property
    def retained(self) -> tuple[int, int] | None:
        """``(first, recent)``: a causal query sees no more than the ``first`` and the ``recent`` last keys. Or None."""
        return None

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


class _Counted(Mask):
    """A mask whose every field is a count."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            check_count(f"{type(self).__name__} {field.name}", getattr(self, field.name))


class _Distances(_Counted):
    """``least <= i - j <= most`` for the pair ``limits``; ``most`` is None where there is no end."""

    limits: tuple[int, int | None]
    _unit = 1  # positions that count as one

    @property
    def retained(self):
        return None if self.limits[1] is None else (0, (self.limits[1] + 1) * self._unit)

    def pairs(self, i, j):
        distance, (least, most) = _units(i, self._unit) - _units(j, self._unit), self.limits
        return distance >= least if most is None else (distance >= least) & (distance <= most)

    def bounds(self, i_low, i_high, j_low, j_high):
        i_low, i_high, j_low, j_high = (x // self._unit for x in (i_low, i_high, j_low, j_high))
        shortest, longest, (least, most) = i_low - j_high, i_high - j_low, self.limits
        if most is None:
            return longest >= least, shortest >= least
        return (longest >= least) & (shortest <= most), (shortest >= least) & (longest <= most)


def _units(positions, unit: int):
    """``floor(positions / unit)``, for arrays in a form that TPU kernels can compile without a TPU at hand."""
    if unit == 1:
        return positions
    if not isinstance(positions, jax.Array):
        return positions // unit
    return jax.lax.div(positions - positions % unit, jnp.asarray(unit, positions.dtype))


class _Chunks(_Distances):
    """The same with positions counted in chunks of ``size``."""

    size: int
    shift_invariant = False

    @property
    def _unit(self):
        return self.size


@partial(_static, meta_fields=["size"])
@dataclasses.dataclass(frozen=True)
class Window(_Distances):
    """``|i - j| < size``: with ``Causal`` the last ``size`` keys, the query's own included.

    Without ``Causal`` it is the symmetric band of ``2 * size - 1`` keys that encoders use. ``Window(L)``, for a decoder
    trained at length ``L``, is the baseline of kexue.fm/archives/9431, where each token sees no more keys than in
    training; language models also need their first tokens, ``Window(L) | Sinks(n)`` (kexue.fm/archives/9948).
    """

    size: int

    @property
    def limits(self):
        return 1 - self.size, self.size - 1

    def visible(self, count, positions, causal):
        return jnp.minimum(count, self.size if causal else 2 * self.size - 1)


@partial(_static, meta_fields=["size"])
@dataclasses.dataclass(frozen=True)
class Band(_Distances):
    """``-floor((size - 1) / 2) <= i - j <= floor(size / 2)``: ``size`` keys around the query, its own included.

    ``Band(L)`` is the bidirectional form of the baseline where each token sees ``L`` keys, the training length
    (kexue.fm/archives/9431, which leaves open where the band lies; here it is centred). Near both ends of a sequence
    there are fewer, also in one no longer than ``L``.
    """

    size: int

    @property
    def limits(self):
        return -((self.size - 1) // 2), self.size // 2

    def visible(self, count, positions, causal):
        return jnp.minimum(count, self.size // 2 + 1 if causal else self.size)


@partial(_static, meta_fields=["size"])
@dataclasses.dataclass(frozen=True)
class Beyond(_Distances):
    """``i - j >= size``: the keys that ``Causal() & Window(size)`` leaves out, the far pairs of ReRoPE."""

    size: int

    @property
    def limits(self):
        return self.size, None

    def visible(self, count, positions, causal):
        return jnp.maximum(count - self.size, 0) if causal else count


@partial(_static, meta_fields=["size", "least", "most"])
@dataclasses.dataclass(frozen=True)
class ChunksApart(_Chunks):
    """``least <= floor(i / size) - floor(j / size) <= most``: the key is so many chunks of ``size`` before the query.

    Args:
        size: tokens of a chunk.
        least: fewest chunks, 0 being the query's own.
        most: most chunks, or None for all that are further back.
    """

    size: int
    least: int
    most: int | None = None

    def __post_init__(self):
        check_count("ChunksApart size", self.size)
        ends = f"least <= most, found {self.least!r} and {self.most!r}"
        check(self.most is None or self.least <= self.most, f"ChunksApart wants {ends}")

    @property
    def limits(self):
        return self.least, self.most


@partial(_static, meta_fields=["size", "dilation"])
@dataclasses.dataclass(frozen=True)
class Dilated(Mask):
    """``i - j = d m`` for a whole ``|m| < size``: a window that looks at every ``d``-th key (Longformer, 2004.05150).

    Longformer's window of ``w`` keys in total with dilation ``d`` is ``Dilated(w // 2 + 1, d)``; with ``d = 1`` this is
    ``Window``. A tuple of dilations, one for each query head, gives the mask a head axis; Longformer dilates two heads
    of the upper layers.

    Args:
        size: keys on each side, the query's own included.
        dilation: ``d``, or one for each head.
    """

    size: int
    dilation: int | tuple[int, ...]

    def __post_init__(self):
        check_count("Dilated size", self.size)
        check(self._each != (), "Dilated dilation is empty: give one for each query head, or one number for all")
        for dilation in self._each:
            check_count("Dilated dilation", dilation)

    @property
    def _each(self) -> tuple[int, ...]:
        return self.dilation if isinstance(self.dilation, tuple) else (self.dilation,)

    @property
    def _steps(self):
        """The dilations, with axes for batch, heads, queries and keys if they differ."""
        return np.reshape(self._each, (1, -1, 1, 1)) if isinstance(self.dilation, tuple) else self.dilation

    def heads(self, start, size):
        return _OfHeads(self, jnp.asarray(start, jnp.int32), size) if isinstance(self.dilation, tuple) else self

    def pairs(self, i, j):
        distance = i - j
        return (distance % self._steps == 0) & (abs(distance) < self.size * self._steps)

    def bounds(self, i_low, i_high, j_low, j_high):
        reach = (self.size - 1) * self._steps
        shortest, longest = i_low - j_high, i_high - j_low
        every = (shortest >= -reach) & (longest <= reach) & (self._steps == 1)
        return (longest >= -reach) & (shortest <= reach), every

    @property
    def retained(self):
        return 0, (self.size - 1) * max(self._each) + 1

    def visible(self, count, positions, causal):
        """As of the least dilated head: one count serves all heads, and from the widest reach on all agree."""
        return jnp.minimum(-(-count // min(self._each)), self.size if causal else 2 * self.size - 1)


@partial(jax.tree_util.register_dataclass, data_fields=["start"], meta_fields=["whole", "size"])
@dataclasses.dataclass(frozen=True)
class _OfHeads(Mask):
    """A position mask with one pattern for each head, narrowed to the ``size`` heads from ``start``."""

    whole: Mask
    start: Int[Array, ""]
    size: int

    def heads(self, start, size):
        return _OfHeads(self.whole, self.start + start, size)

    def _narrow(self, found):
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(found), self.start, self.size, axis=1)

    def pairs(self, i, j):
        return self._narrow(self.whole.pairs(i, j))

    def bounds(self, i_low, i_high, j_low, j_high):
        some, every = self.whole.bounds(i_low, i_high, j_low, j_high)
        return self._narrow(some), self._narrow(every)

    @property
    def retained(self):
        return self.whole.retained


class _First(_Counted):
    """A mask of the first positions: what it allows two positions it allows all earlier ones."""

    shift_invariant = False

    def bounds(self, i_low, i_high, j_low, j_high):
        return self.pairs(i_low, j_low), self.pairs(i_high, j_high)


@partial(_static, meta_fields=["count"])
@dataclasses.dataclass(frozen=True)
class Sinks(_First):
    """``j < count``: every query sees the first ``count`` positions.

    ``Causal() & (Window(w) | Sinks(n))`` is the lambda-shaped mask of StreamingLLM (arXiv 2309.17453) and LM-Infinite.
    """

    count: int

    def pairs(self, i, j):
        # ``i == i`` gives the tile its queries' shape.
        return (j < self.count) & (i == i)

    @property
    def retained(self):
        return self.count, 0

    def visible(self, count, positions, causal):
        return jnp.minimum(count, self.count)


@partial(_static, meta_fields=["count"])
@dataclasses.dataclass(frozen=True)
class GlobalFirst(_First):
    """``i < count or j < count``: the first ``count`` positions see all and are seen by all (Longformer, BigBird).

    ``Window(w // 2 + 1) | GlobalFirst(n)`` is Longformer's attention with its first ``n`` tokens global, by one set of
    projections (Longformer itself has a second one for global tokens). For global tokens anywhere see ``Globals``.
    """

    count: int

    def pairs(self, i, j):
        return (i < self.count) | (j < self.count)

    @property
    def retained(self):
        return self.count, 0

    def visible(self, count, positions, causal):
        return jnp.where(positions < self.count, count, jnp.minimum(count, self.count))


@partial(_static, meta_fields=["length"])
@dataclasses.dataclass(frozen=True)
class Prefix(_First):
    """``i < length and j < length``: the first ``length`` positions see each other both ways.

    ``Causal() | Prefix(n)`` is the mask of a prefix language model.
    """

    length: int

    def pairs(self, i, j):
        return (i < self.length) & (j < self.length)


@partial(_static, meta_fields=["size"])
@dataclasses.dataclass(frozen=True)
class Chunked(_Chunks):
    """``floor(i / size) == floor(j / size)``: attention inside chunks of ``size`` positions (Llama 4)."""

    size: int

    limits = (0, 0)

    def visible(self, count, positions, causal):
        return jnp.minimum(count, positions % self.size + 1 if causal else self.size)


class OfTokens(Mask):
    """A mask that carries ``[batch, q]`` of the queries and ``[batch, k]`` of the keys, that of the queries if None.

    A pair is allowed if ``meet`` says so of the two tokens' numbers; positions play no part.
    """

    _filler: int
    """What a token that padding adds gets."""

    @staticmethod
    def meet(q, k):
        """Whether a query may see a key, for numbers that broadcast against each other."""
        raise NotImplementedError

    @property
    def arrays(self) -> tuple[Array, Array]:
        """The numbers of the queries and of the keys."""
        q, k = (getattr(self, field.name) for field in dataclasses.fields(self))
        return q, k

    def __post_init__(self):
        q, k = dataclasses.fields(self)
        if getattr(self, k.name) is None:
            object.__setattr__(self, k.name, getattr(self, q.name))

    def allowed(self, q_positions, kv_positions):
        return self.meet(*self._columns())

    def _columns(self):
        """Both arrays, as ``[batch, 1, q, 1]`` and ``[batch, 1, 1, k]``."""
        q, k = self.arrays
        return q[:, None, :, None], k[:, None, None, :]

    def _extents(self, q: Extent, k: Extent):
        """The masks of the smallest and of the largest value in every block."""
        blocks = (_block_extent(x, size) for x, size in zip(self.arrays, (q.size, k.size), strict=True))
        return (type(self)(*ends) for ends in zip(*blocks, strict=True))

    def queries(self, start, size):
        q, k = self.arrays
        return type(self)(jax.lax.dynamic_slice_in_dim(q, start, size, axis=1), k)

    def keys(self, start, size):
        q, k = self.arrays
        return type(self)(q, jax.lax.dynamic_slice_in_dim(k, start, size, axis=1))

    def row(self, index):
        pick = partial(jax.lax.dynamic_slice_in_dim, start_index=index, slice_size=1, axis=0)
        return type(self)(*map(pick, self.arrays))

    def pad(self, queries, keys):
        missing = (queries - self.arrays[0].shape[1], keys - self.arrays[1].shape[1])
        pairs = zip(self.arrays, missing, strict=True)
        return type(self)(*(jnp.pad(x, ((0, 0), (0, more)), constant_values=self._filler) for x, more in pairs))

    def map_tokens(self, queries, keys):
        q, k = self.arrays
        return type(self)(queries(q), keys(k))

    def check(self, batch, queries, keys):
        kind, wanted = type(self).__name__, "integers" if self._dtype is jnp.integer else "boolean"
        for field, array, length in zip(dataclasses.fields(self), self.arrays, (queries, keys), strict=True):
            name, found = field.name, jnp.shape(array)
            check(found == (batch, length), f"{kind} {name} must have shape {(batch, length)}, found {found}")
            fits = jnp.issubdtype(array.dtype, self._dtype)
            check(fits, f"{kind} {name} must be {wanted}, found {array.dtype}")

    @property
    def batched(self):
        return True


_of_tokens = partial(jax.tree_util.register_dataclass, meta_fields=[])


@partial(_of_tokens, data_fields=["q_ids", "kv_ids"])
@dataclasses.dataclass(frozen=True)
class Segments(OfTokens):
    """Query and key belong to one segment, and neither is padding: ``q_ids[i] == kv_ids[j] >= 0``.

    Negative ids are padding and match nothing, not even each other.

    Args:
        q_ids: int32 ``[batch, q]``, the segment of every query.
        kv_ids: int32 ``[batch, k]``, the segment of every key; that of the queries when left out.
    """

    q_ids: Int[Array, "batch q"]
    kv_ids: Int[Array, "batch k"] | None = None

    _filler, _dtype = -1, jnp.integer

    @staticmethod
    def meet(q, k):
        return (q == k) & (q >= 0)

    def tiles(self, q: Extent, k: Extent):
        (q_low, k_low), (q_high, k_high) = (ends._columns() for ends in self._extents(q, k))
        some = (q_high >= 0) & (k_high >= 0) & (q_low <= k_high) & (k_low <= q_high)
        return some, (q_low >= 0) & (q_low == q_high) & (k_low == k_high) & (q_low == k_low)


@partial(_of_tokens, data_fields=["q_flags", "kv_flags"])
@dataclasses.dataclass(frozen=True)
class Globals(OfTokens):
    """``q_flags[i] or kv_flags[j]``: tokens with a flag see all and are seen by all (Longformer, 2004.05150).

    ``(Window(w // 2 + 1) | Globals(flags)) & padding(valid)`` is Longformer's attention.

    Args:
        q_flags: bool ``[batch, q]``, whether a query is global.
        kv_flags: bool ``[batch, k]``, whether a key is; those of the queries when left out.
    """

    q_flags: Bool[Array, "batch q"]
    kv_flags: Bool[Array, "batch k"] | None = None

    _filler, _dtype = False, jnp.bool_

    @staticmethod
    def meet(q, k):
        return (q | k) != 0

    def tiles(self, q: Extent, k: Extent):
        every, some = (ends.allowed(None, None) for ends in self._extents(q, k))
        return some, every


def padding(valid: Bool[Array, "batch length"]) -> Segments:
    """The mask that hides padding: tokens where ``valid`` is false see nothing and are seen by nothing."""
    check_rank("valid", valid, 2, "[batch, length]")
    return Segments(jnp.where(valid, 0, -1).astype(jnp.int32))


class Pair(Mask):
    """Two masks combined by ``join``; what And and Or share."""

    left: Mask
    right: Mask

    def allowed(self, q_positions, kv_positions):
        return self.join(*(part.allowed(q_positions, kv_positions) for part in (self.left, self.right)))

    def tiles(self, q, k):
        (some, every), (some_right, every_right) = self.left.tiles(q, k), self.right.tiles(q, k)
        return self.join(some, some_right), self.join(every, every_right)

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

    def map_tokens(self, queries, keys):
        return self._map("map_tokens", queries, keys)

    def heads(self, start, size):
        return self._map("heads", start, size)

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
class And(Pair):
    """Allowed where both masks allow."""

    left: Mask
    right: Mask

    join = staticmethod(operator.and_)

    @property
    def retained(self):
        found = [part.retained for part in (self.left, self.right) if part.retained is not None]
        return min(found, key=sum, default=None)

    def visible(self, count, positions, causal):
        return jnp.minimum(*(part.visible(count, positions, causal) for part in (self.left, self.right)))


@_pair
@dataclasses.dataclass(frozen=True)
class Or(Pair):
    """Allowed where at least one mask allows."""

    left: Mask
    right: Mask

    join = staticmethod(operator.or_)

    @property
    def retained(self):
        left, right = self.left.retained, self.right.retained
        return None if left is None or right is None else (max(left[0], right[0]), max(left[1], right[1]))

    def visible(self, count, positions, causal):
        return jnp.minimum(count, sum(part.visible(count, positions, causal) for part in (self.left, self.right)))


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
