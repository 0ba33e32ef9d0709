"""Runs the TPU compiler in a separate process: a test file starts itself as a script."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def compiled(file: str, *arguments) -> dict:
    """What ``in_process`` prints when the file runs with these arguments."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, file, json.dumps(arguments)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


def in_process(compile_here: Callable[..., dict]) -> None:
    """Prints the result of a function for the arguments on the command line."""
    print(json.dumps(compile_here(*json.loads(sys.argv[1]))))
