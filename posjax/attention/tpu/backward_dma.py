"""Arguments and scratch of the backward kernel, and the DMA copies of queries and of their gradients."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posjax.attention.formulas import LN2
from posjax.attention.rows import PerQuery
from posjax.attention.tiles import Kind
from posjax.attention.tpu.dma import Buffers, CurrentTile, KernelArrays, TileRow, at, for_pairs
from posjax.attention.tpu.inputs import Inputs, KernelConfig, features_at
from posjax.attention.tpu.terms import LANES
from posjax.attention.tpu.tile_lists import choice_of, is_first, is_last, tile_of


class BackwardSums(NamedTuple):
    """The sums of a row of tiles, and values that are computed once for the row."""

    k: Any
    dk: Any
    dv: Any
    columns: tuple
    bias: Any
    d_bias: Any


def arrays_of(config: KernelConfig, x: Inputs, per_query: PerQuery, so_far: tuple | None) -> KernelArrays:
    """The arguments of the kernel, from the inputs of the call and sums of gradients of queries, keys and values."""

    def grouped(a):
        # Query heads grouped by key head; a single head for all stays one.
        return a.reshape(a.shape[0], min(a.shape[1], config.kv_heads), -1, *a.shape[2:])

    bias = config.bias.arrays(config, x, 1)
    bias = bias._replace(origins=tuple(map(grouped, bias.origins)), outer=jax.tree.map(grouped, bias.outer))
    arrays = KernelArrays(x.visits[1], x.starts, x.numbers, bias, x.q, None, x.k, x.v, per_query=per_query)
    if so_far is not None:
        return arrays._replace(**dict(zip(("dq", "dk", "dv"), so_far, strict=True)))
    # With several pairs of features the sums of ``dQ`` start at zero here, because entries mark the first and the last
    # row that visits a block of queries, but not separately for each pair.
    return arrays if x.q.shape[2] == 1 else arrays._replace(dq=jnp.zeros_like(x.q, jnp.float32))


def scratch(config: KernelConfig, x: KernelArrays, of_bias: bool) -> list:
    """Scratch memory: buffers of the copies, sums of a row, and semaphores."""
    q, k, _ = config.tilings[1].blocks
    vmem = pltpu.VMEM
    pairs = x.k.shape[2]
    size = config.size
    value_size = config.value_size
    copied, added, summed = config.bias.scratch(config, 1)
    buffers = Buffers(
        q=vmem((2, pairs, q, size), x.q.dtype),
        k=None,
        v=None,
        numbers=tuple(vmem((2, 1, q), row.dtype) for row in x.numbers[0]),
        per_query=PerQuery(vmem((2, q, value_size), x.per_query.d_out.dtype), *[vmem((2, 1, q), jnp.float32)] * 2),
        bias=copied,
    )
    sums = BackwardSums(
        k=None if config.factor == 1 else vmem((pairs, k, size), x.k.dtype),
        dk=vmem((pairs, k, size), jnp.float32),
        dv=vmem((k, value_size), jnp.float32),
        columns=tuple(vmem((k, LANES), row.dtype) for row in x.numbers[1]),
        bias=added,
        d_bias=summed if of_bias else None,
    )
    copies = pairs + 3 + len(x.numbers[0]) + (copied is not None)
    result = (vmem((q, size), x.q.dtype), pltpu.SemaphoreType.DMA((1,))) if x.dq is None else (None, None)
    return [
        buffers,
        sums,
        QuerySums(
            vmem((3, pairs, q, size), jnp.float32),
            pltpu.SMEM((4,), jnp.int32),
            pltpu.SemaphoreType.DMA((2, pairs, 3)),
            None,
            *result,
        ),
        pltpu.SemaphoreType.DMA((copies, 2)),
    ]


PENDING = 3
"""The index in ``QuerySums.choices`` of whether a result is still being written."""
NOTHING = -1
"""The value of an empty slot of ``QuerySums.choices``."""


class QuerySums(NamedTuple):
    """The sums of ``dQ`` in float32, in main memory, and the result after the last addition.

    Without a ``result`` sums start at the given values and stay float32. With one, the first row of tiles that visits a
    block of queries starts at zero and the last one writes the gradient of the queries, scaled and in their dtype.

    Args:
        slots: three, for the tiles in flight.
        choices: which pair of features is in each slot, and at ``PENDING`` whether a result is being written.
        semaphores: of the copies from and to main memory.
        result: the gradient of the queries in main memory, or None.
        whole: a block of it.
        result_semaphore: of the copy of that block.
    """

    slots: Any
    choices: Any
    semaphores: Any
    result: Any = None
    whole: Any = None
    result_semaphore: Any = None

    def fetches(self, entry):
        """Whether the sums of an entry's tile are fetched from main memory."""
        return True if self.result is None else ~is_first(entry)

    def finishes(self, entry):
        """Whether no later tile adds to these sums."""
        return False if self.result is None else is_last(entry)


