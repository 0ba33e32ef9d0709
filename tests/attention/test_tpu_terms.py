"""Parts of the TPU kernels' terms, against their formulas in NumPy."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from posjax.attention.tpu import terms
from posjax.attention.tpu.terms import LANES, SUBLANES, Axis, Pattern, skewed, unskewed
from posjax.masks import Beyond, Causal, Segments


@pytest.mark.parametrize(("heads", "size"), [(3, 256), (3, 130), (200, 130)])
def test_a_skewed_vector_and_its_transpose(heads, size):
    """``U[t, b, y] = u[128 t + y - b]`` with ``u`` extended by its end values; the transpose adds up their copies."""
    rng = np.random.default_rng(0)
    u, sums = rng.integers(-9, 9, (heads, size)), rng.integers(-9, 9, (heads, 2, SUBLANES, LANES))
    t, b, y = np.ogrid[:2, :SUBLANES, :LANES]
    index = np.clip(LANES * t + y - b, 0, size - 1)
    got = skewed(jnp.asarray(u, jnp.float32), 2)
    chex.assert_shape(got, sums.shape)
    np.testing.assert_array_equal(got, u[:, index])
    want = np.zeros((heads, size))
    np.add.at(want, (slice(None), index), sums)
    np.testing.assert_array_equal(unskewed(jnp.asarray(sums, jnp.float32), size), want)


@pytest.mark.parametrize(("first", "stop"), [(0, 256), (128, 256)])
def test_a_matrix_by_distance_from_a_skewed_vector(first, stop):
    """``W[x, c] = u[256 + c - x]`` in the rows from ``first`` to ``stop``; others are not written."""
    u = np.random.default_rng(0).integers(1, 999, 384).astype(np.float32)

    def kernel(window_ref, matrix_ref):
        matrix_ref[...] = jnp.zeros_like(matrix_ref)
        terms.toeplitz(window_ref, matrix_ref, first, stop)

    run = pl.pallas_call(kernel, jax.ShapeDtypeStruct((256, LANES), jnp.float32), interpret=True)
    x, c = np.ogrid[:256, :LANES]
    want = np.where((x >= first) & (x < stop), u[256 + c - x], 0)
    np.testing.assert_array_equal(jax.jit(run)(skewed(u[None], 3)[0]), want)


def test_gradients_of_a_matrix_by_distance_are_summed_by_distance():
    gradients = np.random.default_rng(0).integers(-9, 9, (256, LANES)).astype(np.float32)

    def kernel(matrix_ref, window_ref):
        for n, eight in enumerate(terms.untoeplitz(matrix_ref)):
            window_ref[n] = eight

    run = pl.pallas_call(kernel, jax.ShapeDtypeStruct((3, SUBLANES, LANES), jnp.float32), interpret=True)
    x, c = np.ogrid[:256, :LANES]
    want = np.zeros(384)
    np.add.at(want, 256 + c - x, gradients)
    found = jax.jit(lambda g: unskewed(run(g)[None], 384)[0])(gradients)
    np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize(("outer", "inner", "part"), [(256, 512, 128), (128, 768, 256), (384, 384, 384)])
def test_a_tile_reads_rows_that_its_parts_have_written_once(outer, inner, part):
    """If the matrix holds column less row, so does the tile, up to a constant."""
    x, c = np.ogrid[: outer + inner - LANES, :LANES]
    written, slabs = [], []
    for first in range(0, inner, part):
        written += range(*terms.new_rows(first, part, outer, inner))
        for n in range(first, first + part, LANES):
            read = terms.slab(x, n, outer, inner)
            assert set(read.flat) <= set(written)
            slabs.append(c - read)
    assert sorted(written) == list(range(len(x)))
    row, column = np.ogrid[:outer, :inner]
    np.testing.assert_array_equal(np.concatenate(slabs, axis=1), column - row + LANES - inner)


def test_rows_become_columns_and_back():
    rows = np.random.default_rng(0).integers(1, 99, (3, 1, 16)).astype(np.float32)
    np.testing.assert_array_equal(terms.column(jnp.asarray(rows[0])), np.repeat(rows[0].T, LANES, axis=1))
    found = terms.columns(list(jnp.asarray(rows)))
    np.testing.assert_array_equal(found, np.pad(rows[:, 0].T, ((0, 0), (0, LANES - 3))))
    np.testing.assert_array_equal(terms.row(found), rows.sum(0))


def test_three_pieces_of_a_number_have_8_bits_each_and_add_up_to_it():
    x = np.float32([1 + 2**-8 + 2**-23, -1e30, 3.1415927, 2**-20, 0])
    found = np.stack(terms.pieces(jnp.asarray(x)))
    chex.assert_shape(found, (3, len(x)))
    np.testing.assert_array_equal(found.astype(jnp.bfloat16).astype(np.float32), found)
    np.testing.assert_array_equal(found.astype(np.float64).sum(0), x)


@pytest.mark.parametrize("ranged", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("outer", [0, 1], ids=["queries are the outer axis", "keys are the outer axis"])
def test_the_mask_and_the_branches_of_a_tile(outer, ranged):
    """16 tokens of the outer axis, 256 of the inner one: each pair of positions and ids compared in NumPy."""
    rng, sizes = np.random.default_rng(0), ((16, 256), (256, 16))[outer]
    firsts, ids = (140, 30), [[rng.integers(0, 3, (1, n), np.int32) for n in sizes] for _ in range(2)]
    positions = [
        np.arange(first, first + n, dtype=np.int32) if counted else rng.permutation(300).astype(np.int32)[:n]
        for first, n, counted in zip(firsts, sizes, ranged, strict=True)
    ]
    formulas = [terms.dissect(mask) for mask in (Causal() & Segments(*ids[0]), Segments(*ids[1]) | Beyond(50))]
    pattern = Pattern(formulas[0][0], (formulas[1][0],))

    def axis(n):
        rows = [] if ranged[n] else [positions[n][None]]
        rows = [jnp.asarray(row) for row in rows + formulas[0][1 + n] + formulas[1][1 + n]]
        numbers = tuple(map(terms.column, rows) if n == outer else rows)
        return Axis(int(n != outer), firsts[n], numbers, ranged[n])

    run = partial(pattern.on, axis(0), axis(1), (16, 256))
    seen, (branch,) = run(masked=True, remap=True)
    i, j = positions[0][:, None], positions[1]
    same = [k == q.T for q, k in ids]
    wants = (i >= j) & same[0], same[1] | (i - j >= 50)
    for got, want in zip((seen, branch), wants, strict=True):
        np.testing.assert_array_equal(got, want if outer == 0 else want.T)
    only, (alone,) = run(masked=False, remap=True)
    assert only is None
    np.testing.assert_array_equal(alone, branch)
    assert run(masked=True, remap=False)[1] == ()
