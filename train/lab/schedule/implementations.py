"""Attention kernels to compile: causal, bfloat16, batch 1, every query head with its own keys.

An implementation is a function of the shape and of its block sizes that returns a `KernelProgram`: how to build the
function to compile, and how often each part of its kernels runs. To add one, write that function and name it in
`SCHEDULED`.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace

from train.lab.schedule.compiling import compile_for
from train.lab.schedule.cost import Cost, Executions, Launch, cost, find_kernel
from train.lab.schedule.posjax_kernels import POSJAX_KERNELS
from train.lab.schedule.program import Blocks, Implementation, KernelProgram, KernelShape
from train.runtime.chips import CHIPS, Product


def make(name: str, shape: Mapping[str, int], blocks: Blocks, chip: str) -> tuple[Callable, list]:
    """The function and its abstract arguments; called by the compiling process."""
    return SCHEDULED[name].program(KernelShape(**shape), blocks, chip).make()


def missing(name: str) -> str | None:
    """Why an implementation cannot be compiled here, or None."""
    package = SCHEDULED[name].needs
    return None if package is None or importlib.util.find_spec(package) else f"{package} is not installed"


def schedule_of(name: str, chip: str, shape: KernelShape, blocks: Blocks, timeout: int) -> tuple[tuple[Cost, ...], int]:
    """Compiles one program: the cost of each of its kernels, and its HBM in addition to arguments and results."""
    arguments = {"name": name, "shape": asdict(shape), "blocks": dict(blocks), "chip": chip}
    compiled = compile_for(chip, "train.lab.schedule.implementations:make", arguments, timeout=timeout)
    launches = SCHEDULED[name].program(shape, blocks, chip).launches
    kernels = [(find_kernel(compiled.kernels, launch.kernel), launch) for launch in launches]
    return tuple(cost(kernel, launch, CHIPS[chip]) for kernel, launch in kernels), compiled.temp_bytes


def causal_tiles(length: int, q: int, kv: int) -> tuple[int, int]:
    """How many q x kv tiles have only pairs with key <= query, and how many have some such pairs and some others.

    A row of queries [start, end) has floor((start + 1) / kv) tiles of the first kind, out of ceil(end / kv).
    """
    starts = range(0, length - q + 1, q)
    full = sum((start + 1) // kv for start in starts)
    return full, sum(math.ceil((start + q) / kv) for start in starts) - full


def forward_products(q: int, kv: int, compute: int, head_dim: int) -> tuple[Product, ...]:
    """Q K^T and P V of one tile, in parts of `compute` keys."""
    return ((q, head_dim, compute), (q, compute, head_dim)) * (kv // compute)


def key_products(q: int, kv: int, compute: int, head_dim: int) -> tuple[Product, ...]:
    """K Q^T, P^T dO, V dO^T and dS^T Q of one tile: the products for gradients of keys and values."""
    return ((compute, head_dim, q), (compute, q, head_dim)) * (2 * kv // compute)


def query_products(q: int, kv: int, head_dim: int) -> tuple[Product, ...]:
    """Q K^T, dO V^T and dS K of one tile: the products for the gradient of queries alone."""
    return (q, head_dim, kv), (q, head_dim, kv), (q, kv, head_dim)


def splash_forward(shape: KernelShape, q: int, kv: int, compute: int) -> KernelProgram:
    """jax's splash attention, forward, without residuals.

    Its grid is (heads, rows, key blocks). A block above the diagonal is a step without a tile, and loads nothing new.
    """
    launch = _by_rows("splash_mha_fwd", shape, q, kv, forward_products(q, kv, compute, shape.head_dim))
    # A row also moves its queries and outputs, and the queries' positions: 128 lanes of int32.
    launch = _moving(launch, shape.heads * shape.length * (2 * 2 * shape.head_dim + 512))
    sizes = {"block_q": q, "block_kv": kv, "block_kv_compute": compute}
    return KernelProgram(lambda: (_splash(shape, **sizes), _inputs(shape, 3)), (launch,))


def splash_fused_backward(shape: KernelShape, q: int, kv: int, compute: int) -> KernelProgram:
    """jax's splash attention, backward in one kernel, which writes a dq for every key block; XLA sums these."""
    products = key_products(q, kv, compute, shape.head_dim) + ((q, compute, shape.head_dim),) * (kv // compute)
    launch = _by_columns(shape, q, kv, products)
    launch = _moving(launch, launch.steps * q * 2 * shape.head_dim)  # every step writes a dq, even without a tile
    sizes = {**_FORWARD, **_backward_sizes(q, kv, compute), "use_fused_bwd_kernel": True}
    return KernelProgram(lambda: (_gradient(_splash(shape, **sizes)), _inputs(shape, 4)), (launch,))


def splash_two_kernel_backward(shape: KernelShape, q: int, kv: int, compute: int) -> KernelProgram:
    """jax's splash attention, backward in one kernel for keys and values and one for queries."""
    keys = _by_columns(shape, q, kv, key_products(q, kv, compute, shape.head_dim))
    queries = _by_rows("splash_mha_dq", shape, q, kv, query_products(q, kv, shape.head_dim))
    # A row moves queries, outputs' gradients and the result, positions, and two float32 per query.
    queries = _moving(queries, shape.heads * shape.length * (3 * 2 * shape.head_dim + 512 + 2 * 4))
    sizes = {**_FORWARD, **_backward_sizes(q, kv, compute), "block_q_dq": q, "block_kv_dq": kv}
    return KernelProgram(lambda: (_gradient(_splash(shape, **sizes)), _inputs(shape, 4)), (keys, queries))


def legacy_forward(shape: KernelShape, q: int, kv: int, compute: int) -> KernelProgram:
    """jax's first flash attention, forward, without a bias."""

    def attend(queries, keys, values):
        from jax.experimental.pallas.ops.tpu import flash_attention as flash

        sizes = flash.BlockSizes(block_q=q, block_k_major=kv, block_k=compute, block_b=1)
        inputs = (x[None] for x in (queries, keys, values))
        return flash.flash_attention(*inputs, causal=True, block_sizes=sizes)[0]

    launch = _by_rows("flash_attention", shape, q, kv, forward_products(q, kv, compute, shape.head_dim))
    launch = _moving(launch, shape.heads * shape.length * 2 * 2 * shape.head_dim)
    return KernelProgram(lambda: (attend, _inputs(shape, 3)), (launch,))


def tokamax_forward(shape: KernelShape, q: int, kv: int, compute: int) -> KernelProgram:
    """tokamax's splash attention, forward: its grid holds the visited tiles only, and only some of them are masked."""
    launch = _by_rows("splash_mha_fwd", shape, q, kv, forward_products(q, kv, compute, shape.head_dim))
    launch = _visited_only(_moving(launch, shape.heads * shape.length * (2 * 2 * shape.head_dim + 512)), shape, q, kv)
    sizes = {"block_q": q, "block_kv": kv, "block_kv_compute": compute}
    return KernelProgram(lambda: (_tokamax(shape, **sizes), _inputs(shape, 3)), (launch,))


def tokamax_backward(shape: KernelShape, q: int, kv: int, compute: int) -> KernelProgram:
    """tokamax's splash attention, backward in one kernel and in linear memory: every tile adds to one of three dq."""
    products = key_products(q, kv, compute, shape.head_dim) + ((q, compute, shape.head_dim),) * (kv // compute)
    launch = _visited_only(_by_columns(shape, q, kv, products), shape, q, kv)
    launch = _moving(launch, launch.steps * q * 2 * 2 * shape.head_dim)  # a dq is read, added to and written
    sizes = {**_FORWARD, **_backward_sizes(q, kv, compute), "dq_reduction_steps": 3}
    return KernelProgram(lambda: (_gradient(_tokamax(shape, **sizes)), _inputs(shape, 4)), (launch,))


def _by_rows(kernel: str, shape: KernelShape, q: int, kv: int, products: tuple[Product, ...]) -> Launch:
    """A grid over rows of queries and all key blocks; a tile loads its keys and values."""
    rows, tiles = shape.heads * shape.length // q, shape.heads * sum(causal_tiles(shape.length, q, kv))
    runs = Executions("row start", rows), Executions("tile", tiles, products), Executions("row finish", rows)
    moved = tiles * kv * 2 * 2 * shape.head_dim
    return Launch(kernel, rows * shape.length // kv, runs, tiles * q * kv, shape.causal_pairs, moved)


def _by_columns(shape: KernelShape, q: int, kv: int, products: tuple[Product, ...]) -> Launch:
    """Splash's grid over key blocks and all rows of queries.

    A tile loads queries and outputs' gradients, and 8 sublanes each of log-sum-exp, delta and positions; a column
    loads keys and values, and stores their gradients.
    """
    columns, tiles = shape.heads * shape.length // kv, shape.heads * sum(causal_tiles(shape.length, q, kv))
    runs = (
        Executions("column start", columns),
        Executions("tile", tiles, products),
        Executions("column finish", columns),
    )
    moved = tiles * q * (2 * 2 * shape.head_dim + 3 * 8 * 4) + columns * kv * 4 * 2 * shape.head_dim
    return Launch("splash_mha_dkv", columns * shape.length // q, runs, tiles * q * kv, shape.causal_pairs, moved)


def _visited_only(launch: Launch, shape: KernelShape, q: int, kv: int) -> Launch:
    """Splash's grid without empty steps, and with a separate part for tiles that need no mask."""
    full, masked = (shape.heads * tiles for tiles in causal_tiles(shape.length, q, kv))
    start, tile, finish = launch.runs
    tiles = Executions("full tile", full, tile.products), Executions("masked tile", masked, tile.products)
    return replace(launch, steps=full + masked, runs=(start, *tiles, finish))


def _moving(launch: Launch, more: float) -> Launch:
    return replace(launch, moved_bytes=launch.moved_bytes + more)


_FORWARD = {"block_q": 512, "block_kv": 512, "block_kv_compute": 512}
"""The block sizes of the forward pass that a gradient needs, which is not measured."""


def _splash(shape: KernelShape, **sizes) -> Callable:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    mask = masks.MultiHeadMask([masks.CausalMask((shape.length, shape.length))] * shape.heads)
    return splash.make_splash_mha(mask, block_sizes=splash.BlockSizes(**sizes), head_shards=1, q_seq_shards=1)


def _backward_sizes(q: int, kv: int, compute: int) -> dict[str, int]:
    return {"block_q_dkv": q, "block_kv_dkv": kv, "block_kv_dkv_compute": compute}


def _tokamax(shape: KernelShape, **config) -> Callable:
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as splash
    from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks

    mask = masks.CausalMask((shape.length, shape.length))
    return splash.make_splash_mha(mask, config=splash.SplashConfig(**config), q_seq_shards=1)


def _gradient(attend: Callable) -> Callable:
    """(q, k, v, d_out) -> (dq, dk, dv)."""
    import jax

    return lambda q, k, v, d_out: jax.vjp(attend, q, k, v)[1](d_out)


def _inputs(shape: KernelShape, count: int) -> list:
    import jax
    import jax.numpy as jnp

    return [jax.ShapeDtypeStruct((shape.heads, shape.length, shape.head_dim), jnp.bfloat16)] * count


def _grid(**sizes: tuple[int, ...]) -> tuple[Blocks, ...]:
    """Every combination of the sizes."""
    return tuple(dict(zip(sizes, choice, strict=True)) for choice in itertools.product(*sizes.values()))


# Blocks of 512 are slower than larger ones; they are here because published numbers often use them.
_SIZES = (
    {"q": 512, "kv": 512, "compute": 512},
    *_grid(q=(1024, 2048), kv=(1024, 2048), compute=(256, 512, 1024)),
)
SCHEDULED = {
    "jax splash, forward": Implementation(splash_forward, _SIZES),
    "jax legacy flash, forward": Implementation(legacy_forward, _SIZES),
    "tokamax splash, forward": Implementation(tokamax_forward, _SIZES, needs="tokamax"),
    "jax splash, fused backward": Implementation(splash_fused_backward, _SIZES),
    "jax splash, two-kernel backward": Implementation(splash_two_kernel_backward, _SIZES),
    "tokamax splash, fused backward": Implementation(tokamax_backward, _SIZES, needs="tokamax"),
    **POSJAX_KERNELS,
}
"""Every kernel that is compiled, by the name it has in tables and configs."""
