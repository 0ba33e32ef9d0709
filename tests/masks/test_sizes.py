"""Sizes of masks: arrays as well as Python ints, and positions at both ends of int32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from masks.kinds import tile_kinds

from posjax import masks
from posjax.positions import Range

N = 24
AT = jnp.arange(N, dtype=jnp.int32)
OF_A_SIZE = {
    "window": masks.Window,
    "band": masks.Band,
    "beyond": masks.Beyond,
    "sinks": masks.FirstTokens,
    "global first": masks.GlobalFirst,
    "prefix": masks.Prefix,
    "chunked": masks.Chunked,
    "chunks apart": lambda n: masks.ChunksApart(n, n - 4, n),
    "no end": lambda n: masks.ChunksApart(n, n - 4),
    "dilated": lambda n: masks.Dilated(n, n),
    "dilated heads": lambda n: masks.Dilated(n, (1, 3)),
    "lambda": lambda n: masks.Causal() & (masks.Window(n) | masks.FirstTokens(n)),
}


@pytest.mark.parametrize("name", OF_A_SIZE)
def test_a_traced_size_is_the_size_and_one_that_is_too_small_counts_as_the_least(name):
    """If it is known, it is refused. A count of first tokens may be 0, as in a layer without sinks."""
    make, row, few = OF_A_SIZE[name], Range(0, N), AT % 5 + 1

    def all_of(n):
        mask = make(n)
        return masks.materialise(mask, row, row), tile_kinds(mask, row, row, 4, 6), mask.visible(few, few, True)

    traced = jax.jit(all_of)
    for n in (2, 5):
        jax.tree.map(np.testing.assert_array_equal, traced(jnp.int32(n)), all_of(n))
    found = np.asarray(traced(jnp.int32(-3))[0])
    if name in ("sinks", "global first", "prefix"):
        assert not found.any()
    elif name == "lambda":
        np.testing.assert_array_equal(np.squeeze(found), np.eye(N, dtype=bool))
    elif "chunks" not in name and name != "no end":
        np.testing.assert_array_equal(found, masks.materialise(make(1), row, row))


def test_a_python_int_stays_structure_and_an_array_becomes_a_leaf():
    mask = masks.Causal() & (masks.Window(3) | masks.FirstTokens(np.int64(2)))
    assert jax.tree.leaves(mask) == []
    assert mask in {masks.Causal() & (masks.Window(3) | masks.FirstTokens(2))}
    assert jax.tree.leaves(masks.Window(jnp.int16(3))) == [jnp.int32(3)]
    assert masks.Window(np.array(3)) == masks.Window(3), "NumPy's numbers are known when tracing"
    assert masks.traced_sizes(~masks.Window(jnp.int32(3)) | masks.FirstTokens(2)) == ("Window size",)
    assert (masks.Window(3).kept_keys, masks.Window(jnp.int32(3)).kept_keys) == ((0, 3), None)


def test_sizes_pass_through_vmap():
    found = jax.vmap(lambda n: masks.materialise(masks.Window(n), AT, AT))(jnp.asarray([2, 5, 9]))
    np.testing.assert_array_equal(found, np.stack([masks.materialise(masks.Window(n), AT, AT) for n in (2, 5, 9)]))


def test_a_span_may_be_all_of_int32():
    assert masks.materialise(
        masks.Dilated(2**20 + 1, 2047), jnp.array([2**31 - 1]), jnp.array([2**31 - 2**20 * 2047 - 1])
    ).all()
    assert (masks.Dilated(2**31 - 1, 1).size, masks.Dilated(2, 2**31 - 1).dilation) == (2**31 - 1, 2**31 - 1)


LOWEST, WIDEST = -(2**31), 2**31 - 1
PLACES = np.array([LOWEST, LOWEST + 1, LOWEST + 6, -(2**30), -3, 0, 4, 2**30, WIDEST - 6, WIDEST - 1, WIDEST])
ROW, COLUMN = PLACES[:, None].astype(object), PLACES[None].astype(object)
FAR_APART = {
    "causal": (masks.Causal(), COLUMN <= ROW),
    "window": (masks.Window(5), abs(ROW - COLUMN) < 5),
    "widest window": (masks.Window(WIDEST), abs(ROW - COLUMN) < WIDEST),
    "band": (masks.Band(6), (ROW - COLUMN <= 3) & (ROW - COLUMN >= -2)),
    "furthest": (masks.Beyond(WIDEST), ROW - COLUMN >= WIDEST),
    "dilated": (masks.Dilated(4, 2), ((ROW - COLUMN) % 2 == 0) & (abs(ROW - COLUMN) < 8)),
    "chunked": (masks.Chunked(7), ROW // 7 == COLUMN // 7),
    "chunks of one": (masks.ChunksApart(1, 5), ROW - COLUMN >= 5),
    "chunks apart": (masks.ChunksApart(3, 0, 2), (ROW // 3 - COLUMN // 3 >= 0) & (ROW // 3 - COLUMN // 3 <= 2)),
}


@pytest.mark.parametrize("name", FAR_APART)
def test_distances_beyond_int32_do_not_wrap_in_pairs_and_in_tiles(name):
    mask, want = FAR_APART[name]
    here, want = jnp.asarray(PLACES, jnp.int32), want.astype(bool)
    np.testing.assert_array_equal(masks.materialise(mask, here, here), want)
    np.testing.assert_array_equal(jax.jit(lambda mask: masks.materialise(mask, here, here))(mask), want)
    bounds = masks.BlockBounds(PLACES[:-1].astype(np.int32), PLACES[1:].astype(np.int32), 2)
    some, every = mask.tiles(bounds, bounds)
    ends = np.stack([want[a : len(want) - 1 + a, b : len(want) - 1 + b] for a in (0, 1) for b in (0, 1)])
    assert not (ends.any(0) & ~some).any(), "a tile with an allowed pair is called empty"
    assert not (~ends.all(0) & every).any(), "a tile with a forbidden pair is called full"


def test_joined_masks_agree_in_rank():
    ids = masks.Segments(jnp.zeros((2, N), jnp.int32))
    with jax.numpy_rank_promotion("raise"):
        for kind in (masks.And, masks.Or):
            assert masks.materialise(kind(masks.Causal(), ids), Range(0, N), jnp.zeros((2, N), jnp.int32)).shape == (
                2,
                1,
                N,
                N,
            )
