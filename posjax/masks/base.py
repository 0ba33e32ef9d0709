"""The base class of masks, masks made from arrays, whole masks as arrays, and combinations of masks."""

import dataclasses
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from posjax._checks import check, describe
from posjax._numbers import align_ranks
from posjax._slots import OfPairs, OfSomeHeads, OverPairs, with_head_axis
from posjax.masks.bounds import BlockBounds
from posjax.positions import Positions, as_array


class Mask(OverPairs):
    """Base of all masks: composition, tiles, and bounds of tiles.

    A subclass must define ``pairs``, and ``axes`` if its arrays have axes of batch rows or tokens. ``bounds`` lets
    attention skip tiles; ``kept_keys`` lets a cache keep fewer keys.
    """

    shift_invariant = False
    """Whether shifting all positions by one constant changes nothing."""

    __array_ufunc__ = None  # so that NumPy calls __rand__ for `array & mask`

    def __and__(self, other: "Mask | Array") -> "Mask":
        return And(self, as_mask(other))

    def __rand__(self, other: Array) -> "Mask":
        return And(as_mask(other), self)

    def __or__(self, other: "Mask | Array") -> "Mask":
        return Or(self, as_mask(other))

    def __ror__(self, other: Array) -> "Mask":
        return Or(as_mask(other), self)

    def __invert__(self) -> "Mask":
        return Not(self)

    def __bool__(self) -> bool:
        raise ValueError(
            "mask: a mask is neither true nor false; write & for `and`, | for `or`, ~ for `not`, and compare with None"
        )

    def allowed(self, q_positions: Int[Array, "*b q"], kv_positions: Int[Array, "*b k"]) -> Bool[Array, "*b q k"]:
        """The tile: true where the query may see the key."""
        return self.pairs(*align_ranks(q_positions[..., :, None], kv_positions[..., None, :]))

    def tiles(self, q: BlockBounds, k: BlockBounds) -> tuple[Bool[Array, "*b nq nk"], Bool[Array, "*b nq nk"]]:
        """``(some, all)`` for every tile: whether a pair may be allowed, and whether all pairs are certainly allowed.

        ``some`` is never false for a tile with an allowed pair, ``all`` never true for a tile with a forbidden pair.
        """
        rows = (q.low[..., :, None], q.high[..., :, None])
        columns = (k.low[..., None, :], k.high[..., None, :])
        return self.bounds(*align_ranks(*rows, *columns))

    def pairs(self, i, j):
        """Allowed pairs for query positions ``i`` and key positions ``j`` that broadcast against each other."""
        raise TypeError(f"{type(self).__name__} is not a function of positions")

    def visible(self, count: Int[Array, "*b q"], positions: Int[Array, "*b q"], causal: bool) -> Int[Array, "*b q"]:
        """How many of ``count`` contiguous keys each query may see, for scales that count them.

        The keys are those up to the query's position if ``causal``. ``|`` adds the counts of its two masks, up to
        ``count``, so a key that both masks allow counts twice; for ``Window(w) | FirstTokens(n)`` the result is exact
        if ``causal``. If not ``causal``, queries near an end of the sequence also count keys beyond that end.
        """
        return count

    @property
    def kept_keys(self) -> tuple[int, int] | None:
        """``(first, recent)``: how many first and most recent keys a causal query can see; None if all."""
        return None

    def bounds(self, i_low, i_high, j_low, j_high):
        """``(some, all)`` for positions anywhere in ``[i_low, i_high]`` and ``[j_low, j_high]``.

        By default every tile may hold allowed and forbidden pairs, so attention visits and masks it.
        """
        shape = np.broadcast_shapes(i_low.shape, j_low.shape)
        return np.ones(shape, bool), np.zeros(shape, bool)

    def _tile(self, q_positions, kv_positions):
        return self.allowed(q_positions, kv_positions)

    def _of_heads(self, start, size):
        return MaskOfHeads(self, start, size)


