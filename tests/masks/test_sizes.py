"""Sizes of masks: arrays as well as Python ints, and positions at both ends of int32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from masks.kinds import tile_kinds

from posjax import masks
from posjax.masks import (
    And,
    Band,
    Beyond,
    Causal,
    Chunked,
    ChunksApart,
    Dilated,
    FirstTokens,
    GlobalFirst,
    Or,
    Prefix,
    Window,
    materialise,
)
from posjax.positions import Range

N = 24
OF_A_SIZE = {
    "window": Window,
    "band": Band,
    "beyond": Beyond,
    "sinks": FirstTokens,
    "global first": GlobalFirst,
    "prefix": Prefix,
    "chunked": Chunked,
    "chunks apart": lambda n: ChunksApart(n, n - 4, n),
    "no end": lambda n: ChunksApart(n, n - 4),
    "dilated": lambda n: Dilated(n, n),
    "dilated heads": lambda n: Dilated(n, (1, 3)),
    "lambda": lambda n: Causal() & (Window(n) | FirstTokens(n)),
}


@pytest.mark.parametrize("name", OF_A_SIZE)
def test_a_traced_size_is_the_size(name):
    make, row = OF_A_SIZE[name], Range(0, N)

    def both(n):
        mask = make(n)
        return materialise(mask, row, row), tile_kinds(mask, row, row, 4, 6), mask.visible(row_of(5), row_of(5), True)

    for n in (2, 5):
        got, want = jax.jit(both)(jnp.int32(n)), both(n)
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("size", [0, -3])
@pytest.mark.parametrize("name", OF_A_SIZE)
def test_a_traced_size_that_is_too_small_counts_as_the_least(name, size):
    """If it is known, it is refused. A count of first tokens may be 0, as in a layer without sinks."""
    make, row = OF_A_SIZE[name], jnp.arange(N)
    got = jax.jit(lambda n: materialise(make(n), row, row))(jnp.int32(size))
    if name in ("sinks", "global first", "prefix"):
        assert not got.any()
    elif name == "lambda":
        np.testing.assert_array_equal(got[0, 0] if got.ndim == 4 else got, np.eye(N, dtype=bool))
    elif "chunks" not in name and name != "no end":
        np.testing.assert_array_equal(got, materialise(make(1), row, row))


def row_of(most):
    return jnp.arange(N, dtype=jnp.int32) % most + 1


def test_a_python_int_stays_structure_and_an_array_becomes_a_leaf():
    mask = Causal() & (Window(3) | FirstTokens(np.int64(2)))
    assert jax.tree.leaves(mask) == []
    assert hash(mask) == hash(Causal() & (Window(3) | FirstTokens(2)))
    assert jax.tree.leaves(Window(jnp.int16(3))) == [jnp.int32(3)]
    assert Window(np.array(3)) == Window(3), "NumPy's numbers are known when tracing"
    assert masks.traced_sizes(~Window(jnp.int32(3)) | FirstTokens(2)) == ("Window size",)
    assert Window(3).kept_keys == (0, 3)
    assert Window(jnp.int32(3)).kept_keys is None


def test_what_two_masks_retain():
    """``&`` retains what its smaller part does. ``|`` retains the larger of each number, or all if one part does."""
    assert (Window(9) & Window(5)).kept_keys == (Window(5) & Window(9)).kept_keys == (0, 5)
    assert (Window(9) & Causal()).kept_keys == (0, 9)
    assert (FirstTokens(2) | Window(5)).kept_keys == (2, 5)
    assert (Window(9) | Window(5)).kept_keys == (0, 9)
    assert (Window(9) | Causal()).kept_keys is None


def test_sizes_pass_through_transformations():
    here = jnp.arange(N, dtype=jnp.int32)
    sizes = jnp.asarray([2, 5, 9])
    want = np.stack([materialise(Window(n), here, here) for n in (2, 5, 9)])
    np.testing.assert_array_equal(jax.vmap(lambda n: materialise(Window(n), here, here))(sizes), want)
    _, scanned = jax.lax.scan(lambda c, n: (c, materialise(Window(n), here, here)), None, sizes)
    np.testing.assert_array_equal(scanned, want)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Window(jnp.int32(-3)), "Window size must be positive and whole, found -3"),
        (lambda: Window(np.array(0)), "Window size must be positive and whole, found 0"),
        (
            lambda: FirstTokens(jnp.float32(3)),
            "FirstTokens count must be positive and whole, found an array of float32 and shape",
        ),
        (lambda: Chunked(jnp.asarray([1, 2])), r"Chunked size .* found an array of int32 and shape \(2,\)"),
        (lambda: Window(True), "Window size must be positive and whole, found True"),
        (lambda: Window(2**31), "Window size must fit in int32, at most 2147483647, found 2147483648"),
        (lambda: Dilated(2**20, 2**12), "Dilated size and dilation span .* more than int32 can hold"),
        (lambda: ChunksApart(3, 2, 1), "least <= most, found 2 and 1"),
        (lambda: ChunksApart(3, 2.5), "ChunksApart least must be whole, found 2.5"),
    ],
)
def test_known_bad_sizes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_span_may_be_all_of_int32():
    assert materialise(Dilated(2**20 + 1, 2047), jnp.array([2**31 - 1]), jnp.array([2**31 - 2**20 * 2047 - 1])).all()
    assert Dilated(2**31 - 1, 1).size == 2**31 - 1
    assert Dilated(2, 2**31 - 1).dilation == 2**31 - 1


LOWEST, HIGHEST = -(2**31), 2**31 - 1
PLACES = np.array([LOWEST, LOWEST + 1, LOWEST + 6, -(2**30), -3, 0, 4, 2**30, HIGHEST - 6, HIGHEST - 1, HIGHEST])
ROW, COLUMN = PLACES[:, None].astype(object), PLACES[None].astype(object)
WIDEST = HIGHEST
FAR_APART = {
    "causal": (Causal(), COLUMN <= ROW),
    "window": (Window(5), abs(ROW - COLUMN) < 5),
    "widest window": (Window(WIDEST), abs(ROW - COLUMN) < WIDEST),
    "band": (Band(6), (ROW - COLUMN <= 3) & (ROW - COLUMN >= -2)),
    "beyond": (Beyond(5), ROW - COLUMN >= 5),
    "furthest": (Beyond(WIDEST), ROW - COLUMN >= WIDEST),
    "dilated": (Dilated(4, 2), ((ROW - COLUMN) % 2 == 0) & (abs(ROW - COLUMN) < 8)),
    "chunked": (Chunked(7), ROW // 7 == COLUMN // 7),
    "chunks of one": (ChunksApart(1, 5), ROW - COLUMN >= 5),
    "chunks apart": (ChunksApart(3, 0, 2), (ROW // 3 - COLUMN // 3 >= 0) & (ROW // 3 - COLUMN // 3 <= 2)),
}


@pytest.mark.parametrize("name", FAR_APART)
def test_distances_beyond_int32_do_not_wrap(name):
    mask, want = FAR_APART[name]
    here = jnp.asarray(PLACES, jnp.int32)
    np.testing.assert_array_equal(materialise(mask, here, here), want.astype(bool))
    traced = jax.jit(lambda mask: materialise(mask, here, here))(mask)
    np.testing.assert_array_equal(traced, want.astype(bool))


@pytest.mark.parametrize("name", FAR_APART)
def test_tiles_are_classified_safely_at_any_distance(name):
    mask, want = FAR_APART[name]
    low, high = PLACES[:-1].astype(np.int32), PLACES[1:].astype(np.int32)
    bounds = masks.BlockBounds(low, high, 2)
    some, every = mask.tiles(bounds, bounds)
    ends = np.stack([want[a : len(want) - 1 + a, b : len(want) - 1 + b] for a in (0, 1) for b in (0, 1)]).astype(bool)
    assert not (ends.any(0) & ~some).any(), "a tile with an allowed pair is called empty"
    assert not (~ends.all(0) & every).any(), "a tile with a forbidden pair is called full"


def test_joined_masks_agree_in_rank():
    ids = masks.Segments(jnp.zeros((2, N), jnp.int32))
    with jax.numpy_rank_promotion("raise"):
        for kind in (And, Or):
            assert materialise(kind(Causal(), ids), Range(0, N), jnp.zeros((2, N), jnp.int32)).shape == (2, 1, N, N)
