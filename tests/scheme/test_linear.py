"""Schemes with linear attention: the rotation of queries, and the options that are refused."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from scheme.calls import HEADS, TOKENS, as_float32, attended, decoded, projections

import posjax as pj
from posjax.positions import Range


def test_linear_attention_rotates_queries_by_their_positions():
    q, k, v = as_float32(*projections())
    scheme = pj.scheme("linear-elu")
    unshifted = scheme.attend(q, k, v)
    assert np.abs(scheme.attend(q, k, v, q_positions=Range(100, TOKENS)) - unshifted).max() > 0.01
    moved = scheme.attend(q, k, v, q_positions=Range(100, TOKENS), kv_positions=Range(100, TOKENS))
    np.testing.assert_allclose(moved, unshifted, atol=1e-5)


@pytest.mark.parametrize("call", [attended, decoded])
@pytest.mark.parametrize("option", [{"softcap": 2.0}, {"sinks": jnp.zeros(HEADS)}, {"return_residuals": True}])
def test_linear_attention_refuses_options_about_logits(call, option):
    (name,) = option
    with pytest.raises(ValueError, match=f"{name}: linear attention has no logits for it"):
        call(pj.scheme("linear-elu"), **option)


@pytest.mark.parametrize("call", [attended, decoded])
def test_linear_attention_ignores_the_choice_of_an_implementation(call):
    scheme = pj.scheme("linear-elu")
    chex.assert_trees_all_equal(call(scheme, implementation="blockwise"), call(scheme))


def test_linear_attention_stores_no_keys():
    scheme, (q, k, v) = pj.scheme("linear-elu"), as_float32(*projections())
    where = {"q_positions": Range(0, TOKENS), "kv_positions": Range(0, TOKENS), "length": TOKENS}
    with pytest.raises(ValueError, match=r"^stored: linear attention keeps one state for all keys; use init_cache"):
        scheme.stored({}, k, v, Range(0, TOKENS))
    with pytest.raises(ValueError, match=r"^attend_stored: linear attention keeps one state for all keys; use init"):
        scheme.attend_stored(q, k, v, params={}, head_dim=8, **where)
