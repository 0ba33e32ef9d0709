"""Compiles the train step or the evaluation of a config for a pod, in a separate process.

So if the compiler runs out of memory or time, or crashes, a sweep continues and reports it in one line.
"""

from __future__ import annotations

import math
import os
import re
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from train.config import Config, MeshConfig, TrainConfig, dump, parse_text
from train.plan.gpus import Nodes, machine_of
from train.plan.hlo import arrays
from train.plan.pods import GIB, Coordinates, Pod
from train.runtime.compiler import DoesNotCompile, answer, check_compiler, run_compiler
from train.runtime.flags import missing, variable_of
from train.runtime.lines import in_a_line

_OUT_OF_MEMORY = (
    re.compile(r"temporaries \(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)"),
    re.compile(r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm"),
)
"""The compiler's messages on too little memory: for temporaries alone, or for everything."""

_UNKNOWN_FLAG = re.compile(r"(?:Unknown command line flag '|Unknown flags? in XLA_FLAGS: --)([^\s'=]*)")

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
"""Bytes per unit in the compiler's texts."""

_ALLOCATION = re.compile(r"^\s*[\d.]+\w*\(\s*\d+%\);\s*([\d.]+)([KMGT]?)i?B?;[^;]*;[^;]*;(.*)$")
"""A line of the compiler's report of memory: its size and the arrays in it."""


@dataclass(frozen=True)
class DeviceMemory:
    """HBM of one device, in bytes."""

    parameters: float
    optimizer: float  # and the averages of train.ema
    batch: float
    arguments: float  # all inputs of the step, with their padding in HBM
    temp: float  # activations, gradients, gathered arrays
    program: float  # the instructions
    kept: float  # results that do not reuse the memory of an argument

    @property
    def total(self) -> float:
        """The peak while the step runs."""
        return self.arguments + self.temp + self.program + self.kept

    @property
    def padding(self) -> float:
        """The part of `arguments` that is padding."""
        return max(0.0, self.arguments - self.parameters - self.optimizer - self.batch)


class Allocation(NamedTuple):
    """Memory that several arrays use, one after the other."""

    bytes: float
    array: str  # the largest of these arrays, ``bf16[16,32,8192,8192]``


@dataclass(frozen=True)
class CompiledStep:
    """A step as the compiler compiled it."""

    text: str  # the optimised program
    memory: DeviceMemory
    axes: dict[str, int]  # of the mesh
    coordinates: tuple[Coordinates, ...]  # of the devices of its first slice, in order
    flags: str | None = None  # of the compiler; None if unknown
    largest: tuple[Allocation, ...] = ()  # temporary arrays


UPDATE, EVALUATION = "update", "evaluation"
"""The kinds of programs: a train step, or the loss of a batch at the longest of ``evaluate.lengths``."""


def compile_step(
    config: Config, pod: Pod | Nodes, timeout: int = 3600, flags: str | None = None, kind: str = UPDATE
) -> CompiledStep:
    """Compiles the step of a config without stages, with `flags` in addition to those of the environment.

    `kind` is `UPDATE` or `EVALUATION`. If `flags` is None, the flags that are recommended for the chip, and that the
    environment does not set, are used. Raises ValueError for a config that does not fit the pod, and `DoesNotCompile`
    if the compiler fails.
    """
    check_compiler(pod.generation)
    flags = compiler_flags(pod.generation, flags)
    with tempfile.TemporaryDirectory(prefix="plan-") as directory:
        (Path(directory) / "config.yaml").write_text(dump(config), encoding="utf-8")
        reply = _run(directory, pod, timeout, flags, kind)
        text = (Path(directory) / "program.txt").read_text(encoding="utf-8")
    coordinates = tuple(map(tuple, reply["coordinates"]))
    allocations = tuple(Allocation(*each) for each in reply["largest"])
    return CompiledStep(text, DeviceMemory(**reply["memory"]), reply["axes"], coordinates, flags, allocations)


def compiler_flags(chip: str, flags: str | None = None) -> str:
    """The flags of the environment, then `flags`; if None, the recommended flags that the environment lacks."""
    present = os.environ.get(variable_of(chip), "")
    return f"{present} {missing(chip, present) if flags is None else flags}".strip()


def _run(directory: str, pod: Pod | Nodes, timeout: int, flags: str, kind: str) -> dict[str, Any]:
    arguments, variable = [directory, pod.slice_name, str(pod.slices), kind], variable_of(pod.generation)
    try:
        return run_compiler("train.plan.compiling", arguments, flags, timeout, variable)
    except DoesNotCompile as error:
        if unknown := _UNKNOWN_FLAG.search(error.details):
            raise ValueError(
                f"--flags: the compiler knows no flag --{unknown[1]}, found among {flags}; take it out of {variable}, "
                'or, if posjax recommends it, give the others by --flags="..."'
            ) from None
        raise


def out_of_memory(message: str) -> str | None:
    """The message for a program that needs more HBM than a device has; None for any other error of the compiler."""
    found = next(filter(None, (pattern.search(message) for pattern in _OUT_OF_MEMORY)), None)
    if not found:
        return None
    used, has = (float(found[n]) * _UNITS[found[n + 1]] for n in (1, 3))
    return does_not_fit(used, has, "temporaries alone need" if "temporaries" in found[0] else "needs")


def does_not_fit(used: float, has: float, needs: str = "needs") -> str:
    """The message for a program that needs more bytes than a device has."""
    return (
        f"does not fit: {needs} {used / GIB:,.1f} GiB of HBM, a device has {has / GIB:,.1f}; more devices, "
        "train.accumulate, train.loss_chunks or model.remat would help"
    )


def largest(folder: Path, count: int = 5) -> list[Allocation]:
    """The largest allocations in HBM, by falling size, from the compiler's report of it in this folder; empty if there
    is none, or one in an unknown form."""
    reports = sorted(folder.glob("*memory-usage-report.txt"), key=lambda path: path.stat().st_size)
    about_hbm = reports[-1].read_text(encoding="utf-8").partition("\n\n")[0] if reports else ""
    found = []
    for line in filter(None, map(_ALLOCATION.match, about_hbm.splitlines())):
        array = max(arrays(line[3]), key=lambda array: array.bytes, default=None)
        if array is not None:
            shape = ",".join(map(str, array.shape))
            found.append(Allocation(float(line[1]) * _UNITS[line[2]], f"{array.dtype}[{shape}]"))
    return found[:count]


def devices_of(pod: Pod | Nodes) -> list:
    """The devices of a pod as the compiler sees them. Raises ValueError for a pod that the compiler does not know."""
    from jax.experimental import topologies

    if isinstance(pod, Nodes):
        described = {"target_config": pod.description, "topology": pod.topology}
        return list(topologies.get_topology_desc(platform="cuda", **described).devices)
    rings = (*pod.rings, False)[:3]  # libtpu expects three, and closes no ring by default
    try:
        found = topologies.get_topology_desc(pod.topology, "tpu", num_slices=pod.slices, wrap=rings)
    except Exception as error:
        raise ValueError(f"--topology: the compiler knows no pod {pod.name}: {in_a_line(error, 2000)}") from None
    return list(found.devices)


def _child(directory: Path, pod: Pod | Nodes, kind: str) -> dict[str, Any]:
    """Compiles, writes the program, and returns its memory, largest arrays, mesh axes and devices' coordinates."""
    import jax

    config = parse_text((directory / "config.yaml").read_text(encoding="utf-8"), "the config")
    mesh, program, arguments = {UPDATE: _update, EVALUATION: _evaluation}[kind](config, devices_of(pod))
    with jax.set_mesh(mesh):
        compiled = program.trace(*arguments).lower(lowering_platforms=(pod.platform,)).compile()
    held = arguments[1:] if kind == UPDATE else arguments  # without the seed and the rates, which are a few bytes
    (directory / "program.txt").write_text(compiled.as_text(), encoding="utf-8")
    return {
        "memory": vars(_memory(compiled.memory_analysis(), *held)),
        "largest": largest(directory),
        "axes": dict(mesh.shape),
        "coordinates": [] if isinstance(pod, Nodes) else _coordinates(mesh.devices.flat[: pod.devices // pod.slices]),
    }


def _coordinates(devices: Any) -> list[Coordinates]:
    return [(*device.coords, device.core_on_chip) for device in devices]


def _update(config: Config, devices: list) -> tuple[Any, Any, tuple]:
    """The mesh of a train step, the step, and its arguments."""
    import jax
    import jax.numpy as jnp

    from train.data.packing import Batch
    from train.loop.step import build_program
    from train.model.build import Setup
    from train.model.mesh import make_mesh
    from train.model.sharding import named_sharding

    train = config.train
    mesh = make_mesh(train.mesh, train.rows // train.accumulate, devices)
    program = build_program(Setup(config, mesh))  # outside `set_mesh`, which would send computed values to the mesh
    rows = jax.ShapeDtypeStruct(
        (train.rows, train.length), jnp.int32, sharding=named_sharding(mesh, ("batch", "length"))
    )
    return mesh, program.update, (program.given, program.abstract, Batch(*(rows for _ in Batch._fields)))


def batch_of_evaluation(config: Config, devices: int, slices: int) -> TrainConfig:
    """The section ``train`` with length, rows and mesh of a batch at the longest of ``evaluate.lengths``."""
    from train.evaluate.mesh import sizes_for
    from train.model.mesh import row_shares

    length = max(config.evaluate.lengths)
    rows = max(1, config.evaluate.batch_tokens // length)
    sizes = sizes_for(config, rows, devices, slices)
    shares = row_shares(sizes)
    tokens = -(-rows // shares) * shares * length
    return replace(config.train, length=length, batch_tokens=tokens, mesh=MeshConfig(**sizes), accumulate=1)


def _evaluation(config: Config, devices: list) -> tuple[Any, Any, tuple]:
    """Mesh, program and arguments for the loss of a batch, under the extension of the config's scheme."""
    import jax

    from posjax.nn import logical_axes
    from train.evaluate.decoder import predictor_of
    from train.evaluate.perplexity import scoring
    from train.model.build import Setup, evaluated_scheme
    from train.model.mesh import make_mesh
    from train.model.sharding import tree_shardings

    train = batch_of_evaluation(config, len(devices), len({getattr(each, "slice_index", 0) for each in devices}))
    mesh = make_mesh(train.mesh, train.rows, devices)
    model = Setup(config).abstract.with_scheme(evaluated_scheme(config))
    predictor, parameters = predictor_of(model, config.seed, mesh)
    shardings = tree_shardings(mesh, logical_axes(model), parameters)
    abstract = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), parameters, shardings)
    program, shapes = scoring(predictor, train.rows, train.length)
    return mesh, program, (abstract, *shapes)


def _memory(analysis: Any, state: Any, *batch: Any) -> DeviceMemory:
    """The memory of a program whose first argument is a state, or parameters alone."""
    parameters = getattr(state, "parameters", state)
    return DeviceMemory(
        parameters=_bytes(parameters),
        optimizer=_bytes([getattr(state, name, ()) for name in ("optimizer", "average")]),
        batch=_bytes(batch),
        arguments=analysis.argument_size_in_bytes,
        temp=analysis.temp_size_in_bytes,
        program=analysis.generated_code_size_in_bytes,
        kept=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
    )


def _bytes(tree: Any) -> float:
    """The bytes of one device's shards; an array without a sharding counts whole."""
    import jax

    def size(x):
        return math.prod(x.sharding.shard_shape(x.shape) if x.sharding else x.shape) * x.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))


def _words(error: Exception, directory: Path) -> str:
    """The error message for a user; a long message of the compiler is cut."""
    text = in_a_line(error, 2000)
    if refused := out_of_memory(text):
        found = [f"{each.array} {each.bytes / GIB:,.1f}" for each in largest(directory, 3)]
        return refused + (f"; the largest arrays of the program, in GiB: {', '.join(found)}" if found else "")
    return text if isinstance(error, ValueError) else text[:400]


def _main(folder: Path, topology: str, slices: str, kind: str) -> None:
    # Asks the compiler, before JAX is loaded, for its report of memory; flags in the user's ``XLA_FLAGS`` win.
    wanted = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    os.environ["XLA_FLAGS"] = f"{wanted} {os.environ.get('XLA_FLAGS', '')}".strip()
    answer(lambda: _child(folder, machine_of(topology, int(slices)), kind), lambda error: _words(error, folder))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), *sys.argv[2:])
