"""RoPE-mixed: learned frequencies on several axes."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from rotations import powers, turn

from posjax.rotary import MixedRotary, grid_coordinates

D, HEADS, KV = 16, 4, 2
SIZES = {"num_heads": HEADS, "num_kv_heads": KV, "head_dim": D}
Q, K = (np.asarray(jax.random.normal(jax.random.key(s), (2, 6, h, D))) for s, h in ((0, HEADS), (1, KV)))
SLOT = MixedRotary()
PARAMS = SLOT.init(jax.random.key(2), **SIZES)
GRID = grid_coordinates(2, 3)
ANGLES = np.einsum("na,hat->nht", GRID, np.asarray(PARAMS["frequencies"], np.float64))


@jax.jit
def features(coordinates, params=PARAMS):
    return SLOT(Q, K, q_positions=coordinates, kv_positions=coordinates, head_dim=D, params=params)


def test_angles_are_mixtures_and_query_heads_share_those_of_their_key_head():
    phi, psi = features(GRID)
    np.testing.assert_allclose(psi, turn(K, ANGLES, "interleaved"), atol=2e-6)
    np.testing.assert_allclose(phi, turn(Q, np.repeat(ANGLES, HEADS // KV, axis=1), "interleaved"), atol=2e-6)


def test_initial_frequencies_are_those_of_rope_vit():
    """Magnitudes 10^(-4t/d) at a random orientation per head, the second half at a right angle to the first."""
    frequencies = np.asarray(SLOT.init(jax.random.key(3), num_heads=8, num_kv_heads=8, head_dim=D)["frequencies"])
    chex.assert_shape(frequencies, (8, 2, D // 2))
    x, y = frequencies[:, 0], frequencies[:, 1]
    np.testing.assert_allclose(np.hypot(x, y), np.tile(powers(10.0, D // 2), (8, 2)), rtol=1e-5)
    phi = np.arctan2(y, x)
    np.testing.assert_allclose(np.cos(phi[:, : D // 4] - phi[:, :1]), 1, atol=1e-5)
    np.testing.assert_allclose(np.cos(phi[:, D // 4 :] - phi[:, :1] - np.pi / 2), 1, atol=1e-5)
    assert np.ptp(phi[:, 0]) > 1


def test_three_axes_start_orthogonal_and_uneven_groups_are_filled():
    frequencies = MixedRotary(num_axes=3).init(jax.random.key(0), **SIZES)["frequencies"]
    chex.assert_shape(frequencies, (KV, 3, D // 2))
    ends = np.asarray(frequencies[:, :, [0, 3, 6]])
    np.testing.assert_allclose(ends.swapaxes(1, 2) @ ends, np.tile(np.eye(3), (KV, 1, 1)), atol=1e-5)
    np.testing.assert_allclose(np.linalg.det(ends), 1, atol=1e-5)


def test_text_has_the_same_position_on_all_axes():
    ids = np.arange(4, 10)
    expected = features(np.stack([ids, ids], axis=1))
    chex.assert_trees_all_equal(features(ids), expected)
    chex.assert_trees_all_equal(features(np.stack([ids, ids])), expected)


def test_scores_do_not_change_far_away_although_frequencies_are_learned():
    @jax.jit
    def scores(coordinates, params):
        phi, psi = features(coordinates, params)
        return jnp.einsum("btnd,bsnd->bnts", phi[:, :, ::2], psi)

    near, far = scores(GRID, PARAMS), scores(GRID + np.array([1_000_003, -2_000_000_000]), PARAMS)
    np.testing.assert_allclose(far, near, atol=2e-5)


def test_gradients_reach_every_frequency_and_real_coordinates():
    loss = jax.grad(lambda params, at: features(at, params)[1][..., 0::2].sum(), (0, 1))
    gradient, by_place = loss(PARAMS, jnp.asarray(GRID, jnp.float32))
    slope = turn(K, ANGLES + np.pi / 2, "interleaved")[..., 0::2]
    np.testing.assert_allclose(gradient["frequencies"], np.einsum("bnht,na->hat", slope, GRID), rtol=1e-4, atol=1e-5)
    expected = np.einsum("bnht,hat->na", slope, np.asarray(PARAMS["frequencies"], np.float64))
    np.testing.assert_allclose(by_place, expected, rtol=1e-4, atol=1e-5)
