"""Numbers that are static or leaves, dtypes of sums, and ranks made equal."""

import dataclasses
import re
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax._numbers import (
    LARGEST,
    at_least_float32,
    is_array_number,
    is_number,
    level,
    positive_number,
    register_numbers,
    whole_number,
    widened,
)


@partial(register_numbers, scalars=("scalar",), structure=("fixed",))
@dataclasses.dataclass(frozen=True)
class Kept:
    """A subtree, a scalar that may be an array, and a field that is never a leaf."""

    tree: Any
    scalar: Any
    fixed: Any


def test_sums_are_taken_in_at_least_float32():
    assert at_least_float32(jnp.bfloat16, np.int8) == jnp.float32
    assert at_least_float32(jnp.float32, np.dtype(np.float64)) == jnp.float64
    chex.assert_type(widened(jnp.zeros(2, jnp.float16)), jnp.float32)
    chex.assert_type(widened(np.zeros(2)), np.float64)


def test_numbers_are_known_and_array_numbers_are_not():
    values = (1, 2.5, np.float32(3), jnp.ones(()), np.ones(()), "1")
    assert [is_number(value) for value in values] == [True, True, True, False, False, False]
    assert [is_array_number(value) for value in values] == [False, False, False, True, False, False]


@pytest.mark.parametrize("scalar", [None, 3, 2.5, (1, 2), np.float32(2)], ids=str)
def test_a_known_scalar_is_part_of_the_structure(scalar):
    value = Kept([1.0, 2.0], scalar, "any")
    assert jax.tree.leaves(value) == [1.0, 2.0]
    doubled = jax.tree.map(lambda x: 2 * x, value)
    assert doubled == Kept([2.0, 4.0], scalar, "any")
    assert jax.tree.structure(value) != jax.tree.structure(dataclasses.replace(value, scalar="other"))


def test_an_array_scalar_is_a_leaf_and_a_fixed_field_never_is():
    value = Kept(None, jnp.float32(3), 4)
    assert [path[0].name for path, _ in jax.tree_util.tree_leaves_with_path(value)] == ["scalar"]
    found = jax.jit(lambda x: jax.tree.map(jnp.square, x))(value)
    assert (float(found.scalar), found.fixed, found.tree) == (9, 4, None)


def test_a_leaf_that_a_transformation_replaced_by_a_number_stays_a_leaf():
    value = Kept(5.0, jnp.float32(3), None)
    axes = jax.tree.map(lambda _: 0, value)
    assert jax.tree.leaves(axes) == [0, 0]
    assert jax.tree.structure(axes) == jax.tree.structure(value)
    assert jax.tree.leaves(jax.tree.map(lambda x: x + 1, axes)) == [1, 1]


@pytest.mark.parametrize("value", [1, np.int64(1), np.array(1), LARGEST])
def test_a_known_size_is_a_python_int(value):
    found = whole_number("x", value)
    assert type(found) is int
    assert found == value


@pytest.mark.parametrize("value", [jnp.int32(3), jnp.int8(3)])
def test_a_size_in_a_jax_array_stays_an_array_of_int32(value):
    for found in (whole_number("x", value), jax.jit(partial(whole_number, "x"))(value)):
        chex.assert_type(found, jnp.int32)
        assert found == 3


@pytest.mark.parametrize(("at_least", "lowest"), [(1, 1), (0, 0), (-5, -5), (-(2**40), -LARGEST)])
def test_the_least_size_is_accepted(at_least, lowest):
    assert whole_number("x", lowest, at_least) == lowest


@pytest.mark.parametrize(
    ("value", "at_least", "message"),
    [
        (0, 1, "x must be positive and whole, found 0"),
        (jnp.int32(0), 1, "x must be positive and whole, found 0"),
        (-1, 0, "x must be whole, found -1"),
        (True, 1, "x must be positive and whole, found True"),
        (1.0, 1, "x must be positive and whole, found 1.0"),
        (np.array(1.5), 1, "x must be positive and whole, found an array of float64 and shape ()"),
        (np.array([1]), 1, "x must be positive and whole, found an array of int64 and shape (1,)"),
        (LARGEST + 1, 1, f"x must fit in int32, at most {LARGEST}, found {LARGEST + 1}"),
        (-LARGEST - 1, -(2**40), f"x must fit in int32, at most {LARGEST}, found {-LARGEST - 1}"),
    ],
)
def test_what_is_no_size_is_named(value, at_least, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        whole_number("x", value, at_least)


def test_sizes_that_are_traced_are_not_checked():
    assert jax.jit(partial(whole_number, "x"))(jnp.int32(-3)) == -3
    assert jax.jit(partial(positive_number, "x"))(jnp.float32(-3)) == -3


@pytest.mark.parametrize("value", [2, 0.5, np.float32(0.5), np.array(0.5), np.array(3)])
def test_a_known_positive_number_is_a_python_number(value):
    found = positive_number("x", value)
    assert type(found) in (int, float)
    assert found == value


def test_a_positive_number_in_a_jax_array_stays_as_it_is():
    value = jnp.float32(0.5)
    assert positive_number("x", value) is value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "x must be positive, found 0.0"),
        (jnp.float32(-1), "x must be positive, found -1.0"),
        (float("inf"), "x must be finite, found inf"),
        (True, "x must be positive, found True"),
        ("1", "x must be positive, found '1'"),
        (np.ones(1), "x must be a positive number, found an array of float64 and shape (1,)"),
        (np.array(True), "x must be a positive number, found an array of bool and shape ()"),
    ],
)
def test_what_is_no_positive_number_is_named(value, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        positive_number("x", value)


def test_arrays_get_leading_axes_until_all_have_the_same_rank():
    arrays = np.zeros((3, 4)), np.zeros(()), np.zeros((2, 3, 4)), np.zeros(4)
    assert [x.shape for x in level(*arrays)] == [(1, 3, 4), (1, 1, 1), (2, 3, 4), (1, 1, 4)]
