"""A call whose tokens are split over devices: how to cut and join its arrays along the tokens.

The query side of a call stays on its device: ``q``, remapped queries, the scale, and the query side of positions, mask
and bias. The key side is sent: ``k``, ``v``, remapped keys, and the key side of positions, mask and bias.
``posjax._axes.map_tokens`` distinguishes them.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from posjax._axes import map_tokens
from posjax.attention.call import Call
from posjax.layout import Layout
from posjax.positions import Positions, Range, as_array


@dataclasses.dataclass(frozen=True)
class SequenceSplit:
    """How a sequence is split along a mesh axis: over ``shards`` groups of ``width`` neighbouring devices.

    Groups of several devices hold their tokens in ascending order within every chunk of the layout over groups.

    Args:
        axis: the mesh axis.
        shards: number of groups.
        width: devices of a group.
        layout: order of the tokens over the devices.
        length: tokens of a sequence.
        split: whether the runs of tokens of a group are separate calls, so that the positions of each are a ``Range``;
            otherwise one call, with an array of positions.
    """

    axis: str | None
    shards: int
    width: int
    layout: Layout
    length: int
    split: bool = True

    @property
    def groups(self) -> Layout:
        """The order of the tokens over the groups."""
        return Layout(self.layout.kind if self.shards > 1 else "contiguous", self.shards)

    @property
    def chunks(self) -> int:
        """Pieces into which the tokens of each group are split."""
        return self.groups.chunks if self.split else 1

    @property
    def piece(self) -> int:
        """Tokens of a piece."""
        return self.length // (self.shards * self.chunks)

    @property
    def shard(self):
        """The group of this device."""
        return 0 if self.shards == 1 else jax.lax.axis_index(self.axis) // self.width

    @property
    def ascending(self) -> np.ndarray:
        """The permutation that sorts the tokens of a group, concatenated by device; it is the same in every group."""
        return np.argsort(self.layout.order(self.length)[: self.length // self.shards])

    def positions(self, row: Range, shard, n) -> Positions:
        """The positions of piece ``n`` of group ``shard``, for a sequence with positions ``row``."""
        if self.chunks < self.groups.chunks:
            return row.start + jnp.concatenate([as_array(p) for p in self.groups.local(self.length, shard)])
        piece = self.groups.piece(self.length, shard, n)
        return Range(row.start + piece.start, piece.length)

    def cut(self, n) -> Callable:
        """The function that cuts piece ``n`` out of an array."""

        def cut(array, axis):
            return array if self.chunks == 1 else jax.lax.dynamic_slice_in_dim(array, n * self.piece, self.piece, axis)

        return cut

    def placed(self, pieces: Call, i, j, source) -> Call:
        """The call of cut-out pieces: query piece ``i`` of this group, key piece ``j`` of ``source``, and positions."""
        run = None if self.split else self.length // (self.shards * self.groups.chunks)
        positions = self._placed(pieces.q_positions, self.shard, i), self._placed(pieces.kv_positions, source, j)
        return dataclasses.replace(pieces, run=run).at(*positions)

    def queries(self, call: Call, i) -> Call:
        """Query piece ``i`` of this group, with all keys."""
        part = map_tokens(call, self.cut(i), keep)
        return part.at(self._placed(part.q_positions, self.shard, i), part.kv_positions)

    def stored(self, n, whole, piece, axis: int):
        """``whole`` with ``piece`` as piece ``n``."""
        if self.chunks == 1:
            return piece
        return jax.lax.dynamic_update_slice_in_dim(whole, piece, n * self.piece, axis % whole.ndim)

    def _placed(self, positions: Positions, shard, n) -> Positions:
        return self.positions(positions, shard, n) if isinstance(positions, Range) else positions


def taken(array, order: np.ndarray, axis: int):
    """``jnp.take`` along an axis, by whole runs of the order. By single tokens, the transpose would be a scatter.

    It returns the array unchanged if the order is the identity.
    """
    breaks = np.flatnonzero(np.diff(order) != 1) + 1
    starts = order[np.concatenate([[0], breaks])]
    run = int(np.gcd.reduce([len(order), *breaks, *starts]))
    if run == len(order):
        return array
    axis %= array.ndim
    shape = array.shape
    runs = array.reshape(*shape[:axis], shape[axis] // run, run, *shape[axis + 1 :])
    return jnp.take(runs, order[::run] // run, axis=axis).reshape(shape)


def keep(array, axis):
    """The array unchanged."""
    return array


def join(parts: list):
    """Results of query pieces, ``[batch, kv heads, group, queries, ...]``, concatenated."""
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=3), *parts)
