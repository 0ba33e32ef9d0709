"""The kind that a mask gives every tile, against the materialised tile."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from masks.cases import CASES, N
from masks.kinds import EMPTY, FULL, MIXED, tile_kinds

from posjax import masks, positions
from posjax.masks import Causal, Dilated, Window


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("block", [(4, 6), (8, 3), (1, 1)])
def test_tiles_are_never_misclassified(name, block):
    mask, want = CASES[name]
    check_kinds(mask, want, block)


def check_kinds(mask, want, block):
    """Asserts that no tile is called empty with an allowed pair in it, and none full with a forbidden one."""
    kinds = tile_kinds(mask, positions.Range(0, N), positions.Range(0, N), *block)
    chex.assert_shape(kinds, (..., N // block[0], N // block[1]))
    chex.assert_type(kinds, jnp.int8)
    tiles = np.broadcast_to(want, (*want.shape[:-2], N, N))
    tiles = tiles.reshape(*want.shape[:-2], N // block[0], block[0], N // block[1], block[1]).swapaxes(-3, -2)
    some, every = tiles.any((-2, -1)), tiles.all((-2, -1))
    kinds = np.broadcast_to(kinds, some.shape)
    assert not (some & (kinds == EMPTY)).any()
    assert not (~every & (kinds == FULL)).any()


ARRAYS = [np.random.default_rng(0).random(shape) < 0.5 for shape in [(N, N), (2, 1, 1, N), (1, 3, N, 1)]]
# Masks that differ between heads must have three heads.
PARTS = sorted(set(CASES) - {"longformer"})


def composed(draw, depth: int) -> tuple:
    """A random mask of up to ``2**depth`` others joined by ``&``, ``|`` and ``~``, and what it must allow."""
    if depth == 0 or draw.random() < 0.2:
        if draw.random() < 0.3:
            array = ARRAYS[draw.integers(len(ARRAYS))]
            shape = np.broadcast_shapes(array.shape, (1, 1, N, N))
            return masks.as_mask(jnp.asarray(array)), np.broadcast_to(array, shape)
        return CASES[draw.choice(PARTS)]
    (mask, want), (other, also) = composed(draw, depth - 1), composed(draw, depth - 1)
    operator = draw.choice([np.logical_and, np.logical_or])
    mask = mask & other if operator is np.logical_and else mask | other
    return (~mask, ~operator(want, also)) if draw.random() < 0.5 else (mask, operator(want, also))


@pytest.mark.parametrize("seed", range(16))
def test_tiles_of_composed_masks_are_never_misclassified(seed):
    mask, want = composed(np.random.default_rng(seed), 3)
    tokens = positions.Range(0, N)
    got = masks.materialise(mask, tokens, tokens)
    np.testing.assert_array_equal(*np.broadcast_arrays(got, want))
    for block in [(4, 6), (8, 3)]:
        check_kinds(mask, want, block)


@pytest.mark.parametrize("name", CASES)
def test_an_inverted_mask_allows_the_opposite(name):
    mask, _ = CASES[name]
    tokens = positions.Range(0, N)
    np.testing.assert_array_equal(masks.materialise(~mask, tokens, tokens), ~masks.materialise(mask, tokens, tokens))
    kinds, inverted = (np.asarray(tile_kinds(each, tokens, tokens, 4, 3)) for each in (mask, ~mask))
    np.testing.assert_array_equal(inverted, FULL - kinds)


@pytest.mark.parametrize("shape", [(N, N), (2, 1, 1, N), (1, 3, N, 1), (2, 3, N, N)])
def test_tiles_of_an_array_are_classified_exactly(shape):
    array = np.random.default_rng(0).random(shape) < 0.9
    kinds = tile_kinds(masks.as_mask(jnp.asarray(array)), positions.Range(0, N), positions.Range(0, N), 4, 3)
    tiles = np.broadcast_to(array, (*shape[:-2], N, N)).reshape(*shape[:-2], N // 4, 4, N // 3, 3).swapaxes(-3, -2)
    exact = np.where(tiles.all((-2, -1)), FULL, np.where(tiles.any((-2, -1)), MIXED, EMPTY))
    whole = np.broadcast_shapes(exact.shape, np.shape(kinds))
    np.testing.assert_array_equal(np.broadcast_to(kinds, whole), np.broadcast_to(exact, whole))


SINGLE = ["causal", "window", "odd band", "even band", "beyond", "sinks", "chunked", "previous chunk", "older chunks"]


@pytest.mark.parametrize("name", [*SINGLE, "globals", "global first", "segments"])
def test_single_masks_classify_every_tile_exactly(name):
    mask, want = CASES[name]
    kinds = tile_kinds(mask, positions.Range(0, N), positions.Range(0, N), 1, 1)
    np.testing.assert_array_equal(kinds == FULL, np.broadcast_to(want, kinds.shape))
    np.testing.assert_array_equal(kinds == EMPTY, ~np.broadcast_to(want, kinds.shape))


@pytest.mark.parametrize("name", [*SINGLE, "globals", "global first"])
def test_only_tiles_on_a_boundary_are_mixed(name):
    mask, want = CASES[name]
    kinds = tile_kinds(mask, positions.Range(0, N), positions.Range(0, N), 4, 3)
    tiles = want.reshape(*want.shape[:-2], N // 4, 4, N // 3, 3).swapaxes(-3, -2)
    exact = np.where(tiles.all((-2, -1)), FULL, np.where(tiles.any((-2, -1)), MIXED, EMPTY))
    np.testing.assert_array_equal(kinds, np.broadcast_to(exact, kinds.shape))


def test_dilated_heads_visit_their_own_band():
    kinds = tile_kinds(Dilated(16, (1, 4)), positions.Range(0, 512), positions.Range(0, 512), 16, 16)
    chex.assert_shape(kinds, (1, 2, 32, 32))
    tiles = (np.asarray(kinds) != EMPTY).sum((0, 2, 3))
    np.testing.assert_array_equal(tiles, [32 * 3 - 2, 32 * 9 - 2 * (1 + 2 + 3 + 4)])


def test_causal_window_visits_a_band_only():
    kinds = tile_kinds(Causal() & Window(16), positions.Range(0, 4096), positions.Range(0, 4096), 64, 64)
    assert int((np.asarray(kinds) != EMPTY).sum()) == 64 + 63


def test_tiles_of_a_range_are_known_when_tracing():
    def trace(_):
        bounds = masks.block_bounds(positions.Range(3, 8), 4)
        some, every = Causal().tiles(bounds, bounds)
        assert isinstance(some, np.ndarray)
        assert isinstance(every, np.ndarray)
        return 0.0

    jax.jit(trace)(0.0)
