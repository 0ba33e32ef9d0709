"""How arrays lie over the mesh: logical axis names, and the one table that gives each a mesh axis."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.model.mesh import BATCH_AXES

AXIS_RULES: dict[str, str | tuple[str, ...]] = {
    "batch": BATCH_AXES,
    "length": "context",
    "embed": ("fsdp", "context"),
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
}
"""Logical axes that are not here are whole on every device."""


def named_sharding(mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...] | None = None) -> NamedSharding:
    """The sharding of an array whose axes have these logical names; None and names without a rule are replicated.

    So is an axis of `shape` that its mesh axis does not divide, which costs memory but is always right.
    """
    wanted = [AXIS_RULES.get(axis) for axis in axes]
    if shape is not None:
        wanted = [rule if _divides(mesh, rule, size) else None for rule, size in zip(wanted, shape, strict=True)]
    return NamedSharding(mesh, PartitionSpec(*wanted))


def _divides(mesh: Mesh, rule: str | tuple[str, ...] | None, size: int) -> bool:
    names = (rule,) if isinstance(rule, str) else rule or ()
    return size % int(np.prod([mesh.shape[name] for name in names])) == 0


def tree_shardings(mesh: Mesh, axes: Any, shapes: Any) -> Any:
    """The shardings of a tree whose leaves are tuples of logical axis names, given its arrays' shapes."""
    return jax.tree.map(
        lambda names, leaf: named_sharding(mesh, names, leaf.shape),
        axes,
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def optimizer_shardings(mesh: Mesh, state: Any, parameters: Any, shardings: Any) -> Any:
    """The shardings of an optimizer's state: moments lie like their parameters, all else is replicated.

    A leaf belongs to the parameter in whose path its own ends, if it has the same shape. Adafactor's sums over rows and
    columns have another, and are small.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(parameters)
    lies = {path: (leaf.shape, own) for (path, leaf), own in zip(flat, jax.tree.leaves(shardings), strict=True)}
    depths = sorted({len(path) for path in lies}, reverse=True)
    whole = named_sharding(mesh, ())

    def like(path: tuple, leaf: Any) -> NamedSharding:
        shape, sharding = next((lies[path[-n:]] for n in depths if path[-n:] in lies), (None, whole))
        return sharding if leaf.shape == shape else whole

    return jax.tree_util.tree_map_with_path(like, state)


def rows_of_process(mesh: Mesh, rows: int, process: int | None = None) -> slice:
    """Which rows of a batch the devices of this process hold a part of: the least range that has them all."""
    process = jax.process_index() if process is None else process
    held = named_sharding(mesh, ("batch",)).devices_indices_map((rows,))
    own = [index[0] for device, index in held.items() if device.process_index == process]
    return slice(min(part.start or 0 for part in own), max(rows if part.stop is None else part.stop for part in own))


def global_batch(mesh: Mesh, batch: Any, rows: int, part: slice) -> Any:
    """The rows `part` of a batch of `rows` rows, each [length], as arrays over the whole mesh."""
    sharding = named_sharding(mesh, ("batch", "length"))

    def put(values: np.ndarray) -> jax.Array:
        def piece(index: tuple[slice, ...]) -> np.ndarray:
            first, last, _ = index[0].indices(rows)
            return values[first - part.start : last - part.start, index[1]]

        return jax.make_array_from_callback((rows, values.shape[1]), sharding, piece)

    return jax.tree.map(put, batch)
