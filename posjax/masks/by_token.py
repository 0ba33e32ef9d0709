"""Masks with a number for every token: segments, and global tokens."""

import dataclasses
from functools import reduce
from operator import or_

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from posjax._checks import check, check_array, check_flags, check_rank
from posjax.masks.base import And, Mask
from posjax.masks.bounds import BlockBounds, block_range


class OfTokens(Mask):
    """A mask with one number for each query, ``[batch, q]``, and for each key, ``[batch, k]``.

    If the array of the keys is None, they have the numbers of the queries. A pair is allowed if ``matches`` of the two
    numbers is true; positions are not used.
    """

    _dtype: type
    """Dtype of its numbers: ``jnp.integer`` or ``jnp.bool_``."""

    reads_positions = False
    shift_invariant = True

    @property
    def axes(self):
        """Batch and tokens of the two fields."""
        q, k = self._fields
        return {q.name: ("batch", "queries"), k.name: ("batch", "keys")}

    @property
    def _fields(self) -> tuple[dataclasses.Field, dataclasses.Field]:
        """The fields with the numbers of the queries and of the keys."""
        return dataclasses.fields(self)[:2]

    @staticmethod
    def matches(q, k):
        """Whether a query may see a key, for numbers that broadcast against each other."""
        raise NotImplementedError

    @property
    def arrays(self) -> tuple[Array, Array]:
        """The numbers of the queries and of the keys."""
        q, k = (getattr(self, field.name) for field in self._fields)
        return q, k

    def __post_init__(self):
        check_flags(self)
        q, k = self._fields
        if getattr(self, k.name) is None:
            object.__setattr__(self, k.name, getattr(self, q.name))

    def allowed(self, q_positions, kv_positions):
        """The tile ``[batch, 1, q, k]``."""
        return self.matches(*self._columns())

    def _columns(self):
        """Both arrays, as ``[batch, 1, q, 1]`` and ``[batch, 1, 1, k]``."""
        q, k = self.arrays
        return q[:, None, :, None], k[:, None, None, :]

    def _block_bounds(self, q: BlockBounds, k: BlockBounds):
        """Two masks of the same class: with the smallest value of every block, and with the largest."""
        blocks = (block_range(x, size) for x, size in zip(self.arrays, (q.size, k.size), strict=True))
        return (type(self)(*ends) for ends in zip(*blocks, strict=True))

    def check(self, batch, queries, keys):
        """Raises ValueError unless both arrays have one number of the right kind for each token."""
        kind = type(self).__name__
        wanted = "integers" if self._dtype is jnp.integer else "boolean"
        for field, array in zip(self._fields, self.arrays, strict=True):
            check_array(f"{kind} {field.name}", array)
            fits = jnp.issubdtype(array.dtype, self._dtype)
            check(fits, f"{kind} {field.name} must be {wanted}, found {array.dtype}")
        super().check(batch, queries, keys)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments(OfTokens):
    """Query and key belong to one segment, and neither is padding: ``q_ids[i] == kv_ids[j] >= 0``.

    Negative ids are padding and match nothing, not even each other.

    Args:
        q_ids: int32 ``[batch, q]``, the segment of every query.
        kv_ids: int32 ``[batch, k]``, the segment of every key; those of the queries when left out.
        finite: whether padding is known to hold finite numbers. Otherwise attention first puts zeros there, which takes
            a pass over queries, keys and values.
    """

    q_ids: Int[Array, "batch q"]
    kv_ids: Int[Array, "batch k"] | None = None
    finite: bool = dataclasses.field(default=False, metadata={"static": True})

    _dtype = jnp.integer

    @staticmethod
    def matches(q, k):
        """``q == k >= 0``."""
        return (q == k) & (q >= 0)

    def tiles(self, q: BlockBounds, k: BlockBounds):
        """From the range of ids in each block: ``some`` if they overlap, ``all`` if both are the same single id."""
        (q_low, k_low), (q_high, k_high) = (ends._columns() for ends in self._block_bounds(q, k))
        some = (q_high >= 0) & (k_high >= 0) & (q_low <= k_high) & (k_low <= q_high)
        return some, (q_low >= 0) & (q_low == q_high) & (k_low == k_high) & (q_low == k_low)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Globals(OfTokens):
    """``q_flags[i] or kv_flags[j]``: tokens with a flag see all and are seen by all (Longformer, 2004.05150).

    ``(Window(w // 2 + 1) | Globals(flags)) & padding(valid)`` is Longformer's attention.

    Args:
        q_flags: bool ``[batch, q]``, whether a query is global.
        kv_flags: bool ``[batch, k]``, whether a key is global; those of the queries when left out.
    """

    q_flags: Bool[Array, "batch q"]
    kv_flags: Bool[Array, "batch k"] | None = None

    _dtype = jnp.bool_

    @staticmethod
    def matches(q, k):
        """``q or k``."""
        return q | k if q.dtype == bool else (q | k) != 0

    def tiles(self, q: BlockBounds, k: BlockBounds):
        """From whether some and whether all tokens of each block have a flag."""
        every, some = (ends.allowed(None, None) for ends in self._block_bounds(q, k))
        return some, every


def padding_of(mask: Mask | None) -> tuple[Bool[Array, "batch q"], Bool[Array, "batch k"]] | None:
    """Which queries and which keys are padding that may hold NaN or infinity: tokens with a negative segment id.

    None for a mask without segments, or if its segments are ``finite``. Segments joined by ``|`` do not hide a token.
    """
    if isinstance(mask, Segments):
        return None if mask.finite else (mask.q_ids < 0, mask.kv_ids < 0)
    if not isinstance(mask, And):
        return None
    paddings = [pair for pair in map(padding_of, mask.parts) if pair is not None]
    return (reduce(or_, (q for q, _ in paddings)), reduce(or_, (k for _, k in paddings))) if paddings else None


def padding(valid: Bool[Array, "batch length"]) -> Segments:
    """The mask that hides padding: tokens where ``valid`` is false see nothing and are seen by nothing."""
    check_rank("valid", valid, 2, "[batch, length]")
    return Segments(jnp.where(valid, 0, -1).astype(jnp.int32))
