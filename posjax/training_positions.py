"""Rules that draw the positions for training and give those for evaluation: randomised, equal-mean, CLEX and PoSE.

A model that has seen only the positions 0 .. N - 1 has not learned larger ones. With these rules it sees larger
positions on rows of N tokens. The rules change no parameter and no method: a model takes the drawn values as its
``positions``, ``coordinates`` and ``length`` arguments.

A rule, ``PositionRule``, has two methods, ``draw(key, batch, length)`` for training and ``evaluate(length)``. Both are
pure functions of their arguments, under ``jit`` too, with ``batch`` and ``length`` static.

Ids are distinct and increase along a row, so a causal mask over ids is the causal mask over tokens. Windows and biases
measure distances in ids; scales that count visible keys count tokens. Real-valued coordinates are for encodings that
are functions of them (rotary, sinusoidal); masks and biases still read the token index.
"""

import abc
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32, Key

from posjax._checks import check, check_choice, check_count, check_counts, check_positive
from posjax._numbers import LARGEST


class PositionSample(NamedTuple):
    """What a rule draws for a batch; None means the model's default.

    Args:
        positions: ids, int32 ``[batch, length]``, or ``[length]`` where all rows share them; default 0, 1, 2, ...
        coordinates: real-valued positions, float32 ``[batch, length, 1]``, that features and embeddings read instead.
        length: the current length for schemes that read it, an int32 scalar; default the number of tokens.
    """

    positions: Int32[Array, "*batch length"] | None = None
    coordinates: Float[Array, "batch length 1"] | None = None
    length: Int32[Array, ""] | None = None


class PositionRule(abc.ABC):
    """The base class of rules. A rule is a frozen, hashable dataclass."""

    reach: int | None = None
    """The number of ids, from 0, that it draws from; None if that is the length of a row."""

    @abc.abstractmethod
    def draw(self, key: Key[Array, ""], batch: int, length: int) -> PositionSample:
        """Positions of ``batch`` rows of ``length`` tokens for one step of training."""

    def evaluate(self, length: int, *, key: Key[Array, ""] | None = None, batch: int = 1) -> PositionSample:
        """Positions of rows of ``length`` tokens for evaluation; rules that draw them read ``key`` and ``batch``.

        By default the plain positions 0, 1, 2, ..., and the rows' own length.
        """
        _check_rows(batch, length)
        return PositionSample()


def sorted_subset(
    key: Key[Array, ""], batch: int, count: int, size: int, limit: int | Int[Array, ""] | None = None
) -> Int32[Array, "batch count"]:
    """A uniform subset of ``count`` of the ids 0 .. size - 1 for every row, sorted, without replacement.

    ``limit``, which may be traced and must be at least ``count``, keeps only ids below it. A row is the indices of the
    ``count`` largest of ``size`` random words; time and memory are O(batch * size). ValueError if count > size.
    """
    check(0 <= count <= size, f"count must be from 0 to size={size}, found {count}")
    words = jax.random.bits(key, (batch, size), jnp.uint32) | jnp.uint32(1)
    if limit is not None:
        words = jnp.where(jnp.arange(size) < limit, words, jnp.uint32(0))
    return jnp.sort(jax.lax.top_k(words, count)[1].astype(jnp.int32), axis=-1)


def _check_rows(batch: int, length: int, at_least: int = 1, max_length: int = LARGEST) -> None:
    check_counts(batch=batch, length=length)
    check(length >= at_least, f"length must be at least {at_least} for this rule, found {length}")
    check(length <= max_length, f"length {length} is above max_length={max_length}: there are fewer ids than tokens")


