"""Angles, position times frequency, against exact rational arithmetic."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_angles import POSITIONS, cos_sin
from refusals import refused

from posjax import _angles as subject

VALUES = np.concatenate([10_000.0 ** -(np.arange(16) / 16), [0.0, 3.0, 6.5, 1000.25, -0.5]])


@pytest.mark.parametrize("x64", [False, True])
def test_angles_are_exact_at_every_position(x64):
    with jax.enable_x64(x64):
        angle = jax.jit(subject.angles)(jnp.array(POSITIONS, jnp.int32), subject.exact(VALUES))
    assert angle.dtype == jnp.float32
    assert np.abs(angle).max() <= np.float32(np.pi)
    cos, sin = cos_sin(POSITIONS, VALUES)
    np.testing.assert_allclose(np.cos(np.float64(angle)), cos, atol=5e-7)
    np.testing.assert_allclose(np.sin(np.float64(angle)), sin, atol=5e-7)


def test_hf_precision_is_the_float32_product():
    positions = np.array([3, 257, 1_000_003], np.int32)
    found = jax.jit(subject.angles, static_argnums=2)(positions, subject.exact(VALUES), "hf")
    np.testing.assert_array_equal(found, positions.astype(np.float32)[:, None] * VALUES.astype(np.float32))
    refused("precision", lambda: subject.angles(positions, subject.exact(VALUES), "exac"))


def test_learned_frequencies_are_differentiable():
    total = jax.grad(lambda f: subject.angles(jnp.array([3, 4]), subject.as_frequencies(f)).sum())
    np.testing.assert_array_equal(total(jnp.ones(2)), [7.0, 7.0])


def test_angles_of_traced_frequencies_are_linear_in_the_position():
    """Shifting positions by any amount changes all angles alike, which the float32 product loses."""
    values = jnp.float32(np.array([1.0, 0.7, 0.01, 3e-5, -0.3, 40.0, 0.0]))
    angle = partial(jax.jit(lambda v, p: subject.angles(p, subject.fixed_point(v))), values)
    for shift in (1_000_003, 2**31 - 9):
        far, near = angle(jnp.array([shift, shift + 8])), angle(jnp.array([0, 8]))
        difference = np.float64(far[1] - far[0]) - np.float64(near[1] - near[0])
        np.testing.assert_allclose(np.sin(difference), 0.0, atol=1e-6)
    np.testing.assert_allclose(angle(jnp.array([1]))[0, :5], values[:5], atol=2e-9, rtol=3e-7)


def test_frequencies_that_are_not_finite_or_not_real_are_refused():
    refused("frequencies", lambda: subject.exact(np.array([1.0, np.inf])))
    refused("frequencies", lambda: subject.as_frequencies(jnp.array([1, 2])))
