"""CoCA's features as kernels for TPUs: one pass over memory, in the layout that attention reads.

XLA cuts a head into its halves, which do not fill the lanes of a TPU, and copies them. Here the matrix unit copies
every component of the planes into both halves of its head, exactly, by a product with a matrix of zeros and ones; the
table is repeated the same way. So every step fills the lanes, and the halves are selected last:

    (x | y) = q P               x and y as wide as a head: (x_0, x_1, ..., x_0, x_1, ...), and so y
    phi     = f_1(x, y, c, s) in the first half of a head, f_2(x, y, c, s) in the second
    dq      = (dx in the first half, dy in the second) R,    (dx, dy) the gradient of g_1 f_1 + g_2 f_2

for a formula ``f`` of single planes and the halves ``g_1``, ``g_2`` of the cotangent of ``phi``. ``R`` puts components
where ``q`` has them. A single component half as wide as a head, for example ``t``, is treated the same way, with
enough heads at once to fill the lanes.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

_LANES = 128
_TOKENS, _COLUMN_BYTES = 512, 2048
"""The largest number of tokens, and of column bytes, in a block of features."""

Formula = Callable[..., tuple[Array, Array]]
"""Maps one or two components, cosines and sines of planes to their two features."""


def supports(x: Array, cos: Array) -> bool:
    """Whether the kernels support these components and this table."""
    _, length, heads, width = x.shape
    known = all(isinstance(size, int) and size for size in x.shape)
    whole = known and length % _LANES == 0 and 2 * cos.shape[-1] % _LANES == 0 and heads % _together(width) == 0
    # Otherwise devices would share the components, and their gradients would have to be summed over devices.
    alike = jax.typeof(cos).manual_axis_type.varying <= jax.typeof(x).manual_axis_type.varying
    return whole and alike and x.dtype in (jnp.bfloat16, jnp.float32)


def _together(width: int) -> int:
    """The smallest number of heads that fills whole groups of lanes."""
    return math.lcm(width, _LANES) // width


@partial(jax.jit, static_argnames=("formula", "pairing", "interpret"))
def features(
    x: Float[Array, "batch length heads width"],
    cos: Array,
    sin: Array,
    *,
    formula: Formula,
    pairing: str | None,
    interpret=False,
) -> Float[Array, "batch length heads size"]:
    """``phi`` of components, by a float32 table ``[length, size/2]`` or ``[batch or 1, length, size/2]``."""
    widths = x.shape[-1], 2 * cos.shape[-1]
    step = partial(_features, formula, widths)
    matrices = [_spread(*widths, pairing)]
    return _call("posjax_coca", step, (cos, sin), matrices, [x], widths[1], interpret)


@partial(jax.jit, static_argnames=("formula", "pairing", "interpret"))
def gradient(
    x: Float[Array, "batch length heads width"],
    cos: Array,
    sin: Array,
    cotangent: Float[Array, "batch length heads size"],
    *,
    formula: Formula,
    pairing: str | None,
    interpret=False,
) -> Float[Array, "batch length heads width"]:
    """``dq``: the cotangent of the components, from that of ``features``."""
    widths = x.shape[-1], 2 * cos.shape[-1]
    step = partial(_gradient, formula, widths)
    matrices = [_spread(*widths, pairing), _gathered(*widths, pairing)]
    return _call("posjax_coca_gradient", step, (cos, sin), matrices, [x, cotangent], widths[0], interpret)


def _call(name: str, step: Callable, table: tuple, matrices: list, arrays: list, width: int, interpret) -> Array:
    """Runs a kernel with ``step`` for each group of heads, whose result has ``width`` numbers per head."""
    x = arrays[0]
    size = 2 * table[0].shape[-1]
    batch, length, heads, _ = x.shape
    tokens, block = _block(x, size)
    table = [jnp.tile(part, 2).reshape(-1, length, size) for part in table]
    table_spec = pl.BlockSpec((None, tokens, size), lambda b, i, h: (b if table[0].shape[0] > 1 else 0, i, 0))
    matrix_specs = [pl.BlockSpec(matrix.shape, lambda b, i, h: (0, 0)) for matrix in matrices]
    widths = *(array.shape[-1] for array in arrays), width
    *inputs, output = (pl.BlockSpec((None, tokens, block * n), lambda b, i, h: (b, i, h)) for n in widths)
    shape = (batch, length, heads * width)
    kind = jax.typeof(x).manual_axis_type
    merged_heads = pl.pallas_call(
        partial(_kernel, step, block // _together(x.shape[-1])),
        grid=(batch, length // tokens, heads // block),
        in_specs=[table_spec, table_spec, *matrix_specs, *inputs],
        out_specs=output,
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype, manual_axis_type=kind),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        interpret=interpret,
        name=name,
    )(*table, *(jnp.asarray(a, x.dtype) for a in matrices), *(a.reshape(batch, length, -1) for a in arrays))
    return merged_heads.reshape(batch, length, heads, width)


def _block(x: Array, size: int) -> tuple[int, int]:
    """Tokens and heads of a block, whose heads have ``size`` features."""
    _, length, heads, width = x.shape
    least = _together(width)
    tokens = max(n for n in range(_LANES, _TOKENS + 1, _LANES) if length % n == 0)
    most = max(least, _COLUMN_BYTES // (size * x.dtype.itemsize))
    return tokens, max(n for n in range(least, most + 1, least) if heads % n == 0)


def _channels(width: int, size: int, pairing: str | None) -> np.ndarray:
    """The channels of a head that hold the components of planes, ``[components, planes]``."""
    channels = np.arange(width)
    return channels.reshape(size // 2, -1).T if pairing == "interleaved" else channels.reshape(-1, size // 2)


def _spread(width: int, size: int, pairing: str | None) -> np.ndarray:
    """``P``, for as many heads as fill the lanes."""
    components = np.eye(width)[_channels(width, size, pairing)].swapaxes(-1, -2)
    several = np.eye(_together(width))
    return np.concatenate([np.kron(several, np.tile(component, 2)) for component in components], axis=1)


def _gathered(width: int, size: int, pairing: str | None) -> np.ndarray:
    """``R``, for as many heads as fill the lanes; for one component it selects the first halves."""
    components = np.eye(width)[_channels(width, size, pairing).ravel()]
    return np.kron(np.eye(_together(width)), np.pad(components, [(0, size - width), (0, 0)]))


def _kernel(step: Callable, groups: int, cos_ref, sin_ref, *refs):
    """``refs``: matrices, as many arrays, and the output, which is written one group of heads at a time."""
    *inputs, output = refs
    matrices = inputs[: len(inputs) // 2]
    arrays = inputs[len(inputs) // 2 :]
    for n in range(groups):
        group = [ref[:, _columns(ref, n, groups)] for ref in arrays]
        group_result = step([cos_ref[...], sin_ref[...]], *(ref[...] for ref in matrices), *group)
        output[:, _columns(output, n, groups)] = group_result.astype(output.dtype)


def _columns(ref, n: int, groups: int) -> slice:
    """The columns of one group of heads."""
    width = ref.shape[1] // groups
    return slice(n * width, (n + 1) * width)


def _features(formula: Formula, widths: tuple[int, int], table: list, spread, x):
    components, table, first = _wide(widths, table, spread, x)
    return jnp.where(first, *formula(*components, *table))


def _gradient(formula: Formula, widths: tuple[int, int], table: list, spread, gathered, x, cotangent):
    components, table, first = _wide(widths, table, spread, x)
    size = widths[1]
    own = cotangent.astype(jnp.float32)
    heads = [own[:, n : n + size] for n in range(0, own.shape[1], size)]
    swapped = jnp.concatenate([pltpu.roll(head, size // 2, 1) for head in heads], axis=1)
    back = jax.vjp(lambda *components: formula(*components, *table), *components)[1]
    d_components = back((jnp.where(first, own, swapped), jnp.where(first, swapped, own)))
    joined = d_components[0] if len(d_components) == 1 else jnp.where(first, *d_components)
    return _product(joined.astype(x.dtype), gathered)


def _wide(widths: tuple[int, int], table: list, spread, x) -> tuple[list, list, Array]:
    """Components and table, as wide as the features of a group of heads, and which columns are in first halves."""
    width, size = widths
    both = _product(x, spread)
    heads = x.shape[1] // width
    components = jnp.split(both, both.shape[1] // (heads * size), axis=1)
    lanes = jax.lax.broadcasted_iota(jnp.int32, components[0].shape, 1)
    return components, [jnp.concatenate([part] * heads, axis=1) for part in table], lanes % size < size // 2


def _product(x, matrix):
    """The product with a matrix of zeros and ones: exact, because a column has at most one 1."""
    precision = jax.lax.Precision.HIGHEST if matrix.dtype == jnp.float32 else None
    return jax.lax.dot(x, matrix, precision=precision, preferred_element_type=jnp.float32)
