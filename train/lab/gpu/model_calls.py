"""Measures whole models of posjax: a training step, and generated tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from train.lab.gpu import jax_calls
from train.lab.gpu.generation import measure_generation
from train.lab.gpu.jobs import STEP, Job, Options
from train.lab.gpu.steps import measure_step


class Measurements(jax_calls.Measurements):
    """Nothing is compiled ahead: XLA tries variants of matrix products on the GPU, which would disturb measurements."""

    def __init__(self, jobs: Sequence[Job], options: Options):
        super().__init__((), options)
        self._settings = options

    def measure(self, job: Job) -> dict[str, Any]:
        """What `measure_step` or `measure_generation` returns."""
        return (measure_step if job.what == STEP else measure_generation)(job, self._settings)
