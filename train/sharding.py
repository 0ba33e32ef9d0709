"""How arrays lie over the mesh: logical axis names, and the one table that gives each a mesh axis."""

from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Logical axes that are not here are replicated. Sharding the parameters means adding their axes to this table.
RULES = {"batch": "data"}


def named_sharding(mesh: Mesh, axes: tuple[str | None, ...]) -> NamedSharding:
    """The sharding of an array whose axes have these logical names; None and names without a rule are replicated."""
    return NamedSharding(mesh, PartitionSpec(*(RULES.get(axis) for axis in axes)))


def tree_shardings(mesh: Mesh, axes: Any) -> Any:
    """The shardings of a tree whose leaves are tuples of logical axis names."""
    return jax.tree.map(lambda names: named_sharding(mesh, names), axes, is_leaf=lambda node: isinstance(node, tuple))


def optimizer_shardings(mesh: Mesh, optimizer: optax.GradientTransformation, state: Any, parameters: Any) -> Any:
    """The shardings of an optimizer's state: moments lie like their parameters, counters are replicated."""
    return optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        state,
        parameters,
        transform_non_params=lambda _: named_sharding(mesh, ()),
    )


def global_batch(mesh: Mesh, batch: Any) -> Any:
    """This process's rows of a batch, [rows, length] each, as arrays over the whole mesh."""
    sharding = named_sharding(mesh, ("batch", "length"))
    return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(sharding, rows), batch)
