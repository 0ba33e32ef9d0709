"""How batch and heads of an attention call are split over a mesh, by the types of its arrays or by ``partition``."""

from typing import NamedTuple

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from posjax._checks import check
from posjax.attention.sharded.automatic import axes_of, explicit_spec, mesh_of
from posjax.attention.sharded.placement import Placement

Partition = NamedSharding | PartitionSpec
_LAYOUT = "[batch, queries, heads, size]"


class Split(NamedTuple):
    """The mesh and the placement of a call."""

    mesh: Mesh | AbstractMesh
    placement: Placement


def split_of(q, k, v, partition: Partition | None) -> Split | None:
    """How a call is split over the mesh of its arrays; None if neither types nor ``partition`` give one.

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
    _check_whole("partition", requested)
    rows, _, heads, _ = (a + b for a, b in zip(_explicit_axes(q), requested, strict=True))
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
    check(partition is None or found is not None, "partition: found no mesh; give a NamedSharding or use jax.set_mesh")
    return found


def _has_layout(mesh: Mesh | AbstractMesh, partition: Partition | None) -> bool:
    """Whether types or the caller give a split over axes outside any ``shard_map``."""
    return bool(mesh.explicit_axes or (partition is not None and mesh.auto_axes))


def _explicit_axes(x) -> tuple[tuple[str, ...], ...]:
    """The Explicit axes of a mesh that each axis of an array is split over."""
    return tuple(axes_of(part) for part in explicit_spec(x))


def _partition_axes(partition: Partition | None, mesh: Mesh | AbstractMesh) -> tuple[tuple[str, ...], ...]:
    """The Auto axes of a mesh that the caller's partition splits each axis of the queries over."""
    spec = PartitionSpec() if partition is None else getattr(partition, "spec", partition)
    check(isinstance(spec, PartitionSpec), f"partition must be a NamedSharding or PartitionSpec, found {spec!r}")
    check(len(spec) <= 4, f"partition must have at most the axes {_LAYOUT}, found {spec}")
    named = [axes_of(part) for part in spec] + [()] * (4 - len(spec))
    known, auto = mesh.axis_names, mesh.auto_axes
    unknown = [name for names in named for name in names if name not in known]
    check(not unknown, f"partition: the mesh has no axis {unknown}; it has {list(mesh.axis_names)}")
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
