"""The inputs of both kernels: the static description of a call and its arrays, queries before keys in every pair.

The features of all heads of a token are adjacent, ``[batch, 1, ..., tokens, heads x size]``, as projections write and
read them, so that nothing around a kernel is transposed; if a head does not fill whole lanes the layout is
``[batch, heads, ..., tokens, size]``.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posjax.attention.tiles import Blocks, Kind
from posjax.attention.tpu.terms import LANES, Pattern
from posjax.attention.tpu.tile_lists import Lists

GRID = ("parallel", "parallel", "arbitrary")
"""Batch and heads may go to different cores; the rows of tiles of a head run one after the other."""


class Tiling(NamedTuple):
    """The blocks of a kernel, the kinds of tiles that occur in them, and how many rows of tiles a head has."""

    blocks: Blocks
    kinds: tuple[Kind, ...]
    rows: int


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """The static part of a call.

    Args:
        heads: query heads.
        kv_heads: key heads.
        size: the head size of queries and keys.
        value_size: the head size of values.
        tilings: those of the forward kernel, whose rows are blocks of queries, and of the backward kernel, whose rows
            are blocks of keys.
        pattern: mask and branches without their arrays.
        ranged: whether the positions of the queries and of the keys are ranges.
        bias: a ``posjax.attention.tpu.biases.KernelBias``.
        softcap: the soft cap in base 2, or None.
        factor: the factor of the queries, ``log2 e`` included.
        bounded: whether the forward kernel uses a bound of the logits instead of their running maximum.
        spare: whether the matrix unit handles 128 more features than a head has in the same time. Then the number of a
            linear bias for each key, and the bound of each query, are appended as features for the product ``Q K^T``:
            numbers in pieces of bfloat16 on one side, ones on the other.
        vmem: bytes of fast memory a kernel may use.
        interpret: how to run without a TPU (``pltpu.InterpretParams``), or False.
    """

    heads: int
    kv_heads: int
    size: int
    value_size: int
    tilings: tuple[Tiling, Tiling]
    pattern: Pattern
    ranged: tuple[bool, bool]
    bias: Any
    softcap: float | None
    factor: float
    bounded: bool
    spare: bool
    vmem: int
    interpret: Any = False

    @property
    def bound_in_features(self) -> bool:
        """Whether the bound of each query is an appended feature."""
        return self.spare and self.bounded and self.softcap is None

    @property
    def compiler_params(self) -> pltpu.CompilerParams:
        """Sequential rows, and the fast memory that a call may use."""
        return pltpu.CompilerParams(dimension_semantics=GRID, vmem_limit_bytes=self.vmem)


class Inputs(NamedTuple):
    """The arrays of a call, tokens padded to whole blocks.

    Args:
        q: ``[batch, 1, pairs, queries, heads x size]`` or ``[batch, heads, pairs, queries, size]``: ``merge_heads``.
        k: ``[batch, 1, pairs, keys, kv heads x size]``, or with a head axis like ``q``.
        v: ``[batch, 1, keys, kv heads x value size]``, or with a head axis like ``q``.
        starts: int32 ``[2]``, the first position of the queries and of the keys if they are ranges.
        visits: the tiles that the forward and the backward kernel visit.
        numbers: int32 ``[batch or 1, 1, 1, tokens]`` each, of the queries and of the keys: positions, unless they are a
            range, and the arrays of masks.
        bias: numbers of the bias times ``log2 e``: see ``KernelBias.numbers``.
        bound: ``[batch, heads, 1, pairs + 1]``, float32, the length of the longest key of each pair of features, and
            the most that the bias adds; None if the call is not bounded.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    starts: jax.Array
    visits: tuple[Lists, Lists]
    numbers: tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]
    bias: dict[str, jax.Array]
    bound: jax.Array | None


def features_at(shape: tuple[int, ...], head, size: int) -> tuple:
    """The features of a head in an array of ``merge_heads``: the index on its second axis, and the columns."""
    if shape[1] > 1 or shape[-1] == size:
        return head if shape[1] > 1 else 0, slice(None)
    return 0, pl.ds(pl.multiple_of(head * size, LANES), size)


def times_factor(config: KernelConfig, x):
    """Queries or keys times the factor of the queries, rounded once."""
    return x if config.factor == 1 else (x.astype(jnp.float32) * config.factor).astype(x.dtype)


def product(a, b, contract: tuple[int, int]):
    """``a b`` summed over one axis of each, in float32; at the highest precision for float32 factors."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def work(config: KernelConfig, x: Inputs, of_q: int, of_v: int) -> pl.CostEstimate:
    """The cost estimate for XLA's scheduler, which hides transfers behind a kernel: half of all pairs, as if causal.

    Args:
        config: the static part of the call.
        x: the inputs.
        of_q: number of matrix products over or into features of queries and keys.
        of_v: the same for features of values.
    """
    pairs = x.q.shape[0] * config.heads * x.q.shape[3] * x.k.shape[3] // 2
    return pl.CostEstimate(
        flops=2 * pairs * (of_q * config.size + of_v * config.value_size),
        transcendentals=pairs,
        bytes_accessed=2 * sum(array.size * array.dtype.itemsize for array in (x.q, x.k, x.v)),
    )