@dataclass(frozen=True)
class Randomised(PositionRule):
    """Ids drawn from 0 .. max_length - 1 without replacement and sorted (Ruoss et al., arXiv 2305.16843, section 3).

    The k-th of N ids is k (max_length + 1)/(N + 1) - 1 on average, k = 1 .. N. The paper draws once per batch; here
    every row has its own ids.

    Args:
        max_length: at least every length used; the paper trains on at most 40 tokens, tests up to 500 and uses 2048.
        test: ``"even"``, the averages above rounded down (kexue.fm/archives/9444 finds evenly spaced ids better); or
            ``"random"``, drawn as in training, as in the paper.
    """

    max_length: int = 2048
    test: str = "even"

    def __post_init__(self):
        check_count("max_length", self.max_length)
        check(self.max_length <= LARGEST, f"max_length must fit in int32, found {self.max_length}")
        check_choice("test", self.test, ("even", "random"))

    @property
    def reach(self):
        """``max_length``."""
        return self.max_length

    def draw(self, key: Key[Array, ""], batch: int, length: int) -> PositionSample:
        """Ids ``[batch, length]``. Raises ValueError for a length above ``max_length``."""
        _check_rows(batch, length, max_length=self.max_length)
        return PositionSample(sorted_subset(key, batch, length, self.max_length))

    def evaluate(self, length: int, *, key: Key[Array, ""] | None = None, batch: int = 1) -> PositionSample:
        """Even ids ``[length]``, or with ``test="random"`` fresh ones ``[batch, length]``, which need ``key``."""
        _check_rows(batch, length, max_length=self.max_length)
        if self.test == "even":
            means = np.arange(1, length + 1) * ((self.max_length + 1) / (length + 1)) - 1
            # Means are at least 1 apart and at most max_length - 1, so rounding down keeps them distinct and in range.
            return PositionSample(jnp.asarray(np.floor(means + 1e-9), jnp.int32))
        check(key is not None, 'test="random" draws positions at evaluation too: pass key=')
        return self.draw(key, batch, length)


@dataclass(frozen=True)
class EqualMean(PositionRule):
    """Real-valued grids 0, s, 2s, ... with a random step s of mean 1 for every row (kexue.fm/archives/9444).

    The article stretches linspace(0, 1, N) by a random n of mean N, so that the mean grid in training is the start of
    the grid 0, 1, 2, ... of any longer test. Its mean step is N/(N - 1). Here the grid is stretched by n (N - 1)/N, so
    the mean step is exactly 1 for rows of any length, and s = n/N:

        exponential:  s ~ Exp(1)                               n ~ Exp of mean N, the article's best
        beta:         s ~ factor Beta(alpha, alpha (factor - 1))      n ~ M Beta of mean N, M = factor N

    The article gives no alpha; with alpha = 1 the beta tends to the exponential as the factor grows. It is only for
    encodings that are functions of a real position (rotary, sinusoidal), and is meant for encoders: tables, biases and
    masks read the token index.

    Args:
        distribution: ``"exponential"`` or ``"beta"``.
        factor: M/N, above 1, the longest test length divided by the training length; only beta uses it.
        alpha: the first parameter of the beta distribution.
    """

    distribution: str = "exponential"
    factor: float = 8.0
    alpha: float = 1.0

    def __post_init__(self):
        check_choice("distribution", self.distribution, ("exponential", "beta"))
        check_positive("alpha", self.alpha)
        check_positive("factor", self.factor)
        check(1 < self.factor < math.inf, f"factor must be above 1: it is M/N; found {self.factor!r}")

    def draw(self, key: Key[Array, ""], batch: int, length: int) -> PositionSample:
        """Coordinates ``[batch, length, 1]``, float32."""
        _check_rows(batch, length)
        if self.distribution == "exponential":
            step = jax.random.exponential(key, (batch, 1, 1), jnp.float32)
        else:
            beta = self.alpha * (self.factor - 1)
            step = self.factor * jax.random.beta(key, self.alpha, beta, (batch, 1, 1), jnp.float32)
        return PositionSample(coordinates=step * jnp.arange(length, dtype=jnp.float32)[:, None])


