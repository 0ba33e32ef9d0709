"""How the rows and heads of an attention call lie over a mesh, by the types of its arrays or by the caller's word."""

import math
from typing import NamedTuple

from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from posjax._checks import check
from posjax.attention.sharded.automatic import axes_of, explicit_spec, mesh_of
from posjax.attention.sharded.placement import Placement

Partition = NamedSharding | PartitionSpec
_LAYOUT = "[batch, queries, heads, size]"


class Split(NamedTuple):
    """The mesh of a call, and what its axes hold."""

    mesh: Mesh | AbstractMesh
    placement: Placement


def split_of(q, k, v, partition: Partition | None) -> Split | None:
    """How a call is to be split over the mesh of its arrays; None where nothing tells.

    The types of arrays tell it of Explicit axes, ``partition`` of Auto ones. Where one of them says that nothing is
    split, every device computes everything.

    Args:
        q: queries ``[batch, queries, heads, size]``.
        k: keys.
        v: values.
        partition: how queries lie over the Auto axes.

    Raises:
        ValueError: for a sequence or a head that is split, and for a partition that does not fit the mesh.
    """
    mesh = _mesh(q, k, v, partition)
    if mesh is None or not _has_layout(mesh, partition):
        return None
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_whole(name, _explicit_axes(x))
    asked = _asked(partition, mesh)
    _check_whole("partition", asked)
    rows, _, heads, _ = (a + b for a, b in zip(_explicit_axes(q), asked, strict=True))
    _check_even("rows", q.shape[0], rows, mesh)
    _check_even("query heads", q.shape[2], heads, mesh)
    return Split(mesh, Placement(batch=rows, heads=heads or None))


def _mesh(q, k, v, partition: Partition | None) -> Mesh | AbstractMesh | None:
    """The mesh of a call."""
    found = mesh_of(q, k, v)
    if isinstance(partition, NamedSharding):
        fits = found is None or dict(found.shape).items() <= dict(partition.mesh.shape).items()
        check(
            fits, f"partition: its mesh {dict(partition.mesh.shape)} is not that of the arrays, {found and found.shape}"
        )
        return partition.mesh
    check(
        partition is None or found is not None, "partition: there is no mesh; give a NamedSharding or jax.set_mesh one"
    )
    return found


def _check_even(what: str, size: int, axes: tuple[str, ...], mesh: Mesh | AbstractMesh) -> None:
    """Refuses a partition that leaves devices with unequal parts."""
    devices = math.prod(mesh.shape[axis] for axis in axes)
    fits = f"axes with {math.gcd(size, devices)} devices would work"
    check(size % devices == 0, f"partition: {devices} devices along {axes} cannot share {size} {what} evenly; {fits}")


def _has_layout(mesh: Mesh | AbstractMesh, partition: Partition | None) -> bool:
    """Whether types or the caller say how arrays lie over axes that no ``shard_map`` has entered yet."""
    auto = partition is not None and _of_type(mesh, AxisType.Auto)
    return bool(auto or _of_type(mesh, AxisType.Explicit))


def _of_type(mesh: Mesh | AbstractMesh, kind: AxisType) -> set[str]:
    return {name for name, own in zip(mesh.axis_names, mesh.axis_types, strict=True) if own == kind}


def _explicit_axes(x) -> tuple[tuple[str, ...], ...]:
    """The Explicit axes of a mesh that each axis of an array is split over."""
    return tuple(axes_of(part) for part in explicit_spec(x))


def _asked(partition: Partition | None, mesh: Mesh | AbstractMesh) -> tuple[tuple[str, ...], ...]:
    """The same of Auto axes and the caller's partition."""
    spec = PartitionSpec() if partition is None else getattr(partition, "spec", partition)
    check(isinstance(spec, PartitionSpec), f"partition must be a NamedSharding or PartitionSpec, found {spec!r}")
    check(len(spec) <= 4, f"partition must have at most the axes {_LAYOUT}, found {spec}")
    named = [axes_of(part) for part in spec] + [()] * (4 - len(spec))
    known, auto = set(mesh.axis_names), _of_type(mesh, AxisType.Auto)
    unknown = [name for names in named for name in names if name not in known]
    check(not unknown, f"partition: the mesh has no axis {unknown}; it has {list(mesh.axis_names)}")
    return tuple(tuple(name for name in names if name in auto) for names in named)


def _check_whole(name: str, axes: tuple[tuple[str, ...], ...]) -> None:
    """Refuses what attention does not split by itself."""
    check(
        not axes[1],
        f"{name}: its sequence is split over mesh axis {axes[1]}, but attention reads whole rows; for a split sequence "
        "use posjax.attention.sharded.attend_on_mesh with Placement(context=...), the context-parallel way",
    )
    check(
        not axes[3],
        f"{name}: the size of its heads is split over mesh axis {axes[3]}; gather it first, with jax.sharding.reshard",
    )
