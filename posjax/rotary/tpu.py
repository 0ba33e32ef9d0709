"""Rotation as a kernel for TPUs: one pass over memory, in the layout that attention reads.

XLA cuts a head into its halves, which do not fill the lanes of a TPU, and copies them. Here the matrix unit finds the
partner of every feature, exactly, by a product with a signed permutation:

    y = x C + (x P) S,   (x P)_a = -x_b,   (x P)_b = x_a   for every pair (a, b)
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

_LANES = 128
_TOKENS, _COLUMNS = 512, 1024
"""The largest number of tokens, and of columns, in a block."""


def supports(x: Array, cos: Array) -> bool:
    """Whether the kernel supports these features and this table."""
    whole = x.ndim == 4 and x.shape[1] % _LANES == 0 and x.shape[3] % _LANES == 0
    known = whole and all(isinstance(size, int) and size for size in x.shape)
    return known and cos.ndim < 4 and x.dtype in (jnp.bfloat16, jnp.float32)


@partial(jax.jit, static_argnames=("pairing", "interpret"))
def rotated(
    x: Float[Array, "batch length heads size"], cos: Array, sin: Array, *, pairing: str, interpret=False
) -> Float[Array, "batch length heads size"]:
    """The features, rotated by a float32 table ``[length, w/2]`` or ``[batch or 1, length, w/2]``."""
    batch, length, heads, size = x.shape
    tokens = max(n for n in range(_LANES, _TOKENS + 1, _LANES) if length % n == 0)
    columns = size * max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * size <= _COLUMNS))
    features = pl.BlockSpec((None, tokens, columns), lambda b, i, h: (b, i, h))
    tables = [_widened(part, size, pairing, fill) for part, fill in ((cos, 1.0), (sin, 0.0))]
    table = pl.BlockSpec((None, tokens, size), lambda b, i, h: (b if tables[0].shape[0] > 1 else 0, i, 0))
    partners = jnp.asarray(_partners(size, 2 * cos.shape[-1], pairing), x.dtype)
    flat = x.reshape(batch, length, heads * size)
    output = pl.pallas_call(
        _kernel,
        grid=(batch, length // tokens, heads * size // columns),
        in_specs=[features, table, table, pl.BlockSpec(partners.shape, lambda b, i, h: (0, 0))],
        out_specs=features,
        out_shape=jax.ShapeDtypeStruct(flat.shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        interpret=interpret,
        name="posjax_rotation",
    )(flat, *tables, partners)
    return output.reshape(x.shape)


def _widened(part: Array, size: int, pairing: str, fill: float) -> Float[Array, "batch_or_1 length size"]:
    """The table with a number for every feature; features that do not rotate get ``fill``."""
    wide = jnp.tile(part, 2) if pairing == "half" else jnp.repeat(part, 2, axis=-1)
    wide = jnp.pad(wide, [(0, 0)] * (wide.ndim - 1) + [(0, size - wide.shape[-1])], constant_values=fill)
    return wide.reshape(-1, *wide.shape[-2:])


def _partners(size: int, width: int, pairing: str) -> np.ndarray:
    """The signed permutation ``P``; zero for features from ``width`` on."""
    channels = np.arange(width)
    first, second = channels.reshape(2, -1) if pairing == "half" else channels.reshape(-1, 2).T
    permutation = np.zeros((size, size), np.float32)
    permutation[second, first] = -1
    permutation[first, second] = 1
    return permutation


def _kernel(x_ref, cos_ref, sin_ref, partners_ref, y_ref):
    cos = cos_ref[...]
    sin = sin_ref[...]
    partners = partners_ref[...]
    precision = jax.lax.Precision.HIGHEST if partners.dtype == jnp.float32 else None
    size = partners.shape[0]
    for n in range(0, x_ref.shape[1], size):
        x = x_ref[:, n : n + size]
        turned = jax.lax.dot(x, partners, precision=precision, preferred_element_type=jnp.float32)
        y_ref[:, n : n + size] = (x.astype(jnp.float32) * cos + turned * sin).astype(y_ref.dtype)
