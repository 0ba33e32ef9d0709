"""Checks of biases and masks from outside the library, once for each call, without computing anything."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posjax._axes import fields_of, narrowed, sizes_of
from posjax._checks import check, describe
from posjax._slots import OfPairs, OfSomeHeads, OverPairs, check_registered, is_custom, is_custom_class
from posjax.bias import Bias, Contextual
from posjax.masks import Mask
from posjax.positions import Positions, Range

# Sides of the tile that is tried: not 1, which would broadcast, and not equal, which would hide a transpose.
_QUERIES, _KEYS = 2, 3


def check_custom(slots: Sequence[Bias | Mask | None], q, k, positions: tuple[Positions, Positions]) -> None:
    """Checks the biases and masks from outside the library, and such parts of others, of one call.

    Args:
        slots: the bias and the masks of the call.
        q, k: its queries and keys, ``[batch, length, heads, size]``.
        positions: those of the queries and of the keys.

    Raises:
        ValueError: for a class that JAX does not know, or a tile of another shape or dtype, naming the class.
    """
    check_registered(slots)
    for part in (part for slot in slots for part in _custom_parts(slot)):
        _check_axes(part.whole if isinstance(part, OfSomeHeads) else part)
        _check_derived(_kind(part))
        _check_part(part, q, k, positions)


def on_device(slot: Any) -> Any:
    """A bias or mask with JAX arrays in place of NumPy arrays in its parts from outside the library.

    A NumPy array cannot be indexed by traced positions.
    """

    def outside(node) -> bool:
        return isinstance(node, OverPairs) and is_custom(node)

    def as_jax(leaf):
        return jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf

    return jax.tree.map(lambda node: jax.tree.map(as_jax, node) if outside(node) else node, slot, is_leaf=outside)


def heads_of(slot: Bias | Mask) -> int | None:
    """The number of heads that a bound bias or a mask is for; None if its values are the same for all.

    Raises:
        ValueError: for a class that JAX does not know, or values that fail, naming the class.
    """
    check_registered(slot)
    if isinstance(slot, OfPairs):
        heads = slot.array.shape[1]
    elif isinstance(slot, Bias) and not is_custom(slot) and sizes_of(slot, "heads"):
        # An axis of size 1 in a bias of the library means one head: it does not broadcast.
        return max(sizes_of(slot, "heads"))
    else:
        position = jax.ShapeDtypeStruct((1,), jnp.int32)
        shape = _tile(slot, "allowed" if isinstance(slot, Mask) else "values", (1, 1), position, position).shape
        heads = shape[-3] if len(shape) > 2 else 1
    return None if heads == 1 else heads


def _kind(part: Any) -> type:
    return type(part.whole if isinstance(part, OfSomeHeads) else part)


def _custom_parts(slot: OverPairs | None) -> Iterator[OverPairs]:
    """The parts of a bias or mask that are from outside the library."""
    if slot is not None and is_custom(slot):
        yield slot
        return
    for leaf in jax.tree.leaves(slot, is_leaf=lambda leaf: leaf is not slot and isinstance(leaf, OverPairs)):
        if isinstance(leaf, OverPairs):
            yield from _custom_parts(leaf)


def has_custom(*slots: Bias | Mask | None) -> bool:
    """Whether a bias or mask, or a part of one, was written outside the library."""
    return any(True for slot in slots for _ in _custom_parts(slot))


def _check_axes(part: OverPairs) -> None:
    """Raises ValueError for a class with more arrays than the class that it inherits its axes from."""
    kind = type(part)
    owner = _owner(type(part), "axes")
    if owner is kind or not dataclasses.is_dataclass(owner):
        return
    more = sorted(fields_of(part) - {field.name for field in dataclasses.fields(owner)})
    check(not more, f"{kind.__name__} has fields {more} besides those of {owner.__name__}: give it axes of its own")


# Properties that describe values or pairs: a class that overrides values or pairs must override these too.
_DERIVED_FROM = {"values": ("by_distance", "constant_from"), "pairs": ("bounds", "kept_keys")}


def _check_derived(kind: type[OverPairs]) -> None:
    """Raises ValueError for a class that overrides values or pairs of a library class but not their properties."""

    def inherited(name: str) -> bool:
        owner = _owner(kind, name)
        return owner not in (Bias, Mask) and not is_custom_class(owner)

    for changed, derived in _DERIVED_FROM.items():
        if hasattr(kind, changed) and is_custom_class(_owner(kind, changed)):
            stale = [name for name in derived if hasattr(kind, name) and inherited(name)]
            check(
                not stale,
                f"{kind.__name__} overrides {changed} but inherits {stale}, which describe the old {changed}: override "
                "them too",
            )


def _owner(kind: type, name: str) -> type:
    """The class, ``kind`` or one of its bases, that defines an attribute."""
    return next(base for base in kind.__mro__ if name in vars(base))


def _check_part(part: OverPairs, q, k, positions: tuple[Positions, Positions]) -> None:
    """Tries a tile of the call, and a tile of its first batch row if the rows differ."""
    if isinstance(part, Contextual):
        return
    batch, queries, heads = q.shape[:3]
    keys = k.shape[1]
    tile = _check_tile(part, batch, heads, (queries, keys), positions)
    if tile.ndim == 4 and tile.shape[0] != 1:
        _check_tile(narrowed(part, batch=(0, 1)), 1, heads, (queries, keys), positions)


def _check_tile(
    part: OverPairs, batch: int, heads: int, tokens: tuple[int, int], positions: tuple[Positions, Positions]
) -> jax.ShapeDtypeStruct:
    q, k = min(_QUERIES, tokens[0]), min(_KEYS, tokens[1])
    positions = [_like(each, batch, n) for each, n in zip(positions, (q, k), strict=True)]
    method = _method(part)
    scores = [jax.ShapeDtypeStruct((batch, heads, q, k), jnp.float32)] if method == "apply" else []
    tile = _tile(part, method, (q, k), *scores, *positions)
    name = f"{_kind(part).__name__}.{method}"
    kind = jnp.bool_ if isinstance(part, Mask) else jnp.floating
    check(jnp.issubdtype(tile.dtype, kind), f"{name} must be of dtype {kind.__name__}, found {tile.dtype}")
    hint = "; name the axes of arrays of tokens in axes" if tile.shape[-2:] == tokens else ""
    check(
        _fits(tile.shape, (batch, heads, q, k)) and not (isinstance(part, Mask) and tile.ndim == 3),
        f"{name} must give [batch, heads, queries, keys] = {(batch, heads, q, k)}, or a shape that broadcasts to it, "
        f"on a tile of {q} queries and {k} keys, found shape {tile.shape}{hint}",
    )
    return tile


def _method(part: OverPairs) -> str:
    """The method that computes the tile of a part."""
    if isinstance(part, Mask):
        return "allowed"
    return "values" if part.only_adds else "apply"


def _like(positions: Positions, batch: int, length: int) -> jax.ShapeDtypeStruct:
    """Positions of ``length`` tokens, with axes of batch and heads if those of the call have a batch axis."""
    rows = not isinstance(positions, Range) and positions.ndim == 2
    return jax.ShapeDtypeStruct((batch, 1, length) if rows else (length,), jnp.int32)


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    sizes = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(size in (1, whole) for size, whole in sizes)


def _tile(part: OverPairs, method: str, sides: tuple[int, int], *arguments) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the result of a method for the first tile with these sides."""

    def computed(*arguments):
        cut = narrowed(on_device(part), queries=(0, sides[0]), keys=(0, sides[1]))
        return getattr(cut, method)(*arguments)

    try:
        program, tile = jax.make_jaxpr(computed, return_shape=True)(*arguments)
    except (TypeError, ValueError, IndexError) as error:
        shapes = ", ".join(str(argument.shape) for argument in arguments)
        why = str(error).partition("\n")[0]
        raise ValueError(f"{_kind(part).__name__}.{method} fails on arrays of shape {shapes}: {why}") from error
    _check_reads(part, method, program.consts)
    name = f"{_kind(part).__name__}.{method}"
    check(isinstance(tile, jax.ShapeDtypeStruct), f"{name} must give an array, found {describe(tile)}")
    return tile


def _check_reads(part: OverPairs, method: str, read: Sequence[Any]) -> None:
    """Raises ValueError if a method reads a traced array that is neither an argument nor a leaf of its object."""
    leaves = {id(leaf) for leaf in jax.tree.leaves(part)}
    foreign = [array for array in read if isinstance(array, jax.core.Tracer) and id(array) not in leaves]
    check(
        not foreign,
        f"{_kind(part).__name__}.{method} reads an array of the function that is being traced, which is not one of its "
        "fields; make it a data field of the class, or give it as a NumPy array",
    )
