"""The kind that a mask gives every tile, against the materialised tile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from masks.cases import CASES, N
from masks.kinds import EMPTY, FULL, MIXED, tile_kinds

from posjax import masks
from posjax.masks import Causal, Dilated, Window
from posjax.positions import Range

AT = Range(0, N)


def exact_kinds(want, block_q, block_k):
    tiles = np.broadcast_to(want, (*want.shape[:-2], N, N))
    tiles = tiles.reshape(*want.shape[:-2], N // block_q, block_q, N // block_k, block_k).swapaxes(-3, -2)
    return np.where(tiles.all((-2, -1)), FULL, np.where(tiles.any((-2, -1)), MIXED, EMPTY))


def check_kinds(mask, want, *block):
    """Checks that a tile is called empty or full only if it is; returns the kinds and the exact ones."""
    found, exact = np.broadcast_arrays(tile_kinds(mask, AT, AT, *block), exact_kinds(want, *block))
    assert ((found == MIXED) | (found == exact)).all()
    return found, exact


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("block", [(4, 6), (8, 3)])
def test_tiles_are_never_misclassified(name, block):
    mask, want = CASES[name]
    found, _ = check_kinds(mask, want, *block)
    np.testing.assert_array_equal(check_kinds(~mask, ~want, *block)[0], FULL - found)


EXACT = "causal,window,odd band,even band,beyond,sinks,chunked,previous chunk,older chunks,globals,global first"


@pytest.mark.parametrize("name", EXACT.split(","))
def test_single_masks_classify_every_tile_exactly(name):
    for block in ((1, 1), (4, 3)):
        np.testing.assert_array_equal(*check_kinds(*CASES[name], *block))


@pytest.mark.parametrize("shape", [(N, N), (2, 1, 1, N), (2, 3, N, N)])
def test_tiles_of_an_array_are_classified_exactly(shape):
    array = np.random.default_rng(0).random(shape) < 0.9
    np.testing.assert_array_equal(*check_kinds(masks.as_mask(jnp.asarray(array)), array, 4, 3))


ARRAYS = [np.random.default_rng(0).random(shape) < 0.5 for shape in [(N, N), (2, 1, 1, N), (1, 3, N, 1)]]
# Masks that differ between heads must have three heads.
PARTS = sorted(set(CASES) - {"longformer"})


def composed(draw, depth: int) -> tuple:
    """A random mask of up to ``2**depth`` others joined by ``&``, ``|`` and ``~``, and what it must allow."""
    if depth == 0 or draw.random() < 0.2:
        if draw.random() < 0.3:
            array = ARRAYS[draw.integers(len(ARRAYS))]
            return masks.as_mask(jnp.asarray(array)), np.broadcast_to(
                array, np.broadcast_shapes(array.shape, (1, 1, N, N))
            )
        return CASES[draw.choice(PARTS)]
    (mask, want), (other, also) = composed(draw, depth - 1), composed(draw, depth - 1)
    both = draw.random() < 0.5
    mask, want = (mask & other, want & also) if both else (mask | other, want | also)
    return (~mask, ~want) if draw.random() < 0.5 else (mask, want)


@pytest.mark.parametrize("seed", range(6))
def test_composed_masks_are_what_their_parts_say_and_their_tiles_are_never_misclassified(seed):
    mask, want = composed(np.random.default_rng(seed), 3)
    np.testing.assert_array_equal(*np.broadcast_arrays(masks.materialise(mask, AT, AT), want))
    check_kinds(mask, want, 4, 6)


def test_few_tiles_of_a_band_are_visited():
    def visited(mask, length, block):
        return (np.asarray(tile_kinds(mask, Range(0, length), Range(0, length), block, block)) != EMPTY).sum((-2, -1))

    assert visited(Causal() & Window(16), 4096, 64) == 64 + 63
    assert visited(Dilated(16, (1, 4)), 512, 16)[0].tolist() == [32 * 3 - 2, 32 * 9 - 2 * (1 + 2 + 3 + 4)]


def test_tiles_of_a_range_are_known_when_tracing():
    def trace(x):
        bounds = masks.block_bounds(Range(3, 8), 4)
        assert all(isinstance(kind, np.ndarray) for kind in Causal().tiles(bounds, bounds))
        return x

    jax.jit(trace)(0.0)
