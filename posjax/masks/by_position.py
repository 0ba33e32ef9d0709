"""Masks that depend only on the two integer positions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from posjax._checks import check
from posjax._numbers import LARGEST, align_ranks, is_array_number, register_numbers, whole_number
from posjax.masks.base import And, Combined, Mask, MaskOfHeads, Or

Size = int | Int[Array, ""]
"""With a Python int the tiles of the mask are known when tracing. An int32 scalar may be traced, and may differ between
the layers of a ``scan``. Its value cannot be checked: a size below 1 counts as 1, a count of first tokens below 0 as 0.
"""


def _sized(cls: type) -> type:
    """Registers a mask whose fields are sizes: static, or leaves if they are arrays."""
    return register_numbers(cls, tuple(field.name for field in dataclasses.fields(cls)))


@_sized
@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """``j <= i``: a query sees the keys up to and including its own position."""

    shift_invariant = True

    def pairs(self, i, j):
        """``j <= i``."""
        return j <= i

    def bounds(self, i_low, i_high, j_low, j_high):
        """Whether the first key is not ahead of the last query, and the last key not ahead of the first query."""
        return j_low <= i_high, j_high <= i_low


def hides_ahead(mask: Mask | None) -> bool:
    """Whether a mask is known to hide every key ahead of the query."""
    if isinstance(mask, And):
        return any(map(hides_ahead, mask.parts))
    if isinstance(mask, Or):
        return all(map(hides_ahead, mask.parts))
    return isinstance(mask, Causal)


class _Sized(Mask):
    """A mask whose fields are sizes: Python ints, or int32 scalars known only at run time."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            self._check(field.name)

    _least_traced = 1
    """Lower limit of sizes that are arrays, which cannot be checked."""

    def _check(self, name: str, at_least: int = 1) -> None:
        size = whole_number(f"{type(self).__name__} {name}", getattr(self, name), at_least)
        least = min(at_least, self._least_traced)
        object.__setattr__(self, name, jnp.maximum(size, least) if is_array_number(size) else size)

    @property
    def traced(self) -> tuple[str, ...]:
        """The names of the sizes that are arrays."""
        sizes = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return tuple(f"{type(self).__name__} {name}" for name, value in sizes if is_array_number(value))

    @property
    def kept_keys(self):
        return None if self.traced else self._kept_keys

    _kept_keys: tuple[int, int] | None = None
    """``kept_keys`` if all sizes are Python ints."""


def traced_sizes(mask: Mask | None) -> tuple[str, ...]:
    """The sizes of a mask that are arrays, such as ``"Window size"``."""
    if isinstance(mask, Combined):
        return sum(map(traced_sizes, mask.parts), ())
    if isinstance(mask, MaskOfHeads):
        return traced_sizes(mask.whole)
    return mask.traced if isinstance(mask, _Sized) else ()


def _at_least(i, j, least):
    """``i - j >= least`` for any two int32. Their difference may wrap: then its sign is wrong."""
    distance = i - j
    behind = i >= j
    no_wrap = behind == (distance >= 0)
    # `^ True` is `not` in a form that the kernels of all devices compile.
    return (no_wrap & (distance >= least)) | ((no_wrap ^ True) & behind)


def _between(i, j, least, most):
    """``least <= i - j <= most``, for any two int32; no upper limit if ``most`` is None."""
    far_enough = _at_least(i, j, least)
    return far_enough if most is None else far_enough & _at_least(j, i, -most)


def _around(i, j, before, after):
    """``i - before <= j <= i + after``, with both ends clipped to int32.

    The ends depend only on the query: in a TPU kernel this costs no more than a difference that may wrap.
    """
    return (j >= _larger(i, before - LARGEST - 1) - before) & (j <= _smaller(i, LARGEST - after) + after)


def _larger(i, j):
    return _module(i, j).maximum(i, j)


def _smaller(i, j):
    return _module(i, j).minimum(i, j)


