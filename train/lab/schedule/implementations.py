"""Attention kernels to compile: causal, bfloat16, batch 1, every query head with its own keys.

An implementation is a function of the shape, of its block sizes and of a chip that returns a `KernelProgram`: how to
build the function to compile, and how often each part of its kernel runs. To add one, write that function and name it
in `SCHEDULED`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from posjax.attention.tiles import Blocks
from train.lab.schedule.compiling import compile_for
from train.lab.schedule.cost import Cost, Executions, Implementation, KernelProgram, KernelShape, Launch, find_cost
from train.lab.schedule.posjax_kernels import POSJAX_KERNELS, forward_products
from train.runtime.chips import CHIPS


def make(name: str, shape: Mapping[str, int], blocks: Sequence[int], chip: str) -> tuple[Callable, list]:
    """The function and its abstract arguments; called by the compiling process."""
    return SCHEDULED[name].program(KernelShape(**shape), Blocks(*blocks), chip).make()


def schedule_of(name: str, chip: str, shape: KernelShape, blocks: Blocks, timeout: int) -> tuple[Cost, int]:
    """Compiles one program: the cost of its kernel, and its HBM in addition to arguments and results."""
    arguments = {"name": name, "shape": asdict(shape), "blocks": blocks, "chip": chip}
    compiled = compile_for(chip, "train.lab.schedule.implementations:make", arguments, timeout=timeout)
    launch = SCHEDULED[name].program(shape, blocks, chip).launch
    return find_cost(compiled.kernels, launch, CHIPS[chip]), compiled.temp_bytes


def causal_tiles(shape: KernelShape, blocks: Blocks) -> int:
    """How many tiles of all heads have pairs with key <= query: ceil(end / keys) in a row of queries [start, end)."""
    ends = range(blocks.q, shape.length + 1, blocks.q)
    return shape.heads * sum(math.ceil(end / blocks.k) for end in ends)


def splash_forward(shape: KernelShape, blocks: Blocks, chip: str) -> KernelProgram:
    """jax's splash attention, forward, without residuals; the same on every chip.

    Its grid is (heads, rows, key blocks). A block above the diagonal is a step without a tile, and loads nothing new.
    """
    q, kv, part = blocks
    rows, tiles = shape.heads * shape.length // q, causal_tiles(shape, blocks)
    tile = Executions("tile", tiles, forward_products(blocks, shape.head_dim))
    runs = Executions("row start", rows), tile, Executions("row finish", rows)
    # A tile loads its keys and values; a row its queries and their positions, 128 lanes of int32, and stores outputs.
    moved = tiles * kv * 2 * 2 * shape.head_dim + rows * q * (2 * 2 * shape.head_dim + 512)
    launch = Launch("splash_mha_fwd", rows * shape.length // kv, runs, tiles * q * kv, shape.causal_pairs, moved)
    sizes = {"block_q": q, "block_kv": kv, "block_kv_compute": part}
    return KernelProgram(lambda: (_splash(shape, **sizes), _inputs(shape, 3)), launch)


def splash_fused_backward(shape: KernelShape, blocks: Blocks, chip: str) -> KernelProgram:
    """jax's splash attention, backward in one kernel, which writes a dq for every key block; XLA sums these.

    Its grid is over key blocks and all rows of queries. The blocks of the forward pass, which is not measured, are 512.
    """
    q, kv, part = blocks
    columns, tiles = shape.heads * shape.length // kv, causal_tiles(shape, blocks)
    steps = columns * shape.length // q
    # K Q^T, P^T dO, V dO^T, dS^T Q and dS K
    of_part = (part, shape.head_dim, q), (part, q, shape.head_dim), (q, part, shape.head_dim)
    products = (*of_part[:2], *of_part) * (kv // part)
    runs = (
        Executions("column start", columns),
        Executions("tile", tiles, products),
        Executions("column finish", columns),
    )
    # A tile loads queries and outputs' gradients, and 8 sublanes each of log-sum-exp, delta and positions; a column
    # loads keys and values, and stores their gradients; every step writes a dq, even without a tile.
    moved = tiles * q * (2 * 2 * shape.head_dim + 3 * 8 * 4) + columns * kv * 4 * 2 * shape.head_dim
    moved += steps * q * 2 * shape.head_dim
    launch = Launch("splash_mha_dkv", steps, runs, tiles * q * kv, shape.causal_pairs, moved)
    sizes = {"block_q": 512, "block_kv": 512, "block_kv_compute": 512, "use_fused_bwd_kernel": True}
    sizes |= {"block_q_dkv": q, "block_kv_dkv": kv, "block_kv_dkv_compute": part}
    return KernelProgram(lambda: (_gradient(_splash(shape, **sizes)), _inputs(shape, 4)), launch)


def _splash(shape: KernelShape, **sizes) -> Callable:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    mask = masks.MultiHeadMask([masks.CausalMask((shape.length, shape.length))] * shape.heads)
    return splash.make_splash_mha(mask, block_sizes=splash.BlockSizes(**sizes), head_shards=1, q_seq_shards=1)


def _gradient(attend: Callable) -> Callable:
    """(q, k, v, d_out) -> (dq, dk, dv)."""
    import jax

    return lambda q, k, v, d_out: jax.vjp(attend, q, k, v)[1](d_out)


def _inputs(shape: KernelShape, count: int) -> list:
    import jax
    import jax.numpy as jnp

    return [jax.ShapeDtypeStruct((shape.heads, shape.length, shape.head_dim), jnp.bfloat16)] * count


# Blocks of 512 are slower than larger ones; they are here because published numbers often use them.
_LARGE = itertools.product((1024, 2048), (1024, 2048), (256, 512, 1024))
_SPLASH_SIZES = (Blocks(512, 512, 512), *itertools.starmap(Blocks, _LARGE))
SCHEDULED = {
    "jax splash, forward": Implementation(splash_forward, _SPLASH_SIZES),
    "jax splash, fused backward": Implementation(splash_fused_backward, _SPLASH_SIZES),
    **POSJAX_KERNELS,
}
"""Every kernel that is compiled, by the name it has in tables and configs."""
