"""VO-RoPE: values are rotated, and outputs are rotated back."""

import chex
import jax
import numpy as np
import pytest
from rotations import powers, turn

from posjax.rotary import Plain, Rotary, ValueRotary, YaRN

D, SIZE, N = 16, 8, 5
Q, K = (np.asarray(jax.random.normal(jax.random.key(seed), (2, N, heads, D))) for seed, heads in ((0, 4), (1, 2)))
V = np.asarray(jax.random.normal(jax.random.key(2), (2, N, 2, SIZE)))
POSITIONS = np.array([3, 4, 9, 10, 1000])


def attend(slot, positions=POSITIONS):
    """Causal attention with the slot's features, in float64."""
    options = {"head_dim": D}
    phi, psi = slot(Q, K, q_positions=positions, kv_positions=positions, **options)
    values = np.repeat(np.float64(slot.value({}, V, positions, **options)), 2, axis=2)
    logits = np.einsum("btnd,bsnd->bnts", np.float64(phi), np.repeat(np.float64(psi), 2, axis=2)) / np.sqrt(D)
    weights = np.exp(logits) * np.tri(N)
    weights = weights / weights.sum(-1, keepdims=True)
    out = np.einsum("bnts,bsnd->btnd", weights, values).astype(np.float32)
    return weights, np.asarray(slot.output({}, out, positions, **options))


@pytest.mark.parametrize(("targets", "pairing"), [("vo", "interleaved"), ("qkvo", "half")])
def test_outputs_sum_values_turned_by_their_distance(targets, pairing):
    """o_i = sum_j a_ij R_{j-i} v_j; pairs and frequencies over the size of the values."""
    slot = ValueRotary(targets=targets, pairing=pairing)
    weights, found = attend(slot)
    angles = (POSITIONS[None, :, None] - POSITIONS[:, None, None]) * powers(10_000.0, SIZE)
    expected = np.zeros((2, N, 4, SIZE))
    for i, j in np.ndindex(N, N):
        turned = turn(np.repeat(V[:, j], 2, axis=1), angles[i, j], pairing)
        expected[:, i] += weights[:, :, i, j, None] * turned
    np.testing.assert_allclose(found, expected, atol=2e-6)
    np.testing.assert_allclose(attend(slot, POSITIONS + 1_000_003)[1], found, atol=1e-5)


def test_targets_say_whether_queries_and_keys_turn():
    places = {"q_positions": POSITIONS, "kv_positions": POSITIONS, "head_dim": D}
    chex.assert_trees_all_equal(ValueRotary()(Q, K, **places), (Q, K))
    chex.assert_trees_all_equal(ValueRotary(targets="qkvo")(Q, K, **places), Rotary()(Q, K, **places))


def test_an_attention_factor_is_for_logits_only():
    slot = ValueRotary(YaRN(4.0, 32))
    turned = slot.value({}, V, POSITIONS, head_dim=D)
    np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(V, axis=-1), rtol=1e-5)
    np.testing.assert_allclose(slot.output({}, turned, POSITIONS, head_dim=D), V, atol=1e-5)


def test_gradient_and_dtype():
    slot = ValueRotary(Plain(100.0))
    turn_back = jax.jit(lambda v: slot.output({}, slot.value({}, v, POSITIONS, head_dim=D), POSITIONS, head_dim=D))
    np.testing.assert_allclose(jax.grad(lambda v: (turn_back(v) * V).sum())(V), V, atol=1e-5)
    assert slot.value({}, V.astype(np.float16), POSITIONS, head_dim=D).dtype == np.float16
