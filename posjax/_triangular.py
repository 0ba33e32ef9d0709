"""The inverse of a triangular matrix with ones on its diagonal: of what the tokens of a chunk do to each other, in the
delta rule and in PaTH."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def inverse_of_unit_triangle(x: Float[Array, "*b n n"]) -> Float[Array, "*b n n"]:
    """The inverse of ``1 + L``, for ``L`` the part of ``x`` below its diagonal, by halves:

        inverse of [A, 0; B, D] = [A', 0; -D' B A', D']   with A' and D' the inverses of A and D

    It takes matrix products alone. A triangular solve has as many steps as rows on a TPU, and on a CPU its gradient in
    a loop may never end (jaxlib 0.10.2, two threads).
    """
    size = x.shape[-1]
    if size == 1:
        return jnp.ones_like(x)
    half = 1 << (size - 1).bit_length() - 1
    whole = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, 2 * half - size)] * 2)
    both = jnp.stack([whole[..., :half, :half], whole[..., half:, half:]])
    first, second = inverse_of_unit_triangle(both)
    corner = -_exact(second, _exact(whole[..., half:, :half], first))
    rows = jnp.concatenate([first, jnp.zeros_like(first)], -1), jnp.concatenate([corner, second], -1)
    return jnp.concatenate(rows, -2)[..., :size, :size]


def _exact(x: Array, y: Array) -> Array:
    """A product in float32 also where the default is narrower: the inverse is built of products of products."""
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)
