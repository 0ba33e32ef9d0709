"""Distance remapping: pairs beyond a boundary are scored by a second pair of feature maps.

Methods such as ReRoPE score near pairs by their true distance. Distant pairs are remapped: they are scored by another
distance that the model has seen in training. Both scores are inner products of features, so a remapped score is a
``Branch``: another pair of features, and a mask of the pairs that use it. An attention backend computes, for each tile,
only the branches that some of its pairs use.

A method is a frozen dataclass, a ``Remap``. With ``r = i - j`` the distances that replace ``r`` are

    ReRoPE          min(r, w)
    LeakyReRoPE     r for r < w, then w + (r - w) / k
    SelfExtend      r for r < w, then floor(i / G) - floor(j / G) + w - w / G
    LMInfinite      min(r, n_local) for the first tokens; tokens between them and the window are hidden
    StreamingLLM    by index in a rolling cache: r in the window, min(i, first + recent - 1) - j for the first tokens
    DualChunk       i mod s - j mod s within a chunk, then s + i mod s - j mod s up to c - 1 - j mod s
    STRING          r for r < S, then r - S + W

All methods are for causal attention: no source defines distances ahead of the query. They are applied to a trained
model (except InvLeaky, which trains a model for plain RoPE) and have no parameters. A cache must hold unrotated keys,
except for DualChunk and STRING, whose keys have one rotation.
"""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from posjax._checks import check, check_count, check_counts, check_number, check_positive, describe
from posjax._slots import Features
from posjax.masks import Beyond, ChunksApart, FirstTokens, Mask, Window, as_mask
from posjax.positions import Positions, as_array
from posjax.rotary import Ahead, FrequencyRule, Stretched


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Branch:
    """Features that replace the first pair of features for the pairs of tokens that ``mask`` allows.

    Masks of several branches must not overlap. ``mask`` itself hides no keys; the mask of the call does.

    Args:
        q: ``[batch, queries, heads, size]``, as wide as the first pair.
        k: ``[batch, keys, kv_heads, size]``.
        mask: a mask over pairs of positions.
    """

    q: Float[Array, "batch queries heads size"]
    k: Float[Array, "batch keys kv_heads size"]
    mask: Mask


def branches(remap: Any) -> tuple[Branch, ...]:
    """The branches of ``remap``, one or several, as a tuple. Raises ValueError for anything else, and for bad masks."""
    entries = (remap,) if isinstance(remap, Branch) else remap
    fits = isinstance(entries, Sequence) and all(isinstance(branch, Branch) for branch in entries)
    check(fits, f"remap must be a posjax.remap.Branch or several, found {describe(remap)}")
    return tuple(Branch(branch.q, branch.k, as_mask(branch.mask)) for branch in entries)


class Remap:
    """The remap slot of a scheme: the distances of remapped pairs. A subclass is a frozen, hashable dataclass."""

    shift_invariant: ClassVar[bool] = True
    one_sided: ClassVar[str] = "remapped distances are defined for keys behind the query: causal attention only"

    def check(self, features: Features | None) -> None:
        """Raises ValueError unless ``features`` can be computed at positions other than the tokens' own."""
        name = type(self).__name__
        check(
            features is not None,
            f"remap: {name} gives pairs other positions, but no features read them; use features=Rotary() or Coca()",
        )
        check(
            not features.decays,
            f"remap: {name} replaces the distances that the decay of {type(features).__name__} reads; leave one out",
        )
        check(
            type(features).value is Features.value,
            f"remap: {name} changes only scores, but {type(features).__name__} encodes position in values too",
        )
        check(
            features.num_axes == 1,
            f"remap: {name} needs positions on one axis, but the features have {features.num_axes}",
        )

    def mask(self) -> Mask | None:
        """The method's own mask, besides the model's, or None."""
        return None

    def branches(
        self,
        features: Features,
        params: Any,
        q: Float[Array, "batch queries heads size"],
        k: Float[Array, "batch keys kv_heads size"],
        q_positions: Positions,
        kv_positions: Positions,
        *,
        head_dim: int,
        length: Any = None,
    ) -> tuple[Array, Array, tuple[Branch, ...]]:
        """The first pair of features ``(phi, psi)`` and the branches that replace it.

        Args:
            features: the map whose positions are changed, for instance ``rotary.Rotary``.
            params: its parameters.
            q: raw query projections.
            k: raw key projections.
            q_positions: ``Range``, int32 ``[queries]`` or ``[batch, queries]``.
            kv_positions: the same for the keys.
            head_dim: size of a head of the model.
            length: the current length, for features that read it.

        Raises:
            ValueError: for features without positions; see ``check``.
        """
        self.check(features)
        shared = {"params": params, "head_dim": head_dim, "length": length}
        phi, psi = features(q, k, q_positions=q_positions, kv_positions=kv_positions, **shared)
        i, j, mask = self._remapped(as_array(q_positions), as_array(kv_positions))
        return phi, psi, (Branch(*features(q, k, q_positions=i, kv_positions=j, **shared), mask),)

    def _remapped(self, i: Int[Array, "*b q"], j: Int[Array, "*b k"]) -> tuple[Array, Array, Mask]:
        """The positions that remapped queries and keys get, and which pairs are remapped."""
        raise TypeError(f"{type(self).__name__} has no single remapped branch")


