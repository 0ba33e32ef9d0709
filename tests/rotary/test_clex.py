"""CLEX against the equation of the paper, integrated in float64 by NumPy as it is written there."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax import rotary
from posjax.positions import Range
from posjax.rotary import CLEX

RULE = CLEX(32, max_factor=4, steps=10)
PLAIN = 10_000.0 ** (-np.arange(8) / 8)
EXPONENTS = -np.arange(0, 16, 2) / 14


def params(rule=RULE, size=0.03):
    made = rule.init(jax.random.key(0), 16)
    return {**made, "down": size * jax.random.normal(jax.random.key(1), made["down"].shape)}


def oracle(params, t, act=np.tanh, steps=400):
    """dz/dt = act((z + ln ntk) up) down + d ln ntk / dt from z(1) = ln theta, by Heun's method in small steps."""
    up, down = (np.asarray(params[name], np.float64) for name in ("up", "down"))

    def slope(t, z):
        ntk = np.log(PLAIN) + EXPONENTS * np.log(2 * t - 1)
        return act((z + ntk) @ up) @ down + EXPONENTS * 2 / (2 * t - 1)

    z, h = np.log(PLAIN), 1 / steps
    for n in range((t - 1) * steps):
        first = slope(1 + n * h, z)
        z = z + h / 2 * (first + slope(1 + (n + 1) * h, z + h * first))
    return np.exp(z)


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize(("activation", "act"), [("tanh", np.tanh), ("silu", silu)])
def test_solution_of_the_equation(activation, act):
    rule = CLEX(32, max_factor=4, steps=10, activation=activation, param_factor=2)
    learned = params(rule)
    traced = jax.jit(lambda n, p: rule.at_length(n, head_dim=16, params=p)[0].value)
    for length, t in ((1, 1), (32, 1), (33, 2), (64, 2), (65, 3), (128, 4), (129, 4), (10**6, 4)):
        expected = oracle(learned, t, act)
        np.testing.assert_allclose(traced(length, learned), expected, rtol=2e-5)
    assert np.abs(expected / oracle({**learned, "down": 0 * learned["down"]}, 4, act) - 1).max() > 0.05
    assert traced._cache_size() == 1
    np.testing.assert_allclose(rule.at_length(65, head_dim=16, params=learned)[0], oracle(learned, 3, act), rtol=2e-5)


def test_untrained_is_the_closed_form():
    rule = CLEX(32, head_dim=128)
    made = rule.init(jax.random.key(0), 128)
    chex.assert_shape([made["up"], made["down"]], [(64, 128), (128, 64)])
    assert not made["down"].any()
    bound = 128**-0.5
    assert 0.95 * bound < np.abs(made["up"]).max() <= bound
    for length, t in ((32, 1), (64, 2), (500, 16), (513, 16)):
        expected = 10_000.0 ** (-np.arange(64) / 64) * (2 * t - 1.0) ** (-2 * np.arange(64) / 126)
        exact, factor = rule.at_length(length)
        assert exact.is_exact
        assert factor == 1.0
        np.testing.assert_allclose(exact, expected, rtol=1e-7)
    np.testing.assert_array_equal(rule.at_length(64, params=made)[0], rule.at_length(64)[0])
    # the closed form solves the equation: the derivative term of the oracle is the slope of its logarithm
    zeros = {"up": np.zeros((8, 16)), "down": np.zeros((16, 8))}
    np.testing.assert_allclose(oracle(zeros, 4), PLAIN * 7**EXPONENTS, rtol=1e-5)


def test_rows_tokens_and_the_float32_mode():
    learned = params()
    lengths = np.array([[16, 33, 70], [100, 128, 999]])
    table = jax.jit(lambda n, p: RULE.table(Range(7, 3), head_dim=16, length=n, params=p))
    for given in (lengths[:, 2], lengths):
        found = table(given, learned)
        chex.assert_shape(found.cos, (2, 3, 8))
        for b, j in np.ndindex(2, 3):
            t = min(4, -(-int(lengths[b, 2 if given.ndim == 1 else j]) // 32))
            np.testing.assert_allclose(found.sin[b, j], np.sin((7 + j) * oracle(learned, t)), atol=2e-4)
    single = RULE.table(Range(7, 3), head_dim=16, length=70, params=learned, precision="hf")
    chex.assert_trees_all_close(jax.tree.map(lambda x: x[2], single), jax.tree.map(lambda x: x[0, 2], found), atol=1e-5)


def test_gradients_are_those_of_the_product():
    learned = params()

    def loss(p, table):
        cos, sin = table(p)
        return jnp.sum(cos * jnp.arange(24.0).reshape(3, 8)) + jnp.sum(sin)

    def naive(p):
        angle = jnp.array([1.0, 2.0, 40.0])[:, None] * RULE.at_length(100, head_dim=16, params=p)[0].value
        return jnp.cos(angle), jnp.sin(angle)

    places = np.array([1, 2, 40])
    gradient = jax.jit(jax.grad(lambda p: loss(p, lambda p: RULE.table(places, head_dim=16, length=100, params=p))))
    found = gradient(learned)
    chex.assert_trees_all_close(found, jax.jit(jax.grad(lambda p: loss(p, naive)))(learned), rtol=1e-3)
    assert all(np.abs(leaf).max() > 1 for leaf in found.values())
    # "up" gets a gradient as soon as "down" is not zero
    assert np.abs(gradient(RULE.init(jax.random.key(0), 16))["down"]).max() > 0


def test_scores_do_not_change_far_away():
    assert RULE.shift_invariant
    learned = params()

    @jax.jit
    def products(start):
        cos, sin = RULE.table(Range(start, 6), head_dim=16, length=128, params=learned)
        return cos @ cos.T + sin @ sin.T

    np.testing.assert_allclose(products(jnp.int32(2**31 - 7)), products(jnp.int32(0)), atol=2e-5)


def test_plain_within_the_training_length():
    table = RULE.table(Range(0, 32), head_dim=16, length=32, params=params())
    chex.assert_trees_all_close(table, rotary.rotary_table(Range(0, 32), rotary.inverse_frequencies(16)), atol=5e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: CLEX(0), "original_length must be positive and whole, found 0"),
        (lambda: CLEX(32, max_factor=0), "max_factor must be positive and whole, found 0"),
        (lambda: CLEX(32, steps=0.5), "steps must be positive and whole, found 0.5"),
        (lambda: CLEX(32, activation="relu"), "activation: unknown value 'relu'"),
        (lambda: CLEX(32).to_hf(), "no rope_type for CLEX"),
        (lambda: RULE.table(Range(0, 4), head_dim=16, length=64), "params must hold 'up', 'down': CLEX"),
        (lambda: RULE.table(Range(0, 4), head_dim=16, params=params()), "reads the current length: pass length="),
        (
            lambda: RULE.table(Range(0, 4), head_dim=32, length=64, params=params()),
            r"up must have shape \(16, 32\), found",
        ),
        (lambda: RULE.table(Range(0, 4), head_dim=16, length=64, params=params(), precision="x"), "precision: unknown"),
    ],
)
def test_bad_calls_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
