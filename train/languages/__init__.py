"""``python -m train tasks``: tests a scheme on longer strings and larger grids than it was trained on."""

from train.languages.config import TasksConfig
from train.languages.report import run

__all__ = ["TasksConfig", "run"]
