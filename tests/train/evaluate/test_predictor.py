"""Losses and likeliest tokens in rows that are padded, reordered and computed in parts, against plain indexing."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.layout import Layout
from train.evaluate import predictor as module
from train.evaluate.predictor import Predictor, RowLayout, next_at, next_nll

ZIGZAG = Layout("zigzag", 2)  # four chunks, of which a shard has the first and last, or those between
LOGITS = np.random.default_rng(0).normal(size=(20, 7)).astype(np.float32)
"""The logits after each of 20 tokens."""
TOKENS = np.random.default_rng(1).integers(0, 7, (3, 12))


def bigram(layout=None, seen=None, rows=1):
    """A model whose logits depend on the token before alone."""

    def logits(parameters, hidden):
        if seen is not None:
            seen.append(hidden.shape[:2])
        return hidden

    row = (lambda length: RowLayout(length, layout)) if layout else RowLayout
    return Predictor(lambda parameters, tokens, length: parameters[tokens], logits, row=row, rows=rows)


@pytest.mark.parametrize(
    ("layout", "most"),
    [(None, 3 * 7 * 2), (ZIGZAG, 2**26), (ZIGZAG, 3 * 7 * 4), (Layout("contiguous", 5), 1)],
    ids=str,
)
def test_losses_and_likeliest_tokens_are_those_of_each_token_in_every_layout(monkeypatch, layout, most):
    monkeypatch.setattr(module, "_LOGITS", most)
    predictor, length, at = bigram(layout), TOKENS.shape[1] - 1, np.array([[0, 10], [3, 4], [9, 1]])
    before, after = TOKENS[:, :-1], TOKENS[:, 1:]
    exact = np.log(np.exp(LOGITS.astype(np.float64)).sum(-1))[before] - LOGITS[before, after]
    found = next_nll(predictor, jnp.asarray(LOGITS), jnp.asarray(TOKENS), length)
    chex.assert_shape(found, (3, length))
    np.testing.assert_allclose(found, exact, rtol=1e-5)
    asked = np.take_along_axis(before, at, axis=1)
    likeliest, losses = next_at(predictor, jnp.asarray(LOGITS), jnp.asarray(TOKENS), jnp.asarray(at), length)
    np.testing.assert_array_equal(likeliest, LOGITS[asked].argmax(-1))
    np.testing.assert_allclose(losses, np.take_along_axis(exact, at, axis=1), rtol=1e-5)


@pytest.mark.parametrize(
    ("devices", "most", "part"),
    [(1, 3 * 7 * 5, 10), (1, 3 * 7 * 2 - 1, 2), (2, 2 * 7 * 2, 4)],  # of two devices one has two of the three rows
)
def test_a_part_has_as_many_tokens_as_a_device_may_have_logits(monkeypatch, devices, most, part):
    """Rows of eleven tokens over two shards of six; a single token first, for the size of the vocabulary."""
    monkeypatch.setattr(module, "_LOGITS", most)
    seen = []
    next_nll(bigram(Layout("contiguous", 2), seen, devices), jnp.asarray(LOGITS), jnp.asarray(TOKENS), 11)
    assert seen[0] == (3, 1)
    assert set(seen[1:]) == {(3, part)}
