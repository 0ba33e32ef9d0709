"""Integer positions: ranges with an offset, and positions derived from padding masks and packed segments.

Every function of posjax that depends on position takes ``positions``: an int32 array ``[length]`` or
``[batch, length]``, or a :class:`Range`. So left padding, packing, decoding and reordering share one code path.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from posjax._checks import check, check_rank, describe, is_known

_INT32 = np.iinfo(np.int32)


@jax.tree_util.register_pytree_node_class
class Range:
    """The contiguous positions ``start, start + 1, ..., start + length - 1``.

    ``length`` is a Python int. ``start`` is a Python int or an int32 scalar array (a decoding offset). A Python int is
    part of the pytree's static structure, so that the tiles of a mask are known when tracing; an array is the only
    leaf. Raises ValueError for a negative length, or a static range that leaves int32.
    """

    start: int | Int[Array, ""]
    length: int

    def __init__(self, start: int | Int[Array, ""], length: int):
        whole = isinstance(length, int | np.integer) and not isinstance(length, bool)
        check(whole, f"length must be a Python int, found {type(length).__name__}")
        check(length >= 0, f"length must not be negative, found {length}")
        if isinstance(start, int | np.integer) and not isinstance(start, bool):
            start = int(start)
            check(
                start >= _INT32.min and start + length - 1 <= _INT32.max,
                f"positions {start} .. {start + length - 1} do not fit in int32",
            )
        else:
            check(
                hasattr(start, "dtype"), f"start must be an integer or an int32 scalar array, found {describe(start)}"
            )
            check(jnp.ndim(start) == 0, f"start must be a scalar, found shape {jnp.shape(start)}")
            check(jnp.issubdtype(start.dtype, jnp.integer), f"start must be an integer, found {start.dtype}")
        self.start = start
        self.length = int(length)

    @property
    def is_static(self) -> bool:
        """Whether ``start`` is known when tracing."""
        return isinstance(self.start, int)

    def __repr__(self) -> str:
        return f"Range(start={describe(self.start)}, length={self.length})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Range) and (self.start, self.length) == (other.start, other.length)

    def __hash__(self) -> int:
        return hash((self.start, self.length))

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[int | None, int]]:
        """A static start is structure; any other start is a leaf."""
        return ((), (self.start, self.length)) if self.is_static else ((self.start,), (None, self.length))

    @classmethod
    def tree_unflatten(cls, structure: tuple[int | None, int], leaves: tuple[Any, ...]) -> "Range":
        """Rebuilds without checks: transformations put placeholders where leaves belong."""
        value = object.__new__(cls)
        start, value.length = structure
        value.start = leaves[0] if leaves else start
        return value


Positions = Range | Int[Array, "length"] | Int[Array, "batch length"]


def as_array(positions: Positions) -> Int[Array, "*batch length"]:
    """The positions as an int32 array ``[length]`` or ``[batch, length]``.

    Raises ValueError for another rank, for positions that are not integers, and for those outside int32. Inside ``jit``
    the values are not known: those of a uint32 or 64-bit array are clipped to int32.
    """
    if isinstance(positions, Range):
        return _to_int32("start", positions.start) + jnp.arange(positions.length, dtype=jnp.int32)
    if not isinstance(positions, jax.Array):
        positions = np.asarray(positions)
    check(positions.ndim in (1, 2), f"positions must be [length] or [batch, length], found shape {positions.shape}")
    check(
        jnp.issubdtype(positions.dtype, jnp.integer),
        f"positions must be integers, found {positions.dtype}: above 256 a bfloat16 does not hold every integer",
    )
    return _to_int32("positions", positions)


def _to_int32(name: str, integers) -> Int[Array, "..."]:
    """Integers as int32. Raises ValueError for known values outside int32; traced ones are clipped to it."""
    if isinstance(integers, int) or np.can_cast(integers.dtype, np.int32):
        return jnp.asarray(integers, jnp.int32)
    if integers.size and is_known(integers):
        low, high = int(integers.min()), int(integers.max())
        check(low >= _INT32.min and high <= _INT32.max, f"{name} {low} .. {high} do not fit in int32")
        return jnp.asarray(integers, jnp.int32)
    low = 0 if jnp.issubdtype(integers.dtype, jnp.unsignedinteger) else _INT32.min
    return jnp.clip(integers, low, _INT32.max).astype(jnp.int32)


def difference(i: Int[Array, "*b"], j: Int[Array, "*b"]) -> Int[Array, "*b"]:
    """``i - j`` of int32 positions, clipped to [-(2^31 - 1), 2^31 - 1]: it never wraps.

    The smallest int32 is left out because its absolute value does not fit.
    """
    wrapped = i - j
    # The difference wrapped if the signs of i and j differ and it does not have the sign of i.
    overflows = ((i ^ j) & (i ^ wrapped)) < 0
    return jnp.maximum(jnp.where(overflows, (i >> 31) ^ _INT32.max, wrapped), -_INT32.max)


def arange(length: int, offset: int | Int[Array, "*batch"] = 0) -> Int[Array, "*batch length"]:
    """``offset + (0, 1, ..., length - 1)`` in int32: ``[length]``, or ``[batch, length]`` for an offset ``[batch]``.

    Raises ValueError for a length that is negative or not a Python int, and an offset that is not an integer.
    """
    whole = isinstance(length, int | np.integer) and length >= 0
    check(whole, f"length must be a whole number of at least 0, found {describe(length)}")
    offset = offset if isinstance(offset, jax.Array) else np.asarray(offset)
    check(offset.ndim <= 1, f"offset must be a scalar or [batch], found shape {offset.shape}")
    check(jnp.issubdtype(offset.dtype, jnp.integer), f"offset must be an integer, found {offset.dtype}")
    return _to_int32("offset", offset)[..., None] + jnp.arange(length, dtype=jnp.int32)


def from_mask(mask: Bool[Array, "batch length"]) -> Int[Array, "batch length"]:
    """Positions that count only the valid tokens: for a valid token, the number of valid tokens before it in its row.

    ``mask`` is True (or 1) at valid tokens; left, right and interior padding all work. Padding gets position 0.
    """
    mask = jnp.asarray(mask)
    check_rank("mask", mask, 2, "[batch, length]")
    check(not jnp.issubdtype(mask.dtype, jnp.floating), f"mask must be boolean or integer, found {mask.dtype}")
    valid = mask.astype(bool)
    return jnp.where(valid, jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, 0)


def from_segments(segment_ids: Int[Array, "batch length"]) -> Int[Array, "batch length"]:
    """Positions that restart at 0 wherever the segment id changes, for rows packed with several documents.

    Negative ids are padding and get position 0.
    """
    segment_ids = jnp.asarray(segment_ids)
    check_rank("segment_ids", segment_ids, 2, "[batch, length]")
    check(jnp.issubdtype(segment_ids.dtype, jnp.integer), f"segment_ids must be integers, found {segment_ids.dtype}")
    index = jnp.broadcast_to(jnp.arange(segment_ids.shape[1], dtype=jnp.int32), segment_ids.shape)
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    run_start = jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
    return jnp.where(segment_ids < 0, 0, index - run_start)
