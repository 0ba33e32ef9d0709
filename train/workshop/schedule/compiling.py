"""Runs the TPU compiler in a separate process; compiles one function for one TPU, and reads the schedules of its
kernels.

libtpu reads its flags once, when it is loaded, so the compiling process is started with them.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.runtime.chips import chip as find_chip
from train.runtime.flags import VARIABLE
from train.runtime.lines import in_a_line
from train.runtime.paths import python_path
from train.workshop.schedule.kernels import Kernel, read_kernels

_LISTINGS = "final_bundles|packed-bundles-post-ra|final_hlo-static"
"""The listings that are read, of about seventy kinds."""

STREAMING = ("posjax_rotation", "posjax_coca", "posjax_coca_gradient", "posjax_attention_correction")
"""Our memory-bound kernels: they take the time that the compiler expects of a fusion that moves the same bytes."""


class DoesNotCompile(ValueError):
    """The program could not be built or compiled; the message is that of the first error, cut to one line."""

    details = ""  # everything that the compiling process wrote to standard error


@dataclass(frozen=True)
class Compiled:
    """The compiler's facts on one program on one chip."""

    temp_bytes: int  # HBM in addition to arguments and outputs
    kernels: tuple[Kernel, ...]


def check_compiler() -> None:
    """Raises unless the TPU compiler is installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("the TPU compiler is not installed, and schedules come from it: pip install libtpu")


def run_compiler(module: str, arguments: Sequence[str], flags: str, timeout: int) -> dict[str, Any]:
    """The reply of a module that runs in a separate process, with these flags for libtpu, and ends with `answer`.

    A ValueError of the module is raised here as a ValueError; any other error, a crash or a timeout is a
    `DoesNotCompile`.
    """
    environment = {
        **os.environ,
        VARIABLE: flags,
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


def compile_for(
    chip: str, factory: str, arguments: Mapping[str, Any] | None = None, keep: Path | None = None, timeout: int = 600
) -> Compiled:
    """Compiles the function of a factory, ``MODULE:NAME`` or ``FILE.py:NAME``, which is called with `arguments`.

    The factory returns a function and a list of its abstract arguments. The dump is kept in `keep` if that is given.
    """
    with tempfile.TemporaryDirectory(prefix="schedule-") as temporary:
        directory = Path(keep or temporary).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        listings = f"--xla_jf_dump_llo_pass_label_regex={_LISTINGS if keep is None else '.*'}"
        flags = f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true {listings}"
        reply = _run(chip, factory, arguments, flags, timeout)
        return Compiled(reply["temp_bytes"], read_kernels(directory, find_chip(chip).branch_slots))


def expected_cycles(chip: str, factory: str, arguments: Mapping[str, Any] | None = None, timeout: int = 600) -> float:
    """The compiler's estimate for everything except attention kernels, in cycles of one core, compiled as by
    `compile_for`,

        sum of `estimated_cycles` in the optimised program + bytes of streaming kernels / streaming x clock

    where a streaming kernel is one of ours that reads and writes everything once. Its speed is that which the
    compiler assumes for its own sum of float32 arrays. Loops are not multiplied by trips.
    """
    reply, found = _run(chip, factory, arguments, "", timeout), find_chip(chip)
    return reply["expected_cycles"] + reply["streamed_bytes"] / found.device_streaming * found.gigahertz


def streamed_bytes(program: str) -> int:
    """Bytes read and written by the streaming kernels of an optimised program."""
    # The shapes of all operands and results of a call come before its metadata.
    call = re.compile(rf"%({'|'.join(STREAMING)})\S* = .* custom-call\(")
    lines = [line.partition("metadata=")[0] for line in program.splitlines() if call.search(line)]
    shapes = itertools.chain(*(re.findall(r"\b(\w+?)(\d+)\[([\d,]*)\]", line) for line in lines))
    return sum(int(bits) // 8 * math.prod(map(int, filter(None, sizes.split(",")))) for _, bits, sizes in shapes)


def _run(chip: str, factory: str, arguments: Mapping[str, Any] | None, flags: str, timeout: int) -> dict[str, Any]:
    request = {"factory": factory, "arguments": dict(arguments or {}), "topology": find_chip(chip).topology}
    check_compiler()
    all_flags = f"{os.environ.get(VARIABLE, '')} {flags}".strip()
    return run_compiler("train.workshop.schedule.compiling", [json.dumps(request)], all_flags, timeout)


def _child(order: Mapping[str, Any]) -> dict[str, Any]:
    """Compiles, in a process whose flags are set; the schedules go into the dump."""
    import jax
    from jax.experimental import topologies

    function, arguments = _load(order["factory"])(**order["arguments"])
    device = topologies.get_topology_desc(topology_name=order["topology"], platform="tpu").devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    mesh = jax.sharding.Mesh([device], ("all",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # tells the function for which chip it is compiled
        compiled = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
    program = compiled.as_text()
    return {
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "expected_cycles": sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', program))),
        "streamed_bytes": streamed_bytes(program),
    }


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {in_a_line(error, 300)}"


def _load(factory: str) -> Any:
    """The object named by ``MODULE:NAME`` or ``FILE.py:NAME``."""
    location, _, name = factory.rpartition(":")
    if not location.endswith(".py"):
        return getattr(importlib.import_module(location), name)
    sys.path.insert(0, str(Path(location).resolve().parent))
    spec = importlib.util.spec_from_file_location(Path(location).stem, location)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


if __name__ == "__main__":
    answer(lambda: _child(json.loads(sys.argv[1])), _words)