@dataclass(frozen=True)
class ClexPositions(PositionRule):
    """Ids of a text t times as long as its rows, for training CLEX (Chen et al., arXiv 2310.16450).

    Each batch draws one factor t, uniform over 1 .. max_factor. Each row of N tokens draws a sorted subset of
    0 .. t N - 1 that includes both ends. The current length is t original_length, so CLEX uses the frequencies of
    factor t. In rows of N >= 2 original_length these ids are divided by c = N // original_length, so they are real.

    The published code has the last id at t N // c - 1, which for c > 2 may be smaller than the id before it; here it is
    (t N - 1)/c, the same for c = 1. Memory while drawing is O(batch max_factor N).

    Args:
        original_length: the length in tokens of the model's earlier training.
        max_factor: the largest t.
    """

    original_length: int
    max_factor: int = 16

    def __post_init__(self):
        check_counts(original_length=self.original_length, max_factor=self.max_factor)
        reach = self.original_length * self.max_factor
        check(reach <= LARGEST, f"original_length * max_factor must fit in int32, found {reach}")

    def draw(self, key: Key[Array, ""], batch: int, length: int) -> PositionSample:
        """Ids ``[batch, length]`` (or coordinates, see above) and the current length; rows need two tokens or more."""
        _check_rows(batch, length, at_least=2)
        for_factor, for_ids = jax.random.split(key)
        factor = jax.random.randint(for_factor, (), 1, self.max_factor + 1, jnp.int32)
        inside = sorted_subset(for_ids, batch, length - 2, self.max_factor * length - 2, factor * length - 2) + 1
        ends = [jnp.full((batch, 1), end, jnp.int32) for end in (0, factor * length - 1)]
        ids = jnp.concatenate([ends[0], inside, ends[1]], axis=1)
        current = factor * self.original_length
        shrink = length // self.original_length
        if shrink < 2:
            return PositionSample(ids, None, current)
        return PositionSample(None, (ids / jnp.float32(shrink))[..., None], current)


@dataclass(frozen=True)
class PoSE(PositionRule):
    """Rows cut into chunks whose ids skip ahead at random (Zhu et al., arXiv 2309.10400).

    Every row is cut at random into ``chunks`` runs of consecutive ids. Run i is moved ahead by u_i, with u_0 = 0 and
    u_i uniform over u_{i-1} .. max_length - N, so that N tokens reach every distance below ``max_length``. Cuts are
    uniform over the row; the published code makes the first of its two chunks the shorter one.

    Args:
        max_length: the length to reach.
        chunks: how many runs, 2 in the paper.
    """

    max_length: int
    chunks: int = 2

    def __post_init__(self):
        check_counts(max_length=self.max_length, chunks=self.chunks)
        check(self.chunks > 1, "chunks must be 2 or more: one chunk is the plain positions")
        check(self.max_length < LARGEST, f"max_length must fit in int32, found {self.max_length}")

    @property
    def reach(self):
        """``max_length``."""
        return self.max_length

    def draw(self, key: Key[Array, ""], batch: int, length: int) -> PositionSample:
        """Ids ``[batch, length]``. Raises ValueError for a length above ``max_length`` or below ``chunks``."""
        _check_rows(batch, length, at_least=self.chunks, max_length=self.max_length)
        for_cuts, *keys = jax.random.split(key, self.chunks)
        cuts = sorted_subset(for_cuts, batch, self.chunks - 1, length - 1) + 1
        index = jnp.arange(length, dtype=jnp.int32)
        shift = jnp.zeros((batch, 1), jnp.int32)
        ids = index + shift
        for n, for_skip in enumerate(keys):
            next_shift = jax.random.randint(for_skip, (batch, 1), shift, self.max_length - length + 1, jnp.int32)
            ids = jnp.where(index >= cuts[:, n : n + 1], index + next_shift, ids)
            shift = next_shift
        return PositionSample(ids)


RULES: dict[str, type] = {"randomised": Randomised, "equal-mean": EqualMean, "clex": ClexPositions, "pose": PoSE}
"""The rules by the names that configurations use."""
