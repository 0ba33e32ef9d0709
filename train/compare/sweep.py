"""Trials: which learning rate, and which multiple of it for what a scheme learns of positions, trains each scheme best."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from train.config import CompareConfig, Config
from train.config.settings.checks import check
from train.model.build import learned_positions


TRIALS_FOLDER = "trials"
"""In a comparison's directory: a directory for each trial."""


class Choice(NamedTuple):
    """A learning rate, and the factor of it for what a scheme learns of positions."""

    learning_rate: float
    position_factor: float


@dataclass(frozen=True)
class Trial:
    """A choice with the rows of its training: perplexity at each length, on the text of the trials."""

    choice: Choice
    rows: Sequence[dict[str, Any]]

    @property
    def loss(self) -> float:
        """Nats per token at the training length; infinite where the training diverged."""
        first = self.rows[0]
        return math.inf if first["error"] else first["window_nll"]


Run = Callable[[list[Config]], Iterator[list[dict[str, Any]]]]
"""Trains configs and gives the rows of each; see `train.compare.compare`."""


def sweep(config: Config, run: Run) -> tuple[Choice, list[Trial]]:
    """The best choice for the scheme of a config, and all trials.

    All pairs of ``compare.sweep.learning_rate`` and ``position_factor`` are tried, the latter where the scheme learns
    anything of positions. While the best choice lies at the end of what was tried, the next value beyond it, in the
    same ratio as the last two, is tried with the best other value: at most ``extensions`` times.

    Raises ValueError when all trials diverged.
    """
    settings, names = config.compare.sweep, learned_positions(config)
    factors = settings.position_factor if names else (1.0,)
    asked = [Choice(*pair) for pair in product(settings.learning_rate, factors)]
    trials: list[Trial] = []
    for _ in range(1 + settings.extensions):
        rows = run([trial_config(config, choice, names) for choice in asked])
        trials += [Trial(choice, list(each)) for choice, each in zip(asked, rows, strict=True)]
        best = min(trials, key=lambda trial: trial.loss)
        check(best.loss < math.inf, f"{config.scheme.label}: all trials diverged; try lower compare.sweep.learning_rate")
        asked = beyond(best.choice, [trial.choice for trial in trials])
        if not asked:
            break
    return best.choice, trials


def beyond(best: Choice, tried: Sequence[Choice]) -> list[Choice]:
    """The choices next to the best one beyond the ends of the values tried; none where it lies at no end.

    A dimension of a single value has no ends.
    """
    found = []
    for field in Choice._fields:
        values = sorted({getattr(choice, field) for choice in tried})
        own = getattr(best, field)
        if len(values) > 1 and own == values[-1]:
            found.append(best._replace(**{field: own * values[-1] / values[-2]}))
        if len(values) > 1 and own == values[0]:
            found.append(best._replace(**{field: own * values[0] / values[1]}))
    return found


def tuned(config: Config, choice: Choice, names: Sequence[str]) -> Config:
    """The config with a choice's rates; `names` are patterns of what its scheme learns of positions."""
    factors = dict(config.train.learning_rate_factors)
    if choice.position_factor != 1:
        factors |= {name: factors.get(name, 1.0) * choice.position_factor for name in names}
    train = replace(config.train, learning_rate=choice.learning_rate, learning_rate_factors=factors)
    return replace(config, train=train)


def trial_config(config: Config, choice: Choice, names: Sequence[str]) -> Config:
    """The training of a trial, in a directory of its own inside the comparison's."""
    rate, factor = (f"{value:.4g}" for value in choice)
    own = replace(
        tuned(config, choice, names),
        name=f"{config.name}-rate{rate}-factor{factor}",
        output=str(config.directory.parent / TRIALS_FOLDER),
        seed=config.compare.sweep.seed,
    )
    return replace(own, compare=replace(own.compare, seeds=(own.seed,), schemes=(config.scheme,)))
