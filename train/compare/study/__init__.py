"""Extensions of one model side by side: a study of many short cells, each kept as it is finished."""

from train.compare.study.run import run_study

__all__ = ["run_study"]
