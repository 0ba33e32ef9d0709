"""Absolute position embeddings, added to the token embeddings: sinusoidal, learned, and learned hierarchically.

The specs, ``Embedding``, fill the embedding slot of a scheme.
"""

import abc
from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from posjax._angles import as_real_positions, exact, real_angles
from posjax._checks import check, check_choice, check_count, check_even, check_number, describe
from posjax._numbers import LARGEST, align_ranks
from posjax.positions import Positions, Range, as_array

CONVENTIONS = ("interleaved", "concatenated", "tensor2tensor")


def sinusoidal(
    positions: Positions | Float[Array, "*batch length"],
    model_dim: int,
    *,
    base: float = 10_000.0,
    convention: str = "interleaved",
) -> Float[Array, "*batch length model_dim"]:
    """Sines and cosines of ``position * frequency_t``, t = 0 .. model_dim/2 - 1; float32, values in [-1, 1].

    convention: three conventions are in use, and a checkpoint works only with its own.
        ``"interleaved"``: frequency base^(-2t/D); features sin_0, cos_0, sin_1, cos_1, ... ("Attention is all you
        need", arXiv:1706.03762, section 3.5).
        ``"concatenated"``: the same frequencies; all sines, then all cosines (GPT-J, RoFormer, DeepMind).
        ``"tensor2tensor"``: all sines, then all cosines, frequency base^(-t/(D/2 - 1)), so that the last one is exactly
        1/base (Tensor2Tensor, fairseq, Whisper, MaxText).
    base: sets the longest wavelength, about 2 pi base positions; above 1.

    Values are within 2e-6 of float64 at any int32 position. Positions may be real-valued (a grid between the tokens):
    the angles of their whole parts are exact.

    The inner product of two embeddings depends only on the difference of their positions; at difference 0 it is D/2.
    Raises ValueError for an odd ``model_dim``, an unknown convention, or real positions narrower than float32.
    """
    _check_sinusoid(convention, base)
    check_even("model_dim", model_dim)
    half = model_dim // 2
    check(
        convention != "tensor2tensor" or half > 1,
        f"model_dim must be at least 4 for tensor2tensor, whose exponents are over model_dim/2 - 1; found {model_dim}",
    )
    steps = half - 1 if convention == "tensor2tensor" else half
    angle = real_angles(as_real_positions(positions), exact(base ** -(np.arange(half) / steps)))
    sines, cosines = jnp.sin(angle), jnp.cos(angle)
    if convention == "interleaved":
        return jnp.stack([sines, cosines], axis=-1).reshape(*angle.shape[:-1], model_dim)
    return jnp.concatenate([sines, cosines], axis=-1)


def _check_sinusoid(convention: str, base: float) -> None:
    check_choice("convention", convention, CONVENTIONS)
    check_number("base", base)
    check(base > 1, f"base must be greater than 1, found {base!r}")


def learned(
    table: Float[Array, "max_length model_dim"], positions: Positions
) -> Float[Array, "*batch length model_dim"]:
    """Rows of a learned table, one per position, in float32.

    A position of an array that is outside the table gives NaN, not the nearest row as in plain indexing: arrays may be
    traced, and their padding may be outside. A ``Range`` with a static start raises ValueError instead.
    """
    return _rows(table, _within(positions, table.shape[0], f"the learned table of max_length {table.shape[0]}"))


