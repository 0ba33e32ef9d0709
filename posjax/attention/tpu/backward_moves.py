"""What the backward kernel takes, where it puts it, and how queries travel to it and their gradients there and back."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posjax.attention.tiles import Kind
from posjax.attention.tpu import terms
from posjax.attention.tpu.call import Call, Inputs, anywhere, at, scalar_memory, scalars_of
from posjax.attention.tpu.schedule import choice_of, tile_of
from posjax.attention.tpu.terms import LANES, SUBLANES


class Saved(NamedTuple):
    """What the rows bring along: ``dO``, ``L`` without what the bias adds to all of a row, and ``D``."""

    d_out: Any
    lse: Any
    correction: Any


class Arrays(NamedTuple):
    """Arguments of the kernel: arrays outside, references inside. Heads are ``[kv heads, group]``."""

    visits: Any
    origins: tuple
    starts: Any
    scalars: dict
    k: Any
    v: Any
    k_rows: tuple
    q: Any
    q_rows: tuple
    saved: Saved
    window: Any
    dq: Any


class Arriving(NamedTuple):
    """Two places for everything that travels one way."""

    q: Any
    rows: tuple
    saved: Saved
    window: Any


class Sums(NamedTuple):
    """What a row of tiles accumulates, and what is prepared once for it."""

    dk: Any
    dv: Any
    columns: tuple
    bias: Any
    d_bias: Any
    matrix: Any


def arrays_of(call: Call, x: Inputs, saved: Saved) -> Arrays:
    """The arguments of the kernel, from those of the call. ``dQ`` starts at zero."""
    kv_heads = x.k.shape[1]

    def grouped(a):
        return a.reshape(a.shape[0], kv_heads, -1, *a.shape[2:])

    def alone(a):
        return a[:, :, None]

    window = None
    if call.bias == "relative":
        first, stop = call.band
        values = x.bias["values"][:, first * LANES : stop * LANES]
        window = terms.skewed(values, stop - first).reshape(kv_heads, -1, stop - first, 8, LANES)
    visits, *origins = x.backward
    origins = tuple((grouped if o.shape[1] > 1 else alone)(o) for o in origins if o is not None)
    k_rows = tuple(map(alone, x.k_numbers)) + ((grouped(x.bias["k"]),) if call.bias == "gates" else ())
    q = grouped(x.q)
    return Arrays(
        visits,
        origins,
        x.starts,
        scalars_of(x.bias),
        x.k,
        x.v,
        k_rows,
        q,
        tuple(map(alone, x.q_numbers)),
        Saved(*map(grouped, saved)),
        window,
        jnp.zeros_like(q, jnp.float32),
    )


def specs(arrays: Arrays, block: int) -> Arrays:
    """Where each argument lives, and which block of it a step of the grid sees."""
    _, _, pairs, _, size = arrays.k.shape

    def visit_spec(table):
        batched = table.shape[0]
        return pl.BlockSpec(
            (None, None, *table.shape[2:]), lambda b, h, j: (at(b, batched), j, 0, 0), memory_space=pltpu.SMEM
        )

    def origin_spec(table):
        sizes = table.shape[:2]
        shape = (None, None, *table.shape[2:])
        return pl.BlockSpec(shape, lambda b, h, j: (at(b, sizes[0]), at(h, sizes[1]), 0, 0, 0), memory_space=pltpu.SMEM)

    def row_spec(row):
        sizes = row.shape[:2]
        shape = (None, None, *row.shape[2:4], block)
        return pl.BlockSpec(shape, lambda b, h, j: (at(b, sizes[0]), at(h, sizes[1]), 0, 0, j))

    specs = jax.tree.map(lambda _: anywhere, arrays)
    return specs._replace(
        visits=jax.tree.map(visit_spec, arrays.visits),
        origins=jax.tree.map(origin_spec, arrays.origins),
        starts=scalar_memory,
        scalars=jax.tree.map(lambda _: scalar_memory, arrays.scalars),
        k=pl.BlockSpec((None, None, pairs, block, size), lambda b, h, j: (b, h, 0, j, 0)),
        v=pl.BlockSpec((None, None, block, arrays.v.shape[-1]), lambda b, h, j: (b, h, j, 0)),
        k_rows=jax.tree.map(row_spec, arrays.k_rows),
    )


def bias_outputs(call: Call, arrays: Arrays, block: int) -> list:
    """Shape and spec of the sums for the bias."""
    head, varying = (*arrays.q.shape[:2],), jax.typeof(arrays.q).manual_axis_type
    group, keys = arrays.q.shape[2], arrays.k.shape[3]

    def output(*shape, by_block: bool = False):
        blocked = (*shape[:-1], block) if by_block else shape

        def index(b, h, j):
            return b, h, *[0] * (len(shape) - 1), j if by_block else 0

        result = jax.ShapeDtypeStruct((*head, *shape), jnp.float32, manual_axis_type=varying)
        return result, pl.BlockSpec((None, None, *blocked), index)

    if call.bias == "linear":
        return [output(group, 1, LANES)]
    if call.bias == "gates":
        return [output(group, 1, keys, by_block=True)]
    if call.bias == "relative":
        return [output(group, arrays.window.shape[2], SUBLANES, LANES), output(group, 2, LANES)]
    return []


def scratch(call: Call, x: Arrays, of_bias: bool) -> list:
    """Room for what travels, for the sums of a row, and the semaphores."""
    q, k, _ = call.backward
    vmem, pairs = pltpu.VMEM, x.k.shape[2]
    size, value_size = x.k.shape[-1], x.v.shape[-1]
    window = x.window is not None
    stretch = q + k - LANES
    arriving = Arriving(
        vmem((2, pairs, q, size), x.q.dtype),
        tuple(vmem((2, 1, q), row.dtype) for row in x.q_rows),
        Saved(vmem((2, q, value_size), x.saved.d_out.dtype), *[vmem((2, 1, q), jnp.float32)] * 2),
        vmem((2, (q + k) // LANES, SUBLANES, LANES), jnp.float32) if window else None,
    )
    sums = Sums(
        vmem((pairs, k, size), jnp.float32),
        vmem((k, value_size), jnp.float32),
        tuple(vmem((k, LANES), row.dtype) for row in x.k_rows),
        vmem((k, LANES), jnp.float32) if call.bias in ("linear", "gates") else None,
        vmem((stretch if window else k, LANES), jnp.float32) if of_bias else None,
        vmem((stretch, LANES), jnp.float32) if window else None,
    )
    copies = 3 + len(x.q_rows) + window
    return [
        arriving,
        sums,
        vmem((3, pairs, q, size), jnp.float32),
        pltpu.SMEM((3,), jnp.int32),
        pltpu.SemaphoreType.DMA((copies, 2)),
        pltpu.SemaphoreType.DMA((pairs, 2)),
        pltpu.SemaphoreType.DMA((2, pairs, 3)),
    ]


class Row(NamedTuple):
    """Everything that stays while a kernel is at one row of tiles."""

    call: Call
    x: Arrays
    arriving: Arriving
    sums: Sums
    dq: Any
    choices: Any
    arrived: Any
    q_arrived: Any
    dq_moved: Any
    batch: Any
    kv_head: Any
    block: Any
    d_bias: tuple


def _copies(row: Row, g, tile, place) -> list:
    """What every tile needs, but for the queries."""
    _, x, arriving, *_ = row
    b, h, q = row.batch, row.kv_head, row.call.backward.q
    tokens = pl.ds(pl.multiple_of(tile * q, q), q)
    pairs = [(x.saved.d_out.at[b, h, g, tokens], arriving.saved.d_out.at[place])]
    for source, target in zip(x.saved[1:], arriving.saved[1:], strict=True):
        pairs.append((source.at[b, h, g, :, tokens], target.at[place]))
    for source, target in zip(x.q_rows, arriving.rows, strict=True):
        pairs.append((source.at[at(b, source.shape[0]), 0, 0, :, tokens], target.at[place]))
    if x.window is not None:
        pairs.append((x.window.at[h, g, window_of(row, tile)], arriving.window.at[place]))
    return [pltpu.make_async_copy(*pair, row.arrived.at[n, place]) for n, pair in enumerate(pairs)]


def window_of(row: Row, tile):
    """Which rows of the band of the skewed vector a tile reads; any of them, where the bias is constant."""
    q, k, _ = row.call.backward
    first, stop = row.call.band
    keys, rows = row.x.k.shape[1] * pl.num_programs(2), (q + k) // LANES
    start = jax.lax.div(keys - k * (row.block + 1) + q * tile, LANES) - first
    return pl.ds(jnp.clip(start, 0, stop - first - rows), rows)


def _block_of(row: Row, g, pair, tile) -> tuple:
    """Where the queries of a tile lie."""
    q = row.call.backward.q
    return row.batch, row.kv_head, g, pair, pl.ds(pl.multiple_of(tile * q, q), q)


def _fetch_q(row: Row, g, pair, tile, to: int, step):
    """The copy of the queries of one pair of features."""
    source, place = row.x.q.at[_block_of(row, g, pair, tile)], step & 1
    return pltpu.make_async_copy(source, row.arriving.q.at[place, to], row.q_arrived.at[to, place])


def _fetch_dq(row: Row, g, pair, tile, to: int, step):
    """The copy of what their gradient is so far."""
    source, place = row.x.dq.at[_block_of(row, g, pair, tile)], jax.lax.rem(step, 3)
    return pltpu.make_async_copy(source, row.dq.at[place, to], row.dq_moved.at[0, to, place])


def _store_dq(row: Row, g, pair, tile, to: int, step):
    """The copy back."""
    target, place = row.x.dq.at[_block_of(row, g, pair, tile)], jax.lax.rem(step, 3)
    return pltpu.make_async_copy(row.dq.at[place, to], target, row.dq_moved.at[1, to, place])


def _for_pairs(row: Row, choice, then) -> None:
    """Calls ``then(pair, place)`` for the pair an entry asks for, or for all of them."""
    pairs = row.x.k.shape[0]
    if pairs == 1:
        then(0, 0)
        return
    then(jnp.where(choice == pairs, 0, choice), 0)

    @pl.when(choice == pairs)
    def _():
        for n in range(1, pairs):
            then(n, n)


def start(row: Row, entry, g, step) -> None:
    """Begins to fetch the tile of an entry for a head of the group."""
    tile = tile_of(entry)
    for copy in _copies(row, g, tile, step & 1):
        copy.start()

    def fetch(pair, to):
        _fetch_q(row, g, pair, tile, to, step).start()
        _fetch_dq(row, g, pair, tile, to, step).start()

    _for_pairs(row, choice_of(entry), fetch)


def wait(row: Row, kind: Kind, step) -> None:
    """Waits until what a tile of this kind needs has arrived."""
    for copy in _copies(row, 0, 0, step & 1):
        copy.wait()
    for n in range(len(kind.pairs)):
        _fetch_q(row, 0, n, 0, n, step).wait()
        _fetch_dq(row, 0, n, 0, n, step).wait()


def write(row: Row, kind: Kind, g, entry, step) -> None:
    """Begins to write ``dQ`` of a tile back."""
    row.choices[jax.lax.rem(step, 3)] = choice_of(entry)
    for n, pair in enumerate(kind.pairs):
        _store_dq(row, g, pair, tile_of(entry), n, step).start()


def wait_written(row: Row, third) -> None:
    """Waits until the ``dQ`` that was in one of the three places has landed."""
    _for_pairs(row, row.choices[third], lambda _, to: _store_dq(row, 0, 0, 0, to, third).wait())
