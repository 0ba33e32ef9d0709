"""The settings of comparisons."""

from dataclasses import dataclass, field
from itertools import pairwise

from train.config.settings.checks import check, check_distinct, check_not_negative, check_positive, check_seed, unknown
from train.config.settings.model import SchemeConfig


@dataclass(frozen=True)
class SearchConfig:
    """The search of LongRoPE's factors for an extension that names LongRoPE without them."""

    length: int = 0  # twice the model's own when 0
    population: int = 8
    iterations: int = 4


@dataclass(frozen=True)
class SweepConfig:
    """Trials that choose the learning rate of every scheme before it is trained with its seeds.

    Each scheme trains once for every pair of a rate and a factor, with a seed of its own. The pair with the lowest loss
    at the training length is chosen, on held-out documents that are used for no reported number. If that pair is at an
    end of the rates or factors tried, the next value beyond that end is tried too.
    """

    learning_rate: tuple[float, ...] = ()  # empty: no trials
    position_factor: tuple[float, ...] = (1.0,)  # multiply the rate, for the parameters of a position scheme
    extensions: int = 2  # maximal rounds of trials beyond the ends
    seed: int = 1000

    def __post_init__(self):
        check_seed("compare.sweep.seed", self.seed)
        check_not_negative("compare.sweep", self, "extensions")
        check(bool(self.position_factor), "compare.sweep.position_factor is empty; [1] would work")
        for name in ("learning_rate", "position_factor"):
            values = getattr(self, name)
            rising = all(low < high for low, high in pairwise(values))
            check(
                rising and all(value > 0 for value in values),
                f"compare.sweep.{name}: expected rising values above 0, found {list(values)}",
            )


@dataclass(frozen=True)
class CompareConfig:
    """The schemes and seeds that ``compare`` trains over the one base config.

    With ``train.steps: 0`` nothing is trained: the model under ``init`` is studied under every scheme.
    """

    seeds: tuple[int, ...] = (0,)
    schemes: tuple[SchemeConfig, ...] = ()
    only: tuple[str, ...] = ()  # labels of the entries to train or study now; all of them when empty
    texts: int = 3  # texts that a study reads
    scored: int = 0  # tokens at the end of each text whose loss is measured; a quarter of the model's length when 0
    positions: bool = True  # whether the loss is also measured by position, which needs the logits of every token
    search: SearchConfig = field(default_factory=SearchConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    together: int = 1  # trainings of one scheme that run as one program; see `train.loop.together`
    processes: int = 0  # that share all trainings; when 0, each has its own and its speed and memory are measured

    def __post_init__(self):
        check_positive("compare", self, "texts", "together")
        check_not_negative("compare", self, "scored", "processes")
        check_not_negative("compare.search", self.search, "length")
        check_positive("compare.search", self.search, "population", "iterations")
        check(bool(self.seeds), "compare.seeds is empty: name at least one seed")
        for seed in self.seeds:
            check_seed("compare.seeds", seed)
        check_distinct("compare.seeds", self.seeds, "leave one out")
        labels = [entry.label for entry in self.schemes]
        check_distinct("compare.schemes", labels, "give one of them its own label")
        for label in self.only:
            if label not in labels:
                raise unknown("compare.only", label, labels, "label")

    @property
    def selected(self) -> tuple[SchemeConfig, ...]:
        """The entries that `only` names; all of them when it is empty."""
        return tuple(entry for entry in self.schemes if not self.only or entry.label in self.only)
