"""``python -m train tasks``: what a scheme does on longer strings and larger grids than it was trained on."""

from train.tasks.config import TasksConfig
from train.tasks.report import run

__all__ = ["TasksConfig", "run"]
