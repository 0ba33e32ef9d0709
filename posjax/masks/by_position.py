"""Masks that are functions of the two integer positions alone."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from posjax._checks import check, check_count
from posjax.masks.base import Mask

_static = partial(jax.tree_util.register_dataclass, data_fields=[])


@partial(_static, meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """``j <= i``: a query sees the keys up to and including its own position."""

    def pairs(self, i, j):
        """``j <= i``."""
        return j <= i

    def bounds(self, i_low, i_high, j_low, j_high):
        """Some if the first key is not ahead of the last query, all if the last key is not ahead of the first query."""
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
        """``1 - size`` to ``size - 1``."""
        return 1 - self.size, self.size - 1

    def visible(self, count, positions, causal):
        """At most ``size`` keys if causal, otherwise ``2 size - 1``."""
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
        """``-floor((size - 1) / 2)`` to ``floor(size / 2)``."""
        return -((self.size - 1) // 2), self.size // 2

    def visible(self, count, positions, causal):
        """At most ``size`` keys; if causal those behind the query and its own, ``floor(size / 2) + 1``."""
        return jnp.minimum(count, self.size // 2 + 1 if causal else self.size)


@partial(_static, meta_fields=["size"])
@dataclasses.dataclass(frozen=True)
class Beyond(_Distances):
    """``i - j >= size``: the keys that ``Causal() & Window(size)`` leaves out, the far pairs of ReRoPE."""

    size: int

    @property
    def limits(self):
        """``size`` and no end."""
        return self.size, None

    def visible(self, count, positions, causal):
        """All but the last ``size`` keys if causal, otherwise counted as all."""
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
        """``least`` and ``most``, in chunks."""
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

    def pairs(self, i, j):
        """Whether the distance is a whole multiple of the dilation, fewer than ``size`` times."""
        distance = i - j
        return (distance % self._steps == 0) & (abs(distance) < self.size * self._steps)

    def bounds(self, i_low, i_high, j_low, j_high):
        """As for the window that it spans; where that has gaps no tile is surely full."""
        reach = (self.size - 1) * self._steps
        shortest, longest = i_low - j_high, i_high - j_low
        every = (shortest >= -reach) & (longest <= reach) & (self._steps == 1)
        return (longest >= -reach) & (shortest <= reach), every

    @property
    def retained(self):
        """No first keys, and as many recent ones as the most dilated head spans."""
        return 0, (self.size - 1) * max(self._each) + 1

    def visible(self, count, positions, causal):
        """As of the least dilated head: one count serves all heads, and from the widest reach on all agree."""
        return jnp.minimum(-(-count // min(self._each)), self.size if causal else 2 * self.size - 1)


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
        """``j < count``."""
        # ``i == i`` gives the tile its queries' shape.
        return (j < self.count) & (i == i)

    @property
    def retained(self):
        """The first ``count`` keys."""
        return self.count, 0

    def visible(self, count, positions, causal):
        """At most ``count`` keys."""
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
        """``i < count or j < count``."""
        return (i < self.count) | (j < self.count)

    @property
    def retained(self):
        """The first ``count`` keys."""
        return self.count, 0

    def visible(self, count, positions, causal):
        """All keys for the first ``count`` queries, at most ``count`` for the others."""
        return jnp.where(positions < self.count, count, jnp.minimum(count, self.count))


@partial(_static, meta_fields=["length"])
@dataclasses.dataclass(frozen=True)
class Prefix(_First):
    """``i < length and j < length``: the first ``length`` positions see each other both ways.

    ``Causal() | Prefix(n)`` is the mask of a prefix language model.
    """

    length: int

    def pairs(self, i, j):
        """``i < length and j < length``."""
        return (i < self.length) & (j < self.length)


@partial(_static, meta_fields=["size"])
@dataclasses.dataclass(frozen=True)
class Chunked(_Chunks):
    """``floor(i / size) == floor(j / size)``: attention inside chunks of ``size`` positions (Llama 4)."""

    size: int

    limits = (0, 0)

    def visible(self, count, positions, causal):
        """At most those of a chunk; if causal those up to the query's place in its own."""
        return jnp.minimum(count, positions % self.size + 1 if causal else self.size)
