"""The words of messages: how values are shown, and which names are suggested."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
