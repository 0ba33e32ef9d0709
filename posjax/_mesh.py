"""Runs functions written for Auto mesh axes, which the compiler splits, on meshes with Explicit axes."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec


def mesh_of(*trees: Any) -> AbstractMesh | None:
    """The mesh of the first array that has one, otherwise the mesh in use; None without either."""
    for leaf in jax.tree.leaves(trees):
        mesh = jax.typeof(leaf).sharding.mesh if is_array(leaf) else None
        if mesh is not None and not mesh.empty:
            return mesh
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def has_explicit(*trees: Any) -> bool:
    """Whether the mesh of some arrays, or the mesh in use, has Explicit axes."""
    mesh = mesh_of(*trees)
    return mesh is not None and bool(mesh.explicit_axes)


def on_auto_axes(function: Callable[..., Any], *arguments: Any, like: Any) -> Any:
    """``function(*arguments)`` with all mesh axes Auto, on meshes with Explicit axes too.

    Args:
        function: of trees; leaves that are not arrays are passed unchanged.
        arguments: the trees.
        like: a tree of ``PartitionSpec`` for the results, which may name other axes too.
    """
    if not has_explicit(*arguments):
        return function(*arguments)
    mesh = mesh_of(*arguments)
    leaves, structure = jax.tree.flatten(arguments)
    arrays = [leaf for leaf in leaves if is_array(leaf)]

    def run(arrays):
        rest = iter(arrays)
        return function(*structure.unflatten([next(rest) if is_array(leaf) else leaf for leaf in leaves]))

    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, explicit_part(spec, mesh)), like, is_leaf=_is_spec)
    return jax.sharding.auto_axes(run, axes=mesh.explicit_axes, out_sharding=shardings)(arrays)


def explicit_part(spec: PartitionSpec, mesh: AbstractMesh) -> PartitionSpec:
    """The part of a spec that names Explicit axes of a mesh."""
    explicit = [tuple(name for name in axes_of(part) if name in mesh.explicit_axes) for part in spec]
    return PartitionSpec(*(names or None for names in explicit))


def explicit_spec(x) -> PartitionSpec:
    """The spec of an array's type over the Explicit axes of its mesh."""
    sharding = jax.typeof(x).sharding
    return explicit_part(sharding.spec, sharding.mesh)


def axes_of(part: Any) -> tuple[str, ...]:
    """The mesh axes of one dimension of a ``PartitionSpec``."""
    if part is None or part is PartitionSpec.UNCONSTRAINED:
        return ()
    return (part,) if isinstance(part, str) else tuple(part)


def is_array(leaf: Any) -> bool:
    """Whether a leaf of a tree is an array, of JAX or NumPy."""
    return isinstance(leaf, jax.Array | np.ndarray)


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)
