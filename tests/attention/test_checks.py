"""Checks of single arguments, such as positions: a Range, one row for the batch, or one row for each sequence."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.attention.checks import check_ahead, check_masks, check_scale, check_sinks, checked_positions, rates
from posjax.bias import ALiBi
from posjax.masks import ArrayMask, Causal, Dilated, FirstTokens, Segments, Window
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


@pytest.mark.parametrize("scale", [None, 2, 0.5, np.float32(3), np.ones(2), jnp.ones(())], ids=str)
def test_scales_are_numbers_or_arrays(scale):
    check_scale(scale)


@pytest.mark.parametrize("scale", [True, "log", [1.0]])
def test_other_scales_are_refused(scale):
    with pytest.raises(ValueError, match=r"^scale must be a number or an array, found .*; named scales go in"):
        check_scale(scale)


HEADS = np.zeros((2, 3, 4, 8), np.float32)
KEYS = np.zeros((2, 5, 2, 8), np.float32)


@pytest.mark.parametrize(
    "mask", [None, Causal(), ArrayMask(np.ones((1, 1, 3, 5), bool)), ArrayMask(np.ones((2, 4, 3, 5), bool))]
)
def test_masks_of_one_head_or_of_all_heads_fit(mask):
    check_masks(HEADS, KEYS, None, mask)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 2, 3, 5), "mask: it has one pattern for each of 2 heads, but q has 4"),
        ((1, 4, 4, 5), r"mask must broadcast to .* = \[2, heads, 3, 5\]"),
        ((1, 4, 3, 6), r"mask must broadcast to .* = \[2, heads, 3, 5\]"),
        ((3, 4, 3, 5), r"mask must broadcast to .* = \[2, heads, 3, 5\]"),
    ],
)
def test_every_mask_must_fit_the_call(shape, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        check_masks(HEADS, KEYS, Causal(), ArrayMask(np.ones(shape, bool)))


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (Range(0, 2), "p must cover 3 tokens, found a Range of 2"),
        (np.zeros(3), "p must be integers, found float64"),
        (np.zeros(2, int), r"p must have shape \(3,\) or \(2, 3\), found \(2,\)"),
        (np.zeros((3, 3), int), r"p must have shape \(3,\) or \(2, 3\), found \(3, 3\)"),
    ],
)
def test_positions_are_integers_one_for_each_token(positions, message):
    assert checked_positions("p", Range(7, 3), HEADS) == Range(7, 3)
    with pytest.raises(ValueError, match=f"^{message}$"):
        checked_positions("p", positions, HEADS)


def test_one_position_for_each_row_needs_an_axis():
    with pytest.raises(ValueError, match=r"found \(2,\); for one position a row write p\[:, None\]$"):
        checked_positions("p", np.zeros(2, int), HEADS[:, :1])


@pytest.mark.parametrize("sinks", [None, np.zeros(4), jnp.zeros(4)])
def test_sinks_are_one_logit_for_each_head(sinks):
    check_sinks(sinks, 4)
    for wrong in (np.zeros(3), np.zeros((1, 4)), [0.0] * 4):
        with pytest.raises(ValueError, match=r"^sinks must have shape \(4,\), one logit per query head, found"):
            check_sinks(wrong, 4)


def test_rates_of_decay_are_not_negative_and_have_no_gradient():
    assert rates(None, jnp.float32) is None
    found = rates(np.array([0, 0.5]), jnp.float32)
    chex.assert_type(found, jnp.float32)
    np.testing.assert_array_equal(found, [0, 0.5])
    chex.assert_shape(rates(np.zeros(0), jnp.float32), (0,))
    with pytest.raises(ValueError, match=r"^decay must not be negative.*, found -0.25$"):
        rates(np.array([0.5, -0.25]), jnp.float32)
    value, gradient = jax.jit(jax.value_and_grad(lambda x: rates(x, jnp.float32).sum()))(jnp.asarray([-3.0, 0.5]))
    assert value == 0.5
    np.testing.assert_array_equal(gradient, [0, 0])


GROWING = ALiBi().bind(num_heads=4)


@pytest.mark.parametrize(
    ("mask", "q_positions", "kv_positions", "key"),
    [
        (None, Range(0, 2), Range(0, 2), 1),
        (None, Range(3, 2), Range(0, 5), 4),
        (None, Range(0, 1), Range(6, 2), 6),
        (None, Range(3, 2), Range(0, 4), None),
        (None, Range(8, 2), Range(0, 4), None),
        (Causal(), Range(0, 4), Range(0, 4), None),
        (~Causal(), Range(0, 4), Range(0, 4), 1),
        (Causal() | FirstTokens(4), Range(0, 6), Range(2, 6), 2),
        (Causal() | ~Window(3), Range(0, 6), Range(0, 6), 3),
        (Dilated(4, (2, 3)), Range(0, 6), Range(0, 6), 2),
        (Segments(np.zeros((1, 2), np.int32)), Range(0, 2), Range(0, 2), None),
        (None, np.arange(2), Range(0, 2), None),
        (None, Range(0, 2), np.arange(2), None),
        (None, Range(jnp.int32(0), 2), Range(0, 2), None),
    ],
)
def test_a_bias_that_grows_ahead_is_refused_if_the_first_query_is_known_to_see_a_key_ahead(
    mask, q_positions, kv_positions, key
):
    check_ahead(None, mask, q_positions, kv_positions)
    check_ahead(ALiBi(symmetric=True).bind(num_heads=4), mask, q_positions, kv_positions)
    if key is None:
        check_ahead(GROWING, mask, q_positions, kv_positions)
        return
    with pytest.raises(ValueError, match=rf"grows without bound .* sees the key at position {key}; use mask=Causal"):
        check_ahead(GROWING, mask, q_positions, kv_positions)