def _module(*arrays):
    """NumPy if all arrays are known when tracing, otherwise ``jax.numpy``."""
    return jnp if any(map(is_array_number, arrays)) else np


def _some_and_all(i_low, i_high, j_low, j_high, least, most):
    """Whether some and whether all pairs of two ranges of positions have ``least <= i - j <= most``."""
    some, every = _at_least(i_high, j_low, least), _at_least(i_low, j_high, least)
    if most is None:
        return some, every
    return some & _at_least(j_high, i_low, -most), every & _at_least(j_low, i_high, -most)


class _Distances(_Sized):
    """``least <= i - j <= most`` for the pair ``limits``; ``most`` is None for no upper limit."""

    shift_invariant = True
    limits: tuple[int, int | None]
    _unit = 1  # how many positions count as one

    @property
    def _kept_keys(self):
        return None if self.limits[1] is None else (0, (self.limits[1] + 1) * self._unit)

    def pairs(self, i, j):
        i = _units(i, self._unit)
        j = _units(j, self._unit)
        least, most = self.limits
        if is_array_number(self._unit) or self._unit == 1:
            return _between(i, j, least, most)
        # With two or more positions in a chunk, two chunks are less than 2^31 apart: no wrap.
        distance = i - j
        return distance >= least if most is None else (distance >= least) & (distance <= most)

    def bounds(self, i_low, i_high, j_low, j_high):
        return _some_and_all(*(_units(x, self._unit) for x in (i_low, i_high, j_low, j_high)), *self.limits)


class _Around(_Distances):
    """``_Distances`` whose limits include the query's own position."""

    def pairs(self, i, j):
        least, most = self.limits
        return _around(i, j, most, -least)


def _units(positions, unit):
    """``floor(positions / unit)``, for arrays in a form that TPU kernels can compile without a TPU."""
    if not is_array_number(unit) and unit == 1:
        return positions
    if not isinstance(positions, jax.Array):
        return positions // unit
    unit = jnp.asarray(unit, positions.dtype)
    below = jax.lax.rem(positions, unit) < 0
    return jax.lax.div(positions, unit) - below.astype(positions.dtype)


class _Chunks(_Distances):
    """``_Distances`` of positions counted in chunks of ``size``."""

    size: Size
    shift_invariant = False

    @property
    def _unit(self):
        return self.size


@_sized
@dataclasses.dataclass(frozen=True)
class Window(_Around):
    """``|i - j| < size``: with ``Causal`` the last ``size`` keys, the query's own included.

    Without ``Causal`` it is the symmetric band of ``2 * size - 1`` keys that encoders use. ``Window(L)``, for a decoder
    trained at length ``L``, is the baseline of kexue.fm/archives/9431, where each token sees no more keys than in
    training; language models also need their first tokens, ``Window(L) | FirstTokens(n)`` (kexue.fm/archives/9948).

    Args:
        size: keys on each side, the query's own included.
    """

    size: Size

    @property
    def limits(self):
        """``1 - size`` to ``size - 1``."""
        return 1 - self.size, self.size - 1

    def visible(self, count, positions, causal):
        """At most ``size`` keys if causal, otherwise ``2 size - 1``."""
        return _at_most_around(count, self.size, causal)