def hierarchical(
    table: Float[Array, "max_length model_dim"], positions: Positions, *, alpha: float = 0.4
) -> Float[Array, "*batch length model_dim"]:
    """Encodes ``n^2`` positions with a learned table of ``n`` rows ``p``, in float32 (Su, kexue.fm/archives/7947).

        u_k = (p_k - alpha p_0) / (1 - alpha),     position a n + c gets alpha u_a + (1 - alpha) u_c

    computed as ``p_c + alpha / (1 - alpha) (p_a - p_0)``. A position below ``n`` (``a = 0``) gets exactly its learned
    row. So it extends a model trained with ``learned``, for further training. If alpha were 0.5, two positions with
    ``a`` and ``c`` swapped would get the same vector.

    Negative positions, and those from ``n^2`` on, give NaN, or ValueError in a ``Range`` with a static start.

    Raises:
        ValueError: if ``alpha`` is not between 0 and 1, or is 0.5.
    """
    _check_alpha(alpha)
    n = table.shape[0]
    end = min(n * n, np.iinfo(np.int32).max)
    array = _within(positions, end, f"the {n}^2 positions that a table of max_length {n} encodes")
    first = _rows(table, jnp.where(array < end, array // n, n))
    fine = _rows(table, array % n)
    first, origin = align_ranks(first, table[0].astype(jnp.float32))
    return fine + np.float32(alpha / (1 - alpha)) * (first - origin)


def _check_alpha(alpha: float) -> None:
    check_number("alpha", alpha)
    fits = 0 < alpha < 1 and alpha != 0.5
    check(fits, f"alpha must be between 0 and 1 and not 0.5 (a n + c and c n + a would share a vector), found {alpha}")


def _within(positions: Positions, end: int, what: str) -> Int[Array, "*batch length"]:
    """The positions as an array; those outside 0 .. end - 1 become ``end``, or an error if they are static."""
    if isinstance(positions, Range) and positions.is_static:
        last = positions.start + positions.length - 1
        check(positions.start >= 0 and last < end, f"positions {positions.start} .. {last} are outside {what}")
    array = as_array(positions)
    return jnp.where((array < 0) | (array >= end), end, array)


def _rows(table, index) -> Float[Array, "*batch length model_dim"]:
    return jnp.take(table.astype(jnp.float32), index, axis=0, mode="fill", fill_value=jnp.nan)


class Embedding(abc.ABC):
    """The base class of the specs: vectors added to the token embeddings. A spec is a frozen, hashable dataclass."""

    shift_invariant: ClassVar[bool] = False
    """Whether shifting all positions by one constant changes nothing."""

    reach: int | None = None
    """How many positions it encodes, from 0; None if it encodes all."""

    def init(self, key: Array, model_dim: int) -> dict[str, Array]:
        """Learned parameters, ``{}`` if there are none."""
        return {}

    @abc.abstractmethod
    def embed(
        self, params: dict[str, Array], positions: Positions | Float[Array, "*batch length"], model_dim: int
    ) -> Float[Array, "*batch length model_dim"]:
        """The embedding of each position, float32."""


@dataclass(frozen=True)
class Sinusoidal(Embedding):
    """Sinusoidal embeddings without parameters; see :func:`sinusoidal`."""

    convention: str = "interleaved"
    base: float = 10_000.0

    def __post_init__(self):
        _check_sinusoid(self.convention, self.base)

    def init(self, key: Array, model_dim: int) -> dict[str, Array]:
        """No parameters: an empty dictionary."""
        check_even("model_dim", model_dim)
        return {}

    def embed(
        self, params: dict[str, Array], positions: Positions | Float[Array, "*batch length"], model_dim: int
    ) -> Float[Array, "*batch length model_dim"]:
        """The embedding of each position, float32; positions may be real-valued."""
        return sinusoidal(positions, model_dim, base=self.base, convention=self.convention)


@dataclass(frozen=True)
class Learned(Embedding):
    """A learned vector for each of ``max_length`` positions (Gehring et al., arXiv:1705.03122; BERT, GPT-2).

    It has no vector for positions from ``max_length`` on.

    max_length: how many positions have a vector.
    stddev: standard deviation of the normal initial values; 0.02 is BERT's and GPT-2's.
    unused: rows of the table before that of position 0, which nothing reads; OPT has two.
    """

    max_length: int
    stddev: float = 0.02
    unused: int = 0

    def __post_init__(self):
        check_count("max_length", self.max_length)
        check_number("unused", self.unused, at_least=0)
        check(self.unused == int(self.unused), f"unused must be a whole number, found {describe(self.unused)}")
        fits = self.max_length <= LARGEST
        check(fits, f"max_length must be at most {LARGEST}, as positions are int32; found {describe(self.max_length)}")
        check_number("stddev", self.stddev, at_least=0)

    @property
    def reach(self):
        """``max_length``."""
        return self.max_length

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return self.max_length + self.unused

    def init(self, key: Array, model_dim: int) -> dict[str, Float[Array, "rows model_dim"]]:
        """``{"embedding": [rows, model_dim]}``, normal with ``stddev``, float32."""
        shape = (self.rows, model_dim)
        return {"embedding": self.stddev * jax.random.normal(key, shape, dtype=jnp.float32)}

    def embed(
        self, params: dict[str, Float[Array, "rows model_dim"]], positions: Positions, model_dim: int
    ) -> Float[Array, "*batch length model_dim"]:
        """The embedding of each position, float32; outside the table NaN, or ValueError for a static ``Range``."""
        table = params["embedding"]
        expected = (self.rows, model_dim)
        check(table.shape == expected, f"embedding must have shape {expected}, found {table.shape}")
        return self._lookup(table[self.unused :], positions)

    def _lookup(self, table, positions):
        return learned(table, positions)


@dataclass(frozen=True)
class Hierarchical(Learned):
    """``hierarchical``: the same parameters as ``Learned``, for ``max_length^2`` positions.

    alpha: the alpha of the formula; 0.4 is the article's and bert4keras's.
    """

    alpha: float = field(default=0.4, kw_only=True)

    @property
    def reach(self):
        """``max_length^2``."""
        return self.max_length**2

    def __post_init__(self):
        super().__post_init__()
        _check_alpha(self.alpha)

    def _lookup(self, table, positions):
        return hierarchical(table, positions, alpha=self.alpha)
