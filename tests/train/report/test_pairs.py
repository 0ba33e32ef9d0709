"""Differences paired by seed, against those of scipy and one computed by hand."""

import math

import numpy as np
import pytest
from report_rows import text
from scipy import stats

from train.report.pairs import Interval, difference, interval


def seeded(label, values, **about):
    """Rows at one length, a value for each seed."""
    return [row for seed, value in enumerate(values) for row in text(label, (value,), seed=seed, **about)]


@pytest.mark.parametrize("seeds", [2, 3, 8])
def test_the_interval_is_that_of_the_paired_t_test(seeds):
    draws = np.random.default_rng(seeds)
    level = draws.normal(2.0, 0.5, seeds)  # of each seed, shared by both schemes
    first, second = (level + draws.normal(shift, 0.05, seeds) for shift in (0.0, 0.03))
    rows = seeded("rope", np.exp(first).tolist()) + seeded("alibi", np.exp(second).tolist())
    found = difference(rows, "alibi", "rope", 32)
    expected = stats.ttest_rel(second, first).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert found.mean == pytest.approx((second - first).mean())


def test_an_interval_computed_by_hand():
    # Mean 2, standard deviation 1, three values: t of two degrees of freedom is 4.30265.
    half = 4.302652729911275 / math.sqrt(3)
    assert interval([1.0, 2.0, 3.0]) == Interval(2.0, pytest.approx(2.0 - half), pytest.approx(2.0 + half))
    assert interval([1.0, 2.0, 3.0]).has_zero
    assert not interval([1.9, 2.0, 2.1]).has_zero
    assert not interval([-1.9, -2.0, -2.1]).has_zero
    assert interval([0.5, 0.5]) == Interval(0.5, 0.5, 0.5)


def test_seeds_are_paired_in_any_order():
    rows = seeded("rope", (5.0, 6.0, 7.0)) + seeded("alibi", (5.1, 6.12, 7.14))[::-1]
    found = difference(rows, "alibi", "rope", 32)
    assert found.mean == pytest.approx(math.log(1.02))
    assert found.high - found.low < 1e-9


def test_only_seeds_that_both_have_count():
    rows = seeded("rope", (5.0, 6.0, 7.0)) + seeded("alibi", (6.0, 6.0))
    assert difference(rows, "alibi", "rope", 32).mean == pytest.approx(math.log(6 / 5) / 2)


@pytest.mark.parametrize("values", [(5.0,), (5.0, None), (5.0, 6.0, None)])
def test_one_pair_or_a_seed_without_a_number_gives_none(values):
    rows = seeded("rope", (5.0, 6.0, 7.0)) + seeded("alibi", values)
    assert difference(rows, "alibi", "rope", 32) is None
    assert difference(rows, "rope", "alibi", 32) is None
    assert difference(rows, "alibi", "rope", 64) is None
