"""Attention on a mesh of devices: each device attends to the rows of the batch that it holds."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from posjax._checks import check


def over_batch(function: Callable[..., Any], axes: tuple[str, ...], replicated: Any, *rows: Any) -> Any:
    """``function(replicated, *rows)`` on every device's own rows, under ``shard_map`` over the mesh axes ``axes``.

    Attention loops over tiles, and with packed documents over rows, in an order that depends on the data; a compiler
    that partitions such a loop by itself would gather the whole batch on every device.

    Args:
        function: called as it is without ``axes``, without a mesh in use (``jax.set_mesh``), or inside a ``shard_map``
            over those axes.
        axes: the mesh axes over which the batch is split.
        replicated: a tree whose arrays are the same on all devices.
        rows: trees whose arrays have the batch as their first axis.

    Raises:
        ValueError: if the mesh in use lacks an axis, or its devices cannot share the rows evenly.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not axes or mesh.empty or set(axes) <= set(mesh.manual_axes):
        return function(replicated, *rows)
    unknown = [axis for axis in axes if axis not in mesh.axis_names]
    check(not unknown, f"batch_axes: the mesh in use has no axis {unknown}; it has {list(mesh.axis_names)}")
    devices = math.prod(mesh.shape[axis] for axis in axes)
    count = jax.tree.leaves(rows)[0].shape[0]
    check(count % devices == 0, f"a batch of {count} rows cannot be shared evenly by {devices} devices along {axes}")
    specs = (PartitionSpec(), *(PartitionSpec(axes) for _ in rows))
    return jax.shard_map(function, in_specs=specs, out_specs=PartitionSpec(axes), axis_names=set(axes))(
        replicated, *rows
    )
