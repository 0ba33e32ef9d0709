"""Checks of positions: a Range, one row for the whole batch, or one row for each sequence."""

import chex
import numpy as np
import pytest

from posjax.attention.checks import checked_positions
from posjax.positions import Range


@pytest.mark.parametrize(
    ("length", "given", "wanted"),
    [
        (3, (3,), (3,)),
        (3, (1, 3), (3,)),
        (3, (2, 3), (2, 3)),
        (1, (1,), (1,)),
        (1, (1, 1), (1,)),
        (1, (2, 1), (2, 1)),
    ],
)
def test_a_single_row_of_positions_serves_the_whole_batch(length, given, wanted):
    positions = np.arange(np.prod(given)).reshape(given)
    found = checked_positions("q_positions", positions, np.zeros((2, length, 1, 4)))
    chex.assert_shape(found, wanted)
    np.testing.assert_array_equal(found, positions.reshape(wanted))


def test_positions_count_from_zero_where_none_are_given():
    assert checked_positions("q_positions", None, np.zeros((2, 3, 1, 4))) == Range(0, 3)
