"""How arrays are sharded over the mesh: logical axis names, and the table that maps each to a mesh axis."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from posjax.nn.huggingface.load import named_parameters
from train.model.mesh import BATCH_AXES, EXPERT
from train.model.state import is_matrix

AXIS_RULES: dict[str, tuple[str, ...]] = {
    "batch": BATCH_AXES,
    "length": ("context",),
    "embed": ("fsdp", EXPERT, "context"),
    "rank": ("fsdp", EXPERT, "context"),
    "experts": (EXPERT,),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
}
"""Mesh axes by logical axis; logical axes that are not listed are replicated. Of several logical axes of an array with
the same mesh axis, the first one is split over it."""


def named_sharding(mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...] | None = None) -> NamedSharding:
    """The sharding of an array whose axes have these logical names; None and names without a rule are replicated.

    An axis of ``shape`` is split over those of its mesh axes that divide it, over as many devices as possible. Over the
    other axes it is replicated, which costs memory but is always correct; `replicated` reports it.
    """
    rules: list[tuple[str, ...]] = []
    for number, axis in enumerate(axes):
        rule = tuple(name for name in _free(axis, rules) if name in mesh.shape)
        rules.append(rule if shape is None else _dividing(mesh, rule, shape[number]))
    return NamedSharding(mesh, PartitionSpec(*(rule[0] if len(rule) == 1 else rule or None for rule in rules)))


def _free(axis: str | None, rules: Sequence[Sequence[str]]) -> list[str]:
    """The mesh axes of a logical axis without those that the rules of other axes have."""
    return [name for name in AXIS_RULES.get(axis, ()) if not any(name in rule for rule in rules)]


def _dividing(mesh: Mesh, axes: tuple[str, ...], size: int) -> tuple[str, ...]:
    """The mesh axes that together divide a size, over the most devices; of equal choices the first."""
    choices = (chosen for n in range(len(axes), -1, -1) for chosen in itertools.combinations(axes, n))
    return max((c for c in choices if size % _devices(mesh, c) == 0), key=lambda c: _devices(mesh, c))


def _devices(mesh: Mesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def replicated(mesh: Mesh, axes: Any, shapes: Any) -> str:
    """A message on parameters that `named_sharding` leaves replicated, with the memory this costs; empty if it is
    little.

    Args:
        mesh: the mesh of the devices.
        axes: logical names of every parameter's axes.
        shapes: the parameters, or their shapes and dtypes.
    """
    extra = [
        (_beyond_share(mesh, names, leaf), name, leaf.shape)
        for (name, names), leaf in zip(named_parameters(axes), jax.tree.leaves(shapes), strict=True)
    ]
    total, (_, name, shape) = sum(size for size, *_ in extra), max(extra)
    if total < _LITTLE:
        return ""
    return (
        f"train.mesh does not divide all parameters: every device holds {total / 2**20:,.0f} MiB of them beyond its "
        f"share, and as much again for each moment of the optimizer; most of {name}, of shape {shape}. Sizes that "
        "divide the axes of parameters would split them"
    )


def _beyond_share(mesh: Mesh, names: tuple[str | None, ...], leaf: Any) -> int:
    """The bytes of a parameter that a device holds in excess of an even split over the mesh."""
    held = math.prod(named_sharding(mesh, names, leaf.shape).shard_shape(leaf.shape))
    wanted = {axis for name in names for axis in AXIS_RULES.get(name, ()) if axis in mesh.shape}
    share = leaf.size // _devices(mesh, tuple(wanted))
    return (held - share) * leaf.dtype.itemsize


LENGTH_AXES = {"positions": -1, "coordinates": -2}
"""By the name of a scheme's draw for a batch, its token axis, for those that have one."""

_LITTLE = 2**26
"""Excess bytes below which nothing is reported."""


def tree_shardings(mesh: Mesh, axes: Any, shapes: Any) -> Any:
    """The shardings of a tree of arrays or shapes, given the tree of their logical axis names."""
    return jax.tree.map(lambda leaf, names: named_sharding(mesh, names, leaf.shape), shapes, axes)


def cast_matrices(parameters: Any, axes: Any, dtype: Any, mesh: Mesh | None) -> Any:
    """Parameters whose matrices are cast to the model's compute dtype if that is narrower, with the same sharding.

    In a program over the mesh so that less is communicated; or, with None, on one device, so that less is read.
    """

    def narrow(leaf: Array, names: tuple) -> Array:
        if leaf.dtype.itemsize <= jnp.dtype(dtype).itemsize or not is_matrix(names):
            return leaf
        cast = leaf.astype(dtype)
        if mesh is None:
            return cast
        return jax.lax.with_sharding_constraint(cast, named_sharding(mesh, names, leaf.shape).spec)

    return jax.tree.map(narrow, parameters, axes)


def optimizer_shardings(mesh: Mesh, state: Any, parameters: Any, shardings: Any) -> Any:
    """The shardings of an optimizer's state: moments are sharded like their parameters, all else is replicated.

    A leaf belongs to the parameter whose path is the end of its own path, if both have the same shape. Adafactor's sums
    over rows and columns have other shapes, and are small.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(parameters)
    by_path = {path: (leaf.shape, each) for (path, leaf), each in zip(flat, jax.tree.leaves(shardings), strict=True)}
    depths = sorted({len(path) for path in by_path}, reverse=True)
    whole = named_sharding(mesh, ())

    def like(path: tuple, leaf: Any) -> NamedSharding:
        shape, sharding = next((by_path[path[-n:]] for n in depths if path[-n:] in by_path), (None, whole))
        return sharding if leaf.shape == shape else whole

    return jax.tree_util.tree_map_with_path(like, state)


def rows_of_process(mesh: Mesh, rows: int, process: int | None = None) -> slice:
    """The rows of a batch that a process reads: the smallest range with all rows that its devices hold a part of."""
    process = jax.process_index() if process is None else process
    held = named_sharding(mesh, ("batch",)).devices_indices_map((rows,))
    runs = [index[0] for device, index in held.items() if device.process_index == process]
    return slice(min(part.start or 0 for part in runs), max(rows if part.stop is None else part.stop for part in runs))


def global_batch(mesh: Mesh, batch: Any, rows: int, part: slice) -> Any:
    """A batch of `rows` rows, each [length], as arrays over the whole mesh; this process gives its rows `part`."""
    sharding = named_sharding(mesh, ("batch", "length"))

    def put(values: np.ndarray) -> jax.Array:
        def piece(index: tuple[slice, ...]) -> np.ndarray:
            first, last, _ = index[0].indices(rows)
            return values[first - part.start : last - part.start, index[1]]

        return jax.make_array_from_callback((rows, values.shape[1]), sharding, piece)

    return jax.tree.map(put, batch)
