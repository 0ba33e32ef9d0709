"""Runs the compiler for TPUs (libtpu), or that for GPUs, in a separate process; neither needs the device.

A compiler reads its flags once, when it is loaded, so the compiling process is started with them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from train.runtime.chips import GPUS
from train.runtime.flags import VARIABLE
from train.runtime.paths import python_path

_CUDA = ("jax_cuda13_plugin", "jax_cuda12_plugin")


class DoesNotCompile(ValueError):
    """The program could not be built or compiled; the message is that of the first error, cut to one line."""

    details = ""  # everything that the compiling process wrote to standard error


def check_compiler(chip: str = "") -> None:
    """Raises ValueError unless the compiler for a chip or a GPU is installed."""
    if chip not in GPUS:
        if importlib.util.find_spec("libtpu") is None:
            raise ValueError("the TPU compiler is not installed, and schedules come from it: pip install libtpu")
        return
    found = importlib.metadata.version("jax")
    is_new = tuple(map(int, found.split(".")[:2])) >= (0, 11)
    if not is_new or not any(map(importlib.util.find_spec, _CUDA)):
        raise ValueError(
            f"--topology: to compile for {chip} needs jax 0.11 or newer with its CUDA plugin, found jax {found}; on "
            'Python 3.12 or newer: pip install -e ".[train,cuda]"'
        )


def run_compiler(
    module: str, arguments: Sequence[str], flags: str, timeout: int, variable: str = VARIABLE
) -> dict[str, Any]:
    """The reply of a module that runs in a separate process, with these flags for the compiler in an environment
    variable, and ends with `answer`.

    A ValueError of the module is raised here as a ValueError; any other error, a crash or a timeout is a
    `DoesNotCompile`.
    """
    environment = {
        **os.environ,
        variable: flags,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no process holds a TPU, so no lock is needed
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a cached program would leave no dump
        "PYTHONPATH": python_path(),
    }
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise DoesNotCompile(f"the compiler took longer than {timeout} s") from None
    lines = done.stdout.splitlines()
    died = {"problem": f"the compiler died {_ending(done.returncode)}", "is_mistake": False}
    reply = json.loads(lines[-1]) if lines and not done.returncode else died
    if "problem" in reply:
        error = (ValueError if reply["is_mistake"] else DoesNotCompile)(reply["problem"])
        error.details = done.stderr
        raise error
    return reply


def _ending(status: int) -> str:
    return f"with exit status {status}" if status >= 0 else f"of signal {signal.Signals(-status).name}"


def answer(work: Callable[[], dict[str, Any]], words: Callable[[Exception], str]) -> None:
    """Prints the reply for `run_compiler`: what `work` returns, or the words for its error."""
    try:
        reply = work()
    except Exception as error:
        traceback.print_exc()
        reply = {"problem": words(error), "is_mistake": isinstance(error, ValueError)}
    print(json.dumps(reply))
