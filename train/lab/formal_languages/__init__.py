"""``python -m train languages``: tests a scheme on longer strings and larger grids than it was trained on."""

from train.lab.formal_languages.config import LanguagesConfig
from train.lab.formal_languages.report import run

__all__ = ["LanguagesConfig", "run"]
