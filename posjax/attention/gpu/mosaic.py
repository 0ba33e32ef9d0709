"""What the kernels use of Pallas' Mosaic GPU, whose interface moves: layouts, buffers, products, sums by distance.

A kernel runs in warpgroups of 128 threads. A tile of 64 rows that the matrix unit computes lies in the registers of one
warpgroup in the layout ``TILE``; numbers of its rows and of its columns are vectors in the layouts ``ROWS`` and
``COLUMNS``. Features lie in shared memory in swizzled blocks, as the matrix unit reads them.

Mosaic's interpreter (jax 0.11 and 0.12) lacks products that add to numbers in registers, products whose first factor
is in registers, and code in MLIR; the functions that need these have a second form, for ``interpret``.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from posjax._lowered import vary, varying

ROWS_OF_GROUP = 64
"""Rows of a tile of one warpgroup."""

GROUPS = 2
"""Warpgroups that compute."""
_COMPUTING_REGISTERS, _COPYING_REGISTERS = 232, 40
"""Registers of a thread: the three warpgroups share 3 x 168."""

GROUP = "group"
"""The axis of the warpgroups of a kernel."""

TILE = plgpu.Layout.WGMMA
ROWS = TILE.reduce(1)
COLUMNS = TILE.reduce(0)


def run(
    body: Callable, inputs: Any, *, out_type: list, scratch: Any, grid: dict[str, int], name: str, interpret
) -> list:
    """Runs ``body(inputs, *outputs, scratch)``, all of them references, for every point of a grid.

    ``inputs`` is a tree of arrays. ``GROUPS`` warpgroups compute and one copies: see ``in_roles``.
    """
    arrays, structure = jax.tree.flatten(inputs)

    def kernel(*refs):
        body(structure.unflatten(refs[: len(arrays)]), *refs[len(arrays) :])

    results = plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=[scratch],
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=GROUPS + 1,
        thread_name=GROUP,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
        **({} if interpret is None else {"interpret": interpret}),
    )(*arrays)
    # Inside ``shard_map`` Mosaic does not say over which axes the results vary.
    axes = varying(arrays[0])
    return [None if each is None else vary(each, axes) for each in results]


def in_roles(compute: Callable[[Any], None], copy: Callable[[], None]) -> None:
    """Runs ``compute(group)`` in the warpgroups that compute, and ``copy()`` in the one that copies."""
    group = lax.axis_index(GROUP)

    @pl.when(group < GROUPS)
    def _():
        plgpu.set_max_registers(_COMPUTING_REGISTERS, action="increase")
        compute(group)

    @pl.when(group == GROUPS)
    def _():
        plgpu.set_max_registers(_COPYING_REGISTERS, action="decrease")
        copy()


def features(shape: tuple[int, ...], dtype, tile: int) -> plgpu.SMEM:
    """Shared memory for features, ``[..., tokens, size]``, swizzled over as much of a row as its size allows.

    The bytes of a swizzle hold no more features than a ``tile`` has tokens: a product over these tokens needs that.
    """
    bits = jnp.finfo(dtype).bits
    swizzle = next(n for n in (128, 64, 32) if shape[-1] * bits % (8 * n) == 0 and 8 * n <= tile * bits)
    tiling = plgpu.TilingTransform((8, 8 * swizzle // bits))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def rows(vector, shape):
    """A number for each row, repeated over a tile."""
    return lax.broadcast_in_dim(vector, shape, [0])


def columns(vector, shape):
    """A number for each column, repeated over a tile."""
    return lax.broadcast_in_dim(vector, shape, [1])


def full(shape, number, layout):
    """A constant float32 vector or tile."""
    return plgpu.layout_cast(jnp.full(shape, number, jnp.float32), layout)


def counted(shape, axis: int):
    """The index along an axis of a tile."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=TILE)


def load(ref, layout, interpret=None):
    """A vector from main memory; with ``interpret``, from a buffer of a ring."""
    vector = plgpu.load(ref, layout=layout, optimized=False)
    if interpret:
        # The interpreter orders a copy after such a read only by a fence; on a GPU the barrier of the ring is enough.
        plgpu.commit_smem()
    return vector


def load_all(ref, layout, interpret=None) -> tuple:
    """The vectors of an array ``[n, tokens]``."""
    return tuple(load(ref.at[n], layout, interpret) for n in range(ref.shape[0]))


def write(x, ref, buffer) -> None:
    """Starts to write a tile to main memory, by a copy from a buffer in shared memory if that has the same dtype."""
    if ref.dtype != buffer.dtype:
        ref[...] = x
        return
    buffer[...] = x.astype(buffer.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, ref)


def accumulator(shape) -> plgpu.ACC:
    """Registers in which the matrix unit sums up."""
    return plgpu.ACC(shape, jnp.float32)


def product_transposed(a, b, meanwhile=lambda: None):
    """``a b^T`` of features in shared memory; ``meanwhile`` runs while the matrix unit computes."""

    def compute(sums):
        plgpu.wgmma(sums, a, b.transpose((1, 0)))
        meanwhile()
        return sums[...]

    return pl.run_scoped(compute, accumulator((a.shape[0], b.shape[0])))


