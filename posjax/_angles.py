"""Exact angles ``position * frequency`` without 64-bit floats.

Sinusoidal embeddings and rotary tables share these angles.

A float32 product ``position * frequency`` has an error of 0.03 rad at one million, and x64 is off in JAX by default. So
each frequency known on the host is stored as *turns per position* in 64-bit fixed point (two uint32 words). Multiplying
by the position in wrapped unsigned arithmetic gives the angle modulo one turn; only the last step rounds.
"""

from dataclasses import dataclass
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from posjax._checks import check, check_choice
from posjax._numbers import align_ranks
from posjax.positions import Positions, Range, as_array

# 1 / (2 pi) to 50 digits: a float64 would have an error of 2e-7 rad at position 2^31.
_TURNS_PER_RADIAN = Fraction("0.15915494309189533576888376337251436203445964574046")
_RADIANS_PER_UNIT = np.float32(2 * np.pi / 2**32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Frequencies:
    """Angular frequencies, in radians per position, with their exact fixed-point form where it is known.

    ``value`` is float32 ``[n]`` (``[batch, n]`` when each row has its own). ``high`` and ``low`` are the two uint32
    words of the turns per position in 64-bit fixed point, of the same shape, or None for frequencies that are learned.
    All three pass through ``jit`` unchanged; a float64 array does not.
    """

    value: Float[Array, "*batch n"]
    high: UInt32[Array, "*batch n"] | None = None
    low: UInt32[Array, "*batch n"] | None = None

    @property
    def is_exact(self) -> bool:
        """Whether angles are multiplied in fixed point (else in float32)."""
        return self.high is not None

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.value, dtype=dtype, copy=copy)

    def __jax_array__(self) -> Float[Array, "*batch n"]:
        return jnp.asarray(self.value)


