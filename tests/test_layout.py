"""The layouts of a sequence over shards against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.layout import KINDS, Layout
from posjax.positions import Range, as_array

ORDERS = {"contiguous": [*range(12)], "zigzag": [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]}
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("axis", [0, -1])
def test_tokens_are_placed_in_order_and_restored(kind, axis):
    x = np.random.default_rng(0).normal(size=(12, 3, 12)).astype(np.float32)
    layout = Layout(kind, 3)
    np.testing.assert_array_equal(layout.order(12), ORDERS[kind])
    for array in (x, jnp.asarray(x)):
        placed = layout.apply(array, axis)
        assert isinstance(placed, type(array))
        np.testing.assert_array_equal(placed, np.take(x, ORDERS[kind], axis))
        np.testing.assert_array_equal(layout.restore(placed, axis), x)


@kinds
def test_each_shard_knows_its_positions_also_when_traced(kind):
    layout = Layout(kind, 3)
    local = jax.jit(lambda shard: jnp.concatenate([as_array(piece) for piece in layout.local(12, shard)]))
    for shard in range(3):
        want = ORDERS[kind][4 * shard : 4 * shard + 4]
        assert local(shard).tolist() == want
        assert [p for piece in layout.local(12, shard) for p in as_array(piece).tolist()] == want


def test_positions_are_a_range_where_no_token_moves():
    assert Layout("contiguous", 3).positions(12) == Layout("zigzag", 1).positions(12) == Range(0, 12)
    assert Layout("zigzag", 3).positions(12).tolist() == ORDERS["zigzag"]


def test_a_layout_is_static():
    layout = Layout("zigzag", 4)
    assert jax.tree.leaves(layout) == []
    assert layout in {Layout("zigzag", 4)}


@pytest.mark.parametrize(("kind", "unit"), [("contiguous", 4), ("zigzag", 8)])
def test_a_length_that_does_not_fit_is_refused_with_one_that_does(kind, unit):
    layout = Layout(kind, 4)
    layout.check(unit)
    for length, works in ((18, 16), (1, unit)):
        for call in (layout.check, layout.order, lambda n: layout.apply(np.arange(n))):
            with pytest.raises(ValueError, match=f"length must be a multiple of {unit} .*; {works} would work"):
                call(length)
