"""Checks of arguments, and the words of their messages: how values are shown, and which names are suggested."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax import _checks as checks
from posjax._checks import check_choice, nearest, shown


class Pair(NamedTuple):
    first: object
    second: object


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Pair, "the class Pair"),
        (np.zeros((2, 3), np.int8), "int8 array of shape (2, 3)"),
        (jnp.zeros(3), "float32 array of shape (3,)"),
        (Pair(1, np.zeros(2)), "a Pair of arrays"),
        ("a\n  b", "'a\\n b'"),
        ("x" * 98, f"'{'x' * 98}'"),
        ("x" * 99, f"'{'x' * 95} ..."),
    ],
)
def test_a_value_in_a_message(value, text):
    assert shown(value) == text


def test_a_traced_array_is_shown_without_its_numbers():
    found = []
    jax.make_jaxpr(lambda x: found.append(shown(x)))(np.zeros((2, 1), np.float32))
    assert found == ["a traced float32 of shape (2, 1)"]


def test_few_known_names_are_listed_and_the_nearest_is_suggested():
    assert nearest("alibbi", ("alibi", "rope")) == "; did you mean 'alibi'? (known: alibi, rope)"
    assert nearest("zzz", ("alibi", "rope"), "the page") == " (known: alibi, rope)"
    assert nearest(3, ("alibi",)) == " (known: alibi)"
    with pytest.raises(ValueError, match=r"^kind: unknown value 'ropes'; did you mean 'rope'\? \(known: alibi, "):
        check_choice("kind", "ropes", ("rope", "alibi"))


def test_of_many_names_three_near_ones_are_listed_and_where_all_are():
    names = [f"name-{n}" for n in range(17)]
    known = f" (known: {', '.join(names[:16])})"
    assert nearest("zzz", names[:16], "the page") == known, "sixteen are few"
    assert nearest("zzz", names) == f" (known: {', '.join(names)})", "there is no page"
    assert nearest("zzz", names, "the page") == " (17 are known; the page list them)"
    found = nearest("name-1", names, "the page")
    assert found.startswith("; did you mean 'name-1'? (17 are known, among them name-1, ")
    assert found.count("name-") == 4


HEADS = np.zeros((1, 2, 3, 4), np.float32)
HOST = ", a Python number known before tracing"


@pytest.mark.parametrize(
    ("name", "value", "options"),
    [
        ("array", np.zeros(2), {}),
        ("array", jnp.zeros(2), {}),
        ("float", np.zeros(2, np.float16), {}),
        ("float", jnp.zeros(2, jnp.bfloat16), {}),
        ("tokens", np.zeros((0, 3), np.int8), {}),
        ("heads", HEADS, {}),
        ("heads", HEADS[:0], {}),
        ("positive", 1e-9, {}),
        ("positive", np.float32(2), {}),
        ("number", -3, {}),
        ("number", 2.5, {"at_least": 2.5}),
        ("count", 1, {}),
        ("count", np.int8(3), {}),
        ("even", 2, {}),
        ("rank", HEADS, {"rank": 4, "layout": "[any]"}),
    ],
)
def test_values_that_fit_are_accepted(name, value, options):
    getattr(checks, f"check_{name}")("x", value, **options)


@pytest.mark.parametrize(
    ("name", "value", "options", "message"),
    [
        ("array", [1.0], {}, "x must be an array, found [1.0]; jnp.asarray makes one of a list of numbers"),
        ("float", np.zeros(2, np.int32), {}, "x must be of a floating dtype, found int32"),
        (
            "float",
            jnp.zeros(2, jnp.float8_e4m3fn),
            {},
            "x must be bfloat16, float16, float32 or float64, found float8_e4m3",
        ),
        ("tokens", np.zeros(3, np.int32), {}, "x must have 2 axes [batch, length], found shape (3,)"),
        ("tokens", np.zeros((1, 3), np.float32), {}, "x must be integers, found float32"),
        ("heads", HEADS[0], {}, "x must have 4 axes [batch, length, heads, size], found shape (2, 3, 4)"),
        ("heads", HEADS.astype(int), {}, "x must be of a floating dtype, found int64"),
        ("heads", HEADS[:, :0], {}, "x must hold at least one token, found shape (1, 0, 3, 4)"),
        ("heads", HEADS[:, :, :0], {}, "x must hold at least one head, found shape (1, 2, 0, 4)"),
        ("heads", HEADS[..., :0], {}, "x must hold at least one feature, found shape (1, 2, 3, 0)"),
        ("positive", 0, {}, "x must be positive, found 0"),
        ("positive", True, {}, "x must be positive, found True"),
        ("positive", "1", {}, "x must be positive, found '1'"),
        ("positive", jnp.ones(()), {}, f"x must be positive{HOST}, found float32 array of shape ()"),
        ("positive", float("inf"), {}, "x must be finite, found inf"),
        ("positive", float("nan"), {}, "x must be positive, found nan"),
        ("number", False, {}, "x must be a number, found False"),
        ("number", float("inf"), {}, "x must be a number, found inf"),
        ("number", 2, {"at_least": 3}, "x must be a number of at least 3, found 2"),
        ("number", jnp.ones(()), {}, f"x must be a number{HOST}, found float32 array of shape ()"),
        ("count", 0, {}, "x must be positive and whole, found 0"),
        ("count", True, {}, "x must be positive and whole, found True"),
        ("count", 1.0, {}, "x must be positive and whole, found 1.0"),
        ("even", 3, {}, "x must be a positive even number, found 3"),
        ("even", 0, {}, "x must be a positive even number, found 0"),
        ("even", -2, {}, "x must be a positive even number, found -2"),
        ("rank", HEADS, {"rank": 3, "layout": "[any]"}, "x must have 3 axes [any], found shape (1, 2, 3, 4)"),
        ("rank", 1, {"rank": 0, "layout": "[any]"}, "x must be an array, found 1;"),
    ],
)
def test_what_does_not_fit_is_named_with_what_was_found(name, value, options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        getattr(checks, f"check_{name}")("x", value, **options)


def test_all_counts_are_checked_and_the_wrong_one_is_named():
    checks.check_counts(one=1, two=2)
    with pytest.raises(ValueError, match=r"^two must be positive and whole, found 0$"):
        checks.check_counts(one=1, two=0)


@pytest.mark.parametrize(
    "length", [None, 1, np.int32(3), np.array([1, 2]), np.array([], int), jnp.zeros(2, jnp.int32)], ids=str
)
def test_lengths_that_fit_are_accepted(length):
    checks.check_length(length)


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (0, "length must be at least 1, found 0"),
        (np.array([4, 0]), "length must be at least 1, found 0"),
        (2.0, "length must be a whole number or an array of them, found 2.0"),
        (np.ones(2), "length must be a whole number or an array of them, found float64 array of shape (2,)"),
    ],
)
def test_lengths_are_whole_and_above_zero(length, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        checks.check_length(length)


def test_arrays_are_known_unless_they_are_traced():
    assert checks.is_known(np.zeros(2))
    assert checks.is_known(jnp.zeros(2))
    assert checks.is_known(3)
    found = []
    jax.make_jaxpr(lambda x: found.append(checks.is_known(x)))(1.0)
    assert found == [False]


def test_parameters_are_taken_in_the_order_that_was_asked():
    params = {"a": np.zeros((2, 3)), "b": np.zeros(4), "unused": 0}
    b, a = checks.take(params, Pair(0, 0), b=(4,), a=("rows", 3))
    assert b is params["b"]
    assert a is params["a"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (None, "params must hold 'a': Pair(...).init makes them"),
        ({"b": 0}, "params must hold 'a': Pair(...).init makes them"),
        ({"a": np.zeros((2, 4))}, "a must have shape ('rows', 3), found (2, 4): Pair(...).init makes them"),
        ({"a": np.zeros((2, 3, 1))}, "a must have shape ('rows', 3), found (2, 3, 1): Pair(...).init makes them"),
    ],
)
def test_parameters_that_are_missing_or_of_another_shape_are_named(params, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        checks.take(params, Pair(0, 0), a=("rows", 3))
