"""Fits two numbers, the same for all chips, that bring predictions closer to published runs.

The compiler's cycles are an estimate. For memory-bound work it predicts more time than chips need, and it assumes half
to three quarters of the peak for matrix products. A correction factor for each is fitted from runs with a known time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Timed(NamedTuple):
    """A run that was planned and also measured by someone; in seconds per step."""

    chip: str
    products: float  # expected time of matrix products, without kernels
    memory: float  # expected time of all other computation
    kernels: float
    exposed: float  # waiting for collectives
    measured: float


class Rates(NamedTuple):
    """The ratios of real time to the compiler's estimate."""

    products: float
    memory: float

    def seconds(self, run: Timed) -> float:
        """The predicted time of a step,

        products' rate x products + memory's rate x memory + kernels + waiting.
        """
        return self.products * run.products + self.memory * run.memory + run.kernels + run.exposed


RAW = Rates(1.0, 1.0)
"""The compiler's own estimate, without correction."""


def fit(runs: Sequence[Timed]) -> Rates:
    """The rates a, b >= 0 with the smallest sum of squared relative errors over all runs,

        minimum over a, b of  sum over runs of ((a products + b memory + kernels + waiting) / measured - 1)^2.

    If a rate would be negative, the best solution with one rate 0 is taken. One run, or several with the same mix, do
    not determine two numbers; then the smallest solution is taken.
    """
    sides = np.array([[run.products / run.measured, run.memory / run.measured] for run in runs])
    left = np.array([1 - (run.kernels + run.exposed) / run.measured for run in runs])
    every = (_least(sides, left, held) for held in ((), (0,), (1,), (0, 1)))
    allowed = [rates for rates in every if min(rates) >= 0]
    return Rates(*min(allowed, key=lambda rates: float(np.square(sides @ rates - left).sum())))


def _least(sides: np.ndarray, left: np.ndarray, held: tuple[int, ...]) -> np.ndarray:
    """Least squares, with the rates of these places held at 0."""
    kept = [place for place in range(2) if place not in held]
    found = np.zeros(2)
    if kept:
        found[kept] = np.linalg.lstsq(sides[:, kept], left, rcond=None)[0]
    return found


def without_own(runs: Sequence[Timed]) -> dict[str, Rates]:
    """For each chip the rates fitted from all runs on other chips; chips with fewer than two such runs are left out."""
    found = {}
    for chip in {run.chip for run in runs}:
        others = [run for run in runs if run.chip != chip]
        if len(others) > 1:
            found[chip] = fit(others)
    return found
