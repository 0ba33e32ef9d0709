"""Measures a training step of posjax, and which kernels take its time."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from posjax._checks import check
from train.config import Config, load
from train.data.packing import Batch
from train.lab.gpu.jobs import DOCUMENT, STEP_FORMS, Job, Options, milliseconds
from train.loop.step import build_program
from train.model.build import Setup
from train.model.mesh import make_mesh

_PROFILED = 3  # steps
_LISTED = 20  # kernels
_NUMBER = re.compile(r"(?<=\w)[._]\d+$")
_LONGEST = 80  # letters of a kernel's name


class TrainingStep:
    """A step of a config on one device, compiled, with its state and a batch of random tokens."""

    def __init__(self, config: Config, documents: bool):
        mesh = make_mesh(config.train.mesh, config.train.rows, jax.devices()[:1])
        setup = Setup(config, mesh)
        program = build_program(setup)
        self._given = program.given
        self._batch = jax.device_put(random_batch(config, setup.decoder.vocab_size, documents))
        with jax.set_mesh(mesh):
            self._update = program.update.lower(program.given, program.abstract, self._batch).compile()
        self._state = program.initialize(program.given.seed)

    @property
    def bytes(self) -> int:
        """Memory of the step: its arguments, results that reuse none of theirs, and temporary arrays."""
        found = self._update.memory_analysis()
        kept = found.output_size_in_bytes - found.alias_size_in_bytes
        return found.argument_size_in_bytes + kept + found.temp_size_in_bytes

    def __call__(self) -> Any:
        """Queues a step; returns its metrics."""
        self._state, metrics = self._update(self._given, self._state, self._batch)
        return metrics


def measure_step(job: Job, options: Options) -> dict[str, Any]:
    """Milliseconds, tokens a second and memory of a step, and the kernels that take most of its time."""
    scheme, documents = STEP_FORMS[job.shape.form]
    config = load(options.step, [f"scheme={scheme}"])
    step = TrainingStep(config, documents)
    ms = milliseconds(step, jax.block_until_ready, options.row_seconds)
    speed = config.train.batch_tokens / ms * 1e3
    kernels = longest_kernels(step)
    return {"ms": ms, "tokens_per_second": speed, "gibibytes": step.bytes / 2**30, "kernels": kernels}


def random_batch(config: Config, vocabulary: int, documents: bool) -> Batch:
    """Rows of random tokens, of documents of `DOCUMENT` tokens or of one document each."""
    train = config.train
    tokens = np.random.default_rng(0).integers(0, vocabulary, (train.rows, train.length + 1), np.int32)
    at = np.arange(train.length, dtype=np.int32)[None].repeat(train.rows, 0)
    size = DOCUMENT if documents else train.length
    return Batch(tokens[:, :-1], at % size, at // size, tokens[:, 1:])


def longest_kernels(step: TrainingStep) -> list[tuple[str, float, int]]:
    """Name, milliseconds of one step, and calls of one step, of the kernels that take most of the time.

    Kernels whose names differ in a number alone count as one: layers that are not scanned have their own.
    """
    jax.block_until_ready(step())
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        with jax.profiler.trace(folder):
            for _ in range(_PROFILED):
                metrics = step()
            jax.block_until_ready(metrics)
        (file,) = Path(folder).rglob("*.xplane.pb")
        events = list(_kernels(jax.profiler.ProfileData.from_file(str(file))))
    seconds, calls = Counter(), Counter()
    for name, nanoseconds in events:
        kind = _NUMBER.sub("", name)
        seconds[kind] += nanoseconds
        calls[kind] += 1
    return [
        (name[:_LONGEST], spent / 1e6 / _PROFILED, calls[name] // _PROFILED)
        for name, spent in seconds.most_common(_LISTED)
    ]


def _kernels(profile: Any) -> Iterator[tuple[str, float]]:
    """What the streams of a GPU ran, with nanoseconds; on a machine without one, what the host ran."""
    on_gpu = jax.default_backend() == "gpu"
    planes = [plane for plane in profile.planes if plane.name.startswith("/device:GPU") or not on_gpu]
    check(bool(planes), "the profile has no events of the GPU")
    for plane in planes:
        for line in plane.lines:
            if line.name.startswith("Stream") or not on_gpu:
                yield from ((event.name, event.duration_ns) for event in line.events)
