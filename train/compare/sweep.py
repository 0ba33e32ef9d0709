"""Trials choose the learning rate of each scheme, and a factor on it for the scheme's own parameters."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from train.config import CompareConfig, Config, SchemeConfig
from train.config.settings.checks import check
from train.config.settings.compare import SweepConfig
from train.model.build import Setup, learned_positions
from train.report.numbers import training_length_loss

TRIALS_FOLDER = "trials"
"""In a comparison's directory: a directory for each trial."""


class Choice(NamedTuple):
    """A learning rate, and the factor on it for the parameters of the position scheme."""

    learning_rate: float
    position_factor: float


Runner = Callable[[list[Config]], Iterator[list[dict[str, Any]]]]
"""Trains configs and gives the rows of each; see `train.compare.compare`."""


def sweep(config: Config, settings: SweepConfig, run: Runner) -> tuple[Choice, dict[Choice, list[dict[str, Any]]]]:
    """The best choice for the scheme of a config, by the loss at its training length, and the rows of every trial.

    All pairs of ``learning_rate`` and ``position_factor`` are tried, the latter only if the scheme has parameters.
    Then, at most ``extensions`` times, the untried `neighbours` of the best choice are tried.

    Raises ValueError if all trials diverged.
    """
    names = learned_positions(Setup(config))
    factors = settings.position_factor if names else (1.0,)
    asked = [Choice(*pair) for pair in product(settings.learning_rate, factors)]
    trials: dict[Choice, list[dict[str, Any]]] = {}
    for _ in range(1 + settings.extensions):
        rows = run([trial_config(config, choice, names) for choice in asked])
        trials |= zip(asked, rows, strict=True)
        losses = {choice: training_length_loss(found) for choice, found in trials.items()}
        best = min(losses, key=losses.__getitem__)
        diverged = f"{config.scheme.label}: all trials diverged; try lower compare.sweep.learning_rate"
        check(losses[best] < math.inf, diverged)
        asked = neighbours(best, list(trials))
        if not asked:
            break
    return best, trials


def neighbours(best: Choice, tried: Sequence[Choice]) -> list[Choice]:
    """The choices next to the best one in either dimension that were not tried.

    Their values were tried before, or are beyond the end of the tried values by the ratio of the last two. A dimension
    with a single value has no neighbours.
    """
    found = []
    for field in Choice._fields:
        values = sorted({getattr(choice, field) for choice in tried})
        if len(values) > 1:
            values = [values[0] ** 2 / values[1], *values, values[-1] ** 2 / values[-2]]
            index = values.index(getattr(best, field))
            found += [best._replace(**{field: values[near]}) for near in (index - 1, index + 1)]
    return [choice for choice in found if choice not in tried]


def tuned(config: Config, choice: Choice, names: Sequence[str]) -> Config:
    """The config with a choice's rates; `names` are patterns of its position scheme's parameters."""
    factors = dict(config.train.learning_rate_factors)
    if choice.position_factor != 1:
        factors |= {name: factors.get(name, 1.0) * choice.position_factor for name in names}
    train = replace(config.train, learning_rate=choice.learning_rate, learning_rate_factors=factors)
    own = replace(config, train=train)
    return replace(own, compare=own_section(own, own.compare.seeds[0], own.compare.schemes))


def own_section(config: Config, seed: int, schemes: Sequence[SchemeConfig]) -> CompareConfig:
    """The ``compare`` section of one training: its seed, and the entries to measure with its parameters.

    Of a sweep only the training's own rate is kept, which marks that some of the held-out text is for trials. So a
    change in the number of trials, in how many run together or at once, or in what runs now, does not make this a
    different training.
    """
    sweep = config.compare.sweep
    own = SweepConfig((config.train.learning_rate,), seed=sweep.seed) if sweep.learning_rate else sweep
    return replace(config.compare, seeds=(seed,), schemes=tuple(schemes), only=(), sweep=own, together=1, processes=0)


def file_name(label: str) -> str:
    """A label as the name of a directory."""
    return re.sub(r"[^\w.=-]+", "-", label).strip("-.") or "scheme"


def trial_config(config: Config, choice: Choice, names: Sequence[str]) -> Config:
    """The training of a trial, in a directory of its own inside the comparison's."""
    rate, factor = (f"{value:.4g}" for value in choice)
    own, seed = tuned(config, choice, names), config.compare.sweep.seed
    return replace(
        own,
        name=f"{file_name(config.scheme.label)}-rate{rate}-factor{factor}",
        output=str(config.directory.parent / TRIALS_FOLDER),
        seed=seed,
        compare=replace(own.compare, seeds=(seed,), schemes=(config.scheme,)),
    )
