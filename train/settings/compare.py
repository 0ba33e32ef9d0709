"""What is compared."""

from dataclasses import dataclass

from train.settings.checks import check, check_distinct, check_seed
from train.settings.model import SchemeConfig


@dataclass(frozen=True)
class CompareConfig:
    """The schemes and seeds that ``compare`` trains over the one base config."""

    seeds: tuple[int, ...] = (0,)
    schemes: tuple[SchemeConfig, ...] = ()

    def __post_init__(self):
        check(bool(self.seeds), "compare.seeds is empty: name at least one seed")
        for seed in self.seeds:
            check_seed("compare.seeds", seed)
        check_distinct("compare.seeds", self.seeds, "leave one out")
        check_distinct("compare.schemes", [entry.label for entry in self.schemes], "give one of them its own label")
