"""The axes that arrays declare: which arrays are sliced or mapped along an axis, and which stay as they are."""

import dataclasses
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax._axes import WithAxes, each, map_tokens, names_of, narrowed, sizes_of
from posjax.positions import Range


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Part(WithAxes):
    """Arrays of queries, of keys and of pairs, and one that declares no axes."""

    q: jax.Array
    k: jax.Array
    pairs: jax.Array
    whole: jax.Array

    axes: ClassVar = {
        "q": ("batch", "queries", None),
        "k": ("batch", "keys"),
        "pairs": ("batch", "heads", "queries", "keys"),
    }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Whole(WithAxes):
    """Parts, and positions."""

    parts: tuple
    q_positions: Range | jax.Array

    axes: ClassVar = {"q_positions": ("batch", "queries")}


def numbers(*shape):
    return np.arange(np.prod(shape)).reshape(shape)


PART = Part(numbers(2, 6, 3), numbers(2, 5), numbers(2, 4, 6, 1), numbers(6, 5))


def test_every_array_gets_the_names_of_its_axes():
    whole = Whole((PART, None), numbers(6))
    assert names_of(whole) == [
        ("batch", "queries", None),
        ("batch", "keys"),
        ("batch", "heads", "queries", "keys"),
        (None, None),
        ("queries",),
    ]
    assert names_of([numbers(2), PART.k]) == [(None,), (None, None)]
    assert names_of(Whole((), Range(0, 6))) == []
    assert names_of(Whole((), Range(jnp.int32(3), 6))) == [()]
    assert sizes_of(whole, "queries") == {6}
    assert sizes_of(Whole((PART,), Range(0, 7)), "queries") == {6, 7}
    assert sizes_of(whole, "keys") == {1, 5}


def test_an_axis_is_cut_wherever_it_is_named():
    some = jax.jit(lambda whole, start: narrowed(whole, queries=(start, 2)))(Whole((PART,), Range(10, 6)), 3)
    part = some.parts[0]
    np.testing.assert_array_equal(part.q, PART.q[:, 3:5])
    np.testing.assert_array_equal(part.pairs, PART.pairs[:, :, 3:5])
    np.testing.assert_array_equal(part.k, PART.k)
    np.testing.assert_array_equal(part.whole, PART.whole)
    assert (some.q_positions.length, int(some.q_positions.start)) == (2, 13)
    assert narrowed(Range(10, 6), queries=(3, 2)) == Range(10, 6)
    np.testing.assert_array_equal(narrowed(Whole((), numbers(2, 6)), batch=(1, 1)).q_positions, numbers(2, 6)[1:])


def test_an_axis_of_size_one_is_not_cut():
    some = narrowed(PART, keys=(2, 3))
    np.testing.assert_array_equal(some.k, PART.k[:, 2:])
    assert some.pairs is PART.pairs


def test_tokens_of_queries_and_of_keys_are_mapped_separately():
    mapped = map_tokens(
        Whole((PART,), Range(0, 6)), lambda x, axis: np.flip(x, axis), lambda x, axis: np.roll(x, 1, axis)
    )
    part = mapped.parts[0]
    np.testing.assert_array_equal(part.q, PART.q[:, ::-1])
    np.testing.assert_array_equal(part.k, np.roll(PART.k, 1, 1))
    np.testing.assert_array_equal(part.pairs, PART.pairs[:, :, ::-1])
    assert part.whole is PART.whole
    assert mapped.q_positions == Range(0, 6)


def test_a_class_that_jax_does_not_know_is_named():
    class Unknown(WithAxes):
        pass

    with pytest.raises(ValueError, match="Unknown is not registered with JAX"):
        each([Unknown()], lambda array, names: array)


def test_mapped_trees_keep_their_structure():
    doubled = jax.jit(lambda part: each(part, lambda array, names: 2 * array))(PART)
    chex.assert_trees_all_equal(doubled, jax.tree.map(lambda x: jnp.asarray(2 * x), PART))
