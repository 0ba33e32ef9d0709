"""A trace of some steps by JAX's profiler, for TensorBoard, XProf or Perfetto."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from train.runtime.paths import is_local


class Trace:
    """Traces the steps ``[first, last]`` into `directory`: the devices are idle when it starts and when it ends.

    A run that resumes inside this range traces the rest; one that ends inside it keeps the partial trace.
    """

    def __init__(self, steps: Sequence[int], directory: Path):
        self._first, self._last = steps or (0, 0)
        self._directory = directory
        self._running = False
        self._near: tempfile.TemporaryDirectory | None = None  # local, if the target is an object store

    def before(self, step: int, state: Any) -> None:
        """Called before a step is dispatched, with the state that it starts from."""
        if self._first <= step <= self._last and not self._running:
            jax.block_until_ready(state)
            if not is_local(self._directory):
                self._near = tempfile.TemporaryDirectory()
            jax.profiler.start_trace(str(self._near.name if self._near else self._directory))
            self._running = True

    def after(self, step: int, result: Any) -> None:
        """Called after a step is dispatched, with its result."""
        if self._running and step >= self._last:
            jax.block_until_ready(result)
            self._end()

    def _end(self) -> None:
        self._running = False
        jax.profiler.stop_trace()
        if self._near:
            with self._near as near:
                self._directory.fs.put(f"{near}/", self._directory.path, recursive=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._running:
            self._end()
