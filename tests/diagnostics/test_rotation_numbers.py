"""Decay curves, turns and the exactness table, against closed forms and exact arithmetic."""

import chex
import numpy as np
import pytest
from exact_angles import cos_sin

from posjax import rotary
from posjax.diagnostics import decay_indicator, exactness, incomplete, mean_score, turns

PLAIN = rotary.Plain()
THETA = 10_000.0 ** -(np.arange(64) / 64)


def test_the_indicator_is_the_mean_of_partial_sums_and_starts_at_the_mean_of_j():
    distances = np.array([0, 1, 7, 1000])
    found = decay_indicator(PLAIN, distances, head_dim=128)
    want = [np.mean([abs(np.exp(1j * r * THETA[:j]).sum()) for j in range(1, 65)]) for r in distances]
    np.testing.assert_allclose(found, want, rtol=1e-5)
    assert found[0] == np.arange(1, 65).mean()
    chex.assert_shape(found, (4,))
    assert found.dtype == np.float64


def test_the_mean_score_first_turns_negative_where_article_18_says():
    """Base 10,000: at 1707 for d = 128, 725 for d = 64."""
    for head_dim, base, first in ((128, 1e4, 1707), (64, 1e4, 725)):
        found = mean_score(rotary.Plain(base), np.arange(first + 1), head_dim=head_dim)
        assert (found < 0).nonzero()[0].tolist() == [first]


def test_an_attention_factor_and_the_current_length_of_a_rule():
    yarn = rotary.YaRN(4.0, original_length=64)
    assert mean_score(yarn, [0], head_dim=32)[0] == pytest.approx(1, abs=1e-6)
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
    assert incomplete(THETA, 4096) == 18
    assert incomplete(2 * np.pi / np.array([63, 64, 65]), 64) == 1, "one whole turn is complete"


def test_the_exactness_table_against_rational_arithmetic():
    found = exactness(PLAIN, head_dim=128, powers=(1, 18, 31), samples=1)
    assert found.positions.tolist() == [2**1 - 1, 2**18 - 1, 2**31 - 1]
    cos, sin = cos_sin(found.positions, THETA)
    want = np.arctan2(sin, cos)
    product = found.positions.astype(np.float32)[:, None] * THETA.astype(np.float32)
    error = np.abs(np.angle(np.exp(1j * (product.astype(np.float64) - want)))).max(-1)
    np.testing.assert_allclose(found.float32, error, rtol=1e-6, atol=1e-9)
    assert found.exact.max() < 3.2e-7


def test_bfloat16_loses_positions_above_256_and_float32_frequencies_lose_a_radian_at_sixteen_million():
    found = exactness(PLAIN, head_dim=128, powers=range(4, 26))
    at = dict(zip(found.positions.tolist(), zip(*found[1:], strict=True), strict=True))
    assert at[255][1] < 2e-5
    assert at[511][1] > 0.9
    assert 0.01 < at[2**20 - 1][0] < 0.1
    assert at[2**24 - 1][0] > 0.3
    assert found.exact.max() < 3.2e-7


def test_bad_arguments():
    with pytest.raises(ValueError, match="length"):
        turns(PLAIN, 0, head_dim=128)
    with pytest.raises(ValueError, match="powers"):
        exactness(PLAIN, head_dim=128, powers=range(30, 33))
    with pytest.raises(ValueError, match="powers"):
        exactness(PLAIN, head_dim=128, powers=range(2))
    with pytest.raises(ValueError, match="samples"):
        exactness(PLAIN, head_dim=128, samples=0)
    with pytest.raises(ValueError, match="learned"):
        exactness(rotary.Frequencies(np.ones(4, np.float32)))
    with pytest.raises(ValueError, match="head_dim"):
        turns(PLAIN, 16)
