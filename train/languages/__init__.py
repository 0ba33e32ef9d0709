"""``python -m train languages``: tests a scheme on longer strings and larger grids than it was trained on."""

from train.languages.config import LanguagesConfig
from train.languages.report import run

__all__ = ["LanguagesConfig", "run"]
