"""CLEX against the equation of the paper, integrated in float64 by NumPy as it is written there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from posjax.positions import Range
from posjax.rotary import CLEX

RULE = CLEX(32, max_factor=4, steps=10)
PLAIN = 10_000.0 ** (-np.arange(8) / 8)
EXPONENTS = -np.arange(0, 16, 2) / 14


def params(rule=RULE):
    made = rule.init(jax.random.key(0), 16)
    return {**made, "down": 0.03 * jax.random.normal(jax.random.key(1), made["down"].shape)}


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


@pytest.mark.parametrize(("activation", "act"), [("tanh", np.tanh), ("silu", lambda x: x / (1 + np.exp(-x)))])
def test_frequencies_solve_the_equation_at_every_length(activation, act):
    rule = CLEX(32, max_factor=4, steps=10, activation=activation, param_factor=2)
    learned = params(rule)
    traced = jax.jit(lambda n, p: rule.at_length(n, head_dim=16, params=p)[0].value)
    for length, t in ((1, 1), (32, 1), (33, 2), (65, 3), (129, 4), (10**6, 4)):
        expected = oracle(learned, t, act)
        np.testing.assert_allclose(traced(length, learned), expected, rtol=2e-5)
    assert np.abs(expected / oracle({**learned, "down": 0 * learned["down"]}, 4, act) - 1).max() > 0.05
    assert traced._cache_size() == 1
    for length in (65, np.array([[16, 65]])):
        found = rule.at_length(length, head_dim=16, params=learned)[0].value
        np.testing.assert_allclose(found.reshape(-1, 8)[-1], oracle(learned, 3, act), rtol=2e-5)


def test_untrained_it_is_the_closed_form():
    rule = CLEX(32, head_dim=128)
    made = rule.init(jax.random.key(0), 128)
    assert not made["down"].any()
    assert 0.95 * 128**-0.5 < np.abs(made["up"]).max() <= 128**-0.5
    for length, t in ((32, 1), (64, 2), (513, 16)):
        expected = 10_000.0 ** (-np.arange(64) / 64) * (2 * t - 1.0) ** (-2 * np.arange(64) / 126)
        found, factor = rule.at_length(length, params=made)
        assert factor == 1.0
        np.testing.assert_allclose(found, expected, rtol=1e-7)


def test_scores_do_not_change_far_away_and_have_gradients_from_the_start():
    @jax.jit
    def products(start, p):
        cos, sin = RULE.table(Range(start, 6), head_dim=16, length=128, params=p)
        return cos @ cos.T + sin @ sin.T

    learned = params()
    np.testing.assert_allclose(products(jnp.int32(2**31 - 7), learned), products(jnp.int32(0), learned), atol=2e-5)
    untrained = jax.jit(jax.grad(lambda p: products(jnp.int32(0), p).sum()))(RULE.init(jax.random.key(0), 16))
    assert np.abs(untrained["down"]).max() > 0
    check_grads(lambda p: products(jnp.int32(0), p).sum(), (learned,), order=1, modes=["rev"], eps=1e-3, rtol=1e-2)
