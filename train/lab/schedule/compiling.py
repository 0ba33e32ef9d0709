"""Compiles one function for one TPU, and reads the schedules of its kernels."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posjax._checks import check_choice
from train.lab.schedule.kernels import Kernel, read_kernels
from train.runtime.chips import CHIPS
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


def chip_names(option: str, text: str) -> list[str]:
    """The chips that an option of the command line names, as in ``v5e,v6e``.

    Raises ValueError for an unknown chip, and if the compiler is not installed.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        check_choice(option, name, tuple(CHIPS))
    check_compiler()
    return names


def compile_for(chip: str, factory: str, arguments: Mapping[str, Any] | None = None, timeout: int = 600) -> Compiled:
    """Compiles the function of a factory, ``MODULE:NAME`` or ``FILE.py:NAME``, which is called with `arguments`.

    The factory returns a function and a list of its abstract arguments.
    """
    check_compiler()
    found = find_chip(chip)
    request = {"factory": factory, "arguments": dict(arguments or {}), "topology": found.topology}
    with tempfile.TemporaryDirectory(prefix="schedule-") as directory:
        listings = f"--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex={_LISTINGS}"
        dump = f"--xla_jf_dump_to={directory} {listings}"
        flags = f"{os.environ.get(VARIABLE, '')} {dump}".strip()
        reply = run_compiler("train.lab.schedule.compiling", [json.dumps(request)], flags, timeout)
        return Compiled(reply["temp_bytes"], read_kernels(Path(directory), found.branch_slots))


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
    return {"temp_bytes": compiled.memory_analysis().temp_size_in_bytes}


def _load(factory: str) -> Any:
    """The object named by ``MODULE:NAME`` or ``FILE.py:NAME``."""
    location, _, name = factory.rpartition(":")
    if location.endswith(".py"):
        sys.path.insert(0, str(Path(location).resolve().parent))
        location = Path(location).stem
    return getattr(importlib.import_module(location), name)


if __name__ == "__main__":
    answer(lambda: _child(json.loads(sys.argv[1])), lambda error: f"{type(error).__name__}: {in_a_line(error, 300)}")
