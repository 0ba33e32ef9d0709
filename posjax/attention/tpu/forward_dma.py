"""Arguments and scratch of the forward kernel, and the DMA copies of keys and values."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posjax.attention.tpu.dma import Buffers, KernelArrays, TileRow
from posjax.attention.tpu.inputs import Inputs, KernelConfig
from posjax.attention.tpu.terms import LANES


class ForwardSums(NamedTuple):
    """The sums of a row of tiles, and values that are computed once for the row."""

    highest: Any
    total: Any
    totals: Any
    tops: Any
    out: Any
    q: Any
    columns: tuple
    bias: Any


def arrays_of(config: KernelConfig, x: Inputs, so_far: tuple | None) -> KernelArrays:
    """The arguments of the kernel, from the inputs of the call and output and log-sum-exp so far."""
    bias = config.bias.arrays(config, x, 0)
    out, lse = so_far or (None, None)
    return KernelArrays(x.visits[0], x.starts, x.numbers, bias, x.q, x.bound, x.k, x.v, out, lse)


def scratch(config: KernelConfig, x: KernelArrays) -> list:
    """Scratch memory: buffers of the copies, sums of a row, and semaphores."""
    q, k, _ = config.tilings[0].blocks
    vmem = pltpu.VMEM
    pairs = x.k.shape[2]
    value_size = config.value_size
    wider = config.bias.in_features or config.bound_in_features
    copied, added, _ = config.bias.scratch(config, 0)
    size = config.size + wider * LANES
    buffers = Buffers(
        q=None,
        k=vmem((2, pairs, k, size), x.k.dtype),
        v=vmem((2, k, value_size), x.v.dtype),
        numbers=tuple(vmem((2, 1, k), row.dtype) for row in x.numbers[1]),
        per_query=None,
        bias=copied,
    )
    sums = ForwardSums(
        highest=vmem((q, LANES), jnp.float32),
        total=vmem((q, LANES), jnp.float32),
        totals=vmem((1, q), jnp.float32),
        tops=vmem((1, q), jnp.float32),
        out=vmem((q, value_size), jnp.float32),
        q=vmem((pairs, q, size), x.q.dtype) if wider or config.factor != 1 else None,
        columns=tuple(vmem((q, LANES), row.dtype) for row in x.numbers[0]),
        bias=added,
    )
    copies = pairs + 1 + len(x.numbers[1]) + (copied is not None)
    return [buffers, sums, pltpu.SMEM((2,), jnp.int32), pltpu.SemaphoreType.DMA((copies, 2))]


@dataclasses.dataclass(frozen=True)
class QueryRow(TileRow):
    """A block of queries over the keys. The ``step`` of a method is the slot itself."""

    side = 0

    def slot(self, step):
        return step

    def own_copies(self, tile, slot):
        plane, columns = self.keys_at(self.x.v, self.config.value_size)
        return [(self.x.v.at[self.batch, plane, self.tokens(tile), columns], self.buffers.v.at[slot])]

    def features(self, pair, tile, to, step):
        target = self.buffers.k.at[step, to]
        if self.buffers.k.shape[-1] > self.config.size:
            target = target.at[:, pl.ds(0, self.config.size)]
        plane, columns = self.keys_at(self.x.k, self.config.size)
        source = self.x.k.at[self.batch, plane, pair, self.tokens(tile), columns]
        arrived = self.arrived.at[self.arrived.shape[0] - 1 - to, step]
        return [pltpu.make_async_copy(source, target, arrived)]
