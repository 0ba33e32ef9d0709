"""Embedding lookup, with a gradient that is summed in float32."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Float, Int

from posjax._mesh import explicit_part
from posjax._numbers import at_least_float32
from posjax.attention.placement import Placement


def lookup(
    table: Float[Array, "vocab embed"], tokens: Int[Array, "rows length"], placement: Placement | None = None
) -> Float[Array, "rows length embed"]:
    """``table[tokens]``, in the dtype of the table, which may be narrow to reduce communication.

    On a mesh every device looks up only its own tokens, in the whole width of the table. (With a table whose width is
    split, like other parameters, the compiler would make every device look up all tokens of the batch.) If the
    vocabulary is split, each device looks up the rows that it has, and the results are summed over devices.

    The gradient of row ``v`` is ``sum_i d_i [tokens_i = v]``. It is summed in at least float32, over the devices too,
    and rounded once: a bfloat16 sum of equal parts stops growing at 256 of them.

    Args:
        table: a row for every token of the vocabulary.
        tokens: from 0 to ``vocab - 1``. A negative token counts from the end. A token that is still outside this range
            gets the nearest row, and adds nothing to the gradient of that row.
        placement: how ``tokens`` are split over the mesh in use. The vocabulary may be split over the axes of the
            heads.
    """
    split = None if placement is None else _split(placement, jax.sharding.get_abstract_mesh(), table, tokens)
    wide = table.dtype == at_least_float32(table.dtype)
    return _rows(split, table, tokens) if wide else _narrow_lookup(split, table, tokens)


class _MeshAxes(NamedTuple):
    """The mesh axes over which batch, sequence and vocabulary are split, and all axes that ``shard_map`` enters."""

    rows: tuple[str, ...]
    length: tuple[str, ...]
    vocabulary: tuple[str, ...]
    entered: frozenset[str]

    @property
    def tokens(self) -> PartitionSpec:
        return PartitionSpec(self.rows or None, self.length or None)

    @property
    def table(self) -> PartitionSpec:
        return PartitionSpec(self.vocabulary or None)

    def map(self, function: Callable, takes: tuple, gives: PartitionSpec) -> Callable:
        """``function`` on the shards of every device."""
        return jax.shard_map(function, in_specs=takes, out_specs=gives, axis_names=self.entered)


def _split(placement: Placement, mesh: AbstractMesh, table: Array, tokens: Array) -> _MeshAxes | None:
    """The mesh axes to split over; None without a mesh, inside ``shard_map``, or if the axes do not divide the tokens.

    Raises ValueError for an axis that the mesh does not have.
    """
    open_axes = [tuple(axis for axis in side if axis not in mesh.manual_axes) for side in placement.split_axes]
    if mesh.empty or not any(open_axes):
        return None
    placement.check_axes(mesh.shape)

    def fits(axes: tuple[str, ...], size: int) -> bool:
        return isinstance(size, int) and size % math.prod(mesh.shape[axis] for axis in axes) == 0

    rows, length, vocabulary = open_axes
    if not (fits(rows, tokens.shape[0]) and fits(length, tokens.shape[1])):
        return None
    entered = frozenset(mesh.axis_names) - frozenset(mesh.manual_axes)
    return _MeshAxes(rows, length, vocabulary if fits(vocabulary, table.shape[0]) else (), entered)


def _rows(split: _MeshAxes | None, table, tokens):
    if split is None:
        return table[tokens]
    local_rows = partial(_rows_of_device, split.vocabulary)
    arrays = _resharded(table, split.table), _resharded(tokens, split.tokens)
    return split.map(local_rows, (split.table, split.tokens), split.tokens)(*arrays)


def _resharded(x: Array, spec: PartitionSpec) -> Array:
    """``x``, resharded to a spec over Explicit axes of the mesh. Over Auto axes the compiler reshards."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.sharding.reshard(x, explicit_part(spec, mesh)) if mesh.explicit_axes else x


def _rows_of_device(axes: tuple[str, ...], table, tokens):
    """The rows of this device's tokens, summed over devices that each have a part of the vocabulary."""
    if not axes:
        return table[tokens]
    size = table.shape[0]
    vocabulary = size * jax.lax.axis_size(axes)
    tokens = jnp.where(tokens < 0, tokens + vocabulary, tokens)
    first = jax.lax.axis_index(axes) * size
    nearest = jnp.clip(tokens, 0, vocabulary - 1) - first
    local = tokens - first
    is_local = (nearest >= 0) & (nearest < size)
    # JAX too reads the nearest row for an index that is outside, and gives that row no gradient. But JAX first adds the
    # size to a negative index, so the size is subtracted before.
    embeddings = table[jnp.where(local < 0, local - size, local)]
    return jax.lax.psum(jnp.where(is_local[..., None], embeddings, 0), axes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _narrow_lookup(split, table, tokens):
    return _rows(split, table, tokens)


def _forward(split, table, tokens):
    return _rows(split, table, tokens), (table, tokens)


def _backward(split, saved, d_rows):
    table, tokens = saved
    # The values of the table are not read, only its shape and sharding.
    _, transpose = jax.vjp(lambda wide: _rows(split, wide, tokens), table.astype(jnp.float32))
    return transpose(d_rows.astype(jnp.float32))[0].astype(table.dtype), None


_narrow_lookup.defvjp(_forward, _backward)