def as_mask(mask: "Mask | Array") -> Mask:
    """A boolean array that broadcasts to ``[batch, heads, queries, keys]``, converted to a mask; a mask, unchanged.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(mask, Mask):
        return mask
    is_array = isinstance(mask, jax.Array | np.ndarray)
    write = f": write {mask.__name__}(...)" if isinstance(mask, type) else ""
    check(is_array, f"mask must be a posjax.masks.Mask or a boolean array, found {describe(mask)}{write}")
    wanted = "mask must be boolean, true where a query may see a key"
    is_additive = jnp.issubdtype(mask.dtype, jnp.floating)
    remedy = "pass numbers that are added to logits as bias=" if is_additive else "convert it with mask != 0"
    check(mask.dtype == jnp.bool_, f"{wanted}; found an array of {mask.dtype}: {remedy}")
    return ArrayMask(ArrayMask.with_four_axes(mask))


def materialise(mask: Mask, q_positions: Positions, kv_positions: Positions) -> Bool[Array, "*b q k"]:
    """The whole mask as an array, ``[q, k]`` or ``[batch, heads or 1, q, k]``: quadratic, for tests and plots."""
    return mask.allowed(with_head_axis(as_array(q_positions)), with_head_axis(as_array(kv_positions)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskOfHeads(OfSomeHeads, Mask):
    """Some heads of a mask that has a pattern for each head."""

    def allowed(self, q_positions, kv_positions):
        """Some heads of the tile of all heads."""
        return self.kept(self.whole.allowed(q_positions, kv_positions))

    def tiles(self, q, k):
        """The result of ``whole``, cut to these heads if heads differ."""
        some, every = self.whole.tiles(q, k)
        return self.kept(some), self.kept(every)

    @property
    def kept_keys(self):
        """Same as ``whole``."""
        return self.whole.kept_keys

    @property
    def shift_invariant(self):
        """Same as ``whole``."""
        return self.whole.shift_invariant


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ArrayMask(OfPairs, Mask):
    """The pairs where an array is true, indexed by the order of the tokens in the call, not by positions.

    Args:
        array: broadcasts to ``[batch, heads, queries, keys]``.
    """

    name = "mask"
    shift_invariant = True

    def allowed(self, q_positions, kv_positions):
        """The array itself, for all positions."""
        return self.array

    def tiles(self, q: BlockBounds, k: BlockBounds):
        """Whether some and whether all pairs of each block are allowed."""
        batch, heads, queries, keys = self.array.shape
        rows, columns = min(q.size, queries), min(k.size, keys)
        blocks = self.array.reshape(batch, heads, queries // rows, rows, keys // columns, columns)
        return blocks.any((3, 5)), blocks.all((3, 5))


class Combined(Mask):
    """A combination of masks, which are its fields."""

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The masks that it combines."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def heads(self, start, size):
        """The masks for some of the heads."""
        return type(self)(*(part.heads(start, size) for part in self.parts))

    @property
    def reads_positions(self):
        """Whether one of the masks reads positions."""
        return any(part.reads_positions for part in self.parts)

    @property
    def shift_invariant(self):
        """Whether shifting all positions changes none of them."""
        return all(part.shift_invariant for part in self.parts)


class Pair(Combined):
    """Two masks combined by ``join``: the base of And and Or."""

    left: Mask
    right: Mask

    def allowed(self, q_positions, kv_positions):
        """The tiles of both masks, joined."""
        return self.join(*align_ranks(*(part.allowed(q_positions, kv_positions) for part in self.parts)))

    def tiles(self, q, k):
        """The results of both masks, joined: still correct bounds for ``&`` and for ``|``."""
        (some, every), (some_right, every_right) = self.left.tiles(q, k), self.right.tiles(q, k)
        return self.join(*align_ranks(some, some_right)), self.join(*align_ranks(every, every_right))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class And(Pair):
    """Allowed where both masks allow."""

    left: Mask
    right: Mask

    join = staticmethod(operator.and_)

    @property
    def kept_keys(self):
        """The ``kept_keys`` of one mask, those with the smaller sum; None if both masks have None."""
        key_counts = [part.kept_keys for part in (self.left, self.right) if part.kept_keys is not None]
        return min(key_counts, key=sum, default=None)

    def visible(self, count, positions, causal):
        """The smaller of the two counts."""
        return jnp.minimum(*(part.visible(count, positions, causal) for part in (self.left, self.right)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Or(Pair):
    """Allowed where at least one mask allows."""

    left: Mask
    right: Mask

    join = staticmethod(operator.or_)

    @property
    def kept_keys(self):
        """The larger of both masks' numbers, first and recent; None if one mask has None."""
        left, right = self.left.kept_keys, self.right.kept_keys
        return None if left is None or right is None else (max(left[0], right[0]), max(left[1], right[1]))

    def visible(self, count, positions, causal):
        """The sum of the two counts, at most ``count``."""
        return jnp.minimum(count, sum(part.visible(count, positions, causal) for part in (self.left, self.right)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Not(Combined):
    """Allowed where the mask forbids."""

    mask: Mask

    def allowed(self, q_positions, kv_positions):
        """The tile of the mask, inverted."""
        return ~self.mask.allowed(q_positions, kv_positions)

    def tiles(self, q, k):
        """``some`` if the mask may forbid a pair, ``all`` if it certainly forbids all pairs."""
        some, every = self.mask.tiles(q, k)
        return ~every, ~some

    def visible(self, count, positions, causal):
        """The keys that the mask forbids."""
        return count - self.mask.visible(count, positions, causal)
