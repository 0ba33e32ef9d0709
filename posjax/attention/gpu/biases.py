"""Biases inside the kernels, one class for each form of ``posjax.attention.formulas``.

A class is derived from ``KernelBias``, overrides what differs from no bias, and stands in ``FORMS``.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from posjax.attention.call import Call
from posjax.attention.formulas import LN2, LOG2E, distance_numbers, exact_difference
from posjax.attention.gpu import mosaic
from posjax.attention.gpu.inputs import BLOCK, Inputs, KernelConfig, own
from posjax.attention.gpu.tile import Tile
from posjax.attention.tiles import BEHIND, NEAR


class BiasSums(NamedTuple):
    """Sums of the gradients ``dS`` of the logits in base e, from which that of a bias is computed.

    Args:
        of_queries: see ``KernelBias.summed``, ``[batch, heads, sums, queries]``, or None.
        of_keys: ``-sum_i dS`` for each key, ``[batch, heads, keys]``, or None.
        d_lse: the gradient of the log-sum-exp, which is ``sum_j dS`` for each query, ``[batch, heads, queries]``.
        of_pairs: ``dS`` itself, float32 ``[batch, heads, queries, keys]``, or None.
        by_distance: the sums at distances ``-keys`` to ``queries - 1``, ``[heads, queries + keys]``, or None.
    """

    of_queries: jax.Array | None
    of_keys: jax.Array | None
    d_lse: jax.Array
    of_pairs: jax.Array | None
    by_distance: jax.Array | None


@dataclasses.dataclass(frozen=True)
class KernelBias:
    """The base class of the forms. An object is static: the numbers are in ``Inputs.bias``.

    Class attributes:
        adds: whether the kernels add anything.
        constant_from: the distance from which it is constant, or None.
        by_distance: whether it is a number for each distance.
        sums: how many sums over the pairs of each query its gradient needs.
        of_pairs: whether it is a number for each pair of tokens.
        of_tokens: whether it has a number for each head and token, ``numbers["q"]`` and ``numbers["k"]``.
    """

    adds = True
    constant_from = None
    by_distance = False
    sums = 0
    of_pairs = False
    of_tokens = False

    @classmethod
    def of(cls, x: Call) -> "KernelBias":
        """The form for a call."""
        return cls()

    def numbers(self, x: Call, ahead) -> dict[str, jax.Array]:
        """Its numbers, in base 2. ``ahead``: distance of the first query from the first key."""
        return {}

    def by_keys(self, x: Inputs) -> Inputs:
        """The inputs for tiles whose rows are keys."""
        return x

    def of_queries(self, config: KernelConfig, x: Inputs):
        """The constant of each query, which no kernel adds, ``[batch or 1, heads, queries]``; or None."""

    def add(self, tile: Tile, reach: str, logits):
        """The logits plus the bias of a tile, without the constant of each query."""
        return logits

    def summed(self, tile: Tile, reach: str, d_logits, so_far: tuple) -> tuple:
        """The ``sums`` of each query so far, plus those of a tile."""
        return so_far

    def gradients(self, x: Inputs, sums: BiasSums) -> dict:
        """Gradients of ``numbers``."""
        return {}


@dataclasses.dataclass(frozen=True)
class NoBias(KernelBias):
    """No bias."""

    adds = False


@dataclasses.dataclass(frozen=True)
class LinearInKey(KernelBias):
    """``slope (p_j - p_i)``: ALiBi.

    With the position ``o`` of the first query of a block it is ``slope (p_j - o)``, which the kernels add, and a
    constant of the query, ``slope (o - p_i)``.
    """

    sums = 1

    def numbers(self, x, ahead):
        """``slopes``, ``[heads]``."""
        return {"slopes": x.bias.slopes.astype(jnp.float32) * LOG2E}

    def of_queries(self, config, x):
        if config.ranged[0]:
            ahead = jnp.arange(x.q.shape[1])[None, None] % BLOCK
        else:
            positions = x.numbers[0][:, :1]
            ahead = exact_difference(positions, jnp.repeat(positions[..., ::BLOCK], BLOCK, axis=-1))
        return x.bias["slopes"][None, :, None] * -ahead.astype(jnp.float32)

    def add(self, tile, reach, logits):
        config, x = tile.config, tile.x
        slope = x.bias["slopes"][tile.head]
        keys = tile.k
        if config.ranged[0]:
            origin = tile.q.start + tile.origin
        else:
            positions = x.numbers[0]
            origin = positions[own(positions, tile.batch), 0, tile.origin]
        if config.ranged[1]:
            base = slope * exact_difference(keys.start + keys.index, origin)
            count = logits.shape[keys.dimension]
            return logits + keys.repeated(mosaic.line(slope, base, count, keys.layout, config.interpret), logits.shape)
        return logits + keys.repeated(slope * exact_difference(keys.numbers[0], origin), logits.shape)

    def summed(self, tile, reach, d_logits, so_far):
        return (so_far[0] + (d_logits * tile.distances()).sum(axis=1),)

    def gradients(self, x, sums):
        return {"slopes": sums.of_queries.sum((0, 2, 3)) * LN2}


@dataclasses.dataclass(frozen=True)
class Gates(KernelBias):
    """``c_i - c_j`` with ``c`` the sums of the logarithms of forget gates: FoX.

    The kernels add ``c_o - c_j`` with the first query ``o`` of the block; ``c_i - c_o`` is a constant of the query.
    """

    of_tokens = True

    def numbers(self, x, ahead):
        """``q``, ``[batch, heads, queries]``, and ``k``, ``[batch, heads, 1, keys]``."""
        return {"q": x.bias.q_gates * LOG2E, "k": x.bias.kv_gates[:, :, None] * LOG2E}

    def of_queries(self, config, x):
        gates = x.bias["q"]
        return gates - jnp.repeat(gates[..., ::BLOCK], BLOCK, axis=-1)

    def add(self, tile, reach, logits):
        gates = tile.x.bias["q"]
        origin = gates[own(gates, tile.batch), tile.head, tile.origin]
        return logits + tile.k.repeated(origin - tile.k.of_bias, logits.shape)

    def gradients(self, x, sums):
        return {"q": sums.d_lse * LN2, "k": sums.of_keys[:, :, None] * LN2}


@dataclasses.dataclass(frozen=True)
class ByDistance(KernelBias):
    """``b(i - j)`` for each head, a vector over all distances between ranges of positions: T5, KERPLE and others.

    Every thread reads the numbers of its pairs. In tiles where the bias is constant one number is added.

    Args:
        constant_from: see ``KernelBias``.
    """

    constant_from: int | None
    by_distance = True

    @classmethod
    def of(cls, x):
        return cls(x.bias.constant_from)

    def numbers(self, x, ahead):
        """``values``, ``[heads, queries + keys]``, at distances ``-keys`` to ``queries - 1``, and ``edges``."""
        return distance_numbers(x, ahead)

    def add(self, tile, reach, logits):
        if reach != NEAR:
            return logits + tile.x.bias["edges"][tile.head, 0 if reach == BEHIND else 1]
        start = tile.q.index - tile.k.index + tile.x.k.shape[1]
        values = tile.x.bias["values"]
        return logits + mosaic.by_distance(
            values, tile.head, start, logits.shape, tile.transposed, tile.config.interpret
        )

    @property
    def sums(self):
        """Those of tiles far behind and far ahead."""
        return 0 if self.constant_from is None else 2

    def summed(self, tile, reach, d_logits, so_far):
        if reach == NEAR:
            return so_far
        behind, ahead = so_far
        of_tile = d_logits.sum(axis=1)
        return (behind + of_tile, ahead) if reach == BEHIND else (behind, ahead + of_tile)

    def gradients(self, x, sums):
        edges = jnp.zeros_like(x.bias["edges"]) if sums.of_queries is None else sums.of_queries.sum((0, 3))
        return {"values": sums.by_distance * LN2, "edges": edges * LN2}


@dataclasses.dataclass(frozen=True)
class WholeArray(KernelBias):
    """An array ``b[batch, head, i, j]``, read tile by tile; a batch or heads of 1 are shared.

    Its gradient is ``dS``, which takes memory for every pair and head.
    """

    of_pairs = True

    def numbers(self, x, ahead):
        """``pairs``, in base e and in the dtype of the array."""
        return {"pairs": x.bias.array}

    def by_keys(self, x):
        # Mosaic reads rows of memory only.
        return x._replace(bias={"pairs": x.bias["pairs"].swapaxes(-1, -2)})

    def add(self, tile, reach, logits):
        pairs = tile.x.bias["pairs"]
        rows, columns = (tile.k, tile.q) if tile.transposed else (tile.q, tile.k)
        at = (pl.ds(axis.index, count) for axis, count in zip((rows, columns), tile.shape, strict=True))
        part = mosaic.load(pairs.at[own(pairs, tile.batch), own(pairs, tile.head, axis=1), *at], mosaic.TILE)
        return logits + part.astype(jnp.float32) * LOG2E

    def gradients(self, x, sums):
        pairs = x.bias["pairs"]
        shared = tuple(axis for axis in range(2) if pairs.shape[axis] == 1)
        return {"pairs": sums.of_pairs.sum(shared, keepdims=True).astype(pairs.dtype)}


FORMS = {"none": NoBias, "linear": LinearInKey, "gates": Gates, "by distance": ByDistance, "pairs": WholeArray}
