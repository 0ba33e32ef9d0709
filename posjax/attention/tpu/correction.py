"""The kernel for ``D = rowsum(dO * O)``, which the backward pass subtracts from the gradient of every weight.

It reads both arrays once, in their layout, and writes one number for each query and head.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posjax.attention.tpu import terms
from posjax.attention.tpu.dma import block_spec, feature_spec
from posjax.attention.tpu.terms import LANES

_LARGEST_BLOCK = 2048


@partial(jax.jit, static_argnums=0, static_argnames="interpret")
def row_sums_of_heads(heads: int, d_out: jax.Array, out: jax.Array, *, interpret=False) -> jax.Array:
    """``D``, float32 ``[batch, heads, 1, queries]``, of two arrays in the layout of ``merge_heads``."""
    batch, head_axis, queries, columns = out.shape
    size = columns * head_axis // heads
    block = next(n for n in range(min(_LARGEST_BLOCK, queries), 0, -LANES) if queries % n == 0)
    varying = jax.typeof(out).manual_axis_type
    sums_type = jax.ShapeDtypeStruct((batch, heads, 1, queries), jnp.float32, manual_axis_type=varying)
    return pl.pallas_call(
        _kernel,
        grid=(batch, heads, queries // block),
        in_specs=[feature_spec(out.shape, size, block)] * 2,
        out_specs=block_spec(sums_type.shape, -1, block),
        out_shape=sums_type,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        interpret=interpret,
        name="posjax_attention_correction",
    )(d_out, out)


def _kernel(d_out_ref, out_ref, sums_ref):
    products = d_out_ref[...].astype(jnp.float32) * out_ref[...].astype(jnp.float32)
    size = products.shape[1]
    if size % LANES:
        products = jnp.pad(products, ((0, 0), (0, -size % LANES)))
    slabs = [products[:, n : n + LANES] for n in range(0, products.shape[1], LANES)]
    sums_ref[...] = terms.row(sum(slabs[1:], start=slabs[0]))