def exact(values: np.ndarray) -> Frequencies:
    """Frequencies known on the host, float64 radians per position, exact at every int32 position.

    The words are round(value / 2 pi * 2^64) modulo 2^64, in integer arithmetic: whole turns per position vanish.
    """
    values = np.asarray(values, dtype=np.float64)
    check(bool(np.isfinite(values).all()), "frequencies must be finite")
    words = [round(Fraction(value) * _TURNS_PER_RADIAN * 2**64) % 2**64 for value in values.ravel().tolist()]
    words = np.array(words, dtype=np.uint64).reshape(values.shape)
    high = (words >> np.uint64(32)).astype(np.uint32)
    low = (words & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return Frequencies(values.astype(np.float32), high, low)


def fixed_point(values: Float[Array, "*batch n"]) -> Frequencies:
    """Fixed-point form of frequencies computed in float32 while tracing: angles are exact multiples of them.

    A float32 frequency has a relative error of about 1e-7, and at position p the error of its angle is p times larger.
    But every position uses the same slightly wrong frequency: angles of p + s and p differ by exactly the angle of s,
    and scores do not change when all positions shift. Not differentiable: learned frequencies stay
    ``Frequencies(values)``.
    """
    turns = values.astype(jnp.float32) * np.float32(_TURNS_PER_RADIAN)
    scaled = (turns - jnp.floor(turns)) * np.float32(2**32)
    high = jnp.floor(scaled)  # 24 bits of mantissa: both words are exact
    low = (scaled - high) * np.float32(2**32)
    return Frequencies(values.astype(jnp.float32), high.astype(jnp.uint32), low.astype(jnp.uint32))


def as_frequencies(frequencies: Frequencies | np.ndarray | Float[Array, "*batch n"]) -> Frequencies:
    """The ``Frequencies`` of an array: exact for a NumPy array, without words for a JAX array (traced, learned).

    Without words, angles are float32 products.
    """
    if isinstance(frequencies, Frequencies):
        return frequencies
    if isinstance(frequencies, jax.Array):
        check(jnp.issubdtype(frequencies.dtype, jnp.floating), f"frequencies must be real, found {frequencies.dtype}")
        return Frequencies(frequencies.astype(jnp.float32))
    return exact(frequencies)


def _high_product(a: UInt32[Array, "..."], b: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """The upper 32 bits of the 64-bit product of two uint32, from 16-bit halves."""
    half = np.uint32(0xFFFF)
    a_high = a >> 16
    a_low = a & half
    b_high = b >> 16
    b_low = b & half
    middle = a_high * b_low + ((a_low * b_low) >> 16)
    other = a_low * b_high + (middle & half)
    return a_high * b_high + (middle >> 16) + (other >> 16)


def phase(positions: Int[Array, "..."], high: UInt32[Array, "..."], low: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """``position * turns`` modulo one turn, in units of 2^-32 turn; exact up to truncation to that unit.

    With F = high * 2^32 + low and a two's complement position p this is the upper word of p * F modulo 2^64; a negative
    p is read as p + 2^32, which adds low * 2^32, and this is subtracted.
    """
    unsigned = jax.lax.bitcast_convert_type(positions, jnp.uint32)
    wrapped = unsigned * high + _high_product(unsigned, low)
    return wrapped - jnp.where(positions < 0, low, np.uint32(0))


def angles(
    positions: Int[Array, "*batch length"], frequencies: Frequencies, precision: str = "exact"
) -> Float[Array, "*batch length n"]:
    """Angles in radians, float32: ``position * frequency`` for every position and frequency.

    ``positions`` int32 ``[length]`` or ``[batch, length]``; ``frequencies`` of rank 1 (shared), 2 (``[batch, n]``, one
    set per row) or 3 (``[batch, length, n]``, one set per token).

    precision:
        ``"exact"`` reduces the angle to [-pi, pi) in fixed point: its cosine and sine are within 5e-7 of float64 at any
        int32 position. Frequencies without words fall back to the float32 product, whose error is about
        ``6e-8 * |angle|`` radians: 0.004 at 65,536 and 0.06 at one million for a frequency of 1.
        ``"hf"`` is always that float32 product, bit for bit what PyTorch code computes from the same frequencies.
    """
    check_choice("precision", precision, ("exact", "hf"))
    positions = positions[..., None]

    def align(array: Array) -> tuple[Array, Array]:
        return align_ranks(positions, array if array.ndim == 3 else jnp.expand_dims(array, -2))

    if precision == "hf" or not frequencies.is_exact:
        aligned, values = align(frequencies.value)
        return aligned.astype(jnp.float32) * values
    aligned, high = align(frequencies.high)
    wrapped = phase(aligned, high, align(frequencies.low)[1])
    return jax.lax.bitcast_convert_type(wrapped, jnp.int32).astype(jnp.float32) * _RADIANS_PER_UNIT


def as_real_positions(
    positions: Positions | Float[Array, "*batch length"],
) -> Int[Array, "*b n"] | Float[Array, "*b n"]:
    """Positions as an array, int32, or float32 for the methods whose positions are real.

    Raises ValueError for a rank other than 1 and 2, and for 16-bit floats, which do not hold every integer above 256
    (bfloat16) or 2048 (float16).
    """
    array = positions if isinstance(positions, Range | jax.Array) else np.asarray(positions)
    if isinstance(array, Range) or not jnp.issubdtype(array.dtype, jnp.floating):
        return as_array(array)
    check(array.ndim in (1, 2), f"positions must be [length] or [batch, length], found shape {array.shape}")
    check(array.dtype.itemsize >= 4, f"positions must be integers or float32, found {array.dtype}")
    return jnp.asarray(array, jnp.float32)


def real_angles(
    positions: Int[Array, "*b n"] | Float[Array, "*b n"], frequencies: Frequencies, precision: str = "exact"
) -> Float[Array, "*b n half"]:
    """``angles`` for real positions too: whole parts exactly, fractions as a float32 product."""
    if jnp.issubdtype(positions.dtype, jnp.integer) or precision == "hf" or not frequencies.is_exact:
        return angles(positions, frequencies, precision)
    whole = jnp.floor(positions)
    return angles(whole.astype(jnp.int32), frequencies) + angles(positions - whole, frequencies, "hf")
