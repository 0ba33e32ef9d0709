"""A study compares extensions of one model, in many short measurements (cells), each saved when finished."""

from train.compare.study.run import run_study

__all__ = ["run_study"]
