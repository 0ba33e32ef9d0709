"""Tasks whose answers are right or wrong: their cases, and the score of a model on them."""

from train.evaluate.tasks.registry import TASKS, cases, check_tasks, lengths_of, sizes_of
from train.evaluate.tasks.scoring import task_rows
from train.evaluate.tasks.vocabulary import Vocabulary

__all__ = ["TASKS", "Vocabulary", "cases", "check_tasks", "lengths_of", "sizes_of", "task_rows"]
