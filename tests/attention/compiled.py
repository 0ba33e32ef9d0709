"""Programs through the TPU compiler, each in a process of its own: a test's file runs itself."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def compiled(file: str, *order) -> dict:
    """What ``in_process`` prints when a file runs with an order."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, file, json.dumps(order)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def in_process(compile_here: Callable[..., dict]) -> None:
    """Prints what a function makes of the order on the command line."""
    print(json.dumps(compile_here(*json.loads(sys.argv[1]))))
