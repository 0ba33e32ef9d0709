"""Absolute position embeddings, added to the token embeddings: sinusoidal and learned.

Both specs fill the embedding slot of a scheme: ``spec.init(key, model_dim) -> params`` and
``spec.embed(params, positions, model_dim) -> [*batch, length, model_dim]`` in float32.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from posjax._checks import check, check_choice, check_even, check_positive
from posjax.angles import angles, exact
from posjax.positions import Positions, Range, as_array

CONVENTIONS = ("interleaved", "concatenated", "tensor2tensor")


def sinusoidal(
    positions: Positions, model_dim: int, *, base: float = 10_000.0, convention: str = "interleaved"
) -> Float[Array, "*batch length model_dim"]:
    """Sines and cosines of ``position * frequency_t``, t = 0 .. model_dim/2 - 1; float32, values in [-1, 1].

    convention: three are in circulation, and a checkpoint works with its own only.
        ``"interleaved"``: frequency base^(-2t/D); features sin_0, cos_0, sin_1, cos_1, ... ("Attention is all you
        need", arXiv:1706.03762, section 3.5).
        ``"concatenated"``: the same frequencies; all sines, then all cosines (GPT-J, RoFormer, DeepMind).
        ``"tensor2tensor"``: all sines, then all cosines, frequency base^(-t/(D/2 - 1)), so that the last one is exactly
        1/base (Tensor2Tensor, fairseq, Whisper, MaxText).

    Within 2e-6 of float64 at any int32 position. The inner product of two positions depends on their difference only,
    and of a position with itself is D/2. Raises ValueError for an odd ``model_dim`` or an unknown convention.
    """
    check_choice("convention", convention, CONVENTIONS)
    check_even("model_dim", model_dim)
    check(base > 1, f"base must be greater than 1, found {base!r}")
    half = model_dim // 2
    check(
        convention != "tensor2tensor" or half > 1,
        f"model_dim must be at least 4 for tensor2tensor, whose exponents are over model_dim/2 - 1; found {model_dim}",
    )
    steps = half - 1 if convention == "tensor2tensor" else half
    angle = angles(as_array(positions), exact(base ** -(np.arange(half) / steps)))
    sines, cosines = jnp.sin(angle), jnp.cos(angle)
    if convention == "interleaved":
        return jnp.stack([sines, cosines], axis=-1).reshape(*angle.shape[:-1], model_dim)
    return jnp.concatenate([sines, cosines], axis=-1)


def learned(
    table: Float[Array, "max_length model_dim"], positions: Positions
) -> Float[Array, "*batch length model_dim"]:
    """Rows of a learned table, one per position, in float32.

    A position the table does not have gives NaN, never the nearest row as plain indexing does. Where the positions are
    known before tracing (a ``Range`` with a static start) they raise ValueError instead.
    """
    max_length = table.shape[0]
    if isinstance(positions, Range) and positions.is_static:
        end = positions.start + positions.length
        check(
            positions.start >= 0 and end <= max_length,
            f"positions {positions.start} .. {end - 1} are outside the learned table of max_length {max_length}",
        )
    array = as_array(positions)
    # take counts negative indices from the end; a learned table has no such rows.
    index = jnp.where(array < 0, max_length, array)
    return jnp.take(table.astype(jnp.float32), index, axis=0, mode="fill", fill_value=jnp.nan)


@dataclass(frozen=True)
class Sinusoidal:
    """Sinusoidal embeddings without parameters; see :func:`sinusoidal`."""

    convention: str = "interleaved"
    base: float = 10_000.0

    shift_invariant: ClassVar[bool] = False

    def __post_init__(self):
        check_choice("convention", self.convention, CONVENTIONS)
        check(self.base > 1, f"base must be greater than 1, found {self.base!r}")

    def init(self, key: Array, model_dim: int) -> dict[str, Array]:
        """No parameters: an empty dictionary."""
        check_even("model_dim", model_dim)
        return {}

    def embed(
        self, params: dict[str, Array], positions: Positions, model_dim: int
    ) -> Float[Array, "*batch length model_dim"]:
        """The embedding of each position, float32."""
        return sinusoidal(positions, model_dim, base=self.base, convention=self.convention)


@dataclass(frozen=True)
class Learned:
    """A learned vector for each of ``max_length`` positions (Gehring et al., arXiv:1705.03122; BERT, GPT-2).

    stddev: of the normal initial values; 0.02 is BERT's and GPT-2's. It cannot run past ``max_length``.
    """

    max_length: int
    stddev: float = 0.02

    shift_invariant: ClassVar[bool] = False

    def __post_init__(self):
        check_positive("max_length", self.max_length)

    def init(self, key: Array, model_dim: int) -> dict[str, Float[Array, "max_length model_dim"]]:
        """``{"embedding": [max_length, model_dim]}``, normal with ``stddev``, float32."""
        shape = (self.max_length, model_dim)
        return {"embedding": self.stddev * jax.random.normal(key, shape, dtype=jnp.float32)}

    def embed(
        self, params: dict[str, Float[Array, "max_length model_dim"]], positions: Positions, model_dim: int
    ) -> Float[Array, "*batch length model_dim"]:
        """The embedding of each position, float32; NaN (or ValueError) past the table."""
        table = params["embedding"]
        expected = (self.max_length, model_dim)
        check(table.shape == expected, f"embedding must have shape {expected}, found {table.shape}")
        return learned(table, positions)
