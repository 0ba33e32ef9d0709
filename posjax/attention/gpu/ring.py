"""The ring of buffers in shared memory through which one warpgroup hands the inputs of each tile to the others."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from posjax.attention.gpu import mosaic
from posjax.attention.gpu.inputs import Inputs, KernelConfig, Walk, own


class Step(NamedTuple):
    """What one step of a walk over tiles reads: views of main memory, or the buffers that hold them.

    Args:
        first: features ``[tokens, size]``: keys, or queries.
        second: features ``[tokens, value size]``: values, or gradients of outputs.
        ints: int32 ``[n, tokens]``, numbers of the tokens, or None.
        floats: float32 ``[n, tokens]``, or None.
    """

    first: Any
    second: Any
    ints: Any
    floats: Any


class Ring(NamedTuple):
    """The buffers, with an axis of stages in front, and the barriers of its two halves.

    ``first``, ``ints`` and ``floats`` are handed over together, and ``second`` by itself.

    Args:
        buffers: in shared memory.
        ready: arrived at when a stage is filled; one for each half.
        free: arrived at by every reader when it has read a stage; one for each half.
    """

    buffers: Step
    ready: tuple
    free: tuple

    @property
    def stages(self) -> int:
        """How many steps the ring holds."""
        return self.buffers.first.shape[0]

    def slot(self, n):
        """The stage of a step."""
        return lax.rem(n, jnp.int32(self.stages))

    def at(self, n) -> Step:
        """The buffers of a step."""
        slot = self.slot(n)
        return Step(*(None if buffer is None else buffer.at[slot] for buffer in self.buffers))

    def wait(self, half: int, n) -> None:
        """Waits until a half of a step is ready."""
        plgpu.barrier_wait(self.ready[half].at[self.slot(n)])

    def release(self, half: int, n) -> None:
        """Says that this reader has read a half of a step."""
        plgpu.barrier_arrive(self.free[half].at[self.slot(n)])

    def fill(self, n, source: Step) -> None:
        """Copies a step as soon as its stage is free."""
        target = self.at(n)
        slot = self.slot(n)
        for half, names in enumerate((("first", "ints", "floats"), ("second",))):
            pl.when(n >= self.stages)(lambda half=half: plgpu.barrier_wait(self.free[half].at[slot]))
            for name in names:
                if getattr(source, name) is not None:
                    plgpu.copy_gmem_to_smem(getattr(source, name), getattr(target, name), self.ready[half].at[slot])

    def drain(self, count) -> None:
        """Waits until all ``count`` steps are read."""
        for n in range(self.stages):

            @pl.when(n < count)
            def _(n=n):
                for half in range(2):
                    plgpu.barrier_wait(self.free[half].at[n])


def feed(count, rings: list[tuple[Ring, Callable[[Any], Step]]], interpret) -> None:
    """Copies ``count`` steps to each ring, in turn."""

    @pl.loop(jnp.int32(0), count)
    def _(n):
        for ring, step in rings:
            ring.fill(n, step(n))

    if interpret:
        # The interpreter wants every arrival to be waited for.
        for ring, _ in rings:
            ring.drain(count)


class OfQueries(NamedTuple):
    """The inputs of the backward pass for each query.

    Args:
        d_out: the gradient of the output, ``[batch, queries, heads, value size]``.
        numbers: float32 ``[batch, heads, 2, queries]``: ``L`` in base 2, without the constant that the bias adds to all
            logits of the query, and ``D``.
    """

    d_out: jax.Array
    numbers: jax.Array


def queries_at(x: Inputs, rows: OfQueries, batch, head, tokens) -> Step:
    """What a backward kernel reads of some queries."""
    numbers = x.numbers[0]
    return Step(
        x.q.at[batch, tokens, head],
        rows.d_out.at[batch, tokens, head],
        None if numbers is None else numbers.at[own(numbers, batch), :, tokens],
        rows.numbers.at[batch, head, :, tokens],
    )


def ring_of_queries(x: Inputs, rows: OfQueries, *, tokens: int, tile: int, stages: int = 2) -> Ring:
    """The types of a ring for the queries of a call, in the backward pass. ``tile``: see ``mosaic.features``."""
    first, second = ((array.shape[-1], array.dtype) for array in (x.q, rows.d_out))
    ints = 0 if x.numbers[0] is None else x.numbers[0].shape[1]
    return _types(first, second, ints, 2, tokens=tokens, tile=tile, stages=stages)


def keys_at(config: KernelConfig, x: Inputs, batch, head, kv_head, tokens) -> Step:
    """What a kernel reads of some keys."""
    numbers = x.numbers[1]
    floats = x.bias["k"] if config.bias.of_tokens else None
    return Step(
        x.k.at[batch, tokens, kv_head],
        x.v.at[batch, tokens, kv_head],
        None if numbers is None else numbers.at[own(numbers, batch), :, tokens],
        None if floats is None else floats.at[own(floats, batch), head, :, tokens],
    )


def feed_keys(config: KernelConfig, x: Inputs, walk: Walk, ring: Ring, batch, head) -> None:
    """Copies the keys of a walk over tiles."""
    kv_head = lax.div(head, jnp.int32(config.group))

    def keys(n):
        return keys_at(config, x, batch, head, kv_head, pl.ds(walk.place(n), walk.tokens))

    feed(walk.count, [(ring, keys)], config.interpret)


def ring_of_keys(config: KernelConfig, x: Inputs, *, tokens: int, tile: int, stages: int = 2) -> Ring:
    """The types of a ring for the keys of a call. ``tile``: see ``mosaic.features``."""
    first, second = ((array.shape[-1], array.dtype) for array in (x.k, x.v))
    ints = 0 if x.numbers[1] is None else x.numbers[1].shape[1]
    return _types(first, second, ints, int(config.bias.of_tokens), tokens=tokens, tile=tile, stages=stages)


def _types(first, second, ints: int, floats: int, *, tokens: int, tile: int, stages: int) -> Ring:
    """The types of a ring for arrays of the given dtypes and sizes.

    Args:
        first: ``(size, dtype)`` of the first features.
        second: the same for the second ones.
        ints: how many int32 numbers a token has.
        floats: how many float32 numbers a token has.
        tokens: of a step.
        tile: see ``mosaic.features``.
        stages: of the ring.
    """
    buffers = Step(
        mosaic.features((stages, tokens, first[0]), first[1], tile),
        mosaic.features((stages, tokens, second[0]), second[1], tile),
        plgpu.SMEM((stages, ints, tokens), jnp.int32) if ints else None,
        plgpu.SMEM((stages, floats, tokens), jnp.float32) if floats else None,
    )
    copies = 1 + (ints > 0) + (floats > 0)
    ready = tuple(plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages) for arrivals in (copies, 1))
    free = tuple(plgpu.Barrier(num_arrivals=mosaic.GROUPS, num_barriers=stages) for _ in range(2))
    return Ring(buffers, ready, free)
