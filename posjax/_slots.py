"""What the slots of a scheme have in common: values taken block by block, and maps of queries, keys and values."""

from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from posjax._checks import check


class Blockwise:
    """A value over (query, key) pairs that can be narrowed to a block of either.

    For a function of positions the defaults are right, because the positions themselves are narrowed beside it: its
    arrays go whole to every tile, every row and every device. A subclass whose arrays have an axis of tokens defines
    ``queries``, ``keys``, ``pad`` and ``map_tokens``; one whose arrays have an axis of rows defines ``rows`` and
    ``batched``.
    """

    @property
    def reads_positions(self) -> bool:
        """Whether it depends on where queries and keys stand."""
        return True

    @property
    def axes(self) -> Any:
        """The value with a tuple in place of each array: what each of its axes holds one entry of.

        Names are ``"batch"``, ``"length"`` and ``"heads"``; None, and axes behind those named, are held whole by every
        device of a mesh.
        """
        return jax.tree.map(lambda _: (), self)

    def queries(self, start, size: int) -> Self:
        """The same value for the block of ``size`` queries from ``start``."""
        return self

    def keys(self, start, size: int) -> Self:
        """The same value for the block of ``size`` keys from ``start``."""
        return self

    def rows(self, start, size: int) -> Self:
        """The same value for the ``size`` rows of the batch from ``start``."""
        return self

    def pad(self, queries: int, keys: int) -> Self:
        """The same value with its arrays lengthened to ``queries`` and ``keys`` tokens."""
        return self

    def map_tokens(self, queries: Callable[[Array], Any], keys: Callable[[Array], Any]) -> Self:
        """The same value with ``queries`` applied to its arrays over queries, and ``keys`` to those over keys.

        Tokens are the last axis of those arrays.
        """
        return self

    def heads(self, start, size: int) -> Self:
        """The same value for the ``size`` query heads from ``start``."""
        return self

    def check(self, batch: int, queries: int, keys: int) -> None:
        """Raises ValueError unless the arrays it carries fit an attention call of these sizes."""

    @property
    def batched(self) -> bool:
        """Whether it carries arrays that differ between the rows of a batch."""
        return False

    @property
    def shift_invariant(self) -> bool:
        """Whether shifting all positions by one constant changes nothing."""
        return True


class OfPairs(Blockwise):
    """A value that is one array over pairs, ``[batch, heads, queries, keys]``; an axis of 1 is for all alike."""

    array: Array
    name: ClassVar[str]
    """The argument of ``attention`` that it is given as."""
    _filler: ClassVar[Any]
    """What a pair with a token that padding adds gets."""

    reads_positions = False

    @property
    def axes(self):
        """Rows and heads; pairs of tokens are never split."""
        return type(self)(("batch", "heads"))

    @classmethod
    def with_four_axes(cls, array: Array) -> Array:
        """The array with axes of 1 in front.

        Raises:
            ValueError: for more than four axes.
        """
        layout = "[batch, heads, queries, keys]"
        check(array.ndim <= 4, f"{cls.name} must broadcast to {layout}, found shape {array.shape}")
        return array.reshape((1,) * (4 - array.ndim) + array.shape)

    def _mapped(self, function: Callable[[Array], Array], axis: int) -> Self:
        return self if self.array.shape[axis] == 1 else type(self)(function(self.array))

    def _cut(self, start, size: int, axis: int) -> Self:
        return self._mapped(lambda array: jax.lax.dynamic_slice_in_dim(array, start, size, axis), axis)

    def queries(self, start, size):
        """The array of a block of queries."""
        return self._cut(start, size, 2)

    def keys(self, start, size):
        """The array of a block of keys."""
        return self._cut(start, size, 3)

    def rows(self, start, size):
        """The array of some rows of the batch."""
        return self._cut(start, size, 0)

    def heads(self, start, size):
        """The array of some query heads; as it is where it has no more of them."""
        return self if self.array.shape[1] == size else self._cut(start, size, 1)

    def pad(self, queries, keys):
        """The array lengthened by what padding gets."""
        return self._lengthened(queries, 2)._lengthened(keys, 3)

    def _lengthened(self, length: int, axis: int) -> Self:
        widths = [(0, length - self.array.shape[axis] if n == axis else 0) for n in range(4)]
        return self._mapped(lambda array: jnp.pad(array, widths, constant_values=self._filler), axis)

    def map_tokens(self, queries, keys):
        """The array mapped along its queries and along its keys."""
        turned = self._mapped(lambda array: jnp.swapaxes(queries(jnp.swapaxes(array, -1, -2)), -1, -2), 2)
        return turned._mapped(keys, 3)

    def check(self, batch, queries, keys):
        """Raises ValueError unless the array broadcasts to the call; attention itself compares the heads."""
        fits = zip(self.array.shape, (batch, self.array.shape[1], queries, keys), strict=True)
        check(
            all(found in (1, wanted) for found, wanted in fits),
            f"{self.name} must broadcast to [batch, heads, queries, keys] = [{batch}, heads, {queries}, {keys}], "
            f"found shape {self.array.shape}",
        )


