"""Decay curves, turns and the exactness table, against closed forms and exact arithmetic."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from exact_angles import cos_sin

from posjax import rotary
from posjax.diagnostics import decay_indicator, exactness, incomplete, mean_score, turns

PLAIN = rotary.Plain()
THETA = 10_000.0 ** -(np.arange(64) / 64)


def test_the_indicator_is_the_mean_of_partial_sums():
    distances = np.array([0, 1, 7, 1000])
    found = decay_indicator(PLAIN, distances, head_dim=128)
    want = [np.mean([abs(np.exp(1j * r * THETA[:j]).sum()) for j in range(1, 65)]) for r in distances]
    np.testing.assert_allclose(found, want, rtol=1e-5)


@pytest.mark.parametrize(("head_dim", "first"), [(128, 1707), (64, 725)])
def test_the_mean_score_first_turns_negative_where_article_18_says(head_dim, first):
    found = mean_score(PLAIN, np.arange(first + 1), head_dim=head_dim)
    assert found[0] == pytest.approx(1, abs=1e-6)
    assert (found < 0).nonzero()[0].tolist() == [first]


def test_an_attention_factor_and_the_current_length_of_a_rule():
    assert mean_score(rotary.YaRN(4.0, original_length=64), [0], head_dim=32)[0] == pytest.approx(1, abs=1e-6)
    at, dynamic, scaled = [300, 17], rotary.DynamicNTK(64), rotary.NTKAware(8.0)
    chex.assert_trees_all_close(
        mean_score(dynamic, at, head_dim=32, length=512), mean_score(scaled, at, head_dim=32), atol=1e-6
    )
    chex.assert_trees_all_close(turns(dynamic, 512, head_dim=32), turns(scaled, 512, head_dim=32), rtol=1e-9)


def test_46_of_64_pairs_complete_a_turn_in_4096_positions():
    found = turns(PLAIN, 4096, head_dim=128)
    np.testing.assert_allclose(found, 4096 * THETA / (2 * np.pi), rtol=1e-12)
    assert (found >= 1).sum() == 46
    assert incomplete(PLAIN, 4096, head_dim=128) == 18
    assert incomplete(rotary.Proportional(0.25), 4096, head_dim=128) == 48
    assert incomplete(2 * np.pi / np.array([63, 64, 65]), 64) == 1, "one whole turn is complete"


def test_the_exactness_table_against_rational_arithmetic():
    """A float32 frequency loses a third of a radian at 2^24, a position in bfloat16 loses it above 256."""
    found = exactness(PLAIN, head_dim=128, powers=(1, 8, 9, 24, 31), samples=1)
    assert found.positions.tolist() == [2**power - 1 for power in (1, 8, 9, 24, 31)]
    cos, sin = cos_sin(found.positions, THETA)
    rounded = found.positions.astype(jnp.bfloat16)
    for name, positions in (("float32", found.positions), ("bfloat16", rounded)):
        product = positions.astype(np.float32)[:, None] * THETA.astype(np.float32)
        error = np.abs(np.angle(np.exp(1j * (product.astype(np.float64) - np.arctan2(sin, cos))))).max(-1)
        np.testing.assert_allclose(getattr(found, name), error, rtol=1e-6, atol=1e-9)
    assert found.float32[3] > 0.3
    assert found.bfloat16[1] < 2e-5 < 0.9 < found.bfloat16[2]
    assert found.exact.max() < 3.2e-7
