"""Shared by both kernels: the memory of arguments, DMA copies of a tile's arrays, and the loop over a list of tiles.

A kernel computes a *row* of tiles: forward a block of queries, backward a block of keys. That block is its *outer*
axis; the tiles of the row are along the *inner* one (see ``terms``). An axis is 0 (queries) or 1 (keys).
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posjax.attention.tiles import Blocks, Kind
from posjax.attention.tpu import terms
from posjax.attention.tpu.inputs import KernelConfig, Tiling, features_at
from posjax.attention.tpu.terms import Axis
from posjax.attention.tpu.tile_lists import choice_of, tile_of

anywhere, scalar_memory = (pl.BlockSpec(memory_space=space) for space in (pl.ANY, pltpu.SMEM))


class BiasArrays(NamedTuple):
    """The arrays of a bias in a kernel.

    Args:
        scalars: a few numbers for each head.
        origins: for every block of queries and of keys, the number to which the numbers of its tokens are relative,
            ``[batch or 1, heads or 1, ..., blocks]``.
        outer: ``[batch, heads, ..., tokens]``, numbers of the tokens of the outer axis.
        copied: an array; a part of it is copied for every tile.
    """

    scalars: Any = None
    origins: tuple = ()
    outer: Any = None
    copied: Any = None


class KernelArrays(NamedTuple):
    """Arguments of a kernel: arrays outside, references inside; None for arrays that it does not have."""

    visits: Any
    starts: Any
    numbers: tuple
    bias: BiasArrays
    q: Any
    bound: Any
    k: Any
    v: Any
    out: Any = None
    lse: Any = None
    per_query: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None

    def aliases(self, **outputs: int) -> dict[int, int]:
        """``input_output_aliases``: from argument number to output number, for arguments that are not None."""
        before = [len(jax.tree.leaves(self[:n])) for n in range(len(self))]
        numbers = {name: before[self._fields.index(name)] for name in outputs if getattr(self, name) is not None}
        return {number: outputs[name] for name, number in numbers.items()}


class Buffers(NamedTuple):
    """Two slots for every array that is copied in; None for arrays that are not copied."""

    q: Any
    k: Any
    v: Any
    numbers: tuple
    per_query: Any
    bias: Any


class CurrentTile(NamedTuple):
    """The current tile of a kernel: its kind, its number in the row, and the slot of its arrays."""

    kind: Kind
    index: Any
    slot: Any


def at(index, size: int):
    """The index along an axis, which is 0 if the axis has size 1."""
    return index if size > 1 else 0


def block_spec(shape, axis: int | None = None, size: int | None = None, memory_space=None) -> pl.BlockSpec:
    """The block of ``[batch or 1, heads or 1, ...]`` in a grid step: ``size`` along ``axis``, which is negative."""
    inner = [size if n - len(shape) == axis else shape[n] for n in range(2, len(shape))]

    def index(b, h, i):
        return at(b, shape[0]), at(h, shape[1]), *(i if n - len(shape) == axis else 0 for n in range(2, len(shape)))

    return pl.BlockSpec((None, None, *inner), index, memory_space=memory_space)


def feature_spec(shape: tuple[int, ...], size: int, block: int) -> pl.BlockSpec:
    """The block, in a grid step, of the features of all heads: the features of one head, ``[..., block, size]``."""
    has_heads = shape[1] > 1
    between = shape[2:-2]

    def index(b, h, i):
        return b, h if has_heads else 0, *[0] * len(between), i, 0 if has_heads else h

    return pl.BlockSpec((None, None, *between, block, size), index)


def _feature_specs(array, size: int, block: int):
    return jax.tree.map(lambda x: feature_spec(x.shape, size, block), array)


def specs(arrays: KernelArrays, side: int, block: int, **sizes: int) -> KernelArrays:
    """The memory of each argument, and its block in a grid step.

    Args:
        arrays: the arguments.
        side: the outer axis.
        block: its tokens in a row of tiles.
        sizes: the head size of each argument with features of the outer axis.
    """

    def visit_spec(table):
        batched = table.shape[0]
        inner = table.shape[2:]
        return pl.BlockSpec((None, None, *inner), lambda b, h, i: (at(b, batched), i, 0, 0), memory_space=pltpu.SMEM)

    def outer_spec(array):
        return block_spec(array.shape, -1, block)

    default_specs = jax.tree.map(lambda _: anywhere, arrays)
    numbers = list(default_specs.numbers)
    numbers[side] = jax.tree.map(outer_spec, arrays.numbers[side])
    return default_specs._replace(
        visits=jax.tree.map(visit_spec, arrays.visits),
        starts=scalar_memory,
        numbers=tuple(numbers),
        bias=default_specs.bias._replace(
            scalars=jax.tree.map(lambda _: scalar_memory, arrays.bias.scalars),
            origins=tuple(block_spec(table.shape, memory_space=pltpu.SMEM) for table in arrays.bias.origins),
            outer=jax.tree.map(outer_spec, arrays.bias.outer),
        ),
        bound=jax.tree.map(lambda x: block_spec(x.shape, memory_space=pltpu.SMEM), arrays.bound),
        lse=jax.tree.map(outer_spec, arrays.lse),
        **{name: _feature_specs(getattr(arrays, name), size, block) for name, size in sizes.items()},
    )


@dataclasses.dataclass(frozen=True)
class TileRow:
    """The state of one row of tiles; ``block`` is its number, ``count`` how many tiles it has."""

    side: ClassVar[int]
    """The outer axis."""

    config: KernelConfig
    x: KernelArrays
    buffers: Buffers
    sums: Any
    arrived: Any
    batch: Any
    head: Any
    kv_head: Any
    block: Any
    count: Any

    @property
    def tiling(self) -> Tiling:
        """The tiling of the kernel."""
        return self.config.tilings[self.side]

    @property
    def blocks(self) -> Blocks:
        """Sizes of the tiles."""
        return self.tiling.blocks

    @property
    def sizes(self) -> tuple[int, int]:
        """Tokens of a tile along the outer and along the inner axis."""
        return self.blocks[self.side], self.blocks[1 - self.side]

    def keys_at(self, ref, size: int) -> tuple:
        """The features of the row's key head: see ``features_at``."""
        return features_at(ref.shape, self.kv_head, size)

    @property
    def pairs(self) -> int:
        """The number of pairs of features."""
        return (self.buffers.q if self.buffers.k is None else self.buffers.k).shape[1]

    def tokens(self, tile):
        """The tokens of a tile along the inner axis."""
        size = self.sizes[1]
        return pl.ds(pl.multiple_of(tile * size, size), size)

    def make_columns(self) -> None:
        """Writes the numbers of the outer axis as columns."""
        for source, target in zip(self.x.numbers[self.side], self.sums.columns, strict=True):
            target[...] = terms.column(source[...])

    def axes(self, tile: CurrentTile, first: int) -> tuple[Axis, Axis]:
        """The queries and the keys of the part of a tile that begins at ``first``."""
        return self._axis(0, tile, first), self._axis(1, tile, first)

    def _axis(self, n: int, tile: CurrentTile, first: int) -> Axis:
        start = self.x.starts[n]
        size = self.blocks[n]
        ranged = self.config.ranged[n]
        if n == self.side:
            return Axis(0, start + self.block * size, tuple(column[...] for column in self.sums.columns), ranged)
        rows = tuple(x[tile.slot, :, pl.ds(first, self.blocks.part)] for x in self.buffers.numbers)
        return Axis(1, start + tile.index * size + first, rows, ranged)

    def of_head(self, ref):
        """The part of a grid step's block that belongs to the row's head: all of it."""
        return ref

    def slot(self, step):
        """The slot of a step's copies: 0 or 1."""
        return step & 1

    def own_copies(self, tile, slot) -> list:
        """Sources and targets of the copies of a tile that only this kernel makes, without features."""

    def features(self, pair, tile, to: int, step) -> list:
        """The copies of one pair of features of a tile, to index ``to`` of its buffer."""

    def copies(self, tile, slot) -> list:
        """All copies of a tile, without features."""
        tokens = self.tokens(tile)
        endpoints = self.own_copies(tile, slot)
        for source, target in zip(self.x.numbers[1 - self.side], self.buffers.numbers, strict=True):
            endpoints.append((source.at[at(self.batch, source.shape[0]), 0, :, tokens], target.at[slot]))
        if self.buffers.bias is not None:
            source = self.x.bias.copied.at[self.config.bias.part_of(self, tile)]
            endpoints.append((source, self.buffers.bias.at[slot]))
        return [pltpu.make_async_copy(*pair, self.arrived.at[n, slot]) for n, pair in enumerate(endpoints)]


