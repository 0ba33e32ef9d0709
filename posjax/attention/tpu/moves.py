"""What both kernels do alike: where arguments live, how a tile's arrays travel, and the walk along a list of tiles.

A kernel is at a *row* of tiles: forward a block of queries, backward a block of keys. That block is its *outer* axis;
the tiles of the row lie along the *inner* one (see ``terms``). In every pair the queries come first: an axis is 0 or 1.
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
from posjax.attention.tpu.call import KernelConfig, Tiling, features_at
from posjax.attention.tpu.schedule import choice_of, tile_of
from posjax.attention.tpu.terms import Axis

anywhere, scalar_memory = (pl.BlockSpec(memory_space=space) for space in (pl.ANY, pltpu.SMEM))


class BiasArrays(NamedTuple):
    """What a bias brings to a kernel.

    Args:
        scalars: a few numbers for each head.
        origins: for every block of queries and of keys what the numbers of its tokens are counted from,
            ``[batch or 1, heads or 1, ..., blocks]``.
        outer: ``[batch, heads, ..., tokens]``, numbers of the tokens of the outer axis.
        moved: an array of which a part travels with every tile.
    """

    scalars: Any = None
    origins: tuple = ()
    outer: Any = None
    moved: Any = None


class KernelArrays(NamedTuple):
    """Arguments of a kernel: arrays outside, references inside; None for what it does not take."""

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
        """The numbers of arguments that results take the place of, for those that are there."""
        before = [len(jax.tree.leaves(self[:n])) for n in range(len(self))]
        places = {name: before[self._fields.index(name)] for name in outputs if getattr(self, name) is not None}
        return {place: outputs[name] for name, place in places.items()}


class Buffers(NamedTuple):
    """Two places for everything that travels one way; None for what does not."""

    q: Any
    k: Any
    v: Any
    numbers: tuple
    per_query: Any
    bias: Any


class Tile(NamedTuple):
    """A tile that a kernel is at: its kind, its number in the row, and the place where its arrays are."""

    kind: Kind
    index: Any
    place: Any


def at(index, size: int):
    """The index along an axis that may have been left at 1."""
    return index if size > 1 else 0


def block_spec(shape, axis: int | None = None, size: int | None = None, memory_space=None) -> pl.BlockSpec:
    """What a step of the grid sees of ``[batch or 1, heads or 1, ...]``: ``size`` along ``axis``, which is negative."""
    inner = [size if n - len(shape) == axis else shape[n] for n in range(2, len(shape))]

    def index(b, h, i):
        return at(b, shape[0]), at(h, shape[1]), *(i if n - len(shape) == axis else 0 for n in range(2, len(shape)))

    return pl.BlockSpec((None, None, *inner), index, memory_space=memory_space)


def feature_spec(shape: tuple[int, ...], size: int, block: int) -> pl.BlockSpec:
    """What a step of the grid sees of the features of all heads: those of its head, ``[..., block, size]``."""
    several, between = shape[1] > 1, shape[2:-2]

    def index(b, h, i):
        return b, h if several else 0, *[0] * len(between), i, 0 if several else h

    return pl.BlockSpec((None, None, *between, block, size), index)


def _feature_specs(array, size: int, block: int):
    return jax.tree.map(lambda x: feature_spec(x.shape, size, block), array)


def specs(arrays: KernelArrays, side: int, block: int, **sizes: int) -> KernelArrays:
    """Where each argument lives, and which block of it a step of the grid sees.

    Args:
        arrays: the arguments.
        side: the outer axis.
        block: its tokens in a row of tiles.
        sizes: of a head, of each argument that holds features of the outer axis.
    """

    def visit_spec(table):
        batched, inner = table.shape[0], table.shape[2:]
        return pl.BlockSpec((None, None, *inner), lambda b, h, i: (at(b, batched), i, 0, 0), memory_space=pltpu.SMEM)

    def outer_spec(array):
        return block_spec(array.shape, -1, block)

    found = jax.tree.map(lambda _: anywhere, arrays)
    numbers = list(found.numbers)
    numbers[side] = jax.tree.map(outer_spec, arrays.numbers[side])
    return found._replace(
        visits=jax.tree.map(visit_spec, arrays.visits),
        starts=scalar_memory,
        numbers=tuple(numbers),
        bias=found.bias._replace(
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
    """Everything that stays while a kernel is at one row of tiles; ``block`` is the row's, of ``count`` tiles."""

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
        """That of the kernel."""
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
        """Where the features of the row's head of keys are: see ``features_at``."""
        return features_at(ref.shape, self.kv_head, size)

    @property
    def pairs(self) -> int:
        """How many pairs of features there are."""
        return (self.buffers.q if self.buffers.k is None else self.buffers.k).shape[1]

    def tokens(self, tile):
        """The tokens of a tile along the inner axis."""
        size = self.sizes[1]
        return pl.ds(pl.multiple_of(tile * size, size), size)

    def make_columns(self) -> None:
        """The numbers of the outer axis as columns."""
        for source, target in zip(self.x.numbers[self.side], self.sums.columns, strict=True):
            target[...] = terms.column(source[...])

    def axes(self, tile: Tile, first: int) -> tuple[Axis, Axis]:
        """The queries and the keys of the part of a tile that begins at ``first``."""
        return self._axis(0, tile, first), self._axis(1, tile, first)

    def _axis(self, n: int, tile: Tile, first: int) -> Axis:
        start, size, ranged = self.x.starts[n], self.blocks[n], self.config.ranged[n]
        if n == self.side:
            return Axis(0, start + self.block * size, tuple(column[...] for column in self.sums.columns), ranged)
        rows = tuple(x[tile.place, :, pl.ds(first, self.blocks.part)] for x in self.buffers.numbers)
        return Axis(1, start + tile.index * size + first, rows, ranged)

    def of_head(self, ref):
        """The part of the row's head of an array of the heads that a step of the grid sees: all of it."""
        return ref

    def place(self, step):
        """Where what travels for a step arrives: 0 or 1."""
        return step & 1

    def own_copies(self, tile, place) -> list:
        """Sources and targets of what the kernel alone needs of a tile, but for features."""

    def features(self, pair, tile, to: int, step) -> list:
        """The copies of one pair of features of a tile, to one of its places for pairs."""

    def copies(self, tile, place) -> list:
        """The copies of all that a tile needs, but for features."""
        tokens, found = self.tokens(tile), self.own_copies(tile, place)
        for source, target in zip(self.x.numbers[1 - self.side], self.buffers.numbers, strict=True):
            found.append((source.at[at(self.batch, source.shape[0]), 0, :, tokens], target.at[place]))
        if self.buffers.bias is not None:
            source = self.x.bias.moved.at[self.config.bias.part_of(self, tile)]
            found.append((source, self.buffers.bias.at[place]))
        return [pltpu.make_async_copy(*pair, self.arrived.at[n, place]) for n, pair in enumerate(found)]


