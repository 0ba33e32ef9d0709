"""The way into a mesh: one ``shard_map``, whose devices have the rows, tokens and heads that a placement gives them."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from posjax._checks import check
from posjax._slots import OverPairs
from posjax.attention.sharded.automatic import is_array, on_auto_axes
from posjax.attention.sharded.placement import Placement
from posjax.attention.sharded.split import Split
from posjax.axes import Names, each
from posjax.masks import as_mask
from posjax.positions import Range

_AXES = {
    "gates": ("batch", "heads", "queries"),
    "length": ("batch",),
    "coordinates": ("batch", "queries", None),
    "scale": ("batch", "queries", "heads"),
}
"""The axes of arrays by name; those of all others are the batch, the tokens, and what is held whole."""

_TOKENS = ("queries", "keys")


def attend_on_mesh(
    function: Callable[..., Any], placement: Placement, replicated: Any, projected: Any, per_row: Mapping[str, Any]
) -> Any:
    """``function(replicated, projected, per_row)`` on every device's own rows, tokens and heads.

    One ``shard_map`` over all axes of the mesh in use, so that kernels which no compiler splits are taken. Axes that
    the placement does not name hold copies. The gradients of replicated arrays are summed over the devices.

    Args:
        function: for instance ``Scheme.attend`` with ``across=placement.for_key_heads(...)``. Called as it is without
            a mesh in use, or inside a ``shard_map`` over the placement's axes.
        placement: which axes hold what.
        replicated: a tree whose arrays are the same on all devices.
        projected: queries, keys and values, ``[batch, length, heads, size]``. Key heads are repeated where their axis
            has more devices than they fill: see ``Placement.for_key_heads``.
        per_row: trees of arrays by name. ``"gates"`` are ``[batch, heads, length]``, ``"length"`` is ``[batch]``,
            ``"coordinates"`` are ``[batch, length, axes]``, masks and biases know their own axes (``"mask"`` may be a
            boolean array), and all others are ``[batch, length]``. An array with fewer axes is the same on all
            devices, and so is an axis of 1.

    Returns:
        What the function returns, ``[batch, length, heads, ...]`` again.

    Raises:
        ValueError: if the mesh in use lacks an axis, or its devices cannot share rows, tokens or heads evenly.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not placement.axes or mesh.empty or set(placement.axes) <= set(mesh.manual_axes):
        return function(replicated, projected, per_row)
    return enter(mesh, placement, function, replicated, projected, per_row)


def enter(
    mesh: Mesh | AbstractMesh, placement: Placement, function: Callable[..., Any], replicated, projected, per_row
) -> Any:
    """``attend_on_mesh`` over a mesh that need not be in use, also where nothing is split."""
    q, k, *_ = projected
    sizes = {"batch": q.shape[0], "length": q.shape[1], "heads": q.shape[2]}
    placement.check(mesh.shape, **sizes, kv_heads=k.shape[2])
    repeats = placement.for_key_heads(mesh.shape, k.shape[2]).repeats
    tokens = _spec(placement, ("batch", "queries", "heads"))
    per_row = {name: as_mask(value) if name == "mask" and is_array(value) else value for name, value in per_row.items()}
    of_rows = {name: _specs(placement, name, value, sizes) for name, value in per_row.items()}
    # All axes by default, but those of a ``vmap`` over the rows; beside Manual ones they must be named.
    axes = {"axis_names": set(mesh.axis_names) - _manual(mesh)} if _manual(mesh) else {}

    def inside(replicated, projected, per_row):
        if repeats > 1:
            projected = [jnp.repeat(x, repeats, axis=2) if x.shape[2] == k.shape[2] else x for x in projected]
        specs = {"in_specs": (PartitionSpec(), tokens, of_rows), "out_specs": tokens}
        # A mesh in use stands for itself; by now its axes may be of another type.
        over = {"mesh": mesh} if jax.sharding.get_abstract_mesh().empty else {}
        return jax.shard_map(function, **specs, **axes, **over)(replicated, projected, per_row)

    # Outside of ``jit`` jax runs no custom gradient with symbolic zeros under ``shard_map``.
    return on_auto_axes(jax.jit(inside), replicated, projected, dict(per_row), like=tokens)


def over_mesh(split: Split, function: Callable[..., Any], projected, params, options: Mapping[str, Any]) -> Any:
    """``function(*projected, **options, across=...)`` on every device's own rows and heads; see ``attend_on_mesh``.

    Args:
        split: the mesh, and what its axes hold.
        function: for instance ``Scheme.attend``.
        projected: see ``attend_on_mesh``.
        params: what is given to the function as ``params`` and is the same on all devices; or None.
        options: those with arrays by the names of ``attend_on_mesh``, and others.
    """
    placement = split.placement.for_key_heads(split.mesh.shape, projected[1].shape[2])
    arrays = {name: value for name, value in options.items() if any(map(is_array, jax.tree.leaves(value)))}
    rest = {name: value for name, value in options.items() if name not in arrays} | {"across": placement}

    def inside(params, projected, arrays):
        given = {} if params is None else {"params": params}
        return function(*projected, **given, **arrays, **rest)

    return enter(split.mesh, placement, inside, params, projected, arrays)


def _spec(placement: Placement, axes: Names) -> PartitionSpec:
    found = {"batch": placement.batch or None, "heads": placement.heads} | dict.fromkeys(_TOKENS, placement.context)
    return PartitionSpec(*(found.get(axis) for axis in axes))


def _specs(placement: Placement, name: str, value: Any, sizes: Mapping[str, int]) -> Any:
    """How a tree of arrays lies over the mesh: along the axes that it has, where it has all of them."""
    usual, sizes = _AXES.get(name, ("batch", "queries")), sizes | dict.fromkeys(_TOKENS, sizes["length"])

    def lies(array, names: Names) -> PartitionSpec:
        if isinstance(array, Range) or jnp.ndim(array) < len(names):
            return PartitionSpec()
        # Tokens of an array over pairs are never split.
        named = [None if name in _TOKENS else name for name in names] if set(_TOKENS) <= set(names) else names
        for axis, size in zip(named, array.shape, strict=False):
            # Keys may be more or fewer than queries, whose length this is; rows and heads are the same for all.
            fits = axis is None or axis in _TOKENS or size in (1, sizes[axis])
            check(fits, f"{name} must have 1 or {sizes.get(axis)} for its axis {axis!r}, found shape {array.shape}")
        pairs = zip(named, array.shape, strict=False)
        return _spec(placement, tuple(axis if sizes.get(axis) == size else None for axis, size in pairs))

    def part(node):
        if not isinstance(node, OverPairs):
            return lies(node, usual)
        node.check_names()
        return each(node, lies)

    return jax.tree.map(part, value, is_leaf=lambda node: isinstance(node, OverPairs | Range))


def _manual(mesh: Mesh | AbstractMesh) -> set[str]:
    """The axes of a ``shard_map`` that is entered already."""
    return {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual}
