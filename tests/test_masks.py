"""Masks: each against its one-line definition, tiles against the materialised mask."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax import masks, positions
from posjax.masks import Causal, Chunked, Prefix, Segments, Sinks, Window

N = 24
ROW, COLUMN = np.mgrid[:N, :N]
IDS = np.array([[0] * 5 + [1] * 12 + [2] * 4 + [-1] * 3, [-1] * 2 + [7] * 22])
SAME = (IDS[:, :, None] == IDS[:, None, :]) & (IDS[:, :, None] >= 0)

CASES = {
    "causal": (Causal(), COLUMN <= ROW),
    "window": (Window(5), abs(ROW - COLUMN) < 5),
    "causal window": (Causal() & Window(5), (COLUMN <= ROW) & (ROW - COLUMN < 5)),
    "sinks": (Sinks(3), COLUMN < 3),
    "lambda": (Causal() & (Window(4) | Sinks(2)), (COLUMN <= ROW) & ((ROW - COLUMN < 4) | (COLUMN < 2))),
    "chunked": (Causal() & Chunked(7), (COLUMN <= ROW) & (ROW // 7 == COLUMN // 7)),
    "prefix": (Causal() | Prefix(6), (COLUMN <= ROW) | ((ROW < 6) & (COLUMN < 6))),
    "segments": (Segments(jnp.asarray(IDS)), SAME[:, None]),
    "packed": (Causal() & Segments(jnp.asarray(IDS)), SAME[:, None] & (COLUMN <= ROW)),
    "either": (Segments(jnp.asarray(IDS)) | Sinks(1), SAME[:, None] | (COLUMN < 1)),
}
cases = pytest.mark.parametrize("name", CASES)


@cases
def test_materialised_mask_is_its_definition(name):
    mask, want = CASES[name]
    got = masks.materialise(mask, positions.Range(0, N), positions.Range(0, N))
    assert got.dtype == bool
    np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))


@cases
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


@pytest.mark.parametrize("name", ["causal", "window", "sinks", "chunked", "segments"])
def test_single_masks_classify_every_tile_exactly(name):
    mask, want = CASES[name]
    kinds = masks.tile_kinds(mask, positions.Range(0, N), positions.Range(0, N), 1, 1)
    np.testing.assert_array_equal(kinds == masks.FULL, np.broadcast_to(want, kinds.shape))
    np.testing.assert_array_equal(kinds == masks.EMPTY, ~np.broadcast_to(want, kinds.shape))


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


def test_positions_not_buffer_indices_decide():
    ids = jnp.asarray([[5, 6, 7, 8]])
    got = masks.materialise(Causal() & Chunked(6), ids, ids)[0, 0]
    np.testing.assert_array_equal(got, [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]])


def test_padding_sees_nothing_and_is_seen_by_nothing():
    got = masks.materialise(masks.padding(jnp.asarray([[False, True, True]])), jnp.arange(3), jnp.arange(3))
    np.testing.assert_array_equal(got[0, 0], [[0, 0, 0], [0, 1, 1], [0, 1, 1]])


@cases
def test_shift_invariance_is_declared_truly(name):
    mask, _ = CASES[name]
    here, there = (masks.materialise(mask, jnp.arange(N) + s, jnp.arange(N) + s) for s in (0, 1_000_003))
    assert mask.shift_invariant == bool((here == there).all())


def test_masks_are_pytrees_and_position_masks_are_hashable():
    mask = Causal() & (Window(4) | Sinks(2))
    assert hash(mask) == hash(Causal() & (Window(4) | Sinks(2)))
    assert jax.tree.leaves(mask) == []
    assert len(jax.tree.leaves(mask & Segments(jnp.asarray(IDS)))) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: Window(0),
        lambda: Window("8"),
        lambda: Window(2.5),
        lambda: Chunked(-1),
        lambda: Sinks(0),
        lambda: Prefix(None),
    ],
)
def test_sizes_must_be_positive(make):
    with pytest.raises(ValueError, match="must be positive"):
        make()


def test_a_mask_composes_with_masks_only():
    with pytest.raises(ValueError, match="composes with masks only"):
        _ = Causal() & True


def test_tile_kinds_wants_whole_tiles():
    with pytest.raises(ValueError, match="q_positions has length 10, not a multiple of its block 4"):
        masks.tile_kinds(Causal(), positions.Range(0, 10), positions.Range(0, 8), 4, 4)


@pytest.mark.parametrize(
    ("name", "causal"),
    [*((name, True) for name in ("causal", "window", "causal window", "sinks", "chunked")), ("window", False)],
)
def test_counts_of_visible_keys_are_the_rows_of_the_mask(name, causal):
    mask, want = CASES[name]
    allowed = np.broadcast_to(want & (COLUMN <= ROW) if causal else want, (N, N))
    there = jnp.arange(N)
    got = mask.visible(there + 1 if causal else jnp.full(N, N), there, causal)
    inner = slice(None) if causal else slice(4, -4)
    np.testing.assert_array_equal(got[inner], allowed.sum(-1)[inner])


def test_counts_of_a_union_are_exact_where_its_parts_do_not_overlap():
    mask = Window(4) | Sinks(2)
    got = mask.visible(jnp.arange(N) + 1, jnp.arange(N), True)
    np.testing.assert_array_equal(got[6:], 6)
    np.testing.assert_array_equal(got[:4], jnp.arange(1, 5))
