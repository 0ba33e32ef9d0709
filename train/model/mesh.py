"""The devices of a run, as a mesh with named axes."""

import math
from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from train.config import MeshConfig
from train.config.settings.checks import divisor_near

AXES = ("replica", "data", "fsdp", "context", "tensor")
"""From the slowest network to the fastest: neighbours along `tensor` are neighbours on the chip's links."""

EXPERT = "expert"
"""The axis of the experts of a mixture, between `fsdp` and `context`; a mesh has it only with several devices along."""

BATCH_AXES = ("replica", "data", "fsdp", EXPERT)
"""The axes over which the rows of a batch are split, if a mesh has them."""


def mesh_shape(config: MeshConfig, devices: int) -> dict[str, int]:
    """The number of devices along each axis of the mesh, with -1 filled in.

    Raises ValueError if the axes need more than `devices` devices, or if an axis is -1 and the others do not divide
    that number.
    """
    axes = (*AXES[:3], EXPERT, *AXES[3:])
    sizes = {axis: getattr(config, axis) for axis in axes if axis != EXPERT or config.expert != 1}
    named = math.prod(size for size in sizes.values() if size > 0)
    open_axis = next((axis for axis, size in sizes.items() if size == -1), None)
    asked = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1)
    if named > devices or (open_axis and devices % named):
        fits = divisor_near(devices, named)
        raise ValueError(
            f"{config.key} ({asked}) needs {'a multiple of ' if open_axis else ''}{named} devices, but there are "
            f"{devices}; sizes whose product is {fits} would work"
        )
    return sizes | ({open_axis: devices // named} if open_axis else {})


def make_mesh(config: MeshConfig, rows: int, devices: list | None = None) -> Mesh:
    """A mesh of as many of the `devices`, by default all, as `config` asks for.

    Raises ValueError, before anything is compiled, if there are too few devices, or the `rows` of a batch cannot be
    split evenly.
    """
    devices = jax.devices() if devices is None else devices
    sizes = mesh_shape(config, len(devices))
    check_rows(sizes, rows)
    return mesh_from_sizes(sizes, devices)


def mesh_from_sizes(sizes: dict[str, int], devices: list, key: str = "train.mesh") -> Mesh:
    """A mesh of these sizes. Raises ValueError if a process has none of its devices; ``key`` is the config's."""
    used = {device.process_index for device in devices[: math.prod(sizes.values())]}
    idle = sorted({device.process_index for device in devices} - used)
    if idle:
        raise ValueError(
            f"{key} takes {math.prod(sizes.values())} of {len(devices)} devices, none of process {idle[0]}; start "
            "fewer processes, or let an axis be -1"
        )
    return Mesh(_arranged(sizes, devices), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def row_shares(sizes: Mapping[str, int]) -> int:
    """The number of devices over which the rows of a batch are split."""
    return math.prod(sizes.get(axis, 1) for axis in BATCH_AXES)


def check_rows(sizes: dict[str, int], rows: int) -> None:
    """Raises ValueError for a batch whose rows cannot be split evenly over the mesh."""
    shares = row_shares(sizes)
    if rows % shares:
        fits = divisor_near(rows, shares)
        others = f"context={sizes['context'] * shares // fits}" if shares % fits == 0 else f"data={fits}"
        axes = ", ".join(axis for axis in BATCH_AXES if axis in sizes)
        raise ValueError(
            f"train.batch_tokens and train.accumulate give {rows} rows at a time, which {shares} devices along "
            f"{axes} cannot share evenly; {fits} along them would work (train.mesh.{others}), or "
            f"{-(-rows // shares) * shares} rows"
        )


def check_slices(sizes: dict[str, int], slices: int) -> None:
    """Raises ValueError for a mesh whose `replica` does not span so many slices."""
    if sizes["replica"] % slices:
        raise ValueError(
            f"train.mesh.replica must be a multiple of the {slices} slices, found {sizes['replica']}; "
            f"train.mesh.replica={slices} would work"
        )


def _arranged(sizes: dict[str, int], devices: list) -> np.ndarray:
    """The devices in the shape of the mesh, neighbours along the last axes first; slices along `replica`."""
    used = devices[: math.prod(sizes.values())]
    shape = tuple(sizes.values())
    if getattr(used[0], "platform", "cpu") != "tpu" or len(used) < len(devices):
        return np.array(used).reshape(shape)
    slices = len({getattr(device, "slice_index", 0) for device in used})
    if slices > 1:
        check_slices(sizes, slices)
        within = (sizes["replica"] // slices, *shape[1:])
        across = (slices, *(1 for _ in shape[1:]))
        return mesh_utils.create_hybrid_device_mesh(within, across, used, allow_split_physical_axes=True)
    return mesh_utils.create_device_mesh(shape, used, allow_split_physical_axes=True)
