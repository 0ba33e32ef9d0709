"""The base that a context needs: a brute-force oracle, and the numbers of arXiv:2405.14591 and kexue.fm 10122."""

import numpy as np
import pytest

from posjax.rotary import largest_context, smallest_base


def sums(base, head_dim, length):
    """f(m) = sum_t cos(m base^(-2t/d)), cosine by cosine."""
    theta = np.float64(base) ** (-np.arange(0, head_dim, 2) / head_dim)
    return np.cos(np.arange(length)[:, None] * theta).sum(-1)


@pytest.mark.parametrize(("base", "head_dim", "context"), [(1e4, 128, 1707), (1e6, 128, 27115), (1e4, 64, 725)])
def test_the_largest_context_ends_where_the_sum_is_negative(base, head_dim, context):
    assert largest_context(base, head_dim) == context
    found = sums(base, head_dim, context + 1)
    assert (found[:-1] >= 0).all()
    assert found[-1] < 0


@pytest.mark.parametrize(("length", "exact"), [(1000, 4206.02), (4096, 26952.34)])
def test_the_smallest_base_is_feasible_and_just_below_it_none_is(length, exact):
    found = smallest_base(length, 128)
    np.testing.assert_allclose(found, exact, atol=0.006)
    assert (sums(found, 128, length) >= 0).all()
    assert (sums(found * (1 - 1e-8), 128, length) < 0).any()


def test_no_smaller_base_is_feasible():
    """All bases of a grid below the answer are infeasible. Some larger bases are infeasible again."""
    found = smallest_base(256, 64)
    below = found * (1 - np.geomspace(1e-7, 0.99, 300))
    assert all((sums(base, 64, 256) < 0).any() for base in below)
    feasible = [(sums(base, 64, 256) >= 0).all() for base in found * np.linspace(1.001, 3, 100)]
    assert any(feasible)
    assert not all(feasible)


def test_large_heads_approach_the_zero_of_the_cosine_integral():
    """f / (d/2) tends to (Ci(m) - Ci(m/b)) / ln b: b >= L / 0.616505."""
    np.testing.assert_allclose(smallest_base(300, 4096) * 0.616505, 300, rtol=5e-3)
    np.testing.assert_allclose(largest_context(1000.0, 4096), 616.505, atol=1.5)


def test_a_head_of_two_pairs_is_the_smallest():
    """cos m + cos(m / sqrt(b)) stays positive up to m = 2 as soon as cos(2 / sqrt(b)) > -cos 2."""
    np.testing.assert_allclose(smallest_base(3, 4), (2 / np.arccos(-np.cos(2))) ** 2, rtol=1e-3)
