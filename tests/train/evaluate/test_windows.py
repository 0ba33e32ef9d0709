"""Pieces and windows of short documents, written out by hand."""

import numpy as np
import pytest

from train.evaluate.windows import full_pieces, last_windows, pieces, whole_windows


def cut(found):
    return [piece.tolist() for piece in found]


def test_pieces_share_one_token_and_no_target_is_left_out():
    documents = [np.arange(10, 18), np.arange(20, 21), np.arange(30, 32)]
    wanted = [[10, 11, 12, 13], [13, 14, 15, 16], [16, 17], [30, 31]]
    assert cut(pieces(documents, 3, 100)) == wanted
    assert cut(pieces(documents, 3, 8)) == wanted


@pytest.mark.parametrize(("tokens", "kept"), [(1, [2]), (4, [1, 3]), (7, [0, 2, 3]), (8, [0, 1, 2, 3])])
def test_the_pieces_that_are_kept_are_spread_evenly(tokens, kept):
    documents = [np.arange(10, 15), np.arange(20, 25)]  # four pieces of two targets
    found = [[10, 11, 12], [12, 13, 14], [20, 21, 22], [22, 23, 24]]
    assert cut(pieces(documents, 2, tokens)) == [found[n] for n in kept]


@pytest.mark.parametrize(
    ("stride", "tokens", "wanted"),
    [
        (0, 100, [[0, 1, 2, 3], [3, 4, 5, 6]]),
        (2, 100, [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7]]),
        (0, 3, [[3, 4, 5, 6]]),
        (0, 1, [[3, 4, 5, 6]]),
    ],
)
def test_full_pieces_end_with_the_last_one_that_fits(stride, tokens, wanted):
    assert cut(full_pieces([np.arange(8), np.arange(3)], 3, tokens, stride)) == wanted


def test_whole_windows_score_every_target_of_a_piece_once():
    windows = whole_windows([np.arange(10, 18), np.arange(30, 32)], 3)
    np.testing.assert_array_equal(windows.tokens, [[10, 11, 12, 13], [13, 14, 15, 16], [16, 17, 0, 0], [30, 31, 0, 0]])
    np.testing.assert_array_equal(windows.weights, [[1, 1, 1], [1, 1, 1], [1, 0, 0], [1, 0, 0]])
    assert len(whole_windows([np.arange(7)], 3).tokens) == 2
    assert (windows.scored, windows.tokens.dtype, windows.weights.dtype) == (8, np.int32, np.float32)


def test_last_windows_score_the_last_targets_of_a_piece():
    windows = last_windows([np.arange(10, 16), np.arange(20, 26)], 4, 3)
    np.testing.assert_array_equal(windows.tokens, [[11, 12, 13, 14, 15], [21, 22, 23, 24, 25]])
    np.testing.assert_array_equal(windows.weights, [[0, 1, 1, 1]] * 2)
    assert windows.scored == 6
