"""What the backward kernel takes, where it puts it, and how queries travel to it and their gradients there and back."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from posjax.attention.operands import PerQuery
from posjax.attention.tpu.call import Inputs, KernelConfig
from posjax.attention.tpu.moves import Buffers, KernelArrays, Tile, TileRow, at, for_pairs
from posjax.attention.tpu.schedule import choice_of
from posjax.attention.tpu.terms import LANES


class BackwardSums(NamedTuple):
    """What a row of tiles accumulates, and what is prepared once for it."""

    dk: Any
    dv: Any
    columns: tuple
    bias: Any
    d_bias: Any


def arrays_of(config: KernelConfig, x: Inputs, per_query: PerQuery) -> KernelArrays:
    """The arguments of the kernel, from those of the call. ``dQ`` starts at zero."""

    def grouped(a):
        # Heads of queries by the head of keys that they share; one for all stays one.
        return a.reshape(a.shape[0], min(a.shape[1], x.k.shape[1]), -1, *a.shape[2:])

    bias, q = config.bias.arrays(config, x, 1), grouped(x.q)
    bias = bias._replace(origins=tuple(map(grouped, bias.origins)), outer=jax.tree.map(grouped, bias.outer))
    per_query, dq = PerQuery(*map(grouped, per_query)), jnp.zeros_like(q, jnp.float32)
    return KernelArrays(x.visits[1], x.starts, x.numbers, bias, q, None, x.k, x.v, per_query, dq)


def scratch(config: KernelConfig, x: KernelArrays, of_bias: bool) -> list:
    """Room for what travels, for the sums of a row, and the semaphores."""
    q, k, _ = config.tilings[1].blocks
    vmem, (pairs, size, value_size) = pltpu.VMEM, (x.k.shape[2], x.k.shape[-1], x.v.shape[-1])
    moved, added, summed = config.bias.scratch(config, 1)
    buffers = Buffers(
        q=vmem((2, pairs, q, size), x.q.dtype),
        k=None,
        v=None,
        numbers=tuple(vmem((2, 1, q), row.dtype) for row in x.numbers[0]),
        per_query=PerQuery(vmem((2, q, value_size), x.per_query.d_out.dtype), *[vmem((2, 1, q), jnp.float32)] * 2),
        bias=moved,
    )
    sums = BackwardSums(
        dk=vmem((pairs, k, size), jnp.float32),
        dv=vmem((k, value_size), jnp.float32),
        columns=tuple(vmem((k, LANES), row.dtype) for row in x.numbers[1]),
        bias=added,
        d_bias=summed if of_bias else None,
    )
    copies = pairs + 3 + len(x.numbers[0]) + (moved is not None)
    return [
        buffers,
        sums,
        vmem((3, pairs, q, size), jnp.float32),
        pltpu.SMEM((3,), jnp.int32),
        pltpu.SemaphoreType.DMA((copies, 2)),
        pltpu.SemaphoreType.DMA((2, pairs, 3)),
    ]


@dataclasses.dataclass(frozen=True)
class KeyRow(TileRow):
    """A block of keys over the queries of one of the heads that share them, and the place of ``dQ`` for every step.

    Args:
        group_head: the head of queries within the group.
        dq: three places for ``dQ``; ``choices`` says what is in each, ``dq_moved`` what has gone there and back.
        d_bias: sums for the bias, if they are wanted.
    """

    side = 1
    dq: Any
    choices: Any
    dq_moved: Any
    group_head: Any
    d_bias: tuple

    @property
    def group(self) -> int:
        """How many heads share the keys."""
        return self.x.q.shape[2]

    def at_head(self, g) -> "KeyRow":
        """The row for another head of the group."""
        return dataclasses.replace(self, group_head=g, head=self.kv_head * self.group + g)

    def of_head(self, ref):
        """The part of the head of an array of all heads that share the keys."""
        return ref.at[at(self.group_head, ref.shape[0])]

    def own_copies(self, tile, place):
        where, tokens = (self.batch, self.kv_head, self.group_head), self.tokens(tile)
        sources = self.x.per_query.d_out.at[*where, tokens], *(x.at[*where, :, tokens] for x in self.x.per_query[1:])
        return [(source, target.at[place]) for source, target in zip(sources, self.buffers.per_query, strict=True)]

    def features(self, pair, tile, to, step):
        source, place = self.x.q.at[self._queries(pair, tile)], self.place(step)
        arrived = self.arrived.at[self.arrived.shape[0] - 1 - to, place]
        dq = pltpu.make_async_copy(self.x.dq.at[self._queries(pair, tile)], *self._dq(0, to, jax.lax.rem(step, 3)))
        return [pltpu.make_async_copy(source, self.buffers.q.at[place, to], arrived), dq]

    def stored(self, pair, tile, to: int, step):
        """The copy of ``dQ`` back."""
        source, moved = self._dq(1, to, jax.lax.rem(step, 3))
        return pltpu.make_async_copy(source, self.x.dq.at[self._queries(pair, tile)], moved)

    def _queries(self, pair, tile) -> tuple:
        """Where the queries of a tile lie."""
        return self.batch, self.kv_head, self.group_head, pair, self.tokens(tile)

    def _dq(self, way: int, to: int, place) -> tuple:
        """A place of ``dQ`` and its semaphore, 0 there and 1 back."""
        return self.dq.at[place, to], self.dq_moved.at[way, to, place]


def write(row: KeyRow, tile: Tile, entry, step) -> None:
    """Begins to write ``dQ`` of a tile back."""
    row.choices[jax.lax.rem(step, 3)] = choice_of(entry)
    for n, pair in enumerate(tile.kind.pairs):
        row.stored(pair, tile.index, n, step).start()


def wait_written(row: KeyRow, third) -> None:
    """Waits until the ``dQ`` that was in one of the three places has landed."""
    for_pairs(row.pairs, row.choices[third], lambda _, to: row.stored(0, 0, to, third).wait())
