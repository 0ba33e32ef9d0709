"""The fit of two rates, on runs made by known rates, and against a search over a grid."""

import itertools

import numpy as np
import pytest

from train.plan.fit import RAW, Rates, Timed, fit, without_own

TRUE = Rates(0.8, 0.45)
MIXES = [
    ("v5e", 10.0, 4.0, 0.4, 0.8),
    ("v5p", 60.0, 11.0, 3.4, 9.3),
    ("v5p", 3.0, 2.2, 2.4, 3.0),
    ("v6e", 2.2, 1.1, 0.5, 0.2),
    ("v6e", 6.5, 2.3, 1.1, 1.6),
    ("7x", 8.0, 4.2, 1.4, 0.1),
]


def made(rates: Rates, noise: float = 0.0) -> list[Timed]:
    """Runs that take what these rates say, but for some noise."""
    runs = [Timed(*mix, measured=1.0) for mix in MIXES]
    errors = np.random.default_rng(0).normal(0, noise, len(runs))
    return [run._replace(measured=rates.seconds(run) * (1 + error)) for run, error in zip(runs, errors, strict=True)]


def squares(rates: Rates, runs: list[Timed]) -> float:
    return sum((rates.seconds(run) / run.measured - 1) ** 2 for run in runs)


def test_known_rates_are_found_again():
    assert fit(made(TRUE)) == pytest.approx(TRUE)
    assert fit(made(RAW)) == pytest.approx(RAW)


def test_no_other_rates_are_better():
    runs = made(TRUE, noise=0.1)
    found = squares(fit(runs), runs)
    grid = itertools.product(np.linspace(0, 1.5, 61), repeat=2)
    best = min(squares(Rates(*rates), runs) for rates in grid)
    assert found <= best
    assert found == pytest.approx(best, rel=0.02)


def test_rates_are_not_negative():
    runs = [run._replace(measured=run.kernels + run.exposed + 0.5 * run.products) for run in made(TRUE)]
    assert fit(runs) == pytest.approx(Rates(0.5, 0.0), abs=1e-9)
    fast = [run._replace(measured=0.5 * (run.kernels + run.exposed)) for run in made(TRUE)]
    assert fit(fast) == (0, 0)


def test_a_chip_is_predicted_by_the_others():
    found = without_own(made(TRUE))
    assert set(found) == {"v5e", "v5p", "v6e", "7x"}
    assert all(rates == pytest.approx(TRUE) for rates in found.values())
    runs = [run._replace(measured=2 * run.measured) if run.chip == "7x" else run for run in made(TRUE)]
    found = without_own(runs)
    assert found["7x"] == pytest.approx(TRUE)  # whatever its own runs say
    assert squares(found["v6e"], runs) < squares(TRUE, runs)


def test_too_few_runs_fix_nothing():
    runs = [Timed("v5e", 10, 4, 0.4, 0.8, 12), Timed("v6e", 2, 1, 0.5, 0.2, 3)]
    assert without_own(runs) == {}
    assert without_own([]) == {}
