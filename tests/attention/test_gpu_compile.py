"""The GPU kernels compiled for an H100 by jax's CUDA compiler and NVIDIA's assembler, on a machine without a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from train.lab.gpu.jobs import FORMS

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs jax's CUDA wheels"),
]
TESTS = Path(__file__).parents[1]
# Bytes stored and loaded, by assembler 13.5. Larger heads fill the registers in the backward pass, most under FoX.
SPILLED = {64: 0, 96: 200, 128: 1600, 192: 400, 256: 800}
LARGEST = [
    *((form, size) for size in (64, 128) for form in FORMS),
    *((f, n) for n in (96, 192, 256) for f in ("t5", "fox")),
]


@pytest.mark.parametrize(("form", "size"), LARGEST)
def test_kernels_fit_an_h100(form, size):
    """No product waits for another one, and registers are not spilled at heads of 64."""
    (nvidia,) = importlib.util.find_spec("nvidia").submodule_search_locations
    path = os.pathsep.join((f"{nvidia}/cu13/bin", os.environ["PATH"], str(TESTS)))
    environment = os.environ | {"PATH": path, "PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS)))}
    command = [sys.executable, "-m", "attention.h100", form, str(size)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) >= 3
    for kernel in kernels:
        assert not kernel["warnings"], kernel
        assert kernel["spilled"] <= SPILLED[size], kernel
