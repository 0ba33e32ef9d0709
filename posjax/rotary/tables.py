"""Rotary tables: the cosines and sines of every position and pair."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from posjax._angles import Frequencies, as_frequencies, as_real_positions, fixed_point, real_angles
from posjax._checks import check, check_finite, describe
from posjax._numbers import align_ranks
from posjax.positions import Positions


class RotaryTable(NamedTuple):
    """cos and sin of ``position * theta_t``, float32 ``[length, w/2]`` or ``[batch, length, w/2]``; a pytree.

    If each head has its own angles it is ``[batch or 1, length, heads, w/2]``.
    """

    cos: Float[Array, "*batch length half"]
    sin: Float[Array, "*batch length half"]


def learned_angles(
    positions: Int[Array, "*b n"] | Float[Array, "*b n"], values: Float[Array, "half"]
) -> Float[Array, "*b n half"]:
    """``position * value`` modulo whole turns for learned float32 frequencies, with the product's derivatives.

    The angle is reduced to one turn in fixed point, so that the angles of two positions differ by the angle of their
    distance, however large the positions are. The float32 product has an error of 0.03 rad at position one million, so
    only the gradient is taken from it.
    """
    exact = real_angles(positions, fixed_point(jax.lax.stop_gradient(values)))
    positions, values = align_ranks(positions.astype(jnp.float32)[..., None], values.astype(jnp.float32))
    product = positions * values
    return jax.lax.stop_gradient(exact) + (product - jax.lax.stop_gradient(product))


def _check_frequencies(given) -> None:
    """Raises ValueError for anything except an array of frequencies, for example for a rule."""
    name = "inverse_frequencies"
    check(
        not hasattr(given, "at_length"),
        f"{name} must be an array, found the rule {type(given).__name__}: pass the first result of at_length()",
    )
    check(
        not (isinstance(given, tuple) and any(isinstance(part, Frequencies) for part in given)),
        f"{name} must be an array, found it together with its factor: write "
        f"{name}, factor = rule.at_length(...) and pass attention_factor=factor",
    )
    known = isinstance(given, Frequencies | jax.Array | np.ndarray | np.generic | list | tuple)
    check(known, f"{name} must be an array, found {describe(given)}")


def rotary_table(
    positions: Positions | Float[Array, "*batch length"],
    inverse_frequencies: Frequencies | np.ndarray | Float[Array, "*batch half"],
    *,
    attention_factor: float | Float[Array, ""] = 1.0,
    precision: str = "exact",
) -> RotaryTable:
    """``attention_factor * cos(p theta_t)`` and ``attention_factor * sin(p theta_t)``, float32.

    positions: int32 ``[length]`` or ``[batch, length]``, or a ``Range``; any value of int32, negative ones too. Or
        float32 of the same shapes, for methods that define real positions; they must be within 2^31.
    inverse_frequencies: from ``inverse_frequencies`` or a rule's ``at_length``, radians per position:
        ``[w/2]``, or ``[batch, w/2]`` for one set per row, or ``[batch, length, w/2]`` for one set per token. A
        NumPy array is made exact on the host. A JAX array (learned, or traced) uses the float32 product and is
        differentiable.
    precision: ``"exact"``, within 2e-6 of float64 at every int32 position for frequencies known on the host; or
        ``"hf"``, the float32 product of PyTorch code, whose error is about ``6e-8 * |angle|`` radians.

    Raises ValueError for positions in 16-bit floats, frequencies of another rank or batch, a rule instead of an array,
    and a factor that is not finite.
    """
    _check_frequencies(inverse_frequencies)
    frequencies = as_frequencies(inverse_frequencies)
    array = as_real_positions(positions)
    shape = frequencies.value.shape
    check(1 <= len(shape) <= 3, f"inverse_frequencies must have 1 to 3 axes, found shape {shape}")
    leading = shape[:-1] if len(shape) == 3 else (*shape[:-1], 1)
    try:
        np.broadcast_shapes(array.shape, leading)
    except ValueError:
        raise ValueError(f"inverse_frequencies of shape {shape} do not fit positions of shape {array.shape}") from None
    check_finite("attention_factor", attention_factor)
    angle = real_angles(array, frequencies, precision)
    factor = jnp.asarray(attention_factor, jnp.float32)
    return RotaryTable(jnp.cos(angle) * factor, jnp.sin(angle) * factor)
