"""The features of RoPE, VO-RoPE and xPos: closed forms, factors, the current length, and shifts of all positions."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rotations import powers, turn

from posjax.positions import Range
from posjax.rotary import DynamicNTK, Plain, Rotary, ValueRotary, XPos, YaRN

D, SIZE, N = 16, 8, 5
Q, K, V = (
    np.random.default_rng(seed).normal(size=(2, N, heads, size)).astype(np.float32)
    for seed, (heads, size) in enumerate(((4, D), (2, D), (2, SIZE)))
)
POSITIONS = np.array([3, 4, 9, 10, 1000])


def features(slot, positions=POSITIONS, length=None):
    return jax.jit(lambda at, n: slot(Q, K, q_positions=at, kv_positions=at, head_dim=D, length=n))(positions, length)


# --- RoPE -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_features_are_rotations_by_position(pairing):
    phi, psi = features(Rotary(pairing=pairing))
    angles = POSITIONS[:, None, None] * powers(10_000.0, D)
    np.testing.assert_allclose(phi, turn(Q, angles, pairing), atol=2e-6)
    np.testing.assert_allclose(psi, turn(K, angles, pairing), atol=2e-6)


def test_the_attention_factor_multiplies_both_sides():
    for found, plain in zip(features(Rotary(YaRN(1.0, 32, attention_factor=1.5))), features(Rotary()), strict=True):
        np.testing.assert_allclose(found, 1.5 * plain, atol=1e-6)


def test_the_length_may_be_traced_and_differ_between_rows():
    rows = features(Rotary(DynamicNTK(4)), length=jnp.array([12, 4]))
    theta = (10_000.0 * 3 ** (D / (D - 2))) ** (-np.arange(D // 2) / (D // 2))
    np.testing.assert_allclose(rows[0][0], turn(Q[0], POSITIONS[:, None, None] * theta), atol=1e-4)
    chex.assert_trees_all_close(rows[1][1], features(Rotary())[1][1], atol=1e-5)


@pytest.mark.parametrize("length", [None, 4096])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_scores_do_not_change_far_away_even_for_a_traced_length(length, pairing):
    slot = Rotary(Plain(partial_rotary_factor=0.5) if length is None else DynamicNTK(32), pairing=pairing)

    @jax.jit
    def scores(start, length):
        at = Range(start, N)
        phi, psi = slot(Q, K, q_positions=at, kv_positions=at, head_dim=D, length=length)
        return jnp.einsum("btnd,bsnd->bnts", phi[:, :, ::2], psi)

    near = scores(jnp.int32(0), length)
    for start in (-8, 2**31 - 1 - N, -(2**31)):
        np.testing.assert_allclose(scores(jnp.int32(start), length), near, atol=2e-5)


# --- VO-RoPE: values are rotated, and outputs are rotated back --------------------------------------------------------


def attend(slot, positions=POSITIONS):
    """Causal attention with the slot's features, in float64."""
    phi, psi = features(slot, positions)
    values = np.repeat(np.float64(slot.value({}, V, positions, head_dim=D)), 2, axis=2)
    logits = np.einsum("btnd,bsnd->bnts", np.float64(phi), np.repeat(np.float64(psi), 2, axis=2)) / np.sqrt(D)
    weights = np.exp(logits) * np.tri(N)
    weights = weights / weights.sum(-1, keepdims=True)
    out = np.einsum("bnts,bsnd->btnd", weights, values).astype(np.float32)
    return weights, np.asarray(slot.output({}, out, positions, head_dim=D))


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
    wanted = (Q, K) if targets == "vo" else features(Rotary(pairing=pairing))
    chex.assert_trees_all_equal(features(slot), wanted)


def test_an_attention_factor_is_for_logits_only_and_the_gradient_is_that_of_a_rotation():
    slot = ValueRotary(YaRN(4.0, 32))
    turned = slot.value({}, V, POSITIONS, head_dim=D)
    np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(V, axis=-1), rtol=1e-5)
    turn_back = jax.jit(lambda v: slot.output({}, slot.value({}, v, POSITIONS, head_dim=D), POSITIONS, head_dim=D))
    np.testing.assert_allclose(turn_back(V), V, atol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda v: (turn_back(v) * V).sum())(V), V, atol=1e-5)
    assert turn_back(V.astype(np.float16)).dtype == np.float16


# --- xPos -------------------------------------------------------------------------------------------------------------


def zeta(d, gamma=0.4):
    return (2 * np.arange(d // 2) + gamma * d) / ((1 + gamma) * d)


def test_numbers_of_the_paper():
    """zeta runs from 0.2857 to 0.978 for a head of 64; at distance 512 it is the factor, at 2048 its fourth power."""
    kept = np.exp(-512 * XPos().decay(64))[:32]
    np.testing.assert_allclose(kept, zeta(64), rtol=1e-12)
    np.testing.assert_allclose(kept[[0, -1]], [0.2857, 0.978], atol=5e-4)
    np.testing.assert_allclose(np.exp(-2048 * XPos().decay(64))[0], 0.00666, atol=1e-5)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_decayed_scores_are_sums_of_damped_pairs(pairing):
    """sum_t zeta_t^((i - j)/512) of the rotated pairs."""
    slot = XPos(pairing=pairing)
    phi, psi = (np.float64(x[0, :, 0]) for x in features(slot))
    angles = POSITIONS[:, None, None] * powers(10_000.0, D)
    q, k = (turn(x, angles, pairing)[0, :, 0] for x in (Q, K))
    channel = np.tile(zeta(D), 2) if pairing == "half" else np.repeat(zeta(D), 2)
    for i, j in zip(*np.tril_indices(N), strict=True):
        apart = POSITIONS[i] - POSITIONS[j]
        found = (phi[i] * psi[j] * np.exp(-slot.decay(D) * apart)).sum()
        np.testing.assert_allclose(found, (q[i] * k[j] * channel ** (apart / 512)).sum(), atol=1e-5)


def test_the_rest_of_a_partial_head_is_not_damped():
    slot = XPos(Plain(partial_rotary_factor=0.5), gamma=1.0, scale_base=100.0)
    np.testing.assert_allclose(np.exp(-100 * slot.decay(D)), np.r_[np.tile(zeta(8, 1.0), 2), np.ones(8)])
    assert slot.shift_invariant
    assert "causal" in slot.one_sided
