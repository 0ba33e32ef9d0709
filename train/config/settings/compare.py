"""What is compared."""

from dataclasses import dataclass, field

from train.config.settings.checks import check, check_distinct, check_positive, check_seed
from train.config.settings.model import SchemeConfig


@dataclass(frozen=True)
class SearchConfig:
    """The search of LongRoPE's factors for an extension that names LongRoPE without them."""

    length: int = 0  # twice the model's own when 0
    population: int = 8
    iterations: int = 4


@dataclass(frozen=True)
class CompareConfig:
    """The schemes and seeds that ``compare`` trains over the one base config.

    With ``train.steps: 0`` nothing is trained: the model under ``init`` is studied under every scheme.
    """

    seeds: tuple[int, ...] = (0,)
    schemes: tuple[SchemeConfig, ...] = ()
    only: tuple[str, ...] = ()  # labels of the extensions that are studied now; all of them when empty
    texts: int = 3  # that are read, of a study
    scored: int = 0  # tokens at the end of each text whose loss is measured; a quarter of the model's length when 0
    search: SearchConfig = field(default_factory=SearchConfig)

    def __post_init__(self):
        check_positive("compare", self, "texts")
        for name, found in (("scored", self.scored), ("search.length", self.search.length)):
            check(found >= 0, f"compare.{name} must not be negative, found {found}")
        check_positive("compare.search", self.search, "population", "iterations")
        check(bool(self.seeds), "compare.seeds is empty: name at least one seed")
        for seed in self.seeds:
            check_seed("compare.seeds", seed)
        check_distinct("compare.seeds", self.seeds, "leave one out")
        check_distinct("compare.schemes", [entry.label for entry in self.schemes], "give one of them its own label")
