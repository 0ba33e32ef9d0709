"""The inputs of the kernels: the static description of a call and its arrays.

Arrays of features are ``[batch, tokens, heads, size]``, as projections write and read them, so that nothing around a
kernel is transposed.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posjax.attention.formulas import Formula
from posjax.attention.tiles import Blocks, Kind, TilePlan, visits

BLOCK = 128
"""Tokens are padded to multiples of it. Numbers of a bias are relative to the first query of each block."""


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """The tiles of the kernels, each beside 128 queries or keys of its own. Shared memory and registers limit them.

    Args:
        forward: keys of a tile.
        queries: keys of a tile of the gradient of the queries.
        keys: queries of a tile of the gradients of keys and values.
        together: whether one kernel sums the gradients of keys and of values, or each has its own.
        stages: how many tiles the rings of the sums by distance hold.
    """

    forward: int = BLOCK
    queries: int = 64
    keys: int = 64
    together: bool = True
    stages: int = 2

    @staticmethod
    def of(size: int) -> "TileSizes":
        """The tiles for heads of a size."""
        if size <= 128:
            return TileSizes()
        if size <= 192:
            return TileSizes(forward=64, together=False, stages=1)
        return TileSizes(forward=64, queries=32, keys=32, together=False, stages=1)


@dataclasses.dataclass(frozen=True)
class Options:
    """How the kernels run.

    Args:
        interpret: ``plgpu.InterpretGPUParams`` to run without a GPU, or None.
        sizes: the tiles, or None for those of ``TileSizes.of``.
    """

    interpret: Any = None
    sizes: TileSizes | None = None


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """The static part of a call.

    Args:
        group: query heads that share a key head.
        formula: the mask without its arrays.
        ranged: whether the positions of the queries and of the keys are ranges.
        bias: a ``posjax.attention.gpu.biases.KernelBias``.
        softcap: the soft cap in base 2, or None.
        factor: the positive factor of the scores, ``log2 e`` included.
        sizes: the tiles.
        interpret: how to run without a GPU (``plgpu.InterpretGPUParams``), or None.
    """

    group: int
    formula: Formula
    ranged: tuple[bool, bool]
    bias: Any
    softcap: float | None
    factor: float
    sizes: TileSizes
    interpret: Any = None


class Inputs(NamedTuple):
    """The arrays of a call, tokens padded to whole blocks.

    Args:
        q: ``[batch, queries, heads, size]``.
        k: ``[batch, keys, kv heads, size]``.
        v: ``[batch, keys, kv heads, value size]``.
        starts: int32 ``[2]``, the first position of the queries and of the keys if they are ranges.
        numbers: int32 ``[batch or 1, n, tokens]`` of the queries and of the keys: positions, unless they are a range,
            and the arrays of masks; None if there are none.
        bias: numbers of the bias times ``log2 e``: see ``KernelBias.numbers``.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    starts: jax.Array
    numbers: tuple[jax.Array | None, jax.Array | None]
    bias: dict[str, jax.Array]


class Lists(NamedTuple):
    """The tiles that a kernel visits, in main memory.

    Args:
        order: int32 ``[batch or 1, rows, columns]``, the columns to visit in each row of tiles, sorted by kind.
        ends: int32 ``[batch or 1, rows, kinds]``, where the list of each kind ends.
    """

    order: jax.Array
    ends: jax.Array


class Tiling(NamedTuple):
    """The blocks of a kernel, the kinds of tiles that occur, and their lists."""

    blocks: Blocks
    kinds: tuple[Kind, ...]
    lists: Lists


def tiling(blocks: Blocks, plan: TilePlan) -> Tiling:
    """The tiling of a kernel whose rows of tiles are the rows of the plan's grid."""
    each = visits(plan.grid, len(plan.kinds))
    return Tiling(blocks, plan.kinds, Lists(*(jnp.asarray(array, jnp.int32) for array in each)))


def own(array, index, axis: int = 0):
    """The index of a batch row, or of a head, in an array where this axis may be 1."""
    return index if array.shape[axis] > 1 else 0


class Walk(NamedTuple):
    """The tiles of one row, within a kernel.

    Args:
        kinds: of all tiles.
        order: the columns to visit.
        ends: where the list of each kind ends.
        tokens: of a column.
        begin: where the walk begins; ``ends`` are relative to it.
    """

    kinds: tuple[Kind, ...]
    order: Any
    ends: tuple
    tokens: int
    begin: Any = 0

    @staticmethod
    def of(kinds: tuple[Kind, ...], lists: Lists, batch, row, tokens: int) -> "Walk":
        """The walk over a row of tiles whose columns have ``tokens`` tokens."""
        batch = own(lists.ends, batch)
        ends = tuple(lists.ends[batch, row, n] for n in range(len(kinds)))
        return Walk(kinds, lists.order.at[batch, row], ends, tokens)

    def share(self, n, number: int) -> "Walk":
        """The ``n``-th of a number of equal shares of the tiles."""
        if number == 1:
            return self
        begin, stop = (jax.lax.div(self.count * m, jnp.int32(number)) for m in (n, n + 1))
        return self._replace(ends=tuple(jnp.clip(end, begin, stop) - begin for end in self.ends), begin=begin)

    @property
    def count(self):
        """The number of tiles."""
        return self.ends[-1]

    def place(self, n):
        """The first token of the column of the ``n``-th tile."""
        return self.order[self.begin + n] * self.tokens

    def run(self, step: Callable, carry, times: int = 1):
        """``carry = step(kind, n, carry)`` for every tile in order, ``times`` steps for each."""
        first = jnp.int32(0)
        for kind, end in zip(self.kinds, self.ends, strict=True):
            stop = end * times
            carry = jax.lax.fori_loop(first, stop, partial(step, kind), carry)
            first = stop
        return carry


def rows_of_numbers(arrays: list) -> jax.Array | None:
    """Arrays ``[tokens]`` or ``[batch, tokens]`` as int32 ``[batch or 1, n, tokens]``."""
    if not arrays:
        return None
    flat = [jnp.asarray(array, jnp.int32).reshape(-1, np.shape(array)[-1]) for array in arrays]
    batch = max(array.shape[0] for array in flat)
    return jnp.stack([jnp.broadcast_to(array, (batch, array.shape[1])) for array in flat], axis=1)
