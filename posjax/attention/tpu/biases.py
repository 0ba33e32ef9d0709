"""Biases inside the kernels, one class for each form of ``posjax.attention.formulas``.

A class is derived from ``KernelBias``, overrides what differs from no bias, and stands in ``FORMS``.
"""

import dataclasses
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posjax.attention.call import Call
from posjax.attention.formulas import LN2, LOG2E, bias_form, distance_numbers, exact_difference
from posjax.attention.tiles import AHEAD, NEAR
from posjax.attention.tpu import terms
from posjax.attention.tpu.blocks import target
from posjax.attention.tpu.dma import BiasArrays, CurrentTile, TileRow
from posjax.attention.tpu.inputs import Inputs, KernelConfig
from posjax.attention.tpu.terms import LANES, SUBLANES
from posjax.masks import hides_ahead
from posjax.positions import Range, as_array


class BiasSum(NamedTuple):
    """A sum of the backward kernel for a bias: its shape after batch and heads, and whether its last axis is keys.

    If the last axis is keys, a row of tiles adds to its own block; otherwise all rows add to the same numbers.
    """

    shape: tuple[int, ...]
    of_keys: bool = False


@dataclasses.dataclass(frozen=True)
class KernelBias:
    """No bias, and the base class of the forms. An object is static: the numbers are in ``Inputs.bias``.

    Class attributes:
        constant_from: the distance from which it is constant, or None.
        in_features: whether its number for each key is appended to the features of keys.
    """

    constant_from = None
    in_features = False

    # Outside the kernels.

    @staticmethod
    def refusal(x: Call) -> str | None:
        """Why the kernels do not support it, or None."""
        return None

    @classmethod
    def of(cls, x: Call, spare: bool, reach: int, ahead) -> "KernelBias":
        """The form for a call.

        Args:
            x: the call, padded.
            spare: see ``KernelConfig``.
            reach: queries plus keys of a backward tile.
            ahead: distance of the first query from the first key, for positions that are ranges before padding.
        """
        return cls()

    def numbers(self, x: Call, ahead) -> dict[str, jax.Array]:
        """Its numbers, in base 2. ``ahead``: distance of the first query from the first key."""
        return {}

    def most(self, x: Call, numbers: dict) -> jax.Array | None:
        """The most that it adds to a logit, for each head, or None if that is not known."""
        return jnp.zeros(x.q.shape[1] * x.q.shape[2], jnp.float32)

    def of_queries(self, config: KernelConfig, x: Inputs, side: int):
        """The constant of each query, which no kernel adds, ``[batch or 1, heads, queries]``; or None."""

    def arrays(self, config: KernelConfig, x: Inputs, side: int) -> BiasArrays:
        """Its arrays for the kernel whose outer axis is ``side``; heads are on one axis."""
        return BiasArrays()

    def scratch(self, config: KernelConfig, side: int) -> tuple[Any, Any, Any]:
        """Two slots for copies, scratch for additions within a tile, and, backward, scratch for its gradient sums."""
        return None, None, None

    def outputs(self, group: int, keys: int) -> list[BiasSum]:
        """The sums of the backward kernel, ``row.d_bias``; zero before the first row of tiles of a head."""
        return []

    def gradients(self, x: Inputs, sums: tuple, d_lse) -> dict:
        """Gradients of ``numbers`` from these sums, in base 2, and from the gradient of the log-sum-exp."""
        return {}

    # In both kernels.

    def part_of(self, row: TileRow, tile) -> tuple:
        """Index of the part of ``BiasArrays.copied`` that is copied for a tile."""

    def level(self, row: TileRow, tile: CurrentTile):
        """A number that is added to all logits of a tile, or None."""

    def begin_part(self, row: TileRow, tile: CurrentTile, first: int) -> None:
        """Before the products of a part of a tile."""

    # Forward.

    def own(self, row: TileRow):
        """What it adds to all logits of each query of the row, ``[1, queries]``, if ``most`` is known; or None."""

    def begin_tile(self, row: TileRow, tile: CurrentTile) -> None:
        """Before the first part of a tile."""

    def of_keys(self, row: TileRow, tile: CurrentTile):
        """What it adds to the logits of each key of a tile, besides the level, ``[1, keys]``."""

    def add(self, row: TileRow, tile: CurrentTile, first: int, logits):
        """The logits of a part, plus the part of the bias that varies within the tile."""
        return logits

    # Backward. The methods from ``begin_sums`` on are called only if gradients are wanted.

    def begin_head(self, row: TileRow) -> None:
        """Before the first tile of a row for one of the heads that share the keys."""

    def add_transposed(self, row: TileRow, tile: CurrentTile, first: int, logits):
        """``add`` for keys by queries."""
        return logits

    def begin_sums(self, row: TileRow, tile: CurrentTile) -> None:
        """Before the first part of a tile."""

    def sum_up(self, row: TileRow, tile: CurrentTile, first: int, d_logits) -> None:
        """Adds gradients of the logits of a part, in base 2, to the sums."""

    def finish_tile(self, row: TileRow, tile: CurrentTile) -> None:
        """After the last part of a tile."""

    def finish_head(self, row: TileRow) -> None:
        """After the last tile of a row for one of the heads."""


