"""What both kernels take: the static description of a call, its arrays, and how blocks of them are named."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posjax.attention.tiles import Blocks, Kind
from posjax.attention.tpu.schedule import Lists
from posjax.attention.tpu.terms import Pattern

GRID = ("parallel", "parallel", "arbitrary")
"""Batch and heads may go to different cores; the rows of tiles of a head follow each other."""


@dataclasses.dataclass(frozen=True)
class Call:
    """The static part of a call.

    Args:
        forward: blocks of the forward kernel, and ``backward`` those of the backward kernel.
        forward_kinds: kinds of tiles that occur, and ``backward_kinds``.
        pattern: mask and branches without their arrays.
        q_numbers: how many numbers of a query positions and masks read, and ``k_numbers`` of a key.
        ranged: whether the positions of the queries and of the keys are ranges.
        bias: ``"linear"``, ``"gates"``, ``"relative"`` or None.
        softcap: in base 2, or None.
        bounded: whether the forward kernel puts a bound of the logits in place of their running maximum.
        spare: whether the matrix unit takes 128 more features than a head has in the same time. Then what a linear bias
            adds for each key, and the bound of each query, ride along in the product ``Q K^T``: numbers in three pieces
            of bfloat16 on one side, ones on the other.
        band: the rows of the skewed vector of a bias by distance, from the first to before the last, that the backward
            kernel's tiles read: those where the bias varies.
        vmem: bytes of fast memory a kernel may use.
        interpret: how to run without a TPU (``pltpu.InterpretParams``), or False.
    """

    forward: Blocks
    backward: Blocks
    forward_kinds: tuple[Kind, ...]
    backward_kinds: tuple[Kind, ...]
    pattern: Pattern
    q_numbers: int
    k_numbers: int
    ranged: tuple[bool, bool]
    bias: str | None
    softcap: float | None
    bounded: bool
    spare: bool
    band: tuple[int, int]
    vmem: int
    interpret: Any = False

    @property
    def bias_rides(self) -> bool:
        """Whether the bias of each key is among the features: where it is the same in every block."""
        return self.spare and self.bias == "linear" and self.ranged[1]

    @property
    def adds_of_keys(self) -> bool:
        """Whether a linear bias or gates are added to the logits, since they do not ride along."""
        return self.bias in ("linear", "gates") and not self.bias_rides

    @property
    def bound_rides(self) -> bool:
        """Whether the bound of each query is."""
        return self.spare and self.bounded and self.softcap is None


class Tables(NamedTuple):
    """What a kernel looks up for every block: the tiles to visit, and the origin of its positions or gates.

    Args:
        visits: order lists.
        q_origins: ``[batch or 1, heads or 1, 1, q blocks]`` for a linear bias or gates, otherwise None.
        k_origins: the same for the keys.
    """

    visits: Lists
    q_origins: jax.Array | None
    k_origins: jax.Array | None


class Inputs(NamedTuple):
    """The arrays of a call, heads before tokens, tokens padded to whole blocks.

    Args:
        q: ``[batch, heads, pairs, queries, size]``, times the scale and ``log2 e``.
        k: ``[batch, kv heads, pairs, keys, size]``.
        v: ``[batch, kv heads, keys, value size]``.
        starts: int32 ``[2]``, the first position of the queries and of the keys where they are ranges.
        forward: tables of the forward kernel.
        backward: tables of the backward kernel.
        q_numbers: int32 ``[batch or 1, 1, 1, queries]`` each: positions, unless they are a range, and what masks read.
        k_numbers: the same of the keys.
        bias: its numbers times ``log2 e``. ``"linear"``: ``slopes`` ``[heads]`` of ``slope (p_i - p_j)``. ``"gates"``:
            ``q`` and ``k``, ``[batch, heads, 1, tokens]``, of ``c_i - c_j``. ``"relative"``:
        bound: ``[batch, heads, 1, queries]``, float32, what no logit of a query exceeds, less what a linear bias adds
            to all of them; None if the call is not bounded.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    starts: jax.Array
    forward: Tables
    backward: Tables
    q_numbers: tuple[jax.Array, ...]
    k_numbers: tuple[jax.Array, ...]
    bias: dict[str, jax.Array]
    bound: jax.Array | None


def rows_of(numbers: tuple, bias: dict, side: str) -> tuple:
    """Everything that has one number for each token of a side: what masks read, then the gates."""
    return (*numbers, bias[side]) if side in bias else numbers


def scalars_of(bias: dict) -> dict:
    """What has a few numbers for each head."""
    return {name: bias[name] for name in ("slopes", "edges") if name in bias}


anywhere = pl.BlockSpec(memory_space=pl.ANY)
scalar_memory = pl.BlockSpec(memory_space=pltpu.SMEM)


def at(index, size: int):
    """The index along an axis that may have been left at 1."""
    return index if size > 1 else 0


def product(a, b, contract: tuple[int, int]):
    """``a b`` summed over one axis of each, in float32; exactly so for float32 factors."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def work(x: Inputs, of_q: int, of_v: int) -> pl.CostEstimate:
    """What XLA's scheduler is told of a kernel, behind which it hides transfers: half of all pairs, as if causal.

    Args:
        x: the inputs.
        of_q: matrix products over or into features of queries and keys, and ``of_v`` of values.
    """
    pairs = x.q.shape[0] * x.q.shape[1] * x.q.shape[3] * x.k.shape[3] // 2
    return pl.CostEstimate(
        flops=2 * pairs * (of_q * x.q.shape[4] + of_v * x.v.shape[3]),
        transcendentals=pairs,
        bytes_accessed=2 * sum(array.size * array.dtype.itemsize for array in (x.q, x.k, x.v)),
    )


def compiler_params(call: Call) -> pltpu.CompilerParams:
    """In-order rows, and the fast memory a call may use."""
    return pltpu.CompilerParams(dimension_semantics=GRID, vmem_limit_bytes=call.vmem)
