"""The layouts of a sequence over shards against their definitions."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.layout import KINDS, Layout
from posjax.positions import Range, as_array

kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        ("contiguous", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        ("zigzag", [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]),
    ],
)
def test_order_of_twelve_tokens_over_three_shards(kind, order):
    found = Layout(kind, 3).order(12)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, order)


@kinds
@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_apply_takes_the_order_and_restore_undoes_it(kind, shards, axis):
    layout = Layout(kind, shards)
    x = np.random.default_rng(0).normal(size=(20, 20, 20)).astype(np.float32)
    for array in (x, jnp.asarray(x)):
        placed = layout.apply(array, axis)
        assert isinstance(placed, type(array))
        np.testing.assert_array_equal(placed, np.take(x, layout.order(20), axis))
        np.testing.assert_array_equal(layout.restore(placed, axis), x)


def test_contiguous_copies_nothing():
    x = np.arange(8)
    assert Layout("contiguous", 4).apply(x) is x
    assert Layout("contiguous", 4).restore(x) is x


@kinds
@pytest.mark.parametrize("traced", [False, True])
def test_local_positions_are_the_parts_of_the_order(kind, traced):
    layout, length = Layout(kind, 4), 24
    for shard in range(4):
        pieces = layout.local(length, jnp.int32(shard) if traced else shard)
        assert len(pieces) == (2 if kind == "zigzag" else 1)
        assert all(isinstance(piece, Range) for piece in pieces)
        found = jnp.concatenate([as_array(piece) for piece in pieces])
        chex.assert_shape(found, (6,))
        np.testing.assert_array_equal(found, layout.order(length)[6 * shard : 6 * shard + 6])


@kinds
def test_positions_are_a_range_where_no_token_moves(kind):
    assert Layout(kind, 1).positions(8) == Range(0, 8)
    found = Layout(kind, 2).positions(8)
    assert isinstance(found, Range) == (kind == "contiguous")
    np.testing.assert_array_equal(as_array(found), Layout(kind, 2).order(8))


def test_shards_share_the_pairs_of_a_causal_mask_evenly():
    """Under zigzag all shards have the same number of pairs."""
    length, shards = 48, 4
    seen = (Layout("zigzag", shards).order(length) + 1).reshape(shards, -1).sum(-1)
    assert seen.max() == seen.min()
    contiguous = (np.arange(length) + 1).reshape(shards, -1).sum(-1)
    assert contiguous.max() > 4 * contiguous.min()


def test_a_layout_is_static_and_has_no_leaves():
    layout = Layout("zigzag", 4)
    assert jax.tree.leaves(layout) == []
    assert hash(layout) == hash(Layout("zigzag", 4))
    assert jax.jit(lambda layout, x: layout.apply(x), static_argnums=0)(layout, jnp.arange(16)).shape == (16,)


@pytest.mark.parametrize(("kind", "unit"), [("contiguous", 4), ("zigzag", 8)])
def test_lengths_that_do_not_fit_are_refused(kind, unit):
    layout = Layout(kind, 4)
    layout.check(unit)
    Layout("contiguous", 1).check(1)
    wanted = f"length must be a multiple of {unit} for a {kind} layout over 4 shards, found 18; 16 would work"
    for call in (layout.check, layout.order, layout.positions, lambda length: layout.apply(np.arange(length))):
        with pytest.raises(ValueError, match=wanted):
            call(18)
    for short in (0, 1):
        with pytest.raises(ValueError, match=f"found {short}; {unit} would work"):
            layout.check(short)


def test_unknown_kinds_and_counts_are_refused():
    with pytest.raises(ValueError, match="did you mean 'zigzag'"):
        Layout("zigzak", 4)
    with pytest.raises(ValueError, match="layout shards must be positive and whole, found 0"):
        Layout("zigzag", 0)
