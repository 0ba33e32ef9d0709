import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax import positions
from posjax.positions import Range


def test_range_with_static_start_is_structure():
    r = Range(3, 4)
    assert r.is_static
    assert jax.tree.leaves(r) == []
    array = positions.as_array(r)
    chex.assert_shape(array, (4,))
    chex.assert_type(array, jnp.int32)
    assert array.tolist() == [3, 4, 5, 6]
    assert (r == Range(3, 4), r == Range(3, 5), hash(r) == hash(Range(3, 4))) == (True, False, True)


def test_range_with_traced_start_is_a_leaf_and_compiles_once():
    compiled = jax.jit(positions.as_array)
    for start in (3, 70):
        assert compiled(Range(jnp.int32(start), 4)).tolist() == list(range(start, start + 4))
    assert compiled._cache_size() == 1
    assert len(jax.tree.leaves(Range(jnp.int32(3), 4))) == 1


def test_range_survives_transformations():
    starts = jnp.array([0, 5], jnp.int32)
    rows = jax.vmap(lambda start: positions.as_array(Range(start, 3)))(starts)
    assert rows.tolist() == [[0, 1, 2], [5, 6, 7]]
    doubled = jax.tree.map(lambda leaf: leaf * 2, Range(jnp.int32(5), 3))
    assert positions.as_array(doubled).tolist() == [10, 11, 12]
    _, last = jax.lax.scan(
        lambda r, _: (Range(r.start + r.length, r.length), r.start), Range(jnp.int32(0), 3), length=4
    )
    assert last.tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, -1), "length must not be negative"),
        ((0, jnp.int32(3)), "length must be a Python int"),
        ((2**31 - 2, 3), "do not fit in int32"),
        ((jnp.zeros((2,), jnp.int32), 3), "start must be a scalar"),
        ((jnp.float32(1), 3), "start must be an integer"),
    ],
)
def test_range_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        Range(*arguments)


def test_range_reaches_the_last_int32():
    assert positions.as_array(Range(2**31 - 2, 2)).tolist() == [2**31 - 2, 2**31 - 1]
    assert positions.as_array(Range(-(2**31), 2)).tolist() == [-(2**31), 1 - 2**31]
    assert positions.as_array(np.array([-(2**31), 0])).tolist() == [-(2**31), 0]
    with pytest.raises(ValueError, match="do not fit in int32"):
        Range(-(2**31) - 1, 2)


def test_there_may_be_no_positions():
    for found in (Range(7, 0), np.zeros(0, np.int64), positions.arange(0)):
        assert positions.as_array(found).tolist() == []
    for length in (-1, 2.0):
        with pytest.raises(ValueError, match="length must be a whole number of at least 0"):
            positions.arange(length)


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.int8])
def test_as_array_gives_int32(dtype):
    array = positions.as_array(np.array([[1, 2], [3, 4]], dtype))
    chex.assert_type(array, jnp.int32)
    chex.assert_shape(array, (2, 2))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array([2**31]), "do not fit in int32"),
        (np.array([0.5]), "must be integers"),
        (jnp.zeros((3,), jnp.bfloat16), "must be integers"),
        (np.zeros((2, 2, 2), np.int32), "must be \\[length\\] or \\[batch, length\\]"),
        (np.int32(3), "must be \\[length\\]"),
    ],
)
def test_as_array_refuses(value, message):
    with pytest.raises(ValueError, match=message):
        positions.as_array(value)