def for_pairs(pairs: int, choice, then: Callable) -> None:
    """Calls ``then(pair, place)`` for the pair an entry asks for, or for all of them."""
    if pairs == 1:
        then(0, 0)
        return
    then(jnp.where(choice == pairs, 0, choice), 0)

    @pl.when(choice == pairs)
    def _():
        for n in range(1, pairs):
            then(n, n)


def start(row: TileRow, entry, step) -> None:
    """Begins to fetch the tile of an entry."""
    _each_copy(row, entry, step, lambda copy: copy.start())


def wait_for(row: TileRow, entry, step) -> None:
    """Waits until the tile of an entry has arrived, of whatever kind it is."""
    _each_copy(row, entry, step, lambda copy: copy.wait())


def _each_copy(row: TileRow, entry, step, then: Callable) -> None:
    tile = tile_of(entry)

    def of_pair(pair, to):
        for copy in row.features(pair, tile, to, step):
            then(copy)

    for copy in row.copies(tile, row.place(step)):
        then(copy)
    for_pairs(row.pairs, choice_of(entry), of_pair)


def wait(row: TileRow, kind: Kind, step) -> None:
    """Waits until what a tile of this kind needs has arrived."""
    for copy in row.copies(0, row.place(step)):
        copy.wait()
    for n in range(len(kind.pairs)):
        for copy in row.features(n, 0, n, step):
            copy.wait()


def walk(row: TileRow, visit: Callable) -> None:
    """Calls ``visit(kind, n, None)`` for the entries of the row's list, kind after kind."""
    begin, ends = 0, row.x.visits.ends
    for n, kind in enumerate(row.tiling.kinds):
        jax.lax.fori_loop(begin, ends[0, n], partial(visit, kind), None)
        begin = ends[0, n]
