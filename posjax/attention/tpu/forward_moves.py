"""What the forward kernel takes, where it puts it, and how keys and values travel to it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posjax.attention.tiles import Kind
from posjax.attention.tpu import terms
from posjax.attention.tpu.call import Call, Inputs, anywhere, at, rows_of, scalar_memory, scalars_of
from posjax.attention.tpu.schedule import choice_of, tile_of
from posjax.attention.tpu.terms import LANES, SUBLANES


class Arrays(NamedTuple):
    """Arguments of the kernel: arrays outside, references inside."""

    visits: Any
    origins: tuple
    starts: Any
    scalars: dict
    q: Any
    q_rows: tuple
    bound: Any
    k: Any
    v: Any
    k_rows: tuple
    window: Any


class Arriving(NamedTuple):
    """Two places for everything that travels."""

    k: Any
    v: Any
    rows: tuple
    window: Any


class Sums(NamedTuple):
    """What a row of tiles accumulates, and what is prepared once for it."""

    highest: Any
    total: Any
    totals: Any
    tops: Any
    out: Any
    q: Any
    columns: tuple
    of_keys: Any
    matrix: Any


def arrays_of(call: Call, x: Inputs) -> Arrays:
    """The arguments of the kernel, from those of the call. A bias by distance becomes a skewed vector."""
    window = None
    if call.bias == "relative":
        # Lanes are keys: the vector runs backwards, so that its index ``queries - (i - j)`` rises with them.
        values = x.bias["values"][:, ::-1]
        values = jnp.concatenate([values[:, :1], values[:, :-1]], axis=1)
        window = terms.skewed(values, values.shape[1] // LANES)
    visits, *origins = x.forward
    q_rows, k_rows = rows_of(x.q_numbers, x.bias, "q"), rows_of(x.k_numbers, x.bias, "k")
    origins = tuple(o for o in origins if o is not None)
    return Arrays(visits, origins, x.starts, scalars_of(x.bias), x.q, q_rows, x.bound, x.k, x.v, k_rows, window)


def specs(arrays: Arrays, block: int) -> Arrays:
    """Where each argument lives, and which block of it a step of the grid sees."""
    _, _, pairs, _, size = arrays.q.shape

    def visit_spec(table):
        batched = table.shape[0]
        return pl.BlockSpec(
            (None, None, *table.shape[2:]), lambda b, h, i: (at(b, batched), i, 0, 0), memory_space=pltpu.SMEM
        )

    def origin_spec(table):
        sizes = table.shape[:2]
        return pl.BlockSpec(
            (None, None, *table.shape[2:]),
            lambda b, h, i: (at(b, sizes[0]), at(h, sizes[1]), 0, 0),
            memory_space=pltpu.SMEM,
        )

    def row_spec(row):
        sizes = row.shape[:2]
        return pl.BlockSpec((None, None, 1, block), lambda b, h, i: (at(b, sizes[0]), at(h, sizes[1]), 0, i))

    specs = jax.tree.map(lambda _: anywhere, arrays)
    return specs._replace(
        visits=jax.tree.map(visit_spec, arrays.visits),
        origins=jax.tree.map(origin_spec, arrays.origins),
        starts=scalar_memory,
        scalars=jax.tree.map(lambda _: scalar_memory, arrays.scalars),
        q=pl.BlockSpec((None, None, pairs, block, size), lambda b, h, i: (b, h, 0, i, 0)),
        q_rows=jax.tree.map(row_spec, arrays.q_rows),
        bound=jax.tree.map(row_spec, arrays.bound),
    )


def scratch(call: Call, x: Arrays) -> list:
    """Room for what travels, for the sums of a row, and the semaphores."""
    q, k, _ = call.forward
    vmem = pltpu.VMEM
    window, rides, pairs = x.window is not None, call.bias_rides or call.bound_rides, x.k.shape[2]
    size = x.k.shape[-1] + rides * LANES
    arriving = Arriving(
        vmem((2, pairs, k, size), x.k.dtype),
        vmem((2, k, x.v.shape[-1]), x.v.dtype),
        tuple(vmem((2, 1, k), row.dtype) for row in x.k_rows),
        vmem((2, (q + k) // LANES, SUBLANES, LANES), jnp.float32) if window else None,
    )
    sums = Sums(
        vmem((q, LANES), jnp.float32),
        vmem((q, LANES), jnp.float32),
        vmem((1, q), jnp.float32),
        vmem((1, q), jnp.float32),
        vmem((q, x.v.shape[-1]), jnp.float32),
        vmem((pairs, q, size), x.k.dtype) if rides else None,
        tuple(vmem((q, LANES), row.dtype) for row in x.q_rows),
        vmem((SUBLANES, k), jnp.float32) if call.adds_of_keys else None,
        vmem((q + k - LANES, LANES), jnp.float32) if window else None,
    )
    copies = pairs + 1 + len(x.k_rows) + window
    return [arriving, sums, pltpu.SMEM((2,), jnp.int32), pltpu.SemaphoreType.DMA((copies, 2))]


class Row(NamedTuple):
    """Everything that stays while a kernel is at one row of tiles."""

    call: Call
    x: Arrays
    arriving: Arriving
    sums: Sums
    arrived: Any
    batch: Any
    head: Any
    kv_head: Any
    block: Any
    queries: int


def _copies(row: Row, i, tile, place) -> list:
    """What every tile needs, but for the keys: values, numbers of its tokens, its window of the bias by distance."""
    _, x, arriving, _, arrived, b, h, kv_head, _, queries = row
    q, k, _ = row.call.forward
    tokens = pl.ds(pl.multiple_of(tile * k, k), k)
    pairs = [(x.v.at[b, kv_head, tokens], arriving.v.at[place])]
    for source, target in zip(x.k_rows, arriving.rows, strict=True):
        pairs.append((source.at[at(b, source.shape[0]), at(h, source.shape[1]), :, tokens], target.at[place]))
    if x.window is not None:
        first = jax.lax.div(queries - q * (i + 1) + k * tile, LANES)
        pairs.append((x.window.at[h, pl.ds(first, (q + k) // LANES)], arriving.window.at[place]))
    return [pltpu.make_async_copy(*pair, arrived.at[n, place]) for n, pair in enumerate(pairs)]


def _keys(row: Row, pair, tile, to: int, place):
    """The copy of the keys of one pair of features."""
    k = row.call.forward.k
    source = row.x.k.at[row.batch, row.kv_head, pair, pl.ds(pl.multiple_of(tile * k, k), k)]
    last = row.arrived.shape[0] - 1
    target = row.arriving.k.at[place, to]
    if row.sums.q is not None:
        target = target.at[:, pl.ds(0, LANES)]
    return pltpu.make_async_copy(source, target, row.arrived.at[last - to, place])


def start(row: Row, i, entry, place) -> None:
    """Begins to fetch the tile of an entry for the row of block ``i``, to one of two places."""
    tile, choice, pairs = tile_of(entry), choice_of(entry), row.x.k.shape[2]
    for copy in _copies(row, i, tile, place):
        copy.start()
    if pairs == 1:
        _keys(row, 0, tile, 0, place).start()
        return
    _keys(row, jnp.where(choice == pairs, 0, choice), tile, 0, place).start()

    @pl.when(choice == pairs)
    def _():
        for n in range(1, pairs):
            _keys(row, n, tile, n, place).start()


def wait(row: Row, kind: Kind, place) -> None:
    """Waits until what a tile of this kind needs has arrived."""
    for copy in _copies(row, 0, 0, place):
        copy.wait()
    for n in range(len(kind.pairs)):
        _keys(row, n, 0, n, place).wait()
