"""The forms of coordinates, and the cells of grids, counted by hand."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.positions import Range
from posjax.rotary import grid_coordinates, mrope_positions, patch_centres, tie_positions
from posjax.rotary.coordinates import by_axis

NUMBERS = np.arange(24)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("shape", [(4, 3), (1, 3), (3, 3), (2, 4, 3), (2, 1, 3)])
def test_coordinates_have_one_array_for_every_axis(shape, kind):
    positions = kind(NUMBERS[: np.prod(shape)].reshape(shape))
    found = by_axis(positions, 3)
    assert len(found) == 3
    np.testing.assert_array_equal(np.stack(found, axis=-1), positions)


@pytest.mark.parametrize("shape", [(), (5,), (3,), (2, 5), (4, 1), (2, 2)])
def test_ids_of_text_are_shared_by_all_axes(shape):
    positions = NUMBERS[: int(np.prod(shape))].reshape(shape)
    (found,) = by_axis(positions, 3)
    np.testing.assert_array_equal(found, positions)
    if len(shape) == 2:
        (found,) = by_axis(positions[..., None], 3)
        np.testing.assert_array_equal(found, positions)
    assert by_axis(Range(3, 5), 3) == [Range(3, 5)]


@pytest.mark.parametrize("shape", [(2, 4, 2), (2, 3, 4), (1, 2, 4, 3), (2, 4, 1, 1), (1, 1, 2, 4, 3)])
def test_coordinates_of_another_number_of_axes_are_refused(shape):
    with pytest.raises(ValueError, match=r"positions of 3 axes must be \[n, 3\] or \[batch, n, 3\]"):
        by_axis(NUMBERS[: np.prod(shape)].reshape(shape), 3)


def test_cells_are_in_row_major_order():
    assert grid_coordinates(2, 3).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert grid_coordinates(2, 1, 2).tolist() == [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]
    chex.assert_type(grid_coordinates(2, 3), np.int32)


def test_centres_of_the_cells_of_a_square():
    assert patch_centres(2, 4)[:5].tolist() == [[-0.5, -0.75], [-0.5, -0.25], [-0.5, 0.25], [-0.5, 0.75], [0.5, -0.75]]
    assert patch_centres(1, 1).tolist() == [[0, 0]]
    chex.assert_type(patch_centres(2, 4), np.float32)


def test_ids_by_hand_for_every_spacing():
    """Text at 5, then an image of 1 x 2 cells, then text. Tie: steps of 3 down and 2 across, 6 to the next text."""
    found = {spacing: tie_positions([1, (1, 2), 1], spacing, start=5) for spacing in ("tie", "equal-tokens", "centred")}
    assert found["tie"].coordinates.tolist() == [[5, 5], [8, 7], [8, 9], [11, 11]]
    assert found["equal-tokens"].coordinates.tolist() == [[5, 5], [6.5, 6], [6.5, 7], [8, 8]]
    assert found["centred"].coordinates.tolist() == [[5, 5], [6.5, 6], [6.5, 7], [8, 8]]
    assert [ids.end for ids in found.values()] == [12, 9, 9]
    ids = mrope_positions([1, (1, 2), 1], start=5)
    assert ids.coordinates.tolist() == [[5, 5, 5], [6, 6, 6], [6, 6, 7], [8, 8, 8]]
    assert ids.end == 9


@pytest.mark.parametrize(
    ("spacing", "first", "last", "following"),
    [("tie", 14, 23, 32), ("equal-tokens", 8, 11, 14), ("centred", 9, 10, 14)],
)
def test_a_cube_of_two_cells_on_every_axis(spacing, first, last, following):
    """After text at 5: steps of 9 to 5 + 27; steps of 9/3 to 5 + 9; steps of 1 from 5 + 1 + (8 - 2)/2 to 5 + 9."""
    ids = tie_positions([1, (2, 2, 2), 1], spacing, num_axes=3, start=5)
    assert ids.coordinates[[0, 1, 8, 9]].tolist() == [[place] * 3 for place in (5, first, last, following)]
    assert ids.end == following + 1


def test_nothing_has_no_coordinates():
    for ids, axes in ((mrope_positions([], start=7), 3), (tie_positions([], start=7, num_axes=2), 2)):
        chex.assert_shape(ids.coordinates, (0, axes))
        assert ids.end == 7
