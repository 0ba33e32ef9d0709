"""Entering a mesh: how a call is split over it, and one ``shard_map`` over its axes."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from posjax._axes import Names, each
from posjax._checks import check
from posjax._mesh import axes_of, explicit_spec, is_array, mesh_of, on_auto_axes
from posjax._slots import OverPairs
from posjax.attention.placement import Placement
from posjax.masks import as_mask
from posjax.positions import Range

Partition = NamedSharding | PartitionSpec
_LAYOUT = "[batch, queries, heads, size]"
_AXES = {
    "gates": ("batch", "heads", "queries"),
    "length": ("batch",),
    "coordinates": ("batch", "queries", None),
    "scale": ("batch", "queries", "heads"),
    "sinks": ("batch", "queries", "heads"),
}
"""The axes of the arrays ``per_row`` by name; arrays of other names have batch, tokens, and axes that are not split."""

_TOKENS = ("queries", "keys")


def split_of(q, k, v, partition: Partition | None) -> tuple[Mesh | AbstractMesh, Placement] | None:
    """The mesh of the arrays of a call and its placement there; None if neither types nor ``partition`` give one.

    The types of arrays give the split over Explicit axes, ``partition`` gives the split over Auto axes. If neither
    splits anything, every device computes everything.

    Args:
        q: queries ``[batch, queries, heads, size]``.
        k: keys.
        v: values.
        partition: the spec of the queries over the Auto axes.

    Raises:
        ValueError: for a sequence or a head that is split, and for a partition that does not fit the mesh.
    """
    mesh = _mesh(q, k, v, partition)
    if mesh is None or not _has_layout(mesh, partition):
        return None
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_whole(name, _explicit_axes(x))
    requested = _partition_axes(partition, mesh)
    _check_whole("placement", requested)
    rows, _, heads, _ = (a + b for a, b in zip(_explicit_axes(q), requested, strict=True))
    return mesh, Placement(batch=rows, heads=heads or None)


def _mesh(q, k, v, partition: Partition | None) -> Mesh | AbstractMesh | None:
    """The mesh of a call."""
    known = partition is None or isinstance(partition, NamedSharding | PartitionSpec)
    check(known, f"placement must be a NamedSharding, a PartitionSpec or a sharded.Placement, found {partition!r}")
    of_arrays = mesh_of(q, k, v)
    if isinstance(partition, NamedSharding):
        fits = of_arrays is None or dict(of_arrays.shape).items() <= dict(partition.mesh.shape).items()
        check(
            fits,
            f"placement: its mesh {dict(partition.mesh.shape)} is not that of the arrays, "
            f"{of_arrays and dict(of_arrays.shape)}",
        )
        return partition.mesh
    is_known = partition is None or of_arrays is not None
    check(is_known, "placement: found no mesh; give a NamedSharding or use jax.set_mesh")
    return of_arrays


def _has_layout(mesh: Mesh | AbstractMesh, partition: Partition | None) -> bool:
    """Whether types or the caller give a split over axes outside any ``shard_map``."""
    return bool(mesh.explicit_axes or (partition is not None and mesh.auto_axes))


def _explicit_axes(x) -> tuple[tuple[str, ...], ...]:
    """The Explicit axes of a mesh that each axis of an array is split over."""
    return tuple(axes_of(part) for part in explicit_spec(x))


def _partition_axes(partition: Partition | None, mesh: Mesh | AbstractMesh) -> tuple[tuple[str, ...], ...]:
    """The Auto axes of a mesh that the caller's partition splits each axis of the queries over."""
    spec = PartitionSpec() if partition is None else getattr(partition, "spec", partition)
    check(len(spec) <= 4, f"placement must have at most the axes {_LAYOUT}, found {spec}")
    named = [axes_of(part) for part in spec] + [()] * (4 - len(spec))
    known, auto = mesh.axis_names, mesh.auto_axes
    unknown = [name for names in named for name in names if name not in known]
    check(not unknown, f"placement: the mesh has no axis {unknown}; it has {list(mesh.axis_names)}")
    return tuple(tuple(name for name in names if name in auto) for names in named)


def _check_whole(name: str, axes: tuple[tuple[str, ...], ...]) -> None:
    """Raises ValueError for a split sequence or head size."""
    check(
        not axes[1],
        f"{name}: its sequence is split over mesh axis {axes[1]}, but attention reads whole sequences; for context "
        "parallelism use posjax.attention.sharded.attend_on_mesh with Placement(context=...)",
    )
    check(
        not axes[3],
        f"{name}: the size of its heads is split over mesh axis {axes[3]}; gather it first, with jax.sharding.reshard",
    )


