"""The features of RoPE: the formula, their factor, the current length, decoding, and shifts of all positions."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rotations import powers, turn

from posjax.positions import Range
from posjax.rotary import DynamicNTK, Plain, Rotary, YaRN

Q, K = (jax.random.normal(jax.random.key(seed), (2, 6, heads, 16)) for seed, heads in ((0, 4), (1, 2)))
PLACES = {"q_positions": Range(3, 6), "kv_positions": Range(3, 6), "head_dim": 16}


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_features_are_rotations_by_position(pairing):
    phi, psi = jax.jit(lambda q, k: Rotary(pairing=pairing)(q, k, **PLACES))(Q, K)
    angles = np.arange(3, 9)[:, None, None] * powers(10_000.0, 16)
    np.testing.assert_allclose(phi, turn(Q, angles, pairing), atol=2e-6)
    np.testing.assert_allclose(psi, turn(K, angles, pairing), atol=2e-6)


def test_a_slot_says_what_it_reads_and_is_a_value():
    slot = Rotary(YaRN(4.0, 32), precision="hf")
    assert (slot.query_size(16), slot.key_size(16), slot.reads_length, slot.shift_invariant) == (16, 16, False, True)
    assert Rotary(DynamicNTK(32)).reads_length
    assert len({Rotary(), Rotary(Plain(500.0)), Rotary(pairing="interleaved"), Rotary()}) == 3


def test_the_attention_factor_multiplies_both_sides():
    rule = YaRN(4.0, 32)
    scores = lambda slot: jnp.einsum("btnd,bsnd->bnts", *slot(Q[:, :, :2], K, **PLACES))  # noqa: E731
    ratio = scores(Rotary(rule)) / scores(Rotary(YaRN(4.0, 32, attention_factor=1.0)))
    np.testing.assert_allclose(ratio, rule.table_factor**2, rtol=1e-3)


def test_the_length_may_be_traced_and_differ_between_rows():
    slot = Rotary(DynamicNTK(4))
    whole = jax.jit(lambda n: slot(Q, K, **PLACES, length=n))(12)
    chex.assert_trees_all_close(whole, slot(Q, K, **PLACES, length=12), atol=1e-5)
    rows = slot(Q, K, **PLACES, length=jnp.array([12, 4]))
    chex.assert_trees_all_close(rows[0][0], whole[0][0], atol=1e-5)
    chex.assert_trees_all_close(rows[1][1], Rotary()(Q, K, **PLACES)[1][1], atol=1e-5)


@pytest.mark.parametrize("length", [None, 4096])
def test_scores_do_not_change_far_away_even_for_a_traced_length(length):
    slot = Rotary(Plain() if length is None else DynamicNTK(32))

    @jax.jit
    def scores(start, length):
        places = {"q_positions": Range(start, 6), "kv_positions": Range(start, 6), "head_dim": 16}
        return jnp.einsum("btnd,bsnd->bnts", *slot(Q[:, :, :2], K, **places, length=length))

    near, far = scores(jnp.int32(0), length), scores(jnp.int32(2**31 - 7), length)
    np.testing.assert_allclose(far, near, atol=2e-5)


def test_positions_may_restart_in_a_row():
    found = Rotary()(Q, K, q_positions=np.array([[0, 0, 0, 1, 2, 3]] * 2), kv_positions=Range(0, 6), head_dim=16)[0]
    angles = np.array([0, 0, 0, 1, 2, 3])[:, None, None] * powers(10_000.0, 16)
    np.testing.assert_allclose(found, turn(Q, angles), atol=2e-6)
