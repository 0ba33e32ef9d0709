"""Differences between schemes, paired by seed."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from train.report.numbers import Row, perplexity_rows


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    @property
    def has_zero(self) -> bool:
        """Whether the difference is within the noise of the seeds."""
        return self.low <= 0 <= self.high


def difference(rows: Sequence[Row], label: str, other: str, length: int) -> Interval | None:
    """The mean NLL of one scheme less that of another, in nats per token over whole windows, paired by seed.

    None if fewer than two seeds have both, or if any seed of either has no number, since a mean over the others would
    be too good.
    """
    mine, theirs = _by_seed(rows, label, length), _by_seed(rows, other, length)
    seeds = mine.keys() & theirs.keys()
    if len(seeds) < 2 or None in (*mine.values(), *theirs.values()):
        return None
    return interval([mine[seed] - theirs[seed] for seed in sorted(seeds)])


def _by_seed(rows: Sequence[Row], label: str, length: int) -> dict[int, float | None]:
    mine = [row for row in perplexity_rows(rows) if (row["label"], row["length"]) == (label, length)]
    return {row["seed"]: row.get("window_nll") for row in mine}


def interval(values: Sequence[float]) -> Interval:
    """``mean ± t s / sqrt(n)`` of at least two values, with s the sample standard deviation and t the 97.5 % point of
    Student's t of n - 1 degrees of freedom.
    """
    from scipy.stats import t  # a slow import that only comparisons of several seeds need

    mean = statistics.fmean(values)
    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)
