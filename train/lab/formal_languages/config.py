"""The typed configuration of ``python -m train languages``."""

from __future__ import annotations

from dataclasses import dataclass

from posjax._checks import check, check_choice, check_count, check_positive
from train.config import SchemeConfig
from train.lab.formal_languages.generators import LANGUAGES, Language


@dataclass(frozen=True)
class LanguagesConfig:
    """Every language of strings with every one of `schemes`, every one of grids with every one of `grid_schemes`."""

    name: str = "languages"
    output: str = "runs"
    seed: int = 0
    imports: tuple[str, ...] = ()  # modules that register your own methods
    languages: tuple[str, ...] = ("even pairs", "cycle navigation", "bucket sort", "grid neighbours")
    schemes: tuple[SchemeConfig, ...] = ()
    grid_schemes: tuple[SchemeConfig, ...] = ()
    train_length: int = 10  # trained on strings of 1 .. train_length symbols
    test_lengths: tuple[int, ...] = (10, 20, 40)
    train_side: int = 5  # and on grids whose longer side is 2 .. train_side
    test_sides: tuple[int, ...] = (5, 8, 12)
    num_layers: int = 2
    model_dim: int = 64
    num_heads: int = 4
    steps: int = 800
    batch: int = 32
    test_batches: int = 8
    learning_rate: float = 3e-3

    def __post_init__(self):
        for name in ("train_length", "train_side", "num_layers", "model_dim", "num_heads", "steps", "batch"):
            check_count(name, getattr(self, name))
        check_count("test_batches", self.test_batches)
        check_positive("learning_rate", self.learning_rate)
        check(0 <= self.seed < 2**32, f"seed must be at least 0 and below 2**32, found {self.seed}")
        check(bool(self.languages), f"languages is empty: name some of {', '.join(LANGUAGES)}")
        for name in ("schemes", "grid_schemes"):
            labels = [entry.label for entry in getattr(self, name)]
            check(len(set(labels)) == len(labels), f"{name}: two have one label; give one of them its own label")
            for entry in getattr(self, name):
                check(
                    not entry.extend, f"{name}: {entry.label!r} has an extension, which this command does not measure"
                )
        for name in self.languages:
            check_choice("languages", name, tuple(LANGUAGES))
            check(bool(self.entries(LANGUAGES[name])), f"no scheme for {name!r}: name some in schemes or grid_schemes")
        for name in ("test_lengths", "test_sides"):
            check(bool(getattr(self, name)) and min(getattr(self, name)) > 0, f"{name} must all be positive")

    def entries(self, language: Language) -> tuple[SchemeConfig, ...]:
        """The schemes to train on a language."""
        return self.grid_schemes if language.level == "grid" else self.schemes

    def lengths(self, language: Language) -> tuple[int, tuple[int, ...]]:
        """The longest length to train a language on, and those to test it at."""
        if language.level == "grid":
            return self.train_side, self.test_sides
        return self.train_length, self.test_lengths
