"""What a placement tells each device of its tokens, heads and positions, and which meshes it fits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from posjax.attention.sharded import Placement
from posjax.layout import KINDS, Layout
from posjax.positions import Range, as_array

PLACEMENT = Placement(context="context", heads="heads")


def over_devices(function, **sizes: int) -> np.ndarray:
    """The results of a function of no arguments on every device of a mesh, ``[*sizes, ...]``."""
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))

    def inside():
        found = jnp.asarray(function())
        return found.reshape((1,) * len(sizes) + found.shape)

    run = jax.shard_map(inside, mesh=mesh, in_specs=(), out_specs=PartitionSpec(*sizes), check_vma=False)
    return np.asarray(jax.jit(run)())


def test_each_device_holds_a_share_of_the_tokens_and_of_the_heads():
    """8 tokens and 3 heads on each of 4 x 2 devices; every key head is there twice."""

    def found():
        assert (PLACEMENT.shards, PLACEMENT.whole(8), PLACEMENT.all_heads(3)) == (4, 32, 6)
        keys = Placement(context="context", heads="heads", repeats=2).key_heads(3)
        return jnp.stack([PLACEMENT.first_head(3), *PLACEMENT.key_heads(3), *keys])

    got = over_devices(found, context=4, heads=2)
    np.testing.assert_array_equal(got[:, 0], [[0, 0, 1, 2, 0, 0, 1]] * 4)
    np.testing.assert_array_equal(got[:, 1], [[3, 3, 4, 5, 1, 2, 2]] * 4)


def test_without_a_mesh_one_device_holds_everything():
    assert (PLACEMENT.shards, PLACEMENT.whole(8), PLACEMENT.all_heads(3), PLACEMENT.first_head(3)) == (1, 8, 3, 0)
    assert PLACEMENT.key_heads(3) is None
    np.testing.assert_array_equal(Placement(repeats=2).key_heads(4), [0, 0, 1, 1])
    positions = np.arange(8)
    assert PLACEMENT.local(positions, 8) is positions
    assert PLACEMENT.local(None, 8) == Range(0, 8)
    assert PLACEMENT.local(Range(5, 8), 8) == Range(5, 8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [None, 7])
def test_each_device_gets_the_positions_of_its_tokens(kind, first):
    layout = Layout(kind, 4)
    placement = Placement(context="context", layout=layout)

    def found():
        positions = placement.local(None if first is None else Range(first, 32), 8)
        assert isinstance(positions, Range) == (kind == "contiguous")
        return as_array(positions)

    want = (first or 0) + np.asarray(layout.order(32)).reshape(4, 8)
    np.testing.assert_array_equal(over_devices(found, context=4), want)


def test_an_array_of_positions_is_cut_if_it_covers_the_whole_sequence():
    whole = np.arange(32)[::-1] ** 2
    got = over_devices(lambda: PLACEMENT.local(jnp.asarray(whole), 8), context=4, heads=2)
    np.testing.assert_array_equal(got[:, 1], whole.reshape(4, 8))

    def unchanged():
        for shape in ((8,), (2, 8), (2, 32)):
            positions = jnp.zeros(shape, jnp.int32)
            assert PLACEMENT.local(positions, 8) is positions
        return 0

    over_devices(unchanged, context=4)


def test_a_range_must_cover_the_whole_sequence():
    with pytest.raises(ValueError, match="must cover the whole sequence of 32 tokens"):
        over_devices(lambda: as_array(PLACEMENT.local(Range(0, 8), 8)), context=4)


def test_the_lowest_position_of_a_row_is_that_over_all_devices():
    assert (PLACEMENT.lowest(None), PLACEMENT.lowest(Range(5, 8))) == (0, 5)
    positions = np.random.default_rng(0).integers(-99, 99, (4, 2, 8))
    np.testing.assert_array_equal(PLACEMENT.lowest(positions[0]), positions[0].min(1, keepdims=True))
    found = over_devices(lambda: PLACEMENT.lowest(jnp.asarray(positions)[jax.lax.axis_index("context")]), context=4)
    np.testing.assert_array_equal(found, [positions.min((0, 2))[:, None]] * 4)


def test_a_placement_is_open_outside_its_own_axes():
    def opened(*placements):
        mesh = jax.sharding.get_abstract_mesh()
        return np.array([placement.is_open(mesh) for placement in placements])

    both = partial(opened, PLACEMENT, Placement())
    np.testing.assert_array_equal(both(), [True, False])
    np.testing.assert_array_equal(over_devices(both, batch=8), [[True, False]] * 8)
    np.testing.assert_array_equal(over_devices(both, heads=8), [[False, False]] * 8)


SIZES = {"batch": 3, "heads": 8, "kv_heads": 4}


def test_any_length_fits_if_the_sequence_is_not_split():
    Placement(heads="heads").check({"heads": 2, "context": 4}, length=5, **SIZES)
    PLACEMENT.check({"heads": 2, "context": 1}, length=5, **SIZES)
    with pytest.raises(ValueError, match="must be a multiple of 2 for a contiguous layout over 2 shards, found 5"):
        PLACEMENT.check({"heads": 2, "context": 2}, length=5, **SIZES)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_a_ring_of_groups_needs_several_shards_in_each_of_several_groups(group):
    check = partial(Placement(context="context", strategy="ring-ulysses", ulysses=group).check, {"context": 8})
    if group in (2, 4):
        check(length=16, **SIZES)
    else:
        with pytest.raises(ValueError, match=f"must divide the 8 shards, and be neither 1 nor all .*, found {group};"):
            check(length=16, **SIZES)
