"""Parts of the TPU kernels' terms that need no kernel, against their formulas in NumPy."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.attention.tpu.terms import LANES, SUBLANES, skewed, unskewed


@pytest.mark.parametrize(("heads", "size"), [(3, 256), (3, 130), (200, 130)])
def test_a_skewed_vector_and_its_transpose(heads, size):
    """``U[t, b, y] = u[128 t + y - b]`` with ``u`` extended by its end values; the transpose adds up their copies."""
    rng = np.random.default_rng(0)
    u, sums = rng.integers(-9, 9, (heads, size)), rng.integers(-9, 9, (heads, 2, SUBLANES, LANES))
    t, b, y = np.ogrid[:2, :SUBLANES, :LANES]
    index = np.clip(LANES * t + y - b, 0, size - 1)
    got = skewed(jnp.asarray(u, jnp.float32), 2)
    chex.assert_shape(got, sums.shape)
    np.testing.assert_array_equal(got, u[:, index])
    want = np.zeros((heads, size))
    np.add.at(want, (slice(None), index), sums)
    np.testing.assert_array_equal(unskewed(jnp.asarray(sums, jnp.float32), size), want)
