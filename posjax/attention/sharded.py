"""Attention on a mesh of devices: each device attends to the rows of the batch that it holds."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec


def over_batch(function: Callable[..., Any], axis: str | None, replicated: Any, *rows: Any) -> Any:
    """``function(replicated, *rows)`` on every device's own rows, under ``shard_map`` over the mesh axis ``axis``.

    Attention loops over tiles, and with packed documents over rows, in an order that depends on the data; a compiler
    that partitions such a loop by itself would gather the whole batch on every device.

    Args:
        function: called as it is when ``axis`` is None, or when the mesh in use (``jax.set_mesh``) has no such axis or
            the caller is inside a ``shard_map`` over it already.
        axis: the mesh axis over which the batch is split.
        replicated: a tree whose arrays are the same on all devices.
        rows: trees whose arrays have the batch as their first axis.

    Raises:
        ValueError: if the devices along ``axis`` cannot share the rows evenly.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if axis is None or axis not in mesh.axis_names or axis in mesh.manual_axes:
        return function(replicated, *rows)
    specs = (PartitionSpec(), *(PartitionSpec(axis) for _ in rows))
    return jax.shard_map(function, in_specs=specs, out_specs=PartitionSpec(axis), axis_names={axis})(replicated, *rows)
