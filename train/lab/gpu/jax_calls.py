"""Measures calls of posjax and tokamax: compiles them ahead in threads, and runs one at a time."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

from posjax.attention.gpu.inputs import TileSizes
from train.lab.gpu import calls
from train.lab.gpu.jobs import (
    DECODE,
    ERRORS,
    FORWARD,
    LAYERS,
    OTHER_TILES,
    OURS,
    TILES,
    Job,
    Options,
    milliseconds,
)


class Measurements:
    """The programs of some jobs."""

    def __init__(self, jobs: Sequence[Job], options: Options):
        self._options = options
        self._python = threading.Lock()  # held by whoever traces a program, or takes a time
        self._pool = ThreadPoolExecutor(options.threads)
        self._programs = {job: self._pool.submit(self._compiled, job) for job in jobs if not job.is_tuned}

    def about(self) -> dict[str, str]:
        """The kind of the device, and its platform: ``gpu`` or ``cpu``."""
        return {"device": jax.devices()[0].device_kind, "platform": jax.default_backend()}

    def works(self) -> bool:
        """Whether the device still computes: after some errors it does no more."""
        try:
            jax.block_until_ready(jnp.ones(8) + 1)
        except RuntimeError:
            return False
        return True

    def measure(self, job: Job) -> dict[str, float]:
        """The errors of a job, or its time in milliseconds."""
        waiting = self._programs.pop(job, None)
        programs = self._compiled(job) if waiting is None else waiting.result()
        arguments = _arguments(job)
        if job.what == ERRORS:
            found, wanted = (program(*arguments) for program in programs)
            return calls.errors(found, wanted)
        (program,) = programs
        with self._python:
            ms = milliseconds(lambda: program(*arguments), jax.block_until_ready, self._options.row_seconds)
        if job.what == DECODE:
            ms /= LAYERS
            return {"ms": ms, "gigabytes_per_second": calls.decode_bytes(job.shape) / ms / 1e6}
        return {"ms": ms}

    def _compiled(self, job: Job) -> list[Callable]:
        """The programs of a job. Only the part in Python waits for others: the compiler lets Python run."""
        with self._python:
            shapes = jax.eval_shape(lambda: _arguments(job))
            lowered = [jax.jit(function).lower(*shapes) for function in self._functions(job)]
        return [program.compile() for program in lowered]

    def _functions(self, job: Job) -> list[Callable]:
        """What a job runs: for errors a second function that is exact."""
        shape = job.shape
        if job.library == "tokamax":
            tokamax = _tokamax()
            return [tokamax.forward(shape) if job.what == FORWARD else tokamax.gradients(shape)]
        implementation = self._options.implementation if job.library == OURS else job.library
        if job.what == ERRORS:
            return [calls.gradients(shape, implementation), calls.exact_gradients(shape)]
        if job.what == DECODE:
            return [calls.decode(shape, implementation)]
        if job.what == TILES:
            sizes = dataclasses.replace(TileSizes.of(shape.size), **OTHER_TILES[job.library])
            return [calls.with_gradients(calls.with_tiles(shape, sizes))]
        function = calls.forward if job.what == FORWARD else calls.gradients
        return [function(shape, implementation)]


def _arguments(job: Job) -> tuple:
    if job.what == DECODE:
        return calls.decode_arguments(job.shape)
    return _tokamax().arguments(job.shape) if job.library == "tokamax" else calls.arguments(job.shape)


def _tokamax():
    # Imported where it is measured, because it may not be installed.
    from train.lab.gpu import tokamax_calls

    return tokamax_calls