def for_pairs(pairs: int, choice, then: Callable) -> None:
    """Calls ``then(pair, index)`` for the pair of an entry, or for all pairs."""
    if pairs == 1:
        then(0, 0)
        return
    then(jnp.where(choice == pairs, 0, choice), 0)

    @pl.when(choice == pairs)
    def _():
        for n in range(1, pairs):
            then(n, n)


def start(row: TileRow, entry, step) -> None:
    """Starts the copies of the tile of an entry."""
    _each_copy(row, entry, step, lambda copy: copy.start())


def wait_for(row: TileRow, entry, step) -> None:
    """Waits for the copies of the tile of an entry, of any kind."""
    _each_copy(row, entry, step, lambda copy: copy.wait())


def _each_copy(row: TileRow, entry, step, then: Callable) -> None:
    tile = tile_of(entry)

    def of_pair(pair, to):
        for copy in row.features(pair, tile, to, step):
            then(copy)

    for copy in row.copies(tile, row.slot(step)):
        then(copy)
    for_pairs(row.pairs, choice_of(entry), of_pair)


def wait(row: TileRow, kind: Kind, step) -> None:
    """Waits for the copies of a tile of this kind."""
    for copy in row.copies(0, row.slot(step)):
        copy.wait()
    for n in range(len(kind.pairs)):
        for copy in row.features(n, 0, n, step):
            copy.wait()


def walk(row: TileRow, visit: Callable) -> None:
    """Calls ``visit(kind, n, None)`` for the entries of the row's list, sorted by kind."""
    begin, ends = 0, row.x.visits.ends
    for n, kind in enumerate(row.tiling.kinds):
        jax.lax.fori_loop(begin, ends[0, n], partial(visit, kind), None)
        begin = ends[0, n]