class OfSomeHeads(Blockwise):
    """The ``size`` heads from ``start`` of a ``whole`` that does not say how its arrays are narrowed to them.

    It is computed for all heads, of which these are kept: right whatever the axes of the arrays are.
    """

    whole: Any
    start: Int[Array, ""]
    size: int

    def kept(self, tile):
        """These heads of a tile ``[..., heads, q, k]``; all of it where it has no heads of its own."""
        if tile.ndim < 3 or tile.shape[-3] == 1:
            return tile
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(tile), self.start, self.size, axis=tile.ndim - 3)

    def heads(self, start, size):
        """Some of these heads."""
        return type(self)(self.whole, self.start + start, size)

    def _with(self, whole) -> Self:
        return type(self)(whole, self.start, self.size)

    def queries(self, start, size):
        """The whole for a block of queries."""
        return self._with(self.whole.queries(start, size))

    def keys(self, start, size):
        """The whole for a block of keys."""
        return self._with(self.whole.keys(start, size))

    def rows(self, start, size):
        """The whole for some rows of the batch."""
        return self._with(self.whole.rows(start, size))

    def pad(self, queries, keys):
        """The whole with longer arrays."""
        return self._with(self.whole.pad(queries, keys))

    def map_tokens(self, queries, keys):
        """The whole with its arrays mapped."""
        return self._with(self.whole.map_tokens(queries, keys))

    def check(self, batch, queries, keys):
        """Raises ValueError unless the whole fits the call."""
        self.whole.check(batch, queries, keys)

    @property
    def reads_positions(self):
        """As the whole."""
        return self.whole.reads_positions

    @property
    def axes(self):
        """Those of the whole."""
        return type(self)(self.whole.axes, (), self.size)

    @property
    def batched(self):
        """As the whole."""
        return self.whole.batched

    @property
    def shift_invariant(self):
        """As the whole."""
        return self.whole.shift_invariant


def is_own(part: Any) -> bool:
    """Whether the class of a bias or mask was written outside the library."""
    return is_own_class(type(part.whole if isinstance(part, OfSomeHeads) else part))


def is_own_class(kind: type) -> bool:
    """Whether a class was written outside the library."""
    return not kind.__module__.startswith("posjax.")


def check_registered(value: Any) -> None:
    """Raises ValueError for a mask or bias anywhere in ``value`` whose class JAX does not know as a pytree."""
    for leaf in jax.tree.leaves(value):
        check(
            not isinstance(leaf, Blockwise),
            f"{type(leaf).__name__} is not registered with JAX: write @jax.tree_util.register_dataclass above its "
            "@dataclasses.dataclass(frozen=True)",
        )


def with_head_axis(positions: Int[Array, "*b n"]) -> Int[Array, "*b n"]:
    """``[n]`` as it is, ``[batch, n]`` as ``[batch, 1, n]``: the form in which masks and biases take positions."""
    return positions if positions.ndim == 1 else positions[:, None, :]


class Features:
    """The feature slot: a map of every query, key and, rarely, value and output, by its own position alone.

    ``score(i, j) = phi(q_i, p_i) . psi(k_j, p_j)``. A subclass is a frozen, hashable dataclass. ``positions`` are
    integers ``[length]`` or ``[batch, length]``, a ``Range``, or coordinates with a further axis for methods that have
    several; ``length`` is the current length, for methods that read it; ``head_dim`` is the size of a head of the
    model, which the width of a projection need not be. A method that turns by a frequency rule holds it in
    ``frequencies``, and what it declares is the rule's unless it says otherwise.
    """

    frequencies: Any = None
    """The frequency rule (``rotary.FrequencyRule``), or None."""
    widths: tuple[float, float] = (1.0, 1.0)
    """Widths of the query and key projections, as shares of a head."""
    cached: str = "rotated"
    """What a cache should hold: ``psi`` (``"rotated"``), or what it is made of where that is narrower."""
    one_sided: str | None = None
    """None for a method that fits bidirectional attention too; otherwise the option that makes it fit, or ``""``."""

    @property
    def axes(self) -> int:
        """How many coordinates a position has."""
        return 1 if self.frequencies is None else self.frequencies.axes

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
        """A factor of the logits that the method brings along (YaRN as DeepSeek applies it)."""
        return 1.0 if self.frequencies is None else self.frequencies.softmax_scale

    @property
    def decays(self) -> bool:
        """Whether ``decay`` gives rates, whatever the size of a head."""
        return type(self).decay is not Features.decay

    @property
    def own_head_dim(self) -> int | None:
        """The only size of a head that its rule is made for, or None."""
        return None if self.frequencies is None else self.frequencies.head_dim

    def decay(self, head_dim: int) -> Float[Array, "size"] | None:
        """Rates ``a`` of the features if the score is ``sum_c phi_c psi_c exp(-a_c (i - j))`` (xPos), or None."""
        return None

    def init(self, key: Array, *, num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, Array]:
        """Learned parameters of one layer, ``{}`` where there are none."""
        return {} if self.frequencies is None else self.frequencies.init(key, head_dim)

    def heads(self, params, which: Int[Array, "kv_heads"]):
        """The parameters of some key heads, by their numbers; most methods have the same for all."""
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
        """What a cache holds of a key that it cannot hold mapped."""
        return k

    def query(self, params, q, positions, *, head_dim: int, length=None):
        """``phi``: the features of the queries ``[batch, length, heads, query_size]``."""
        return q

    def key(self, params, k, positions, *, head_dim: int, length=None):
        """``psi``: the features of the keys ``[batch, length, kv_heads, key_size]``."""
        return k

    def __call__(self, q, k, *, q_positions, kv_positions, head_dim: int, length=None, params=None):
        """``(phi, psi)`` of the raw projections."""
        where = {"head_dim": head_dim, "length": length}
        return self.query(params, q, q_positions, **where), self.key(params, k, kv_positions, **where)

    def value(self, params, v, positions, *, head_dim: int, length=None):
        """A map of the values ``[batch, length, kv_heads, value_size]``; most methods have none."""
        return v

    def output(self, params, out, positions, *, head_dim: int, length=None):
        """A map of what attention gives for each query ``[batch, length, heads, value_size]``; most have none."""
        return out