@dataclasses.dataclass(frozen=True)
class ReRoPE(Remap):
    """Distance ``min(r, w)`` (Su, kexue.fm/archives/9708): remapped queries at position ``w``, remapped keys at 0.

    It works at any length without training, usually with ``ClippedLogN``; a model trained with it does not extrapolate.

    Args:
        window: ``w``; a quarter to a half of the training length is best, the full training length fails.
    """

    window: int

    def __post_init__(self):
        check_count("window", self.window)

    def _remapped(self, i, j):
        return jnp.full_like(i, self.window), jnp.zeros_like(j), Beyond(self.window)


@dataclasses.dataclass(frozen=True)
class LeakyReRoPE(Remap):
    """Distance ``r`` for ``r < w``, then ``w + (r - w) / k`` (Su, kexue.fm/archives/9708).

    ``k = 1`` is RoPE, infinite ``k`` is ReRoPE. Remapped pairs rotate by ``(i + w (k - 1) - j) theta / k``:
    positions stay whole, so they are exact, and the frequencies are divided. See ``inverse_leaky`` for ``k < 1``.

    Args:
        window: ``w``; ``w (k - 1)`` must be a whole number.
        factor: ``k``; 16 in the article. Keep ``w + (longest - w) / k`` below about half the training length.
    """

    window: int
    factor: float = 16.0

    def __post_init__(self):
        check_count("window", self.window)
        check(self.factor != float("inf"), "factor must be finite: use ReRoPE(window) for an infinite one")
        check_positive("factor", self.factor)
        step = Fraction(float(self.factor)).limit_denominator(2**16).denominator
        near = max(1, round(self.window / step)) * step
        check(
            self.window % step == 0,
            f"window (factor - 1) must be whole, found {self.window} and {self.factor!r}; the nearest window is {near}",
        )
        check(abs(self._shift) < 2**31, f"factor times window must fit in int32, found {self.factor} and {self.window}")

    def check(self, features):
        """Same as ``Remap.check``; the features must also have a frequency rule that can be stretched."""
        super().check(features)
        check(
            isinstance(features.frequencies, FrequencyRule),
            f"remap: LeakyReRoPE stretches a frequency rule, but {type(features).__name__} has none",
        )
        dataclasses.replace(features, frequencies=Stretched(features.frequencies, self.factor))

    def branches(self, features, params, q, k, q_positions, kv_positions, *, head_dim, length=None):
        """See ``Remap.branches``. Remapped queries are shifted by ``w (k - 1)`` positions, possibly beyond int32."""
        self.check(features)
        sizes = {"head_dim": head_dim, "length": length}
        near = features(q, k, q_positions=q_positions, kv_positions=kv_positions, params=params, **sizes)
        rule = features.frequencies
        queries = dataclasses.replace(features, frequencies=Ahead(rule, self.factor, self._shift))
        keys = dataclasses.replace(features, frequencies=Stretched(rule, self.factor))
        phi, psi = queries.query(params, q, q_positions, **sizes), keys.key(params, k, kv_positions, **sizes)
        return *near, (Branch(phi, psi, Beyond(self.window)),)

    @property
    def _shift(self) -> int:
        return round(self.window * (self.factor - 1))


