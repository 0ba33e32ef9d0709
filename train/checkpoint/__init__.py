"""Runs on disk: their directory, their checkpoints, and models restored from them or from a release."""