@_sized
@dataclasses.dataclass(frozen=True)
class Band(_Around):
    """``-floor((size - 1) / 2) <= i - j <= floor(size / 2)``: ``size`` keys around the query, its own included.

    ``Band(L)`` is the bidirectional form of the baseline where each token sees ``L`` keys, the training length
    (kexue.fm/archives/9431, which does not say where the band lies; here it is centred). Near both ends of a sequence
    a token sees fewer keys, even if the sequence is not longer than ``L``.

    Args:
        size: keys on both sides together, the query's own included.
    """

    size: Size

    @property
    def limits(self):
        """``-floor((size - 1) / 2)`` to ``floor(size / 2)``."""
        return -((self.size - 1) // 2), self.size // 2

    def visible(self, count, positions, causal):
        """At most ``size`` keys; if causal ``floor(size / 2) + 1``, those behind the query and its own."""
        return jnp.minimum(count, self.size // 2 + 1 if causal else self.size)


@_sized
@dataclasses.dataclass(frozen=True)
class Beyond(_Distances):
    """``i - j >= size``: the keys that ``Causal() & Window(size)`` leaves out, the remapped pairs of ReRoPE."""

    size: Size

    @property
    def limits(self):
        """``size`` and no upper limit."""
        return self.size, None

    def pairs(self, i, j):
        """``j < i - size + 1``, clipped to int32."""
        return j < _larger(i, self.size - LARGEST - 2) - (self.size - 1)

    def visible(self, count, positions, causal):
        """All but the last ``size`` keys if causal, otherwise counted as all."""
        return jnp.maximum(count - self.size, 0) if causal else count


@_sized
@dataclasses.dataclass(frozen=True)
class ChunksApart(_Chunks):
    """``least <= floor(i / size) - floor(j / size) <= most``: how many chunks the key is before the query.

    Args:
        size: tokens of a chunk.
        least: fewest chunks, 0 for the query's own.
        most: most chunks, or None for no limit.
    """

    size: Size
    least: Size
    most: Size | None = None

    def __post_init__(self):
        self._check("size")
        ends = ("least",) if self.most is None else ("least", "most")
        for name in ends:
            self._check(name, at_least=-LARGEST)
        least, most = self.least, self.most
        known = most is not None and not is_array_number(least) and not is_array_number(most)
        check(not known or least <= most, f"ChunksApart needs least <= most, found {least!r} and {most!r}")

    @property
    def limits(self):
        """``least`` and ``most``, in chunks."""
        return self.least, self.most


@_sized
@dataclasses.dataclass(frozen=True)
class Dilated(_Sized):
    """``i - j = d m`` for a whole ``|m| < size``: a window of every ``d``-th key (Longformer, 2004.05150).

    Longformer's window of ``w`` keys in total with dilation ``d`` is ``Dilated(w // 2 + 1, d)``; with ``d = 1`` this is
    ``Window``. A tuple of dilations, one for each query head, gives the mask a head axis; Longformer dilates two heads
    of the upper layers.

    Args:
        size: keys on each side, the query's own included.
        dilation: ``d``, or a tuple of Python ints, one for each head.
    """

    size: Size
    dilation: Size | tuple[int, ...]
    shift_invariant = True

    def __post_init__(self):
        self._check("size")
        check(self._each != (), "Dilated dilation is empty: give one for each query head, or one number for all")
        each = tuple(whole_number("Dilated dilation", dilation) for dilation in self._each)
        object.__setattr__(self, "dilation", each if isinstance(self.dilation, tuple) else each[0])
        known = not any(map(is_array_number, (self.size, *each)))
        span = known and (self.size - 1) * max(each)
        check(span <= LARGEST, f"Dilated size and dilation span {span} positions, more than int32 can hold")

    @property
    def _each(self) -> tuple:
        return self.dilation if isinstance(self.dilation, tuple) else (self.dilation,)

    @property
    def _steps(self):
        """The dilations, with axes for batch, heads, queries and keys if they differ."""
        if not isinstance(self.dilation, tuple):
            return self.dilation
        return np.reshape(np.asarray(self.dilation, np.int32), (1, -1, 1, 1))

    def _for_heads(self, *positions):
        """The positions with an axis for the heads, if dilations differ."""
        return align_ranks(np.zeros((1,) * 4), *positions)[1:] if isinstance(self.dilation, tuple) else positions

    def pairs(self, i, j):
        """Whether the distance is a multiple of the dilation, by a whole number below ``size`` in absolute value."""
        i, j = self._for_heads(i, j)
        reach = (self.size - 1) * self._steps
        return ((i - j) % self._steps == 0) & _around(i, j, reach, reach)

    def bounds(self, i_low, i_high, j_low, j_high):
        """The bounds of the window that the keys span; if the window has gaps, no tile is certainly full."""
        reach = (self.size - 1) * self._steps
        some, every = _some_and_all(*self._for_heads(i_low, i_high, j_low, j_high), -reach, reach)
        return some, every & (self._steps == 1)

    @property
    def _kept_keys(self):
        """No first keys, and the span of the most dilated head as recent ones."""
        return 0, (self.size - 1) * max(self._each) + 1

    def visible(self, count, positions, causal):
        """The count of the least dilated head, for all heads; they all agree if ``count`` exceeds the widest span."""
        least = min(self.dilation) if isinstance(self.dilation, tuple) else self.dilation
        return _at_most_around(-(-count // least), self.size, causal)


def _at_most_around(count, size, causal: bool):
    """At most ``size`` keys up to the query's own, and if not causal ``size - 1`` after it."""
    return jnp.minimum(count, size) if causal else jnp.minimum(count - size, size - 1) + size


class _First(_Sized):
    """A mask of the first positions: a pair that it allows is also allowed at any earlier positions."""

    _least_traced = 0

    def bounds(self, i_low, i_high, j_low, j_high):
        return self.pairs(i_low, j_low), self.pairs(i_high, j_high)


@_sized
@dataclasses.dataclass(frozen=True)
class FirstTokens(_First):
    """``j < count``: every query sees the first ``count`` positions.

    Models attend to them strongly (attention sinks). ``Causal() & (Window(w) | FirstTokens(n))`` is the lambda-shaped
    mask of StreamingLLM (arXiv 2309.17453) and LM-Infinite.

    Args:
        count: how many first positions every query sees.
    """

    count: Size

    def pairs(self, i, j):
        """``j < count``."""
        # ``i == i`` broadcasts the result to the shape of the queries.
        return (j < self.count) & (i == i)

    @property
    def _kept_keys(self):
        """The first ``count`` keys."""
        return self.count, 0

    def visible(self, count, positions, causal):
        """At most ``count`` keys."""
        return jnp.minimum(count, self.count)


@_sized
@dataclasses.dataclass(frozen=True)
class GlobalFirst(_First):
    """``i < count or j < count``: the first ``count`` positions see all and are seen by all (Longformer, BigBird).

    ``Window(w // 2 + 1) | GlobalFirst(n)`` is Longformer's attention with its first ``n`` tokens global, but with one
    set of projections (Longformer has a second set for global tokens). For global tokens at any position see
    ``Globals``.
    """

    count: Size

    def pairs(self, i, j):
        """``i < count or j < count``."""
        return (i < self.count) | (j < self.count)

    @property
    def _kept_keys(self):
        """The first ``count`` keys."""
        return self.count, 0

    def visible(self, count, positions, causal):
        """All keys for the first ``count`` queries, at most ``count`` for the others."""
        return jnp.where(positions < self.count, count, jnp.minimum(count, self.count))


@_sized
@dataclasses.dataclass(frozen=True)
class Prefix(_First):
    """``i < length and j < length``: the first ``length`` positions see each other both ways.

    ``Causal() | Prefix(n)`` is the mask of a prefix language model.
    """

    length: Size

    def pairs(self, i, j):
        """``i < length and j < length``."""
        return (i < self.length) & (j < self.length)


@_sized
@dataclasses.dataclass(frozen=True)
class Chunked(_Chunks):
    """``floor(i / size) == floor(j / size)``: attention inside chunks of ``size`` positions (Llama 4).

    Args:
        size: tokens of a chunk.
    """

    size: Size

    limits = (0, 0)

    def visible(self, count, positions, causal):
        """At most the keys of a chunk; if causal, those of its own chunk up to the query."""
        return jnp.minimum(count, positions % self.size + 1 if causal else self.size)
