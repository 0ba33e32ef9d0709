"""Compiles one function for one TPU, and reads the schedules of its kernels."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.lab.schedule.kernels import Kernel, read_kernels
from train.plan.kernels import STREAMING
from train.runtime.chips import chip as find_chip
from train.runtime.compiler import answer, check_compiler, run_compiler
from train.runtime.flags import VARIABLE
from train.runtime.lines import in_a_line

_LISTINGS = "final_bundles|packed-bundles-post-ra|final_hlo-static"
"""The listings that are read, of about seventy kinds."""


@dataclass(frozen=True)
class Compiled:
    """The compiler's facts on one program on one chip."""

    temp_bytes: int  # HBM in addition to arguments and outputs
    kernels: tuple[Kernel, ...]


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
    return run_compiler("train.lab.schedule.compiling", [json.dumps(request)], all_flags, timeout)


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