def inverse_leaky(length: int, extension: float) -> LeakyReRoPE:
    """InvLeaky ReRoPE (Su, kexue.fm/archives/9728): train with it at ``length``, then use plain RoPE.

    Leaky ReRoPE with ``w = length / 4`` and ``k = 1 / (2 s)``: beyond the window, positions are ``2 s`` apart, so that
    training at ``length`` includes the distances of sequences ``s`` times as long. The article also tries a base ``s``
    times as large.

    Args:
        length: training length; a quarter of it must be a multiple of ``2 s``.
        extension: ``s``, longest length over training length.

    Raises:
        ValueError: if the window is not whole, or does not fit the factor.
    """
    check_count("length", length)
    check(length % 4 == 0, f"length must be a multiple of 4, because the window is a quarter of it; found {length}")
    check_number("extension", extension, at_least=1)
    return LeakyReRoPE(length // 4, 1 / (2 * extension))


@dataclasses.dataclass(frozen=True)
class SelfExtend(Remap):
    """Distance ``r`` for ``r < w``, then ``floor(i / G) - floor(j / G) + w - w / G`` (arXiv 2401.01325).

    Leaky ReRoPE with whole distances. Here ``G`` must divide ``w``; the released code does not always round
    ``w / G`` down.

    Args:
        group: ``G``, tokens that share a remapped position.
        window: ``w``. The authors advise ``w + (longest - w) / G`` below half to two thirds of the training length.
    """

    group: int = 8
    window: int = 1024

    shift_invariant: ClassVar[bool] = False

    def __post_init__(self):
        check_counts(group=self.group, window=self.window)
        near = max(1, round(self.window / self.group)) * self.group
        check(
            self.window % self.group == 0,
            f"window must be a multiple of group={self.group}, found {self.window}; the nearest is {near}",
        )

    def _remapped(self, i, j):
        ahead = self.window - self.window // self.group
        return i // self.group + ahead, j // self.group, Beyond(self.window)


@dataclasses.dataclass(frozen=True)
class LMInfinite(Remap):
    """The nearest ``n_local`` keys, and the first ``n_global`` tokens at distance ``min(r, n_local)`` (2308.16137).

    This is ReRoPE on a lambda-shaped mask, ``Window(n_local) | FirstTokens(n_global)``. It has no effect up to
    ``n_local`` tokens. The optional middle tokens and offsets of the paper are not implemented.

    Args:
        n_local: as long as the training length.
        n_global: 10 in the released code.
    """

    n_local: int = 4096
    n_global: int = 10

    shift_invariant: ClassVar[bool] = False

    def __post_init__(self):
        check_counts(n_local=self.n_local, n_global=self.n_global)

    def mask(self) -> Mask:
        """``Window(n_local) | FirstTokens(n_global)``."""
        return Window(self.n_local) | FirstTokens(self.n_global)

    def _remapped(self, i, j):
        return jnp.full_like(i, self.n_local), jnp.zeros_like(j), Beyond(self.n_local)


@dataclasses.dataclass(frozen=True)
class StreamingLLM(Remap):
    """Positions in a rolling cache of the first and the last tokens (arXiv 2309.17453).

    Tokens of the window keep their true distance. For a first token ``j`` the key has position ``j`` and the query
    ``min(i, first + recent - 1)``, the last position of the cache. Up to ``first + recent`` tokens the method has no
    effect, and it never lengthens the context that a model uses. A bias still reads true distances.

    Args:
        first: how many first tokens; 4 in the paper.
        recent: tokens of the window, including the query's own (the released evaluation drops tokens after each step,
            not before it, so its window has one more); ``first + recent`` is at most the training length.
    """

    first: int = 4
    recent: int = 1020

    shift_invariant: ClassVar[bool] = False

    def __post_init__(self):
        check_counts(first=self.first, recent=self.recent)

    def mask(self) -> Mask:
        """``Window(recent) | FirstTokens(first)``."""
        return Window(self.recent) | FirstTokens(self.first)

    def _remapped(self, i, j):
        return jnp.minimum(i, self.first + self.recent - 1), j, Beyond(self.recent)


@dataclasses.dataclass(frozen=True)
class DualChunk(Remap):
    """Dual chunk attention (arXiv 2402.17463): chunks of ``s``, distances below ``c``, and one position for each key.

    With ``w = c - s`` a key has position ``j mod s`` and a query

        i mod s                      for keys of its own chunk
        min(s + i mod s, c - 1)      for keys of the chunk before
        c - 1                        for keys of older chunks

    Distances are true for ``r <= w`` and lie in ``[w, c - 1]`` beyond. The positions of the released ChunkLlama, for a
    training length ``L``, are ``DualChunk(3 L / 4 + 1, 5 L / 8)``.

    Args:
        length: ``c``, the training length.
        chunk: ``s``, between half of ``c`` and ``c``; None means three quarters of ``c``.
    """

    length: int
    chunk: int | None = None

    shift_invariant: ClassVar[bool] = False

    def __post_init__(self):
        check_count("length", self.length)
        if self.chunk is None:
            check(self.length % 4 == 0, f"length must be a multiple of 4 unless chunk is given, found {self.length}")
            object.__setattr__(self, "chunk", self.length * 3 // 4)
        check_count("chunk", self.chunk)
        fits = self.length <= 2 * self.chunk < 2 * self.length
        check(fits, f"chunk must be at least half of length={self.length} and below it, found {self.chunk}")

    def branches(self, features, params, q, k, q_positions, kv_positions, *, head_dim, length=None):
        """Features within a chunk, and branches for the previous chunk and for older ones; see ``Remap.branches``."""
        self.check(features)
        sizes = {"head_dim": head_dim, "length": length}
        inside = as_array(q_positions) % self.chunk
        last = jnp.full_like(inside, self.length - 1)
        own, before, older = (
            features.query(params, q, at, **sizes) for at in (inside, jnp.minimum(inside + self.chunk, last), last)
        )
        psi = features.key(params, k, as_array(kv_positions) % self.chunk, **sizes)
        previous = ChunksApart(self.chunk, 1, 1)
        rest = ChunksApart(self.chunk, 2)
        return own, psi, (Branch(before, psi, previous), Branch(older, psi, rest))


@dataclasses.dataclass(frozen=True)
class STRING(Remap):
    """STRING (An et al., arXiv 2410.18745): distance ``r`` for ``r < S``, then ``r - S + W``.

    Models have seen the longest distances of their training length rarely. Here they are not used: distant keys are
    moved back by ``S - W`` positions, so among ``n`` tokens no moved distance exceeds ``n - S + W``. It is for trained
    models, at lengths up to ``L``, and changes nothing up to ``S`` tokens. It reaches beyond ``L`` only to
    ``n = L + S - W``, where the moved distances end at ``L``.

    The released code also multiplies the logits by ``(0.1 ln 2 + 1)^2 = 1.1434``, near and far, which the paper does
    not have: add ``scale=Constant(1.1434)`` for it. In prefilling, not in decoding, that code also counts the pair at
    distance ``S`` twice, at ``S`` and at ``W``.

    Args:
        length: ``L``, the training length.
        shift: ``S``, from which distance on keys are moved; None means a third of ``L``, as in the paper.
        window: ``W``, the distance of the nearest moved key, below ``S``.
    """

    length: int
    shift: int | None = None
    window: int = 128

    def __post_init__(self):
        check_count("length", self.length)
        check(self.shift is not None or self.length >= 3, f"length must be at least 3, found {self.length}")
        if self.shift is None:
            object.__setattr__(self, "shift", self.length // 3)
        check_counts(shift=self.shift, window=self.window)
        check(self.shift <= self.length, f"shift must be at most length={self.length}, found {self.shift}")
        check(self.window < self.shift, f"window must be below shift={self.shift}, found {self.window}")

    def _remapped(self, i, j):
        return i - (self.shift - self.window), j, Beyond(self.shift)
