"""Attention sinks against an explicit key and value, and against the oracle."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles

import posjax
from posjax.masks import Causal
from posjax.sinks import LearnedSinks, SoftmaxPlusOne

HEADS = 4
Q, K, V = (np.random.default_rng(0).standard_normal((2, 6, heads, 8)).astype(np.float32) for heads in (HEADS, 2, 2))


def test_softmax_plus_one_is_a_zero_key_with_a_zero_value():
    found = posjax.attention(Q, K, V, mask=Causal(), sinks=SoftmaxPlusOne().logits({}, HEADS))
    more = (np.concatenate([np.zeros((2, 1, 2, 8)), x], axis=1) for x in (K, V))
    want, _ = oracles.attention(Q, *more, allowed=np.tri(6, 7, 1, dtype=bool))
    np.testing.assert_allclose(found, want, atol=1e-5)


def test_learned_sinks_are_one_logit_per_head():
    params = {"sinks": jnp.array([-1.0, 0.0, 0.5, 3.0])}
    found = posjax.attention(Q, K, V, mask=Causal(), sinks=LearnedSinks().logits(params, HEADS))
    want, _ = oracles.attention(Q, K, V, allowed=np.tri(6, dtype=bool), sinks=np.asarray(params["sinks"]))
    np.testing.assert_allclose(found, want, atol=1e-5)


def test_learned_sinks_start_at_softmax_plus_one_and_learn():
    params = LearnedSinks().init(jax.random.key(0), HEADS)
    chex.assert_trees_all_equal(params, {"sinks": jnp.zeros(HEADS)})
    assert SoftmaxPlusOne().init(jax.random.key(0), HEADS) == {}

    def loss(params):
        return jnp.square(posjax.attention(Q, K, V, sinks=LearnedSinks().logits(params, HEADS))).sum()

    assert np.all(jax.jit(jax.grad(loss))(params)["sinks"] < 0)
