"""Positions: ranges, offsets, those of padded and of packed rows, and the ends of int32."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from posjax import positions
from posjax.positions import Range, as_array


def test_a_range_with_a_static_start_is_structure():
    given = Range(3, 4)
    assert given.is_static
    assert jax.tree.leaves(given) == []
    chex.assert_type(as_array(given), jnp.int32)
    assert as_array(given).tolist() == [3, 4, 5, 6]
    assert (given in {Range(3, 4)}, given == Range(3, 5)) == (True, False)
    assert repr(given) == "Range(start=3, length=4)"
    assert repr(Range(jnp.int32(3), 4)) == "Range(start=int32 array of shape (), length=4)"


def test_a_range_with_a_traced_start_is_a_leaf_and_compiles_once():
    compiled = jax.jit(as_array)
    for start in (3, 70):
        assert compiled(Range(jnp.int32(start), 4)).tolist() == list(range(start, start + 4))
    assert compiled._cache_size() == 1


def test_a_range_survives_transformations():
    rows = jax.vmap(lambda start: as_array(Range(start, 3)))(jnp.array([0, 5]))
    assert rows.tolist() == [[0, 1, 2], [5, 6, 7]]
    doubled = jax.tree.map(lambda leaf: leaf * 2, Range(jnp.int32(5), 3))
    assert as_array(doubled).tolist() == [10, 11, 12]
    start = Range(jnp.int32(0), 3)
    _, starts = jax.lax.scan(lambda r, _: (Range(r.start + r.length, r.length), r.start), start, length=4)
    assert starts.tolist() == [0, 3, 6, 9]


def test_positions_reach_both_ends_of_int32_and_may_be_none():
    assert as_array(Range(2**31 - 2, 2)).tolist() == [2**31 - 2, 2**31 - 1]
    assert as_array(Range(-(2**31), 2)).tolist() == [-(2**31), 1 - 2**31]
    assert as_array(np.array([-(2**31), 0])).tolist() == [-(2**31), 0]
    for none in (Range(7, 0), np.zeros(0, np.int64), positions.arange(0)):
        assert as_array(none).tolist() == []


def test_arange_with_an_offset_for_each_row():
    assert positions.arange(3, 7).tolist() == [7, 8, 9]
    rows = jax.jit(positions.arange, static_argnums=0)(3, jnp.array([0, 10]))
    assert rows.tolist() == [[0, 1, 2], [10, 11, 12]]
    chex.assert_type(rows, jnp.int32)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_valid_tokens_are_counted_and_segments_restart(transform):
    mask = jnp.array([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0]])
    for given in (mask, mask.astype(bool)):
        found = transform(positions.from_mask)(given)
        assert found.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 0, 0], [0, 0, 1, 0, 2], [0, 0, 0, 0, 0]]
    segments = jnp.array([[0, 0, 0, 1, 1, -1], [7, 2, 2, 2, 7, 7], [-1, -1, 3, 3, -1, -1]], jnp.int32)
    rows = transform(positions.from_segments)(segments)
    assert rows.tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 0, 1], [0, 0, 0, 1, 0, 0]]
    chex.assert_type([found, rows], jnp.int32)


@pytest.mark.parametrize("dtype", ["uint32", "int64", "uint64"])
def test_wide_integers_are_refused_where_known_and_stop_at_the_ends_of_int32_where_traced(dtype):
    with jax.enable_x64(dtype != "uint32"):
        fits, beyond = (jnp.array([0, last], dtype) for last in (2**31 - 1, 2**31))
        chex.assert_type(as_array(fits), jnp.int32)
        assert as_array(fits).tolist() == [0, 2**31 - 1]
        refused("positions", lambda: as_array(beyond))
        refused("start", lambda: as_array(Range(beyond[1], 2)))
        refused("offset", lambda: positions.arange(3, beyond))
        low = 0 if dtype.startswith("u") else -(2**31) - 5
        traced = jax.jit(as_array)(jnp.array([low, 7, 2**32 - 1], dtype))
        assert traced.tolist() == [max(low, -(2**31)), 7, 2**31 - 1]


def test_differences_do_not_wrap():
    ends = [-(2**31), 1 - 2**31, -(2**30), -1, 0, 1, 2**30, 2**31 - 1]
    i, j = np.meshgrid(ends, ends)
    found = jax.jit(positions.difference)(jnp.asarray(i, jnp.int32), jnp.asarray(j, jnp.int32))
    np.testing.assert_array_equal(found, np.clip(i - j, -(2**31) + 1, 2**31 - 1))
