"""Runs on disk: their directory, their checkpoints, and models restored from them or from a release."""

from train.checkpoint.directory import FOUND, RESULTS, check_run, create_run, is_started, read_config
from train.checkpoint.local import LocalCheckpoint, LocalCheckpoints
from train.checkpoint.manager import Checkpoint, Checkpoints, kept_steps
from train.checkpoint.restore import restore_model

__all__ = [
    "FOUND",
    "RESULTS",
    "Checkpoint",
    "Checkpoints",
    "LocalCheckpoint",
    "LocalCheckpoints",
    "check_run",
    "create_run",
    "is_started",
    "kept_steps",
    "read_config",
    "restore_model",
]
