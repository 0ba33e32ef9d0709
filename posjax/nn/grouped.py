"""Matrix products of rows that are sorted by group, each group with its own matrix.

On accelerators these are ``jax.lax.ragged_dot``. XLA has no kernel of it for CPUs: there every group would multiply all
rows. On CPUs blocks of rows of one group are multiplied one after the other instead.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from posjax._lowered import Lowered, full_varying_like, match_varying, run

_BLOCKS = (8, 128)
"""The least and the most rows of a block."""
_OUTER = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)
"""Of the products that are summed over the rows of each group."""


def grouped_product(
    rows: Float[Array, "rows size"], matrices: Float[Array, "groups size out"], sizes: Int[Array, "groups"]
) -> Float[Array, "rows out"]:
    """For every row the product with the matrix of its group, float32.

    Args:
        rows: sorted by group.
        matrices: of the groups.
        sizes: the number of rows of every group; rows beyond their sum belong to no group, and give 0.
    """
    sizes, rows, matrices = match_varying((sizes, rows, matrices))
    return run(_OfRows(), sizes, matrices, rows)[0]


@dataclass(frozen=True)
class _OfRows(Lowered):
    """``grouped_product`` of sizes, matrices and rows."""

    @property
    def linear(self):
        """In the rows."""
        return 1

    def types(self, sizes, matrices, rows):
        return [_product(rows, matrices[0])]

    def on(self, platform, sizes, matrices, rows):
        return [_on_cpu(sizes, matrices, rows) if platform == "cpu" else _ragged(sizes, matrices, rows)]

    def differentiated(self, primals, tangents):
        (sizes, matrices, rows), (_, d_matrices, d_rows) = primals, tangents
        out = run(self, *primals)
        of_rows = None if d_rows is None else run(self, sizes, matrices, d_rows)[0]
        of_matrices = None if d_matrices is None else run(_OfMatrices(), sizes, rows, d_matrices)[0]
        return out, [_sum(of_rows, of_matrices)]

    def transposed(self, constants, cotangents):
        (sizes, matrices), (d_out,) = constants, cotangents
        return [run(self, sizes, matrices.swapaxes(1, 2), d_out.astype(matrices.dtype))[0].astype(matrices.dtype)]


@dataclass(frozen=True)
class _OfMatrices(_OfRows):
    """``grouped_product`` of sizes, rows and matrices."""

    def types(self, sizes, rows, matrices):
        return super().types(sizes, matrices, rows)

    def on(self, platform, sizes, rows, matrices):
        return super().on(platform, sizes, matrices, rows)

    def differentiated(self, primals, tangents):
        sizes, rows, matrices = primals
        _, d_rows, d_matrices = tangents
        return _OfRows().differentiated((sizes, matrices, rows), (None, d_matrices, d_rows))

    def transposed(self, constants, cotangents):
        (sizes, rows), (d_out,) = constants, cotangents
        return [run(_Outer(), sizes, rows, d_out.astype(rows.dtype))[0].astype(rows.dtype)]


@dataclass(frozen=True)
class _Outer(Lowered):
    """For every group the product ``rows^T others`` over its rows, float32."""

    @property
    def linear(self):
        """In the others."""
        return 1

    def types(self, sizes, rows, others):
        return [jnp.broadcast_to(_product(rows.T, others), (*sizes.shape, rows.shape[1], others.shape[1]))]

    def on(self, platform, sizes, rows, others):
        if platform == "cpu":
            return [_outer_on_cpu(sizes, rows, others)]
        return [jax.lax.ragged_dot_general(rows, others, sizes, _OUTER, preferred_element_type=jnp.float32)]

    def differentiated(self, primals, tangents):
        (sizes, rows, others), (_, d_rows, d_others) = primals, tangents
        parts = [
            None if d_rows is None else run(self, sizes, d_rows, others)[0],
            None if d_others is None else run(self, sizes, rows, d_others)[0],
        ]
        return run(self, *primals), [_sum(*parts)]

    def transposed(self, constants, cotangents):
        (sizes, rows), (d_out,) = constants, cotangents
        return [run(_OfRows(), sizes, d_out.astype(rows.dtype), rows)[0].astype(rows.dtype)]


def _sum(one: Array | None, other: Array | None) -> Array:
    return one if other is None else other if one is None else one + other


def _product(rows, matrix):
    return jnp.matmul(rows, matrix, preferred_element_type=jnp.float32)


def _ragged(sizes, matrices, rows):
    return jax.lax.ragged_dot(rows, matrices, sizes, preferred_element_type=jnp.float32)


# --- on CPUs ----------------------------------------------------------------------------------------------------------


def _block_rows(rows: int, groups: int) -> int:
    """The rows of a block: about a quarter of a group, so that few rows of a block are of other groups."""
    least, most = _BLOCKS
    quarter = max(rows // (4 * groups), 1)
    return min(max(1 << (quarter - 1).bit_length(), least), most)


def _for_groups(sizes: Array, of_group: Callable, carry: Array) -> Array:
    """``of_group(carry, group, start, end)`` for all groups with rows, in order: those from ``start`` to ``end``."""
    ends = jnp.cumsum(sizes)

    def one(group, carry):
        def with_rows(carry):
            return of_group(carry, group, ends[group] - sizes[group], ends[group])

        return jax.lax.cond(sizes[group] > 0, with_rows, lambda carry: carry, carry)

    return jax.lax.fori_loop(0, len(sizes), one, carry)


def _for_blocks(start: Array, end: Array, block: int, step: Callable, carry: Array) -> Array:
    """``step(carry, first, kept)`` for the blocks of a group; ``kept``: which rows from ``first`` on are its own."""

    def one(number, carry):
        first = start + number * block
        return step(carry, first, (first + jnp.arange(block, dtype=jnp.int32) < end)[:, None])

    return jax.lax.fori_loop(0, -(-(end - start) // block), one, carry)


def _padded(rows: Array, block: int) -> Array:
    """The rows and a block of zeros, so that every block lies inside the array."""
    return jnp.pad(rows, ((0, block), (0, 0)))


def _on_cpu(sizes, matrices, rows):
    """Every block is written whole. Its rows of later groups, which are wrong, are overwritten by the later blocks."""
    count = rows.shape[0]
    block = _block_rows(*rows.shape[:1], *sizes.shape)
    padded = _padded(rows, block)

    def of_group(out, group, start, end):
        matrix = matrices[group]  # once for all blocks: XLA copies it

        def step(out, first, kept):
            product = _product(jax.lax.dynamic_slice_in_dim(padded, first, block), matrix)
            return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(kept, product, 0), first, 0)

        return _for_blocks(start, end, block, step, out)

    shape = (count + block, matrices.shape[2])
    return _for_groups(sizes, of_group, full_varying_like(shape, jnp.float32, rows))[:count]


def _outer_on_cpu(sizes, rows, others):
    block = _block_rows(*rows.shape[:1], *sizes.shape)
    rows, others = _padded(rows, block), _padded(others, block)

    def of_group(out, group, start, end):
        def step(product, first, kept):
            # Both, since a number of another group that is not finite times 0 is not 0.
            pair = [jnp.where(kept, jax.lax.dynamic_slice_in_dim(x, first, block), 0) for x in (rows, others)]
            return product + _product(pair[0].T, pair[1])

        none = full_varying_like(out.shape[1:], jnp.float32, rows)
        return out.at[group].set(_for_blocks(start, end, block, step, none))

    shape = (*sizes.shape, rows.shape[1], others.shape[1])
    return _for_groups(sizes, of_group, full_varying_like(shape, jnp.float32, rows))
