"""The kind that a mask gives a tile, against the tile of the mask written out."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from masks.cases import CASES, N

from posjax import masks, positions
from posjax.masks import Causal, Dilated, Window


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("block", [(4, 6), (8, 3), (1, 1)])
def test_tiles_never_lie(name, block):
    mask, want = CASES[name]
    kinds = masks.tile_kinds(mask, positions.Range(0, N), positions.Range(0, N), *block)
    chex.assert_shape(kinds, (..., N // block[0], N // block[1]))
    chex.assert_type(kinds, jnp.int8)
    tiles = np.broadcast_to(want, (*want.shape[:-2], N, N))
    tiles = tiles.reshape(*want.shape[:-2], N // block[0], block[0], N // block[1], block[1]).swapaxes(-3, -2)
    some, every = tiles.any((-2, -1)), tiles.all((-2, -1))
    kinds = np.broadcast_to(kinds, some.shape)
    assert not (some & (kinds == masks.EMPTY)).any()
    assert not (~every & (kinds == masks.FULL)).any()


SINGLE = ["causal", "window", "odd band", "even band", "beyond", "sinks", "chunked", "previous chunk", "older chunks"]


@pytest.mark.parametrize("name", [*SINGLE, "globals", "global first", "segments"])
def test_single_masks_classify_every_tile_exactly(name):
    mask, want = CASES[name]
    kinds = masks.tile_kinds(mask, positions.Range(0, N), positions.Range(0, N), 1, 1)
    np.testing.assert_array_equal(kinds == masks.FULL, np.broadcast_to(want, kinds.shape))
    np.testing.assert_array_equal(kinds == masks.EMPTY, ~np.broadcast_to(want, kinds.shape))


@pytest.mark.parametrize("name", [*SINGLE, "globals", "global first"])
def test_only_tiles_on_a_boundary_are_mixed(name):
    mask, want = CASES[name]
    kinds = masks.tile_kinds(mask, positions.Range(0, N), positions.Range(0, N), 4, 3)
    tiles = want.reshape(*want.shape[:-2], N // 4, 4, N // 3, 3).swapaxes(-3, -2)
    exact = np.where(tiles.all((-2, -1)), masks.FULL, np.where(tiles.any((-2, -1)), masks.MIXED, masks.EMPTY))
    np.testing.assert_array_equal(kinds, np.broadcast_to(exact, kinds.shape))


def test_dilated_heads_visit_their_own_band():
    kinds = masks.tile_kinds(Dilated(16, (1, 4)), positions.Range(0, 512), positions.Range(0, 512), 16, 16)
    chex.assert_shape(kinds, (1, 2, 32, 32))
    tiles = (np.asarray(kinds) != masks.EMPTY).sum((0, 2, 3))
    np.testing.assert_array_equal(tiles, [32 * 3 - 2, 32 * 9 - 2 * (1 + 2 + 3 + 4)])


def test_causal_window_visits_a_band_only():
    kinds = masks.tile_kinds(Causal() & Window(16), positions.Range(0, 4096), positions.Range(0, 4096), 64, 64)
    assert int((np.asarray(kinds) != masks.EMPTY).sum()) == 64 + 63


def test_tiles_of_a_range_are_known_when_tracing():
    def trace(_):
        extent = masks.extent(positions.Range(3, 8), 4)
        some, every = Causal().tiles(extent, extent)
        assert isinstance(some, np.ndarray)
        assert isinstance(every, np.ndarray)
        return 0.0

    jax.jit(trace)(0.0)


def test_tile_kinds_wants_whole_tiles():
    with pytest.raises(ValueError, match="q_positions has length 10, not a multiple of its block 4"):
        masks.tile_kinds(Causal(), positions.Range(0, 10), positions.Range(0, 8), 4, 4)
