"""The strategies by which devices share a sequence, for the queries of one device, inside ``shard_map``.

A ring has a file of its own. The others bring what a call needs to a device first: the keys of the whole sequence
(all-gather), tokens in exchange for heads (Ulysses, arXiv 2309.14509), or the edge of the neighbouring chunk
(windows within a chunk).
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from posjax._axes import Names, each, map_tokens
from posjax.attention.call import RUN, Call
from posjax.attention.logits import flat_heads
from posjax.attention.placement import Placement, Sizes, copies
from posjax.attention.platform import attend, needs_ranges
from posjax.attention.rows import Rows
from posjax.attention.sharded.line import SequenceSplit, join, keep, taken
from posjax.attention.sharded.ring import ring
from posjax.bias import Contextual
from posjax.masks import Mask, hides_ahead
from posjax.positions import Range

# The position of a key that does not exist: further away than any window.
_NOWHERE = -(2**30)


def spread(placement: Placement, call: Call, implementation: str | None, with_lse: bool) -> Rows:
    """The results of a call for the queries of this device, by the strategy of the placement."""
    shards = placement.shards
    length = placement.whole(call.q.shape[3])
    run = partial(attend, implementation, with_lse=with_lse)
    if shards == 1:
        # One device may still hold a sequence in the layout for several devices.
        line = SequenceSplit(None, 1, 1, placement.layout, length)
        return ulysses(line, call, run) if placement.layout.reorders else run(call)
    layout = placement.layout_over(shards)
    layout.check(length)
    sizes = _sizes(call, placement, length)
    strategy = placement.chosen(sizes)
    line = SequenceSplit(placement.context, shards, 1, layout, length)
    if strategy == "all-gather":
        return _by_pieces(line, gathered(line, call), run)
    if strategy == "neighbour":
        return neighbour(line, call, sizes.window, run)
    if strategy == "ring":
        return ring(_joined(line, call), implementation, call)
    width = shards if strategy == "ulysses" else placement.ulysses
    line = _joined(SequenceSplit(placement.context, shards // width, width, layout, length), call)
    return ulysses(line, call, run if line.shards == 1 else partial(ring, line, implementation))


def _joined(line: SequenceSplit, call: Call) -> SequenceSplit:
    """The line, with both runs of a zigzag in one call for every step of a ring, if backends support that.

    A run must be a multiple of the smallest tile.
    """
    joins = line.groups.kind == "zigzag" and line.piece % RUN == 0 and not needs_ranges(call)
    return dataclasses.replace(line, split=not joins)


def _sizes(call: Call, placement: Placement, length: int) -> Sizes:
    """The sizes of a call, for the choice of a strategy."""
    bounds = None if call.mask is None else call.mask.kept_keys
    return Sizes(
        batch=call.q.shape[0],
        length=length,
        heads=call.q.shape[1] * call.q.shape[2],
        kv_heads=call.q.shape[1],
        shards=placement.shards,
        features=sum(k.shape[-1] for _, k in call.pairs) + call.v.shape[-1],
        query_features=sum(q.shape[-1] for q, _ in call.pairs) + call.v.shape[-1],
        itemsize=call.q.dtype.itemsize,
        window=bounds[1] if bounds is not None and bounds[0] == 0 else None,
        counts=isinstance(call.bias, Contextual),
        layout=placement.layout_over(placement.shards),
        ulysses=placement.ulysses,
    )


def _by_pieces(line: SequenceSplit, call: Call, run: Callable) -> Rows:
    """The results of ``run`` for one query piece after the other, over all keys: the positions of each are a range."""
    if not isinstance(call.q_positions, Range):
        return run(call)
    return join([run(line.queries(call, n)) for n in range(line.chunks)])


def gathered(line: SequenceSplit, call: Call) -> Call:
    """The call with the keys of the whole sequence in their original order; its transpose scatters their gradients."""

    def gather(array, axis):
        whole = jax.lax.all_gather(array, line.axis, axis=array.ndim + axis, tiled=True)
        return line.layout.restore(whole, axis)

    return map_tokens(call, keep, gather)


def ulysses(line: SequenceSplit, call: Call, run: Callable) -> Rows:
    """The results of ``run`` on all tokens of a group of devices, in ascending order, for an equal share of the heads.

    The results are sent back to the devices of their tokens. Key heads are repeated if the devices of a group do not
    divide their number, as few times as possible.
    """
    exchange = _Exchange(line)
    kv_heads = call.k.shape[1]
    rows = run(exchange.to_heads(call))
    return jax.tree.map(lambda array: _regrouped(exchange.to_tokens(flat_heads(array)), kv_heads), rows)


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """The exchange between the devices of a group of ``line``."""

    line: SequenceSplit

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
        width = self.line.width
        repeats = copies(call.k.shape[1], width)
        kv_heads = call.k.shape[1] * repeats // width
        heads = call.q.shape[1] * call.q.shape[2] // width

        def moved(array, names: Names):
            if "group" in names:
                return _regrouped(self.split(flat_heads(array)), kv_heads)
            if "kv_heads" in names:
                return self.split(jnp.repeat(array, repeats, axis=1))
            return map_tokens(array, *[self.whole] * 2, names)

        def with_share(slot):
            return slot if width == 1 else slot.heads(self._position * heads, heads)

        return each(call, moved).with_slots(with_share)

    @property
    def _position(self):
        """The position of this device in its group."""
        return jax.lax.axis_index(self.line.axis) % self.line.width


def _regrouped(array, kv_heads: int):
    return array.reshape(array.shape[0], kv_heads, -1, *array.shape[2:])


def neighbour(line: SequenceSplit, call: Call, window: int, run: Callable) -> Rows:
    """The results of ``run`` on every query chunk, over the chunk's own keys and the keys next to them.

    The keys next to them are the ``window - 1`` before and, unless the mask hides keys ahead, as many after.

    Among the keys that a query may see, positions must rise by at least one from a token to the next, as they do in
    packed documents; then a window of positions spans at most as many tokens.
    """
    reach = window - 1
    edges = _Edges(line, reach, 0 if hides_ahead(call.mask) else reach)
    return join([run(edges.piece(call, n)) for n in range(line.chunks)])


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["first", "last"])
@dataclasses.dataclass(frozen=True)
class _Inside(Mask):
    """``first <= j <= last``: hides keys before and after the sequence."""

    first: int
    last: int

    def pairs(self, i, j):
        return (j >= self.first) & (j <= self.last) & (i == i)

    def bounds(self, i_low, i_high, j_low, j_high):
        return (j_high >= self.first) & (j_low <= self.last), (j_low >= self.first) & (j_high <= self.last)


@dataclasses.dataclass(frozen=True)
class _Edges:
    """Extends chunks by the last ``before`` tokens of the previous chunk and the first ``after`` tokens of the next."""

    line: SequenceSplit
    before: int
    after: int

    def piece(self, call: Call, n: int) -> Call:
        """Query chunk ``n`` of this device and the keys that it may see."""
        row = call.kv_positions
        part = map_tokens(self.line.queries(call, n), keep, partial(self._widened, n=n))
        if not isinstance(row, Range):
            return part.at(part.q_positions, self._hidden(part.kv_positions, n))
        start = self.line.positions(row, self.line.shard, n).start - self.before
        keys = Range(start, self.before + self.line.piece + self.after)
        inside = part.mask & _Inside(row.start, row.start + row.length - 1)
        return dataclasses.replace(part, mask=inside).at(part.q_positions, keys)

    def _widened(self, array, axis: int, n: int):
        pieces = jnp.split(array, self.line.chunks, axis)
        size = self.line.piece
        tails = [jax.lax.slice_in_dim(a, size - self.before, size, axis=axis) for a in pieces]
        heads = [jax.lax.slice_in_dim(a, 0, self.after, axis=axis) for a in pieces]
        parts = [self._from(tails, n, 1)] * (self.before > 0) + [pieces[n]]
        return jnp.concatenate(parts + [self._from(heads, n, -1)] * (self.after > 0), axis)

    def _from(self, ends: list, n: int, step: int):
        """The edge of the chunk before chunk ``n`` (``step`` 1) or after it (``step`` -1).

        In a zigzag the second chunks are in reverse order of the shards, and the two chunks of the last shard are
        neighbours.
        """
        received = self._shifted(ends[n], step if n == 0 else -step)
        if self.line.chunks == 1 or (n == 1) != (step == 1):
            return received
        return jnp.where(self.line.shard == self.line.shards - 1, ends[1 - n], received)

    def _shifted(self, array, step: int):
        """The array of the previous shard (``step`` 1) or of the next one (``step`` -1)."""
        shards = self.line.shards
        return jax.lax.ppermute(array, self.line.axis, [(s, (s + step) % shards) for s in range(shards)])

    def _hidden(self, positions, n: int):
        """Positions of the keys of chunk ``n``, ``_NOWHERE`` beyond the ends of the sequence."""
        index = jnp.arange(positions.shape[-1])
        first = (self.line.shard == 0) & (n == 0)
        last = (self.line.shard == (self.line.shards - 1 if self.line.chunks == 1 else 0)) & (n == self.line.chunks - 1)
        beyond = (first & (index < self.before)) | (last & (index >= self.before + self.line.piece))
        return jnp.where(beyond, _NOWHERE, positions)
