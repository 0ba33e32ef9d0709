"""The base that a context needs: a brute-force oracle, and the numbers of arXiv:2405.14591 and kexue.fm 10122."""

import numpy as np
import pytest

from posjax.rotary import largest_context, smallest_base
from posjax.rotary.base import _last_negative, _sums


def sums(base, head_dim, length):
    """f(m) = sum_t cos(m base^(-2t/d)), cosine by cosine."""
    theta = np.float64(base) ** (-np.arange(0, head_dim, 2) / head_dim)
    return np.cos(np.arange(length)[:, None] * theta).sum(-1)


@pytest.mark.parametrize(
    ("base", "head_dim", "context"),
    [(1e4, 128, 1707), (5e5, 128, 18438), (1e6, 128, 27115), (1e4, 64, 725), (1e4, 256, 2653)],
)
def test_largest_context(base, head_dim, context):
    assert largest_context(base, head_dim) == context
    found = sums(base, head_dim, context + 1)
    assert (found[:-1] >= 0).all()
    assert found[-1] < 0


@pytest.mark.parametrize(
    ("length", "grid", "exact"),
    [(1000, None, 4206.02), (1024, 4300, 4293.44), (2048, 11600, 11587.24), (4096, 26960, 26952.34)],
)
def test_smallest_base(length, grid, exact):
    """On a grid with steps of 20, the first feasible base is at or above the exact one."""
    found = smallest_base(length, 128)
    np.testing.assert_allclose(found, exact, atol=0.006)
    assert grid is None or grid - 20 < found <= grid
    assert (sums(found, 128, length) >= 0).all()
    assert (sums(found * (1 - 1e-8), 128, length) < 0).any()
    assert largest_context(found, 128) >= length


def test_no_smaller_base_is_feasible():
    """All bases of a fine grid below the answer are infeasible. Some larger bases are infeasible again."""
    found = smallest_base(256, 64)
    below = found * (1 - np.geomspace(1e-7, 0.999, 2000))
    assert all((sums(base, 64, 256) < 0).any() for base in below[below > 1])
    above = found * np.linspace(1.001, 3, 400)
    feasible = np.array([(sums(base, 64, 256) >= 0).all() for base in above])
    assert feasible.any()
    assert not feasible.all()


def test_skipped_intervals_of_bases_are_infeasible():
    powers = np.arange(0, 64, 2) / 64
    for log_base, distance in ((1.0, 2), (4.0, 30), (6.0, 300), (8.0, 2000)):
        distances = np.flatnonzero(_sums(np.exp(-log_base * powers), 0, distance + 200) < 0)[-5:]
        end = _last_negative(log_base, distances, powers)
        assert end > log_base
        grid = np.linspace(log_base, end, 200)[:-1]
        values = np.cos(distances[:, None, None] * np.exp(-grid[:, None] * powers)).sum(-1)
        assert (values < 0).all(axis=-1).any()


def test_sums_by_blocks():
    theta = 1e4 ** (-np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(_sums(theta, 0, 1000), sums(1e4, 16, 1000), atol=1e-11)
    np.testing.assert_allclose(_sums(theta, 37, 38), sums(1e4, 16, 38)[-1:], atol=1e-11)


def test_large_heads_approach_the_zero_of_the_cosine_integral():
    """f / (d/2) tends to (Ci(m) - Ci(m/b)) / ln b: b >= L / 0.616505, 1.622 L where the article rounds to 2 L."""
    np.testing.assert_allclose(smallest_base(300, 4096) * 0.616505, 300, rtol=5e-3)
    np.testing.assert_allclose(largest_context(1000.0, 4096), 616.505, atol=1.5)


def test_a_head_of_two_pairs_is_the_smallest():
    """cos m + cos(m / sqrt(b)) stays positive up to m = 2 as soon as cos(2 / sqrt(b)) > -cos 2."""
    np.testing.assert_allclose(smallest_base(3, 4), (2 / np.arccos(-np.cos(2))) ** 2, rtol=1e-3)


def test_smaller_heads_need_larger_bases():
    found = [smallest_base(512, head_dim) for head_dim in (16, 32, 64, 128)]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: smallest_base(2, 128), "context_length must be at least 3, found 2"),
        (lambda: smallest_base(10.5, 128), "context_length must be positive and whole, found 10.5"),
        (lambda: smallest_base(1000, 2), "head_dim must be at least 4, found 2"),
        (lambda: smallest_base(1000, 7), "head_dim must be a positive even number, found 7"),
        (lambda: largest_context(1.0, 128), "base must be greater than 1, found 1.0"),
        (lambda: largest_context("1e4", 128), "base must be a number, found '1e4'"),
        (lambda: largest_context(1e4, 0), "head_dim must be a positive even number, found 0"),
    ],
)
def test_bad_calls_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
