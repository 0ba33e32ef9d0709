"""Names for the axes of the arrays that attention gets.

A registered dataclass names the axes of its arrays, by field:

    axes = {"q_gates": ("batch", "heads", "queries"), "kv_gates": ("batch", "heads", "keys")}

Code that cuts arrays into tiles, pads them or shards them asks for an axis by its name. Names are ``"batch"``,
``"heads"`` (query heads), ``"queries"`` and ``"keys"``; the arrays of ``posjax.attention.call`` also have
``"kv_heads"``, ``"group"`` and ``"size"``.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from posjax._checks import check
from posjax.positions import Range

AXES = ("batch", "heads", "queries", "keys")
"""The names of axes that biases and masks may have."""

Names = tuple[str | None, ...]
"""A name for each axis of an array; None for an axis that is never cut."""


class WithAxes:
    """A dataclass, registered with JAX, that names the axes of its arrays."""

    axes: ClassVar[Mapping[str, Names]] = {}
    """The names of the axes of each field's array. A field without names is never cut. Arrays of positions and
    of a scale may lack the first of these axes."""


def each(tree: Any, function: Callable[[Any, Names], Any], names: Names = ()) -> Any:
    """The tree with ``function(array, names)`` in place of every array; a ``Range`` of positions counts as an array.

    Args:
        tree: arrays, and ``WithAxes`` objects, which name the axes of their arrays.
        function: called with an array and, for each of its axes, a name or None.
        names: the names for arrays that are not in a ``WithAxes`` object.

    Raises:
        ValueError: for a class that JAX does not know.
    """

    def part(node):
        return _each_field(node, function) if isinstance(node, WithAxes) else function(node, _aligned(node, names))

    return jax.tree.map(part, tree, is_leaf=lambda node: isinstance(node, WithAxes | Range))


def _each_field(owner: WithAxes, function: Callable) -> Any:
    fields, structure = _fields(owner)
    return structure.unflatten([each(value, function, owner.axes.get(name, ())) for name, value in fields])


def _fields(owner: WithAxes) -> tuple[list[tuple[str | None, Any]], Any]:
    """The fields that JAX knows, as pairs of name (or None) and value, and the structure that rebuilds the owner."""
    fields, structure = jax.tree_util.tree_flatten_with_path(owner, is_leaf=lambda node: node is not owner)
    check(
        not fields or fields[0][1] is not owner,
        f"{type(owner).__name__} is not registered with JAX: write @jax.tree_util.register_dataclass above its "
        "@dataclasses.dataclass(frozen=True)",
    )
    return [(getattr(path[0], "name", None), value) for path, value in fields], structure


def fields_of(owner: WithAxes) -> set[str | None]:
    """The names of the owner's fields that are part of the pytree."""
    return {name for name, _ in _fields(owner)[0]}


def _aligned(array: Any, names: Names) -> Names:
    if isinstance(array, Range):
        return names[-1:]
    more = np.ndim(array) - len(names)
    return names[-more:] if more < 0 else (*names, *[None] * more)


def names_of(tree: Any) -> list[Names]:
    """The names of the axes of every leaf of a tree, in leaf order; ``()`` for the start of a ``Range``."""
    leaf_names = []

    def note(array, names: Names):
        leaf_names.extend([()] * len(jax.tree.leaves(array)) if isinstance(array, Range) else [names])
        return array

    each(tree, note)
    return leaf_names


def sizes_of(tree: Any, axis: str) -> set[int]:
    """How many entries the arrays of a tree have along an axis."""
    sizes = set()

    def look(array, names: Names):
        if axis in names:
            sizes.add(array.length if isinstance(array, Range) else array.shape[names.index(axis)])
        return array

    each(tree, look)
    return sizes


def narrowed(tree: Any, **parts: tuple[Any, int]) -> Any:
    """The tree with its arrays cut along named axes: ``narrowed(x, queries=(start, size), ...)``.

    An axis of size 1 is not cut, because it broadcasts.
    """

    def cut(array, names: Names):
        for name, (start, size) in parts.items():
            if name in names and isinstance(array, Range):
                array = Range(array.start + start, size)
            elif name in names and array.shape[names.index(name)] != 1:
                array = jax.lax.dynamic_slice_in_dim(array, start, size, names.index(name))
        return array

    return each(tree, cut)


def map_tokens(tree: Any, queries: Callable, keys: Callable, names: Names = ()) -> Any:
    """The tree with ``queries`` applied to every array over queries, and ``keys`` to every array over keys.

    Both are called as ``function(array, axis)``, with a negative axis. They are not called for a ``Range`` of
    positions, and not for an axis of size 1 of an array over pairs. ``names``: the axis names for plain arrays.
    """
    functions = {"queries": queries, "keys": keys}

    def mapped(array, names: Names):
        present = [name for name in names if name in functions and not isinstance(array, Range)]
        for name in present:
            axis = names.index(name) - len(names)
            array = array if len(present) == 2 and array.shape[axis] == 1 else functions[name](array, axis)
        return array

    return each(tree, mapped, names)
