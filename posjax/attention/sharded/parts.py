"""An attention call whose tokens are spread over devices, and how to cut and join its arrays along the tokens.

What belongs to the queries of a call stays where it is: ``q``, far queries, the scale, and the query side of positions,
mask and bias. What belongs to its keys travels: ``k``, ``v``, far keys, and the key side of positions, mask and bias.
``posjax.axes.map_tokens`` tells them apart.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from posjax.attention.operands import LANES, Operands, apart, beside
from posjax.axes import Names, WithAxes, each, map_tokens
from posjax.layout import Layout
from posjax.positions import Positions, Range, as_array


@partial(jax.tree_util.register_dataclass, data_fields=["x", "scale"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Call(WithAxes):
    """Operands, their queries not scaled yet, and the scale.

    Positions are arrays over this device's tokens, or a ``Range`` over the whole row, of which ``Line`` knows the part.
    """

    x: Operands
    scale: Any

    axes: ClassVar = {"scale": ("batch", "kv_heads", "group", "queries", "size")}

    def halves(self) -> tuple["Call", "Call"]:
        """The calls of the first and of the second half of the heads."""
        heads, group = self.x.q.shape[1] // 2, self.x.q.shape[2]

        def half(array, names: Names, n: int):
            return _half(array, names.index("kv_heads"), n) if "kv_heads" in names else array

        def own(slot, n: int):
            return slot if slot is None else slot.heads(n * heads * group, heads * group)

        def part(n: int) -> "Call":
            plain = dataclasses.replace(self, x=dataclasses.replace(self.x, bias=None, mask=None))
            found = each(plain, partial(half, n=n))
            far = tuple(dataclasses.replace(pair, where=own(pair.where, n)) for pair in found.x.far)
            x = dataclasses.replace(found.x, bias=own(self.x.bias, n), mask=own(self.x.mask, n), far=far)
            return dataclasses.replace(found, x=x)

        return part(0), part(1)

    def at(self, q_positions: Positions, kv_positions: Positions) -> "Call":
        """The call at other positions."""
        return Call(dataclasses.replace(self.x, q_positions=q_positions, kv_positions=kv_positions), self.scale)


@dataclasses.dataclass(frozen=True)
class Line:
    """How a row lies along an axis: over ``shards`` groups of ``width`` neighbouring devices.

    With one device in each the groups are the devices. Wider ones hold their tokens in ascending order within every
    chunk of ``layout``, which is the one over groups.

    Args:
        axis: of the mesh.
        shards: groups.
        width: devices in each.
        layout: order of the tokens over the devices.
        length: tokens of a row.
        split: whether the runs of tokens that a group holds are taken one by one, so that the positions of each are a
            ``Range``; otherwise all at once, by an array of positions.
    """

    axis: str | None
    shards: int
    width: int
    layout: Layout
    length: int
    split: bool = True

    @property
    def groups(self) -> Layout:
        """The order of the tokens over the groups; within striped groups see ``positions``."""
        return Layout(self.layout.kind if self.shards > 1 else "contiguous", self.shards)

    @property
    def chunks(self) -> int:
        """Pieces in which the tokens of each group are taken."""
        return self.groups.chunks if self.split else 1

    @property
    def piece(self) -> int:
        """Tokens in each of them."""
        return self.length // (self.shards * self.chunks)

    @property
    def shard(self):
        """The group of this device."""
        return 0 if self.shards == 1 else jax.lax.axis_index(self.axis) // self.width

    @property
    def ascending(self) -> np.ndarray:
        """The order that sorts the tokens of a group, put one device after the other: the same in every group."""
        return np.argsort(self._first_group)

    @property
    def _first_group(self) -> np.ndarray:
        order = self.layout.order(self.length)
        return order if self.shards == 1 else order[: self.length // self.shards]

    def positions(self, row: Range, shard, n) -> Positions:
        """The positions of piece ``n`` of group ``shard``, of a row that has those of ``row``."""
        if self.groups.kind == "striped":
            return row.start + shard * self.width + jnp.asarray(np.sort(self._first_group))
        if self.chunks < self.groups.chunks:
            return row.start + jnp.concatenate([as_array(p) for p in self.groups.local(self.length, shard)])
        found = self.groups.piece(self.length, shard, n)
        return Range(row.start + found.start, found.length)

    def cut(self, n) -> Callable:
        """The function that takes piece ``n`` out of an array."""

        def cut(array, axis):
            return array if self.chunks == 1 else jax.lax.dynamic_slice_in_dim(array, n * self.piece, self.piece, axis)

        return cut

    def placed(self, pieces: Call, i, j, source) -> Call:
        """Those pieces, cut out already, at their positions."""
        run = None if self.split else self.length // (self.shards * self.groups.chunks)
        x = dataclasses.replace(pieces.x, run=run)
        where = self._placed(x.q_positions, self.shard, i), self._placed(x.kv_positions, source, j)
        return Call(x, pieces.scale).at(*where)

    def queries(self, call: Call, i) -> Call:
        """Query piece ``i`` of this group, with the keys as they are."""
        found = map_tokens(call, self.cut(i), keep)
        return found.at(self._placed(found.x.q_positions, self.shard, i), found.x.kv_positions)

    def stored(self, n, whole, piece, axis: int):
        """``whole`` with ``piece`` in the place of piece ``n``."""
        if self.chunks == 1:
            return piece
        return jax.lax.dynamic_update_slice_in_dim(whole, piece, n * self.piece, axis % whole.ndim)

    def _placed(self, positions: Positions, shard, n) -> Positions:
        return self.positions(positions, shard, n) if isinstance(positions, Range) else positions


def _half(array, axis: int, n: int):
    """A half along an axis, of heads side by side where they are kept so; the transpose puts the halves together."""
    if array.shape[axis] == 1:
        return array
    size = array.shape[axis] // 2
    if axis != 1 or array.shape[-1] % LANES:
        return jax.lax.split(array, (size, size), axis)[n]
    flat, heads = beside(array), (size, *array.shape[2:-2])
    columns = flat.shape[-1] // 2
    return apart(jax.lax.split(flat, (columns, columns), flat.ndim - 1)[n], heads)


def taken(array, order: np.ndarray, axis: int):
    """``jnp.take`` along an axis, of whole runs of the order at once: tokens would be scattered in the transpose.

    Nothing at all where every token stays.
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
    """The array as it is."""
    return array


def join(parts: list):
    """Results of query pieces, ``[batch, kv heads, group, queries, ...]``, one after the other."""
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=3), *parts)