def products_transposed(*factors):
    """``a b^T`` for several pairs of features in shared memory."""

    def compute(*sums):
        for (a, b), each in zip(factors, sums, strict=True):
            plgpu.wgmma(each, a, b.transpose((1, 0)))
        return tuple(each[...] for each in sums)

    return pl.run_scoped(compute, *(accumulator((a.shape[0], b.shape[0])) for a, b in factors))


def plus_product(sums, a, b, meanwhile, interpret):
    """``sums + a b`` for ``a`` in registers; ``meanwhile`` runs while the matrix unit computes."""
    if interpret:
        sums = sums + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
        # A read by threads, not by the matrix unit: it must end before the next copy to this memory.
        plgpu.commit_smem()
        meanwhile()
        return sums

    def compute(sums_ref):
        plgpu.wgmma(sums_ref, a, b)
        meanwhile()

    return pl.run_state(compute)(plgpu.ACC.init(sums))


def add_product(sums_ref, a, b, copy):
    """Starts to add ``a b`` to an accumulator. ``copy``: shared memory for ``a`` in the interpreter, otherwise None."""
    if copy is None:
        plgpu.wgmma(sums_ref, a, b)
        return
    copy[...] = a
    plgpu.commit_smem()
    plgpu.wgmma(sums_ref, copy, b)
    plgpu.wgmma_wait(0)


def current(sums_ref, running: int, interpret):
    """The numbers of an accumulator while the last ``running`` products that were started may still run."""
    return sums_ref[...] if interpret else plgpu.wgmma_accumulator_load(sums_ref, wait_n=running)


def line(slope, base, count: int, layout, interpret):
    """``base + slope n`` for ``n`` from 0, float32: one multiply-add for each number that a thread holds."""
    if interpret:
        return base + slope * lax.broadcasted_iota(jnp.float32, (count,), 0)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct((count,), jnp.float32, layout=layout),
    )
    def compute(_, slope, base):
        from jax.experimental.mosaic import gpu as mgpu
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, vector

        f32 = ir.F32Type.get()
        i32 = ir.IntegerType.get_signless(32)
        slope = slope.registers.item()
        result = layout.to_mgpu()
        registers = np.empty(result.registers_shape((count,)), dtype=object)
        first = next(iter(result.thread_idxs((count,))))[0]
        first = arith.uitofp(f32, arith.index_cast(i32, first))
        base = arith.addf(base.registers.item(), arith.mulf(slope, first))
        strides = result.tiling.tile_strides((1,))
        several = ir.VectorType.get((result.vector_length,), f32)
        for index in np.ndindex(registers.shape):
            start = sum(i * stride for i, stride in zip(index, strides, strict=True))
            steps = (arith.constant(f32, ir.FloatAttr.get(f32, start + n)) for n in range(result.vector_length))
            numbers = [arith.addf(arith.mulf(slope, step), base) for step in steps]
            registers[index] = vector.from_elements(several, numbers)
        return mgpu.FragmentedArray(_registers=registers, _layout=result, _is_signed=None)

    return compute(slope, base)


def by_distance(table, head, start, shape, transposed: bool, interpret):
    """``t[x, y] = table[head, start + x - y]``, or ``start + y - x`` if ``transposed``, from main memory.

    The numbers of one thread repeat along diagonals, so it reads ``shape[1] / 4 + 2`` numbers for 16 rows.
    """
    sign = -1 if transposed else 1
    if interpret:
        x, y = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(2))
        before = shape[0 if transposed else 1] - 1
        window = table[head, pl.ds(start - before, sum(shape) - 1)]
        return window[before + sign * (x - y)]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=TILE),
    )
    def read(_, memory, head, start):
        from jax.experimental.mosaic import gpu as mgpu
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, gpu, llvm, vector

        f32 = ir.F32Type.get()
        i32 = ir.IntegerType.get_signless(32)

        def number(n):
            return arith.constant(i32, ir.IntegerAttr.get(i32, n))

        layout = TILE.to_mgpu()
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        thread = arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x))
        lane = arith.remui(thread, number(32))
        warp = arith.remui(arith.divui(thread, number(32)), number(4))
        x0 = arith.addi(arith.muli(warp, number(16)), arith.divui(lane, number(4)))
        y0 = arith.muli(arith.remui(lane, number(4)), number(2))
        offset = arith.subi(x0, y0) if sign > 0 else arith.subi(y0, x0)
        row = arith.muli(head.registers.item(), number(memory.type.shape[1]))
        first = arith.addi(row, arith.addi(start.registers.item(), offset))
        base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(memory), [first], f32)
        known = {}

        def value(x, y):
            n = sign * (x - y)
            if n not in known:
                known[n] = llvm.load(f32, mgpu.utils.getelementptr(base, [n], f32), invariant=True)
            return known[n]

        pair = ir.VectorType.get((2,), f32)
        strides = layout.tiling.tile_strides(tuple(mgpu.utils.get_contiguous_strides(shape)))
        for index in np.ndindex(registers.shape):
            linear = sum(i * stride for i, stride in zip(index, strides, strict=True))
            x, y = divmod(linear, shape[1])
            registers[index] = vector.from_elements(pair, [value(x, y), value(x, y + 1)])
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return read(table, head, start)