def test_arange_with_offset():
    assert positions.arange(3).tolist() == [0, 1, 2]
    assert positions.arange(3, 7).tolist() == [7, 8, 9]
    rows = jax.jit(positions.arange, static_argnums=0)(3, jnp.array([0, 10]))
    assert rows.tolist() == [[0, 1, 2], [10, 11, 12]]
    chex.assert_type(rows, jnp.int32)
    with pytest.raises(ValueError, match="offset must be an integer"):
        positions.arange(3, 0.5)
    with pytest.raises(ValueError, match="offset must be a scalar or"):
        positions.arange(3, np.zeros((2, 2), np.int32))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_from_mask_counts_valid_tokens(transform):
    mask = jnp.array([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0]], bool)
    found = transform(positions.from_mask)(mask)
    chex.assert_type(found, jnp.int32)
    assert found.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 0, 0], [0, 0, 1, 0, 2], [0, 0, 0, 0, 0]]
    assert transform(positions.from_mask)(mask.astype(jnp.int32)).tolist() == found.tolist()


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_from_segments_restarts_in_each_run(transform):
    segments = jnp.array([[0, 0, 0, 1, 1, -1], [7, 2, 2, 2, 7, 7], [-1, -1, 3, 3, -1, -1]], jnp.int32)
    found = transform(positions.from_segments)(segments)
    chex.assert_type(found, jnp.int32)
    assert found.tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 0, 1], [0, 0, 0, 1, 0, 0]]


def test_from_segments_equals_separate_documents():
    lengths = np.random.default_rng(0).integers(1, 9, size=6)
    ids = np.repeat(np.arange(6, dtype=np.int32), lengths)[None]
    expected = np.concatenate([np.arange(n) for n in lengths])
    np.testing.assert_array_equal(positions.from_segments(ids)[0], expected)


@pytest.mark.parametrize("function", [positions.from_mask, positions.from_segments])
def test_masks_and_segments_are_checked(function):
    with pytest.raises(ValueError, match="\\[batch, length\\]"):
        function(jnp.zeros((4,), jnp.int32))
    with pytest.raises(ValueError, match="must be"):
        function(jnp.zeros((2, 4), jnp.float32))


def test_from_segments_on_a_mesh():
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    segments = np.random.default_rng(1).integers(-1, 3, size=(8, 16)).astype(np.int32)
    spec = jax.sharding.PartitionSpec("batch")
    sharded = jax.shard_map(positions.from_segments, mesh=mesh, in_specs=spec, out_specs=spec)(segments)
    np.testing.assert_array_equal(sharded, positions.from_segments(segments))


@pytest.mark.parametrize("dtype", ["uint32", "int64", "uint64"])
def test_wide_integers_on_a_device_are_checked_as_those_of_numpy(dtype):
    with jax.enable_x64(dtype != "uint32"):
        fits, beyond = (jnp.array([0, last], dtype) for last in (2**31 - 1, 2**31))
        array = positions.as_array(fits)
        chex.assert_type(array, jnp.int32)
        assert array.tolist() == [0, 2**31 - 1]
        with pytest.raises(ValueError, match=r"positions 0 \.\. 2147483648 do not fit in int32"):
            positions.as_array(beyond)
        with pytest.raises(ValueError, match=r"start 2147483648 \.\. 2147483648 do not fit in int32"):
            positions.as_array(Range(beyond[1], 2))
        with pytest.raises(ValueError, match=r"offset 0 \.\. 2147483648 do not fit in int32"):
            positions.arange(3, beyond)


@pytest.mark.parametrize("dtype", ["uint32", "int64", "uint64"])
def test_wide_integers_that_are_traced_stop_at_the_ends_of_int32(dtype):
    with jax.enable_x64(dtype != "uint32"):
        low = 0 if dtype.startswith("u") else -(2**31) - 5
        array = jax.jit(positions.as_array)(jnp.array([low, 7, 2**32 - 1], dtype))
        chex.assert_type(array, jnp.int32)
        assert array.tolist() == [max(low, -(2**31)), 7, 2**31 - 1]


def test_differences_do_not_wrap():
    ends = [-(2**31), 1 - 2**31, -(2**30), -1, 0, 1, 2**30, 2**31 - 1]
    i, j = np.meshgrid(ends, ends)
    found = jax.jit(positions.difference)(jnp.asarray(i, jnp.int32), jnp.asarray(j, jnp.int32))
    np.testing.assert_array_equal(found, np.clip(i - j, -(2**31) + 1, 2**31 - 1))
