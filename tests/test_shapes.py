"""Grouping of heads, blocks of tokens, and zeros at hidden tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from posjax._shapes import grouped, in_blocks, joined, ungrouped, zeros_at

X = np.arange(2 * 6 * 4 * 3).reshape(2, 6, 4, 3)  # [batch, tokens, heads, size]


def test_neighbouring_heads_share_a_key_head():
    found = grouped(jnp.asarray(X), 2)
    for head in range(4):
        np.testing.assert_array_equal(found[:, head // 2, head % 2], X[:, :, head])
    np.testing.assert_array_equal(ungrouped(found), X)
    np.testing.assert_array_equal(ungrouped(found[..., 0]), X[..., 0])


@pytest.mark.parametrize("axis", [0, 1])
def test_blocks_come_first_and_go_back(axis):
    found = in_blocks(jnp.asarray(X), axis, 2)
    np.testing.assert_array_equal(found[-1], np.take(X, [-2, -1], axis))
    np.testing.assert_array_equal(joined(found, axis), X)


@pytest.mark.parametrize(("rows", "tokens"), [(0, 1), (1, 0), (0, 2), (3, 1)])
def test_hidden_tokens_are_zeros_even_where_they_were_nan(rows, tokens):
    hidden = np.array([[True, False, False], [False, False, True]])
    x = np.moveaxis(np.where(hidden[..., None, None], np.nan, np.arange(1.0, 5).reshape(2, 2)), (0, 1), (rows, tokens))
    found = np.moveaxis(np.asarray(zeros_at(jnp.asarray(hidden), jnp.asarray(x), rows, tokens)), (rows, tokens), (0, 1))
    np.testing.assert_array_equal(found, np.where(hidden[..., None, None], 0, np.arange(1.0, 5).reshape(2, 2)))
