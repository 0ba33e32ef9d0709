"""xPos: its decay against the closed form."""

import jax
import numpy as np
import pytest
from rotations import powers, turn

from posjax.rotary import Plain, Rotary, XPos

D = 16
Q, K = (np.asarray(jax.random.normal(jax.random.key(seed), (1, 5, 1, D))) for seed in (0, 1))
POSITIONS = np.array([0, 1, 40, 512, 3000])


def zeta(d, gamma=0.4):
    return (2 * np.arange(d // 2) + gamma * d) / ((1 + gamma) * d)


def test_numbers_of_the_paper():
    """zeta runs from 0.2857 to 0.978 for a head of 64; at distance 512 it is the factor, at 2048 its fourth power."""
    kept = np.exp(-512 * XPos().decay(64))[:32]
    np.testing.assert_allclose(kept, zeta(64), rtol=1e-12)
    np.testing.assert_allclose(kept[[0, -1]], [0.2857, 0.978], atol=5e-4)
    np.testing.assert_allclose(np.exp(-2048 * XPos().decay(64))[0], 0.00666, atol=1e-5)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_decayed_scores_are_those_of_scaled_queries_and_keys(pairing):
    """sum_t zeta_t^((i - j)/512) of the rotated pairs, and equally q zeta^((i - c)/512) on k zeta^(-(j - c)/512)."""
    slot = XPos(pairing=pairing)
    phi, psi = slot(Q, K, q_positions=POSITIONS, kv_positions=POSITIONS, head_dim=D)
    rates = slot.decay(D)
    rotated = [turn(x, (POSITIONS[:, None] * powers(10_000.0, D))[:, None], pairing)[0, :, 0] for x in (Q, K)]
    channel = np.tile(zeta(D), 2) if pairing == "half" else np.repeat(zeta(D), 2)
    centre = 700
    ups, downs = (channel ** (sign * (POSITIONS[:, None] - centre) / 512) for sign in (1, -1))
    for i, j in zip(*np.tril_indices(5), strict=True):
        found = (np.float64(phi[0, i, 0] * psi[0, j, 0]) * np.exp(-rates * (POSITIONS[i] - POSITIONS[j]))).sum()
        plain = (rotated[0][i] * rotated[1][j] * channel ** ((POSITIONS[i] - POSITIONS[j]) / 512)).sum()
        scaled = (rotated[0][i] * ups[i]) @ (rotated[1][j] * downs[j])
        np.testing.assert_allclose([found, scaled], plain, atol=1e-5)


def test_features_are_those_of_rope_and_the_rest_of_a_partial_head_is_not_damped():
    slot = XPos(Plain(partial_rotary_factor=0.5), gamma=1.0, scale_base=100.0)
    places = {"q_positions": POSITIONS, "kv_positions": POSITIONS, "head_dim": D}
    np.testing.assert_array_equal(slot(Q, K, **places)[0], Rotary(slot.frequencies)(Q, K, **places)[0])
    rates = slot.decay(D)
    np.testing.assert_allclose(np.exp(-100 * rates), np.r_[np.tile(zeta(8, 1.0), 2), np.ones(8)])
    assert (rates >= 0).all()
    assert slot.shift_invariant
    assert "causal" in slot.one_sided
