"""Base classes for the slots of a scheme: values over pairs of tokens, and maps of queries, keys and values."""

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from posjax._axes import AXES, WithAxes, fields_of, names_of, narrowed
from posjax._checks import check


class OverPairs(WithAxes):
    """A value over (query, key) pairs: the base class of biases and masks.

    It is evaluated tile by tile, for the positions of a tile. Its arrays are cut to the tile, to batch rows and heads,
    and to the tokens of a device. ``axes`` says along which axes: it has a name for each axis of a field's array,
    ``"batch"``, ``"heads"``, ``"queries"`` or ``"keys"``, or None for an axis that is never cut.
    """

    reads_positions: ClassVar[bool] = True
    """Whether it depends on the positions of queries and keys."""

    def heads(self, start, size: int) -> Self:
        """The same value for the ``size`` query heads from ``start``.

        Arrays with an axis of heads are cut. If heads differ but no array has this axis, all heads are computed and
        these are selected.
        """
        if any("heads" in names for names in self.axes.values()):
            return narrowed(self, heads=(start, size))
        return self._of_heads(jnp.asarray(start, jnp.int32), size) if self.differs_between_heads else self

    def _of_heads(self, start: Int[Array, ""], size: int) -> Self:
        raise NotImplementedError

    @property
    def differs_between_heads(self) -> bool:
        """Whether a tile has several heads."""
        position = jnp.zeros(1, jnp.int32)
        one = narrowed(self, queries=(0, 1), keys=(0, 1))
        shape = jax.eval_shape(lambda: one._tile(position, position)).shape
        return len(shape) > 2 and shape[-3] > 1

    def _tile(self, q_positions: Int[Array, "*b q"], kv_positions: Int[Array, "*b k"]) -> Array:
        raise NotImplementedError

    def check(self, batch: int, queries: int, keys: int) -> None:
        """Raises ValueError unless its arrays, and those of its parts, fit an attention call of these sizes."""
        self.check_names()
        sizes = {"batch": batch, "queries": queries, "keys": keys}
        for field, names in self.axes.items():
            wanted = [sizes.get(name) for name in names]
            for shape in map(np.shape, jax.tree.leaves(getattr(self, field))):
                fits = len(shape) == len(names) and all(map(_fits, shape, wanted))
                shown = ", ".join(str(size or name or "any") for size, name in zip(wanted, names, strict=True))
                check(fits, f"{type(self).__name__} {field} must have shape ({shown}), found {shape}")
        for part in jax.tree.leaves(self, is_leaf=lambda node: node is not self and isinstance(node, OverPairs)):
            if isinstance(part, OverPairs):
                part.check(batch, queries, keys)

    def check_names(self) -> None:
        """Raises ValueError unless ``axes`` has only known names of axes, for fields that JAX knows by name."""
        fields = fields_of(self)
        unknown = [name for names in self.axes.values() for name in names if name not in (*AXES, None)]
        unknown += [field for field in self.axes if field not in fields]
        check(
            not unknown,
            f"{type(self).__name__}.axes: found {unknown}; it must map the names of data fields, as given to "
            f"jax.tree_util.register_dataclass, to one of {AXES} or None for each axis of their arrays",
        )


def _fits(size: int, wanted: int | None) -> bool:
    return wanted is None or size == wanted


@dataclasses.dataclass(frozen=True)
class OfPairs(OverPairs):
    """A value that is one array over pairs, ``[batch, heads, queries, keys]``; an axis of 1 broadcasts."""

    array: Array
    name: ClassVar[str]
    """The name of the argument of ``attention`` that takes this value."""

    axes: ClassVar = {"array": ("batch", "heads", "queries", "keys")}
    reads_positions: ClassVar[bool] = False

    @classmethod
    def with_four_axes(cls, array: Array) -> Array:
        """The array with axes of 1 in front.

        Raises:
            ValueError: for more than four axes.
        """
        layout = "[batch, heads, queries, keys]"
        check(array.ndim <= 4, f"{cls.name} must broadcast to {layout}, found shape {array.shape}")
        return array.reshape((1,) * (4 - array.ndim) + array.shape)

    def check(self, batch, queries, keys):
        """Raises ValueError unless the array broadcasts to the call; attention itself compares the heads."""
        fits = zip(self.array.shape, (batch, self.array.shape[1], queries, keys), strict=True)
        check(
            all(size in (1, wanted) for size, wanted in fits),
            f"{self.name} must broadcast to [batch, heads, queries, keys] = [{batch}, heads, {queries}, {keys}], "
            f"found shape {self.array.shape}",
        )


@dataclasses.dataclass(frozen=True)
class OfSomeHeads(OverPairs):
    """The ``size`` heads from ``start`` of a value ``whole`` that has no axis of heads to cut.

    All heads are computed, then these are selected. This is correct for any axes of the arrays.
    """

    whole: Any
    start: Int[Array, ""]
    size: int = dataclasses.field(metadata={"static": True})

    def kept(self, tile):
        """These heads of a tile ``[..., heads, q, k]``; the whole tile if the heads do not differ."""
        if tile.ndim < 3 or tile.shape[-3] == 1:
            return tile
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(tile), self.start, self.size, axis=tile.ndim - 3)

    def heads(self, start, size):
        """Some of these heads."""
        return type(self)(self.whole, self.start + start, size)

    @property
    def reads_positions(self):
        """Same as ``whole``."""
        return self.whole.reads_positions


