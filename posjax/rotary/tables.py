"""Rotary tables: the cosines and sines of every position and pair."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from posjax._checks import check
from posjax.angles import Frequencies, angles, as_frequencies
from posjax.positions import Positions, as_array


class RotaryTable(NamedTuple):
    """cos and sin of ``position * theta_t``, float32 ``[length, w/2]`` or ``[batch, length, w/2]``; a pytree."""

    cos: Float[Array, "*batch length half"]
    sin: Float[Array, "*batch length half"]


def rotary_table(
    positions: Positions,
    inverse_frequencies: Frequencies | np.ndarray | Float[Array, "*batch half"],
    *,
    attention_factor: float | Float[Array, ""] = 1.0,
    precision: str = "exact",
) -> RotaryTable:
    """``attention_factor * cos(p theta_t)`` and ``attention_factor * sin(p theta_t)``, float32.

    positions: int32 ``[length]`` or ``[batch, length]``, or a ``Range``; any value of int32, negative ones too.
    inverse_frequencies: what ``frequencies`` or a rule's ``frequencies`` returned, radians per position: ``[w/2]``, or
        ``[batch, w/2]`` for one set per row, or ``[batch, length, w/2]`` for one set per token. A NumPy array is made
        exact on the host. A JAX array (learned, or traced) uses the float32 product and is differentiable.
    precision: ``"exact"``, within 2e-6 of float64 at every int32 position for frequencies known on the host; or
        ``"hf"``, the float32 product of PyTorch code (see :func:`posjax.angles.angles` for its error).

    Raises ValueError for positions that are not integers and frequencies of another rank or batch.
    """
    frequencies = as_frequencies(inverse_frequencies)
    array = as_array(positions)
    check(1 <= frequencies.ndim <= 3, f"inverse_frequencies must have 1 to 3 axes, found shape {frequencies.shape}")
    leading = frequencies.shape[:-1] if frequencies.ndim == 3 else (*frequencies.shape[:-1], 1)
    try:
        np.broadcast_shapes(array.shape, leading)
    except ValueError:
        raise ValueError(
            f"inverse_frequencies of shape {frequencies.shape} do not fit positions of shape {array.shape}"
        ) from None
    angle = angles(array, frequencies, precision)
    factor = jnp.asarray(attention_factor, jnp.float32)
    return RotaryTable(jnp.cos(angle) * factor, jnp.sin(angle) * factor)