def attend_on_mesh(
    function: Callable[..., Any], placement: Placement, replicated: Any, projected: Any, per_row: Mapping[str, Any]
) -> Any:
    """``function(replicated, projected, per_row)`` on every device, for its own batch rows, tokens and heads.

    It is one ``shard_map`` over all axes of the mesh in use, so that kernels can be used. Data are replicated over axes
    that the placement does not name. The gradients of replicated arrays are summed over the devices.

    Args:
        function: for instance ``Scheme.attend`` with ``placement=placement.for_key_heads(...)``. It is called directly
            if no mesh is in use or the placement names no axis, or inside a ``shard_map`` over the placement's axes.
        placement: the axes of batch, sequence and heads.
        replicated: a tree whose arrays are the same on all devices.
        projected: queries, keys and values, ``[batch, length, heads, size]``. Key heads are repeated if the devices of
            their axis do not divide them: see ``Placement.for_key_heads``.
        per_row: trees of arrays by name. ``"gates"`` are ``[batch, heads, length, ...]``, ``"length"`` is ``[batch]``,
            ``"coordinates"`` are ``[batch, length, axes]``, masks and biases name their own axes (``"mask"`` may be a
            boolean array), and all others are ``[batch, length]``. An array with fewer axes is the same on all
            devices. An axis of size 1 is not split.

    Returns:
        The result of the function, ``[batch, length, heads, ...]`` again.

    Raises:
        ValueError: if the mesh in use lacks an axis, or its devices cannot split batch, tokens or heads evenly.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not placement.axes or mesh.empty or set(placement.axes) <= set(mesh.manual_axes):
        return function(replicated, projected, per_row)
    return enter(mesh, placement, function, replicated, projected, per_row)


def enter(
    mesh: Mesh | AbstractMesh, placement: Placement, function: Callable[..., Any], replicated, projected, per_row
) -> Any:
    """``attend_on_mesh`` over a mesh that need not be in use, even if nothing is split."""
    q, k, *_ = projected
    sizes = {"batch": q.shape[0], "length": q.shape[1], "heads": q.shape[2]}
    placement.check(mesh.shape, **sizes, kv_heads=k.shape[2])
    repeats = placement.for_key_heads(mesh.shape, k.shape[2]).repeats
    tokens = _spec(placement, ("batch", "queries", "heads"))
    if per_row.get("gates") is not None:  # those of the key heads are split as the queries are
        of_queries = partial(_repeated, heads=q.shape[2], kv_heads=k.shape[2])
        per_row = dict(per_row) | {"gates": jax.tree.map(of_queries, per_row["gates"])}
    per_row = {name: as_mask(value) if name == "mask" and is_array(value) else value for name, value in per_row.items()}
    of_rows = {name: _specs(placement, name, value, sizes) for name, value in per_row.items()}
    # By default ``shard_map`` takes all axes except those of a ``vmap`` over the batch. If some axes are Manual, the
    # others must be named.
    axes = {"axis_names": set(mesh.axis_names) - set(mesh.manual_axes)} if mesh.manual_axes else {}

    def inside(replicated, projected, per_row):
        if repeats > 1:
            projected = [jnp.repeat(x, repeats, axis=2) if x.shape[2] == k.shape[2] else x for x in projected]
        specs = {"in_specs": (PartitionSpec(), tokens, of_rows), "out_specs": tokens}
        # A mesh in use is not passed: its axes may have another type by now.
        mesh_option = {"mesh": mesh} if jax.sharding.get_abstract_mesh().empty else {}
        return jax.shard_map(function, **specs, **axes, **mesh_option)(replicated, projected, per_row)

    # Outside ``jit`` jax cannot run a custom gradient with symbolic zeros under ``shard_map``.
    return on_auto_axes(jax.jit(inside), replicated, projected, dict(per_row), like=tokens)


def over_mesh(
    mesh: Mesh | AbstractMesh,
    placement: Placement,
    function: Callable[..., Any],
    projected,
    params,
    options: Mapping[str, Any],
) -> Any:
    """``function(*projected, **options, placement=...)`` on every device's batch rows and heads.

    Args:
        mesh, placement: the result of ``split_of``.
        function: for instance ``Scheme.attend``; see ``attend_on_mesh``.
        projected: see ``attend_on_mesh``.
        params: the argument ``params`` of the function, the same on all devices; or None.
        options: other arguments. Arguments with arrays have the names that ``per_row`` has in ``attend_on_mesh``.
    """
    placement = placement.for_key_heads(mesh.shape, projected[1].shape[2])
    arrays = {name: value for name, value in options.items() if any(map(is_array, jax.tree.leaves(value)))}
    rest = {name: value for name, value in options.items() if name not in arrays} | {"placement": placement}

    def inside(params, projected, arrays):
        params_option = {} if params is None else {"params": params}
        return function(*projected, **params_option, **arrays, **rest)

    return enter(mesh, placement, inside, params, projected, arrays)


def _repeated(array: Array, heads: int, kv_heads: int) -> Array:
    """An array of key heads ``[batch, kv_heads, ...]`` with all query heads; others unchanged."""
    return jnp.repeat(array, heads // kv_heads, axis=1) if array.shape[1] == kv_heads != heads else array


def _spec(placement: Placement, axes: Names) -> PartitionSpec:
    split = {"batch": placement.batch or None, "heads": placement.heads} | dict.fromkeys(_TOKENS, placement.context)
    return PartitionSpec(*(split.get(axis) for axis in axes))


def _specs(placement: Placement, name: str, value: Any, sizes: Mapping[str, int]) -> Any:
    """The specs of a tree of arrays: each axis is split if the array has its full size."""
    default_names = _AXES.get(name, ("batch", "queries"))
    sizes = sizes | dict.fromkeys(_TOKENS, sizes["length"])

    def spec_of(array, names: Names) -> PartitionSpec:
        if isinstance(array, Range) or jnp.ndim(array) < len(names):
            return PartitionSpec()
        # Tokens of an array over pairs are never split.
        named = [None if name in _TOKENS else name for name in names] if set(_TOKENS) <= set(names) else names
        for axis, size in zip(named, array.shape, strict=False):
            # The length is that of the queries; keys may be more or fewer.
            fits = axis is None or axis in _TOKENS or size in (1, sizes[axis])
            check(fits, f"{name} must have 1 or {sizes.get(axis)} for its axis {axis!r}, found shape {array.shape}")
        pairs = zip(named, array.shape, strict=False)
        return _spec(placement, tuple(axis if sizes.get(axis) == size else None for axis, size in pairs))

    def part(node):
        if not isinstance(node, OverPairs):
            return spec_of(node, default_names)
        node.check_names()
        return each(node, spec_of)

    return jax.tree.map(part, value, is_leaf=lambda node: isinstance(node, OverPairs | Range))
