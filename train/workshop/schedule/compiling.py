"""Compiles one function for one TPU in a process of its own, and reads the schedules of its kernels.

libtpu reads its flags once, when it is loaded: so the process that compiles is started with them.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.runtime.chips import chip as find_chip
from train.runtime.paths import python_path
from train.workshop.schedule.kernels import Kernel, read_kernels

_LISTINGS = "final_bundles|packed-bundles-post-ra|final_hlo-static"
"""Those that are read, of about seventy."""


class DoesNotCompile(ValueError):
    """The program could not be made or compiled; the message is the first error's, cut to one line."""

    details = ""  # all that the compiling process wrote


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of one program on one chip."""

    temp_bytes: int  # HBM beside arguments and outputs
    kernels: tuple[Kernel, ...]


def check_compiler() -> None:
    """Raises unless the TPU compiler is installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("the TPU compiler is not installed, and schedules come from it: pip install libtpu")


def compile_for(
    chip: str, factory: str, arguments: Mapping[str, Any] | None = None, keep: Path | None = None, timeout: int = 600
) -> Compiled:
    """Compiles what a factory makes, ``MODULE:NAME`` or ``FILE.py:NAME``, called with `arguments`.

    The factory returns a function and a list of its abstract arguments. The dump stays in `keep` if that is given.
    """
    with tempfile.TemporaryDirectory(prefix="schedule-") as temporary:
        directory = Path(keep or temporary).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        listings = f"--xla_jf_dump_llo_pass_label_regex={_LISTINGS if keep is None else '.*'}"
        flags = f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true {listings}"
        reply = _run(chip, factory, arguments, flags, timeout)
        return Compiled(reply["temp_bytes"], read_kernels(directory, find_chip(chip).branch_slots))


def expected_cycles(chip: str, factory: str, arguments: Mapping[str, Any] | None = None, timeout: int = 600) -> int:
    """What the compiler expects of all that is not a kernel written by hand, compiled as by `compile_for`.

    It is the sum of the `estimated_cycles` in the optimised program, of one core; loops are not multiplied by trips.
    """
    return _run(chip, factory, arguments, "", timeout)["expected_cycles"]


def _run(chip: str, factory: str, arguments: Mapping[str, Any] | None, flags: str, timeout: int) -> dict[str, Any]:
    order = {"factory": factory, "arguments": dict(arguments or {}), "topology": find_chip(chip).topology}
    check_compiler()
    environment = {
        **os.environ,
        "LIBTPU_INIT_ARGS": f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip(),
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nobody holds a TPU, so nobody needs a lock
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a program from the cache leaves no dump
        "PYTHONPATH": python_path(),
    }
    command = [sys.executable, "-m", "train.workshop.schedule.compiling", json.dumps(order)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise DoesNotCompile(f"longer than {timeout} s") from None
    lines = done.stdout.splitlines()
    reply = json.loads(lines[-1]) if lines and not done.returncode else {"problem": f"exit status {done.returncode}"}
    if "problem" in reply:
        error = DoesNotCompile(reply["problem"])
        error.details = done.stderr
        raise error
    return reply


def _child(order: Mapping[str, Any]) -> dict[str, Any]:
    """Compiles, in a process whose flags are set; the schedules go into the dump."""
    import jax
    from jax.experimental import topologies

    function, arguments = _load(order["factory"])(**order["arguments"])
    device = topologies.get_topology_desc(topology_name=order["topology"], platform="tpu").devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    mesh = jax.sharding.Mesh([device], ("all",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # which tells a function for which chip it is made
        compiled = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
    expected = map(int, re.findall(r'"estimated_cycles":"(\d+)"', compiled.as_text()))
    return {"temp_bytes": compiled.memory_analysis().temp_size_in_bytes, "expected_cycles": sum(expected)}


def _main(order: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return _child(order)
    except Exception as error:
        traceback.print_exc()
        return {"problem": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def _load(factory: str) -> Any:
    """The object named by ``MODULE:NAME`` or ``FILE.py:NAME``."""
    where, _, name = factory.rpartition(":")
    if not where.endswith(".py"):
        return getattr(importlib.import_module(where), name)
    sys.path.insert(0, str(Path(where).resolve().parent))
    spec = importlib.util.spec_from_file_location(Path(where).stem, where)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


if __name__ == "__main__":
    print(json.dumps(_main(json.loads(sys.argv[1]))))
