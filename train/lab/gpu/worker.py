"""A process that measures the jobs of one library, one after the other; its own process, because a kernel may hang."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from train.lab.gpu.jobs import Job, Options

_MODULES = {"jax": "jax_calls", "models": "model_calls", "tokamax": "jax_calls", "torch": "torch_calls"}
"""The module of each process, whose ``Measurements`` measure jobs."""
_LONGEST = 300  # letters of a problem


class Worker:
    """The process, seen from the one that started it.

    Args:
        name: ``jax``, ``models``, ``tokamax`` or ``torch``.
        jobs: all that it will be asked for, in this order: it compiles some of them ahead.
        log: the file to which it writes what libraries print.
    """

    def __init__(self, name: str, jobs: Sequence[Job], options: Options, log: Path):
        # Not forked: a process with threads cannot fork safely.
        context = multiprocessing.get_context("spawn")
        self._pipe, its_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(its_end, _MODULES[name], tuple(jobs), options, log))
        self._process.start()
        its_end.close()  # so that the end of the process ends the pipe

    def answer(self, seconds: float) -> dict[str, Any]:
        """What the process sends next, within a limit. Its first answer is about the device.

        If there is none it ends the process, and returns ``{"problem": why}``. It also ends a process whose device
        computes no more.
        """
        try:
            if self._pipe.poll(seconds):
                found = self._pipe.recv()
                if not found.pop("works", True):
                    self.close()
                return found
            problem = f"longer than {seconds:g} s"
        except (EOFError, OSError):
            self._process.join(seconds)
            problem = f"the process died, exit code {self._process.exitcode}"
        self.close()
        return {"problem": problem}

    def measure(self, job: Job, seconds: float) -> dict[str, Any]:
        """The result of a job, or its problem."""
        with contextlib.suppress(OSError):  # the answer says that the process died
            self._pipe.send(job)
        return self.answer(seconds)

    @property
    def runs(self) -> bool:
        """Whether the process is alive."""
        return self._process.is_alive()

    def close(self) -> None:
        """Ends the process, whatever it does."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, module: str, jobs: tuple[Job, ...], options: Options, log: Path) -> None:
    """What the process does: it says what its device is, then measures what it is asked for, until the pipe ends."""
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the GPU's memory is for several processes
    os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.9")
    try:
        measurements = importlib.import_module(f"train.lab.gpu.{module}").Measurements(jobs, options)
        pipe.send(measurements.about())
    except Exception as error:
        pipe.send(_problem(error))
        return
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            os._exit(0)  # without waiting for threads that compile
        try:
            pipe.send(measurements.measure(job))
        except Exception as error:  # whatever a compiler or a device raises is a result
            pipe.send(_problem(error) | {"works": measurements.works()})


def _problem(error: Exception) -> dict[str, str]:
    return {"problem": f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST]}"}
