"""What the slots of a scheme have in common: parts of their heads, and the widths of projections."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from posjax._slots import Features, OfSomeHeads


@dataclasses.dataclass(frozen=True)
class Some(OfSomeHeads):
    """Some heads of ``whole``, which is not used here."""

    whole: Any
    start: int
    size: int


@pytest.mark.parametrize("shape", [(6, 3, 5), (2, 6, 3, 5)])
def test_some_heads_of_a_tile_are_kept(shape):
    tile = np.arange(np.prod(shape)).reshape(shape)
    np.testing.assert_array_equal(Some(None, 2, 3).kept(tile), tile[..., 2:5, :, :])


@pytest.mark.parametrize("shape", [(3, 5), (1, 3, 5), (2, 1, 3, 5)])
def test_a_tile_without_heads_of_its_own_is_kept_whole(shape):
    tile = np.ones(shape)
    assert Some(None, 2, 3).kept(tile) is tile


def test_some_of_some_heads_are_counted_from_the_first_of_all():
    assert Some("whole", 4, 4).heads(1, 2) == Some("whole", 5, 2)


def test_widths_of_projections_are_shares_of_a_head():
    class Narrow(Features):
        widths = (0.5, 0.25)

    assert (Narrow().query_size(16), Narrow().key_size(16), Narrow().head_dim(4)) == (8, 4, 16)
    assert (Features().num_axes, Features().softmax_scale, Features().shift_invariant) == (1, 1.0, True)
    assert not Features().reads_length
