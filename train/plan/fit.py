"""Two numbers, the same for all chips, by which predictions come closer to published runs.

The compiler's cycles are an estimate: what is bound by memory is expected to take longer than chips take, and products
are expected at half to three quarters of the peak. How much of each is real is fitted from runs whose time is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Timed(NamedTuple):
    """A run that was planned and that someone has measured; seconds of a step."""

    chip: str
    products: float  # of what multiplies matrices, kernels left out, as expected
    memory: float  # of everything else that computes, as expected
    kernels: float
    exposed: float  # waiting for collectives
    measured: float


class Rates(NamedTuple):
    """How much of what the compiler expects is real."""

    products: float
    memory: float

    def seconds(self, run: Timed) -> float:
        """A step,

        products' rate x products + memory's rate x memory + kernels + waiting.
        """
        return self.products * run.products + self.memory * run.memory + run.kernels + run.exposed


RAW = Rates(1.0, 1.0)
"""What the compiler expects."""


def fit(runs: Sequence[Timed]) -> Rates:
    """The rates a, b >= 0 that are least wrong over all runs, by the sum of squares of relative errors,

        minimum over a, b of  sum over runs of ((a products + b memory + kernels + waiting) / measured - 1)^2.

    Of rates that would be negative, the best with one of them 0 is taken. One run, or several of the same mix, fix no
    two numbers: of all that fit, these are then the smallest.
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
    """For each chip the rates fitted from all runs on other chips; nothing where fewer than two are left."""
    found = {}
    for chip in {run.chip for run in runs}:
        others = [run for run in runs if run.chip != chip]
        if len(others) > 1:
            found[chip] = fit(others)
    return found
