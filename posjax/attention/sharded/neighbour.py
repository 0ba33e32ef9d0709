"""Windows within a chunk: one exchange brings the edge of the neighbouring chunk."""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from posjax._axes import map_tokens
from posjax.attention.rows import Rows
from posjax.attention.sharded.line import Call, Line, join, keep
from posjax.masks import Mask, hides_ahead
from posjax.positions import Range

# The position of a key that does not exist: further away than any window.
_NOWHERE = -(2**30)


def neighbour(line: Line, call: Call, window: int, run: Callable) -> Rows:
    """The results of ``run`` on every query chunk, over the chunk's own keys and the keys next to them.

    The keys next to them are the ``window - 1`` before and, unless the mask hides keys ahead, as many after.

    Among the keys that a query may see, positions must rise by at least one from a token to the next, as they do in
    packed documents; then a window of positions spans at most as many tokens.
    """
    reach = window - 1
    edges = _Edges(line, reach, 0 if hides_ahead(call.x.mask) else reach)
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

    line: Line
    before: int
    after: int

    def piece(self, call: Call, n: int) -> Call:
        """Query chunk ``n`` of this device and the keys that it may see."""
        row = call.x.kv_positions
        found = map_tokens(self.line.queries(call, n), keep, partial(self._widened, n=n))
        if not isinstance(row, Range):
            return found.at(found.x.q_positions, self._hidden(found.x.kv_positions, n))
        start = self.line.positions(row, self.line.shard, n).start - self.before
        keys = Range(start, self.before + self.line.piece + self.after)
        inside = found.x.mask & _Inside(row.start, row.start + row.length - 1)
        return dataclasses.replace(found, x=dataclasses.replace(found.x, mask=inside)).at(found.x.q_positions, keys)

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