def _slabs(x) -> list:
    """Parts of 128 lanes."""
    return [x[:, n : n + LANES] for n in range(0, x.shape[1], LANES)]


@dataclasses.dataclass(frozen=True)
class _DifferenceOfTokens(KernelBias):
    """``f (t_i - t_j)`` with a number ``t`` of each token and a factor ``f`` of each head.

    It is ``f (t_i - o) + f (o - o') + f (o' - t_j)``, where ``o`` and ``o'`` are the numbers of the first tokens of the
    blocks. The first term is a constant of the query, which does not change the weights. The second is the level of the
    tile, the third a small number of the key.
    """

    @staticmethod
    def minus(a, b):
        """The difference of two ``t``."""
        return a - b

    def counted(self, config: KernelConfig, x: Inputs, side: int, step: int = 1):
        """``t`` of every ``step``-th query or key, ``[batch or 1, heads or 1, 1, tokens / step]``."""

    def times(self, row: TileRow, differences):
        """``f`` times differences of ``t``."""
        return differences

    def column_of_keys(self, row: TileRow):
        """``of_keys`` as a column, for the current head of the row."""

    def of_queries(self, config, x, side):
        block = config.tilings[side].blocks.q
        origins = jnp.repeat(self.counted(config, x, 0, block), block, axis=-1)
        return self.minus(self.counted(config, x, 0), origins)[:, :, 0]

    def arrays(self, config, x, side):
        sizes = config.tilings[side].blocks[:2]
        return BiasArrays(origins=tuple(self.counted(config, x, n, size) for n, size in enumerate(sizes)))

    def scratch(self, config, side):
        keys = config.tilings[side].blocks.k
        if side == 1:
            return None, *[pltpu.VMEM((keys, LANES), jnp.float32)] * 2
        return None, None if self.in_features else pltpu.VMEM((SUBLANES, keys), jnp.float32), None

    def origins(self, row: TileRow, tile) -> list:
        """``o`` and ``o'`` of a tile."""
        blocks = (row.block, tile) if row.side == 0 else (tile, row.block)
        return [row.of_head(table)[0, n] for table, n in zip(row.x.bias.origins, blocks, strict=True)]

    def level(self, row, tile):
        q, k = self.origins(row, tile.index)
        return self.times(row, self.minus(q, k))

    def begin_tile(self, row, tile):
        if not self.in_features:
            row.sums.bias[...] = jnp.broadcast_to(self.of_keys(row, tile), row.sums.bias.shape)

    def add(self, row, tile, first, logits):
        if self.in_features:
            return logits
        queries, part = logits.shape
        return logits + jnp.tile(row.sums.bias[:, first : first + part], (queries // SUBLANES, 1))

    def begin_head(self, row):
        row.sums.bias[...] = self.column_of_keys(row)
        if row.d_bias:
            row.sums.d_bias[...] = jnp.zeros_like(row.sums.d_bias)

    def add_transposed(self, row, tile, first, logits):
        return logits + jnp.tile(row.sums.bias[...], (1, logits.shape[1] // LANES))

    def sum_up(self, row, tile, first, d_logits):
        row.sums.d_bias[...] += reduce(jnp.add, _slabs(d_logits))


@dataclasses.dataclass(frozen=True)
class LinearInKey(_DifferenceOfTokens):
    """``slope (p_i - p_j)``: ALiBi.

    It is ``in_features`` if there are spare features and key positions are a range: its numbers for the keys are then
    the same in every block.
    """

    in_features: bool

    minus = staticmethod(exact_difference)

    @classmethod
    def of(cls, x, spare, reach, ahead):
        return cls(spare and isinstance(x.kv_positions, Range))

    def numbers(self, x, ahead):
        """``slopes``, ``[heads]``."""
        return {"slopes": x.bias.slopes.astype(jnp.float32) * -LOG2E}

    def most(self, x, numbers):
        """Known only if the mask hides keys ahead."""
        if not hides_ahead(x.mask):
            return None
        farthest = self.minus(as_array(x.q_positions).max(), as_array(x.kv_positions).min())
        return jnp.maximum(0, numbers["slopes"] * farthest)

    def of_queries(self, config, x, side):
        return x.bias["slopes"][None, :, None] * super().of_queries(config, x, side)

    def own(self, row):
        if row.config.ranged[0]:
            return self.times(row, jax.lax.broadcasted_iota(jnp.int32, (1, row.blocks.q), 1))
        return self.times(row, self.minus(row.x.numbers[0][0][...], self.origins(row, 0)[0]))

    def counted(self, config, x, side, step=1):
        if not config.ranged[side]:
            return x.numbers[side][0][..., ::step]
        # Not a slice of all positions: a million of them would not fit in fast memory.
        return x.starts[side] + jnp.arange(0, (x.q, x.k)[side].shape[3], step)[None, None, None]

    def arrays(self, config, x, side):
        return super().arrays(config, x, side)._replace(scalars=x.bias["slopes"])

    def outputs(self, group, keys):
        return [BiasSum((group, 1, LANES))]

    def gradients(self, x, sums, d_lse):
        return {"slopes": sums[0].sum((0, 3, 4)).reshape(-1) * LN2}

    def times(self, row, differences):
        return row.x.bias.scalars[row.head] * differences.astype(jnp.float32)

    def of_keys(self, row, tile):
        shape = 1, row.blocks.k
        if row.config.ranged[1]:
            return self.times(row, -jax.lax.broadcasted_iota(jnp.int32, shape, 1))
        return self.times(row, self.minus(self.origins(row, tile.index)[1], row.buffers.numbers[0][tile.slot]))

    def column_of_keys(self, row):
        return row.x.bias.scalars[row.head] * -self._keys_ahead(row)

    def sum_up(self, row, tile, first, d_logits):
        super().sum_up(row, tile, first, d_logits)
        of_queries = jnp.sum(d_logits, axis=0, keepdims=True) * self._queries_ahead(row, tile, first)
        row.d_bias[0][row.group_head] += reduce(jnp.add, _slabs(of_queries))

    def finish_head(self, row):
        from_keys = jnp.sum(row.sums.d_bias[...] * self._keys_ahead(row), axis=0, keepdims=True)
        row.d_bias[0][row.group_head] -= from_keys

    def _keys_ahead(self, row: TileRow):
        """Distance of the keys from the first one of their block, a float32 column."""
        if row.config.ranged[1]:
            return jax.lax.broadcasted_iota(jnp.int32, (row.blocks.k, LANES), 0).astype(jnp.float32)
        return self.minus(row.sums.columns[0][...], self.origins(row, 0)[1])

    def _queries_ahead(self, row: TileRow, tile: CurrentTile, first: int):
        """Distance of the queries of a part from the first key of the block, a float32 row."""
        part = row.blocks.part
        q, k = self.origins(row, tile.index)
        if row.config.ranged[0]:
            within = first + jax.lax.broadcasted_iota(jnp.int32, (1, part), 1)
            return self.minus(q, k) + within.astype(jnp.float32)
        return self.minus(row.buffers.numbers[0][tile.slot, :, first : first + part], k)


@dataclasses.dataclass(frozen=True)
class Gates(_DifferenceOfTokens):
    """``c_i - c_j`` with ``c`` the sums of the logarithms of forget gates: FoX."""

    def numbers(self, x, ahead):
        """``q`` and ``k``, ``[batch, heads, 1, tokens]``."""
        return {"q": x.bias.q_gates[:, :, None] * LOG2E, "k": x.bias.kv_gates[:, :, None] * LOG2E}

    def most(self, x, numbers):
        return None

    def counted(self, config, x, side, step=1):
        return x.bias["qk"[side]][..., ::step]

    def arrays(self, config, x, side):
        arrays = super().arrays(config, x, side)
        return arrays._replace(copied=x.bias["k"]) if side == 0 else arrays._replace(outer=x.bias["k"])

    def scratch(self, config, side):
        copied = pltpu.VMEM((2, 1, config.tilings[0].blocks.k), jnp.float32) if side == 0 else None
        return copied, *super().scratch(config, side)[1:]

    def outputs(self, group, keys):
        return [BiasSum((group, 1, keys), of_keys=True)]

    def gradients(self, x, sums, d_lse):
        """A number added to all logits of a query changes the log-sum-exp, not the weights."""
        return {"q": d_lse[:, :, None], "k": sums[0].reshape(x.bias["k"].shape) * LN2}

    def part_of(self, row, tile):
        return row.batch, row.head, slice(None), row.tokens(tile)

    def of_keys(self, row, tile):
        return self.origins(row, tile.index)[1] - row.buffers.bias[tile.slot]

    def column_of_keys(self, row):
        return self.origins(row, 0)[1] - terms.column(row.of_head(row.x.bias.outer)[...])

    def finish_head(self, row):
        row.d_bias[0][row.group_head] = -terms.row(row.sums.d_bias[...])


@dataclasses.dataclass(frozen=True)
class ByDistance(KernelBias):
    """``b(i - j)`` for each head, a vector over all distances between ranges of positions: T5, KERPLE and others.

    For every tile a kernel reads a skewed window of the vector and makes a matrix of it: see ``terms.toeplitz``. In
    tiles where the bias is constant it is the level of the tile.

    Args:
        band: rows of 128 distances of the vector that tiles of the backward kernel read, as ``(first, stop)``: those
            where the bias varies.
        constant_from: see ``KernelBias``.
    """

    band: tuple[int, int]
    constant_from: int | None

    @staticmethod
    def refusal(x):
        if _sums_by_distance(x) > target().vmem // 2:
            return "the gradient of a bias by distance does not fit in fast memory at this length; use 'blockwise'"
        return None

    @classmethod
    def of(cls, x, spare, reach, ahead):
        return cls(_band(x, reach, ahead), x.bias.constant_from)

    def numbers(self, x, ahead):
        """See ``posjax.attention.formulas.distance_numbers``."""
        return distance_numbers(x, ahead)

    def most(self, x, numbers):
        return jnp.maximum(numbers["values"].max(-1), numbers["edges"].max(-1))

    def arrays(self, config, x, side):
        values = x.bias["values"]
        first, stop = self.band
        if side == 0:
            # Keys are along the lanes: the vector is reversed, so that its index ``queries - (i - j)`` rises with them.
            values = values[:, ::-1]
            values = jnp.concatenate([values[:, :1], values[:, :-1]], axis=1)
            first = 0
            stop = values.shape[1] // LANES
        copied = terms.skewed(values[:, first * LANES : stop * LANES], stop - first)
        return BiasArrays(scalars=x.bias["edges"], copied=copied)

    def scratch(self, config, side):
        q, k, _ = config.tilings[side].blocks
        matrix = pltpu.VMEM((q + k - LANES, LANES), jnp.float32)
        return pltpu.VMEM((2, (q + k) // LANES, SUBLANES, LANES), jnp.float32), matrix, matrix

    def outputs(self, group, keys):
        return [BiasSum((group, self.band[1] - self.band[0], SUBLANES, LANES)), BiasSum((group, 2, LANES))]

    def gradients(self, x, sums, d_lse):
        skewed, edges = (a.sum(0).reshape(-1, *a.shape[3:]) * LN2 for a in sums)
        values = terms.unskewed(skewed, skewed.shape[1] * LANES)
        before = self.band[0] * LANES
        after = x.bias["values"].shape[1] - before - values.shape[1]
        return {"values": jnp.pad(values, ((0, 0), (before, after))), "edges": edges.sum(-1)}

    def part_of(self, row, tile):
        return row.head, self._window(row, tile)

    def _window(self, row: TileRow, tile):
        """The rows of the skewed vector that a tile reads; backward, rows within the band."""
        outer, inner = row.sizes
        first = outer * (row.tiling.rows - row.block - 1) + inner * tile
        rows = (outer + inner) // LANES
        start = jax.lax.div(first, LANES)
        if row.side == 1:
            start = jnp.clip(start - self.band[0], 0, self.band[1] - self.band[0] - rows)
        return pl.ds(start, rows)

    def level(self, row, tile):
        if tile.kind.reach == NEAR:
            return None
        return row.x.bias.scalars[row.head, _edge(tile)]

    def begin_part(self, row, tile, first):
        if tile.kind.reach == NEAR:
            rows = terms.new_rows(first, row.blocks.part, *row.sizes)
            terms.toeplitz(row.buffers.bias.at[tile.slot], row.sums.bias, *rows)

    def add(self, row, tile, first, logits):
        if tile.kind.reach != NEAR:
            return logits
        slabs = [terms.slab(row.sums.bias, first + n, *row.sizes) for n in range(0, logits.shape[1], LANES)]
        return logits + jnp.concatenate(slabs, axis=1)

    add_transposed = add

    def begin_sums(self, row, tile):
        if tile.kind.reach == NEAR:
            row.sums.d_bias[...] = jnp.zeros_like(row.sums.d_bias)

    def sum_up(self, row, tile, first, d_logits):
        keys, queries = row.sizes
        slabs = _slabs(d_logits)
        if tile.kind.reach != NEAR:
            row.d_bias[1][row.group_head, _edge(tile)] += jnp.sum(reduce(jnp.add, slabs), axis=0)
            return
        for n, slab in enumerate(slabs):
            start = queries - LANES - first - n * LANES
            row.sums.d_bias[start : start + keys, :] += slab

    def finish_tile(self, row, tile):
        if tile.kind.reach == NEAR:
            first = self._window(row, tile.index).start
            for n, eight in enumerate(terms.untoeplitz(row.sums.d_bias)):
                row.d_bias[0][row.group_head, first + n] += eight


def _edge(tile: CurrentTile) -> int:
    """Index of the constant of a tile far behind or far ahead."""
    return int(tile.kind.reach == AHEAD)


# The sum of queries and keys of the largest backward blocks.
_LARGEST_BLOCKS = 4096


def _sums_by_distance(x: Call) -> int:
    """Bytes of two copies of the backward sums, 8 float32 numbers for each distance and head of a group."""
    first, stop = _band(x, _LARGEST_BLOCKS, x.q_positions.start - x.kv_positions.start)
    return 2 * x.q.shape[2] * (stop - first) * LANES * 32


def _band(x: Call, reach: int, ahead) -> tuple[int, int]:
    """Rows of 128 distances, between ``-keys`` and ``queries``, where a bias by distance varies, as ``(first, stop)``.

    ``ahead`` is the distance of the first query from the first key, an array if it is not known when tracing. Tiles
    at the ends of the band read up to ``reach`` more distances, the sum of their queries and keys.
    """
    queries, keys = x.q.shape[3], x.k.shape[2]
    rows = -(-(queries + keys) // LANES)
    edge = x.bias.constant_from
    if edge is None or not isinstance(ahead, int):
        return 0, rows
    middle = keys - ahead
    aside = edge + reach + LANES
    # At least what one tile reads.
    least = min(rows, reach // LANES)
    first = min(max(0, (middle - aside) // LANES), rows - least)
    return first, max(min(rows, -(-(middle + aside) // LANES)), first + least)


FORMS = {"none": KernelBias, "linear": LinearInKey, "gates": Gates, "by distance": ByDistance}


def form_of(x: Call) -> type[KernelBias] | None:
    """The form of the bias of a call in the kernels, or None."""
    return FORMS.get(bias_form(x))