@dataclasses.dataclass(frozen=True)
class KeyRow(TileRow):
    """A block of keys over the queries of one of the heads that share them.

    Args:
        group_head: the query head within the group.
        dq: the sums of ``dQ``.
        d_bias: sums for the bias, if its gradient is wanted.
    """

    side = 1
    dq: QuerySums
    group_head: Any
    d_bias: tuple

    @property
    def scaled_keys(self):
        """The keys of the row, times the factor of the queries."""
        return self.x.k if self.sums.k is None else self.sums.k

    @property
    def group(self) -> int:
        """How many heads share the keys."""
        return self.config.heads // self.config.kv_heads

    def at_head(self, g) -> "KeyRow":
        """The row for another head of the group."""
        return dataclasses.replace(self, group_head=g, head=self.kv_head * self.group + g)

    def of_head(self, ref):
        """The head's part of an array of all heads that share the keys."""
        return ref.at[at(self.group_head, ref.shape[0])]

    def own_copies(self, tile, slot):
        d_out, *rows, _ = self.x.per_query
        tokens = self.tokens(tile)
        plane, columns = features_at(d_out.shape, self.head, self.config.value_size)
        sources = d_out.at[self.batch, plane, tokens, columns], *(x.at[self.batch, self.head, :, tokens] for x in rows)
        return [(source, target.at[slot]) for source, target in zip(sources, self.buffers.per_query[:3], strict=True)]

    def features(self, pair, tile, to, step):
        source = self.x.q.at[self._queries(pair, tile)]
        slot = self.slot(step)
        arrived = self.arrived.at[self.arrived.shape[0] - 1 - to, slot]
        return [pltpu.make_async_copy(source, self.buffers.q.at[slot, to], arrived)]

    def fetched(self, pair, tile, to: int, step):
        """The copy of ``dQ`` from main memory."""
        return pltpu.make_async_copy(self.x.dq.at[self._queries(pair, tile)], *self._dq(0, to, jax.lax.rem(step, 3)))

    def stored(self, pair, tile, to: int, step):
        """The copy of ``dQ`` back to main memory."""
        source, semaphore = self._dq(1, to, jax.lax.rem(step, 3))
        return pltpu.make_async_copy(source, self.x.dq.at[self._queries(pair, tile)], semaphore)

    def finished(self, tile):
        """The copy of the finished ``dQ`` of a tile."""
        return pltpu.make_async_copy(
            self.dq.whole, self.dq.result.at[self._queries(0, tile)], self.dq.result_semaphore.at[0]
        )

    def _queries(self, pair, tile) -> tuple:
        """The index of the queries of a tile."""
        plane, columns = features_at(self.x.q.shape, self.head, self.config.size)
        return self.batch, plane, pair, self.tokens(tile), columns

    def _dq(self, way: int, to: int, slot) -> tuple:
        """A slot of ``dQ`` and its semaphore, 0 for the copy in and 1 for the copy out."""
        return self.dq.slots.at[slot, to], self.dq.semaphores.at[way, to, slot]


def when(condition, then: Callable[[], None]) -> None:
    """``pl.when`` for a condition that may be known when tracing."""
    if condition is True:
        then()
    elif condition is not False:
        pl.when(condition)(then)


def start_sums(row: KeyRow, entry, step) -> None:
    """Starts the copy of ``dQ`` for the tile of an entry, unless this ``dQ`` starts at zero."""
    tile = tile_of(entry)
    when(
        row.dq.fetches(entry),
        lambda: for_pairs(row.pairs, choice_of(entry), lambda n, to: row.fetched(n, tile, to, step).start()),
    )


def wait_sums(row: KeyRow, kind: Kind, entry, step) -> None:
    """Waits until ``dQ`` of a tile has arrived, or clears its slot."""

    def wait():
        for n in range(len(kind.pairs)):
            row.fetched(n, 0, n, step).wait()

    def clear():
        slot = row.dq.slots.at[jax.lax.rem(step, 3)]
        slot[...] = jnp.zeros_like(slot)

    when(row.dq.fetches(entry), wait)
    if row.dq.result is not None:
        when(is_first(entry), clear)


def write(row: KeyRow, tile: CurrentTile, entry, step) -> None:
    """Starts to write ``dQ`` of a tile back, or the result if no later tile adds to it."""
    third = jax.lax.rem(step, 3)
    done = row.dq.finishes(entry)

    def store():
        row.dq.choices[third] = choice_of(entry)
        for n, pair in enumerate(tile.kind.pairs):
            row.stored(pair, tile.index, n, step).start()

    def finish():
        row.dq.choices[third] = NOTHING
        _finish(row, tile, row.dq.slots[third, 0])

    when(done, finish)
    when(True if done is False else ~done, store)


def _finish(row: KeyRow, tile: CurrentTile, sums) -> None:
    wait_finished(row)
    row.dq.whole[...] = (sums * (LN2 * row.config.factor)).astype(row.dq.whole.dtype)
    row.finished(tile.index).start()
    row.dq.choices[PENDING] = 1


def wait_finished(row: KeyRow) -> None:
    """Waits until the last result is written."""

    @pl.when(row.dq.choices[PENDING] == 1)
    def _():
        row.finished(0).wait()
        row.dq.choices[PENDING] = 0


def wait_written(row: KeyRow, third) -> None:
    """Waits until the ``dQ`` in one of the three slots is written, if it was written back."""
    choice = row.dq.choices[third]
    wait = partial(for_pairs, row.pairs, choice, lambda _, to: row.stored(0, 0, to, third).wait())
    when(True if row.dq.result is None else choice != NOTHING, wait)