def is_custom(part: Any) -> bool:
    """Whether the class of a bias or mask was written outside the library."""
    return is_custom_class(type(part.whole if isinstance(part, OfSomeHeads) else part))


def is_custom_class(kind: type) -> bool:
    """Whether a class was written outside the library."""
    return not kind.__module__.startswith("posjax.")


def check_registered(value: Any) -> None:
    """Raises ValueError for a mask or bias anywhere in ``value`` whose class JAX does not know as a pytree."""
    names_of(value)


def with_head_axis(positions: Int[Array, "*b n"]) -> Int[Array, "*b n"]:
    """Positions as masks and biases take them: ``[n]`` unchanged, ``[batch, n]`` as ``[batch, 1, n]``."""
    return positions if positions.ndim == 1 else positions[:, None, :]


class Features:
    """The feature slot: maps of every query, key and, rarely, value and output. Each reads only its token's position.

    ``score(i, j) = phi(q_i, p_i) . psi(k_j, p_j)``. A subclass is a frozen, hashable dataclass. ``positions`` are
    integers ``[length]`` or ``[batch, length]``, a ``Range``, or coordinates with a further axis for methods that have
    several; ``length`` is the current length, for methods that read it; ``head_dim`` is the size of a head of the
    model, which may differ from the width of a projection. A method with a frequency rule holds it in ``frequencies``,
    and takes its properties from the rule unless it overrides them.
    """

    frequencies: Any = None
    """The frequency rule (``rotary.FrequencyRule``), or None."""
    widths: tuple[float, float] = (1.0, 1.0)
    """Widths of the query and key projections, as shares of a head."""
    copies: int = 1
    """How many heads of attention a query head makes: ``query`` has this many times the heads of its input (RoPE++)."""
    cached: str = "rotated"
    """What a cache should hold: ``psi`` (``"rotated"``), or the input of ``psi`` if that is narrower."""
    one_sided: str | None = None
    """None for a method that fits bidirectional attention too; otherwise why not, or the option that makes it fit."""

    @property
    def num_axes(self) -> int:
        """How many coordinates a position has."""
        return 1 if self.frequencies is None else self.frequencies.num_axes

    @property
    def reads_length(self) -> bool:
        """Whether a call needs ``length``."""
        return self.frequencies is not None and self.frequencies.reads_length

    @property
    def shift_invariant(self) -> bool:
        """Whether shifting all positions by one constant changes nothing."""
        return self.frequencies is None or self.frequencies.shift_invariant

    @property
    def softmax_scale(self) -> float:
        """A factor of the logits that belongs to the method (YaRN as DeepSeek applies it)."""
        return 1.0 if self.frequencies is None else self.frequencies.softmax_scale

    @property
    def decays(self) -> bool:
        """Whether ``decay`` gives rates."""
        return type(self).decay is not Features.decay

    @property
    def own_head_dim(self) -> int | None:
        """The only head size that the frequency rule is made for; None if it is made for any size."""
        return None if self.frequencies is None else self.frequencies.head_dim

    def decay(self, head_dim: int) -> Float[Array, "size"] | None:
        """Rates ``a`` of the features if the score is ``sum_c phi_c psi_c exp(-a_c (i - j))`` (xPos), or None."""
        return None

    def init(self, key: Array, *, num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, Array]:
        """Learned parameters of one layer, ``{}`` if there are none."""
        return {} if self.frequencies is None else self.frequencies.init(key, head_dim)

    def heads(self, params, which: Int[Array, "kv_heads"]):
        """The parameters of the key heads with the indices ``which``; most methods have the same for all heads."""
        return params

    def query_size(self, head_dim: int) -> int:
        """Width of a head's query projection."""
        return int(head_dim * self.widths[0])

    def key_size(self, head_dim: int) -> int:
        """Width of a head's key projection."""
        return int(head_dim * self.widths[1])

    def head_dim(self, key_size: int) -> int:
        """The size of a head whose key projection is ``key_size`` wide."""
        return int(key_size / self.widths[1])

    def compact(self, k):
        """The form of a key that a cache stores if it does not store ``psi``."""
        return k

    def query(self, params, q, positions, *, head_dim: int, length=None):
        """``phi``: the features of the queries, ``[batch, length, copies heads, size]``."""
        return q

    def key(self, params, k, positions, *, head_dim: int, length=None):
        """``psi``: the features of the keys ``[batch, length, kv_heads, key_size]``."""
        return k

    def __call__(self, q, k, *, q_positions, kv_positions, head_dim: int, length=None, params=None):
        """``(phi, psi)`` of the raw projections."""
        sizes = {"head_dim": head_dim, "length": length}
        return self.query(params, q, q_positions, **sizes), self.key(params, k, kv_positions, **sizes)

    def value(self, params, v, positions, *, head_dim: int, length=None):
        """A map of the values ``[batch, length, kv_heads, value_size]``; most methods have none."""
        return v

    def output(self, params, out, positions, *, head_dim: int, length=None):
        """A map of the outputs of attention, ``[batch, length, copies heads, value_size]``; most methods have none."""
        return out
