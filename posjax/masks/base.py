"""What a mask is, and how two of them are joined."""

import dataclasses
import operator
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from posjax._checks import check
from posjax._slots import Blockwise
from posjax.masks.extents import Extent


class Mask(Blockwise):
    """Base of all masks: composition, the tile of a mask, and what its extent tells."""

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, _checked(other))

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, _checked(other))

    def allowed(self, q_positions: Int[Array, "*b q"], kv_positions: Int[Array, "*b k"]) -> Bool[Array, "*b q k"]:
        """The tile: true where the query may see the key."""
        return self.pairs(q_positions[..., :, None], kv_positions[..., None, :])

    def tiles(self, q: Extent, k: Extent) -> tuple[Bool[Array, "*b nq nk"], Bool[Array, "*b nq nk"]]:
        """For every pair of blocks: whether some pair of tokens may be allowed, and whether all surely are.

        Both answers are safe: ``some`` is never false for a tile with an allowed pair, ``all`` never true for a tile
        with a forbidden one.
        """
        rows = (q.low[..., :, None], q.high[..., :, None])
        columns = (k.low[..., None, :], k.high[..., None, :])
        return self.bounds(*rows, *columns)

    def pairs(self, i, j):
        """Allowed pairs for query positions ``i`` and key positions ``j`` that broadcast against each other."""
        raise TypeError(f"{type(self).__name__} is not a function of positions")

    def visible(self, count: Int[Array, "*b q"], positions: Int[Array, "*b q"], causal: bool) -> Int[Array, "*b q"]:
        """How many of ``count`` contiguous keys the mask leaves to each query, for scales that count them.

        The keys are those up to the query's position if ``causal``. Where masks are joined by ``|`` keys that both
        allow are counted twice, though never beyond ``count``: exact for ``Window(w) | Sinks(n)`` if ``causal``. Where
        queries see both sides, those near an end are counted as if the keys went on.
        """
        return count

    @property
    def retained(self) -> tuple[int, int] | None:
        """``(first, recent)``: a causal query sees no more than the ``first`` and the ``recent`` last keys. Or None."""
        return None

    def bounds(self, i_low, i_high, j_low, j_high):
        """``(some, all)`` for positions anywhere in ``[i_low, i_high]`` and ``[j_low, j_high]``."""
        raise TypeError(f"{type(self).__name__} is not a function of positions")


def _checked(mask: Mask) -> Mask:
    check(isinstance(mask, Mask), f"a mask composes with masks only, found {type(mask).__name__}")
    return mask


class Pair(Mask):
    """Two masks combined by ``join``; what And and Or share."""

    left: Mask
    right: Mask

    def allowed(self, q_positions, kv_positions):
        """The tiles of both masks, joined."""
        return self.join(*(part.allowed(q_positions, kv_positions) for part in (self.left, self.right)))

    def tiles(self, q, k):
        """What both masks say of every pair of blocks, joined: safe for ``&`` and for ``|``."""
        (some, every), (some_right, every_right) = self.left.tiles(q, k), self.right.tiles(q, k)
        return self.join(some, some_right), self.join(every, every_right)

    def _map(self, method: str, *arguments):
        left, right = (getattr(part, method)(*arguments) for part in (self.left, self.right))
        return type(self)(left, right)

    def queries(self, start, size):
        """Both masks for a block of queries."""
        return self._map("queries", start, size)

    def keys(self, start, size):
        """Both masks for a block of keys."""
        return self._map("keys", start, size)

    def row(self, index):
        """Both masks for one row of the batch."""
        return self._map("row", index)

    def pad(self, queries, keys):
        """Both masks with longer arrays."""
        return self._map("pad", queries, keys)

    def map_tokens(self, queries, keys):
        """Both masks with their arrays mapped."""
        return self._map("map_tokens", queries, keys)

    def heads(self, start, size):
        """Both masks for the heads at hand."""
        return self._map("heads", start, size)

    def check(self, batch, queries, keys):
        """Raises ValueError unless both masks fit the call."""
        self.left.check(batch, queries, keys)
        self.right.check(batch, queries, keys)

    @property
    def batched(self):
        """Whether one of them carries arrays that differ between rows."""
        return self.left.batched or self.right.batched

    @property
    def shift_invariant(self):
        """Whether shifting all positions changes neither mask."""
        return self.left.shift_invariant and self.right.shift_invariant


_pair = partial(jax.tree_util.register_dataclass, data_fields=["left", "right"], meta_fields=[])


@_pair
@dataclasses.dataclass(frozen=True)
class And(Pair):
    """Allowed where both masks allow."""

    left: Mask
    right: Mask

    join = staticmethod(operator.and_)

    @property
    def retained(self):
        """The smaller of what the two leave; None if neither says."""
        found = [part.retained for part in (self.left, self.right) if part.retained is not None]
        return min(found, key=sum, default=None)

    def visible(self, count, positions, causal):
        """The smaller of the two counts."""
        return jnp.minimum(*(part.visible(count, positions, causal) for part in (self.left, self.right)))


@_pair
@dataclasses.dataclass(frozen=True)
class Or(Pair):
    """Allowed where at least one mask allows."""

    left: Mask
    right: Mask

    join = staticmethod(operator.or_)

    @property
    def retained(self):
        """The larger of each number of the two; None if one of them leaves all."""
        left, right = self.left.retained, self.right.retained
        return None if left is None or right is None else (max(left[0], right[0]), max(left[1], right[1]))

    def visible(self, count, positions, causal):
        """The sum of the two counts, though never more than there are."""
        return jnp.minimum(count, sum(part.visible(count, positions, causal) for part in (self.left, self.right)))
