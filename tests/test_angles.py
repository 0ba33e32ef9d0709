from fractions import Fraction

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_angles import POSITIONS, TWO_PI, cos_sin

from posjax import _angles as subject


def test_words_are_turns_per_position_in_64_bits():
    values = np.array([1.0, 1e-4, 0.0, 7.0, -0.5])
    frequencies = subject.exact(values)
    chex.assert_type([frequencies.high, frequencies.low, frequencies.value], [np.uint32, np.uint32, np.float32])
    words = frequencies.high.astype(object) * 2**32 + frequencies.low.astype(object)
    for value, word in zip(values.tolist(), words.tolist(), strict=True):
        off = Fraction(value) / TWO_PI - Fraction(word, 2**64)
        assert abs(off - round(off)) <= Fraction(1, 2**65)
    assert words[2] == 0


def test_phase_equals_python_integers():
    rng = np.random.default_rng(0)
    positions = np.concatenate([rng.integers(-(2**31), 2**31, 200), [0, 1, -1, 2**31 - 1, -(2**31)]]).astype(np.int32)
    high, low = rng.integers(0, 2**32, (2, 3), dtype=np.uint32)
    found = jax.jit(subject.phase)(positions[:, None], high, low)
    words = high.astype(object) * 2**32 + low.astype(object)
    expected = [[(int(p) * int(w)) % 2**64 >> 32 for w in words] for p in positions]
    np.testing.assert_array_equal(found, np.array(expected, np.uint32))


@pytest.mark.parametrize("jit", [False, True])
def test_exact_angles_at_every_magnitude(jit):
    values = np.concatenate([10_000.0 ** -(np.arange(16) / 16), [0.0, 3.0, 6.5, 1000.25]])
    function = jax.jit(subject.angles) if jit else subject.angles
    angle = function(jnp.array(POSITIONS, jnp.int32), subject.exact(values))
    chex.assert_type(angle, jnp.float32)
    assert np.abs(angle).max() <= np.float32(np.pi)
    cos, sin = cos_sin(POSITIONS, values)
    np.testing.assert_allclose(np.cos(np.float64(angle)), cos, atol=5e-7)
    np.testing.assert_allclose(np.sin(np.float64(angle)), sin, atol=5e-7)


def test_exactness_does_not_need_x64_and_survives_it():
    with jax.enable_x64(True):
        angle = subject.angles(jnp.array([2**31 - 1], jnp.int32), subject.exact(np.array([1.0])))
        chex.assert_type(angle, jnp.float32)
    np.testing.assert_allclose(np.cos(angle), cos_sin([2**31 - 1], [1.0])[0], atol=5e-7)


def test_hf_precision_is_the_float32_product():
    positions = np.array([3, 257, 1_000_003], np.int32)
    values = 10_000.0 ** -(np.arange(8) / 8)
    found = jax.jit(subject.angles, static_argnums=2)(positions, subject.exact(values), "hf")
    np.testing.assert_array_equal(found, positions.astype(np.float32)[:, None] * values.astype(np.float32))
    with pytest.raises(ValueError, match=r"precision.*did you mean 'exact'"):
        subject.angles(positions, subject.exact(values), "exac")


def test_learned_frequencies_use_float32_and_are_differentiable():
    frequencies = subject.as_frequencies(jnp.array([0.5, 0.25]))
    assert not frequencies.is_exact
    gradient = jax.grad(lambda f: subject.angles(jnp.array([3, 4]), subject.as_frequencies(f)).sum())(jnp.ones(2))
    np.testing.assert_array_equal(gradient, [7.0, 7.0])


def test_fixed_point_of_traced_frequencies_is_linear_in_the_position():
    """Shifting positions by any amount changes all angles alike, which the float32 product loses."""
    values = jnp.float32(np.array([1.0, 0.7, 0.01, 3e-5, 0.0]))
    angle = jax.jit(lambda p, v: subject.angles(p, subject.fixed_point(v)))
    for shift in (1_000_003, 2**31 - 9):
        far, near = angle(jnp.array([shift, shift + 8]), values), angle(jnp.array([0, 8]), values)
        difference = np.float64(far[1] - far[0]) - np.float64(near[1] - near[0])
        np.testing.assert_allclose(np.sin(difference), 0.0, atol=1e-6)
    np.testing.assert_allclose(angle(jnp.array([1]), values)[0], values, atol=2e-9, rtol=3e-7)


def test_fixed_point_words_hold_the_float32_turns_exactly():
    values = np.float32([1.0, 0.7, 3e-5, 1e-9, 40.0, -0.3, 0.0])
    frequencies = subject.fixed_point(jnp.asarray(values))
    words = np.asarray(frequencies.high).astype(object) * 2**32 + np.asarray(frequencies.low).astype(object)
    turns = values * np.float32(1 / (2 * np.pi))
    fraction = turns - np.floor(turns)
    assert words.tolist() == [int(Fraction(float(f)) * 2**64) for f in fraction]


def test_frequencies_behave_as_an_array_and_pass_through_jit():
    frequencies = subject.exact(np.array([1.0, 0.5]))
    assert (frequencies.value.shape, frequencies.is_exact) == ((2,), True)
    np.testing.assert_array_equal(np.asarray(frequencies), [1.0, 0.5])
    np.testing.assert_allclose(jnp.multiply(frequencies, 2), [2.0, 1.0])
    chex.assert_trees_all_equal(jax.jit(lambda f: f)(frequencies), frequencies)
    assert isinstance(jax.jit(lambda f: f)(frequencies), subject.Frequencies)


def test_bad_frequencies_are_refused():
    with pytest.raises(ValueError, match="finite"):
        subject.exact(np.array([1.0, np.inf]))
    with pytest.raises(ValueError, match="frequencies must be real"):
        subject.as_frequencies(jnp.array([1, 2]))
