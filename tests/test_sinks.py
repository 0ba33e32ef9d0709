"""Attention sinks against an explicit key and value, and against the oracle."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import posjax
from posjax.masks import Causal
from posjax.sinks import LearnedSinks, SoftmaxPlusOne

HEADS = 4
INPUTS = tuple(
    jax.random.normal(key, (2, 6, heads, 8))
    for key, heads in zip(jax.random.split(jax.random.key(0), 3), (HEADS, 2, 2), strict=True)
)


def test_softmax_plus_one_is_a_zero_key_with_a_zero_value():
    q, k, v = INPUTS
    found = posjax.attention(q, k, v, mask=Causal(), sinks=SoftmaxPlusOne().logits({}, HEADS))
    more = tuple(np.concatenate([np.zeros((2, 1, 2, 8)), x], axis=1) for x in (k, v))
    want, _ = oracles.attention(q, *more, allowed=np.tri(6, 7, 1, dtype=bool))
    np.testing.assert_allclose(found, want, atol=1e-5)
    # Nothing but the sink is left when all logits are far below it.
    faint = posjax.attention(100 * jnp.ones_like(q), -jnp.ones_like(k), v, sinks=SoftmaxPlusOne().logits({}, HEADS))
    np.testing.assert_allclose(faint, 0, atol=1e-6)


def test_learned_sinks_are_one_logit_per_head():
    q, k, v = INPUTS
    params = {"sinks": jnp.array([-1.0, 0.0, 0.5, 3.0])}
    found = posjax.attention(q, k, v, mask=Causal(), sinks=LearnedSinks().logits(params, HEADS))
    want, _ = oracles.attention(q, k, v, allowed=np.tri(6, dtype=bool), sinks=np.asarray(params["sinks"]))
    np.testing.assert_allclose(found, want, atol=1e-5)


def test_learned_sinks_start_at_softmax_plus_one_and_learn():
    q, k, v = INPUTS
    params = LearnedSinks().init(jax.random.key(0), HEADS)
    chex.assert_shape(params["sinks"], (HEADS,))
    chex.assert_type(params["sinks"], jnp.float32)
    chex.assert_trees_all_equal(LearnedSinks().logits(params, HEADS), SoftmaxPlusOne().logits({}, HEADS))
    assert SoftmaxPlusOne().init(jax.random.key(0), HEADS) == {}

    def loss(params):
        return jnp.square(posjax.attention(q, k, v, sinks=LearnedSinks().logits(params, HEADS))).sum()

    gradient = jax.jit(jax.grad(loss))(params)["sinks"]
    assert np.all(np.asarray(gradient) < 0)


def test_learned_sinks_need_their_parameters():
    for params in ({}, {"sinks": jnp.zeros(2)}):
        with pytest.raises(ValueError, match=r"LearnedSinks\(\.\.\.\)\.init makes them"):
            LearnedSinks().logits(params, HEADS)
    assert LearnedSinks() in {LearnedSinks()}
