"""Whole sequences on every device: gathered keys, or tokens exchanged for heads (Ulysses, arXiv 2309.14509)."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from posjax._axes import Names, each, map_tokens
from posjax.attention.operands import flat_heads
from posjax.attention.rows import Rows
from posjax.attention.sharded.choice import copies
from posjax.attention.sharded.line import Call, Line, keep, taken


def gathered(line: Line, call: Call) -> Call:
    """The call with the keys of the whole sequence in their original order; its transpose scatters their gradients."""

    def gather(array, axis):
        whole = jax.lax.all_gather(array, line.axis, axis=array.ndim + axis, tiled=True)
        return line.layout.restore(whole, axis)

    return map_tokens(call, keep, gather)


def ulysses(line: Line, call: Call, run: Callable) -> Rows:
    """The results of ``run`` on all tokens of a group of devices, in ascending order, for an equal share of the heads.

    The results are sent back to the devices of their tokens. Key heads are repeated if the devices of a group do not
    divide their number, as few times as possible.
    """
    exchange = _Exchange(line)
    x = call.x
    kv_heads = x.k.shape[1]
    found = run(exchange.to_heads(call))
    return jax.tree.map(lambda array: _regrouped(exchange.to_tokens(flat_heads(array)), kv_heads), found)


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """The exchange between the devices of a group of ``line``."""

    line: Line

    @property
    def groups(self) -> list[list[int]]:
        """The devices of every group."""
        width = self.line.width
        return [list(range(g * width, (g + 1) * width)) for g in range(self.line.shards)]

    def split(self, array):
        """``[batch, heads, tokens, ...]``: all tokens of the group, ascending, for this device's share of the heads."""
        if self.line.width > 1:
            array = jax.lax.all_to_all(array, self.line.axis, 1, 2, axis_index_groups=self.groups, tiled=True)
        return taken(array, self.line.ascending, 2)

    def to_tokens(self, array):
        """The inverse of ``split``."""
        array = taken(array, np.argsort(self.line.ascending), 2)
        if self.line.width == 1:
            return array
        return jax.lax.all_to_all(array, self.line.axis, 2, 1, axis_index_groups=self.groups, tiled=True)

    def whole(self, array, axis: int):
        """An array over tokens, with all tokens of the group, ascending."""
        if self.line.width > 1:
            array = jax.lax.all_gather(
                array, self.line.axis, axis=array.ndim + axis, axis_index_groups=self.groups, tiled=True
            )
        return taken(array, self.line.ascending, axis)

    def to_heads(self, call: Call) -> Call:
        """The call of this device's share of the heads and of all tokens of its group."""
        x, width = call.x, self.line.width
        repeats = copies(x.k.shape[1], width)
        kv_heads, heads = x.k.shape[1] * repeats // width, x.q.shape[1] * x.q.shape[2] // width

        def moved(array, names: Names):
            if "group" in names:
                return _regrouped(self.split(flat_heads(array)), kv_heads)
            if "kv_heads" in names:
                return self.split(jnp.repeat(array, repeats, axis=1))
            return map_tokens(array, *[self.whole] * 2, names)

        def with_share(slot):
            return slot if width == 1 else slot.heads(self._position * heads, heads)

        found = each(call, moved)
        return dataclasses.replace(found, x=found.x.with_slots(with_share))

    @property
    def _position(self):
        """The position of this device in its group."""
        return jax.lax.axis_index(self.line.axis) % self.line.width


def _regrouped(array, kv_heads: int):
    return array.reshape(array.shape[0], kv_heads, -1, *array.shape[2:])
