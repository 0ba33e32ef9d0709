"""The base classes of additive biases and of their specs."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from posjax._numbers import align_ranks, widened
from posjax._slots import OfSomeHeads, OverPairs


class Bias(OverPairs):
    """A bound bias: a registered pytree whose leaves are its parameters, ready to be evaluated on any tile.

    Every attention backend gives gradients for the leaves. A subclass must define ``values``, and ``axes`` if its
    arrays have axes of batch rows or tokens, or an axis of heads that can be cut.
    """

    by_distance: ClassVar[bool] = False
    """Whether the bias only adds a function of ``i - j``."""

    @property
    def grows_ahead(self) -> bool:
        """Whether it grows without bound for keys ahead of the query, so that they must be hidden."""
        return False

    @property
    def constant_from(self) -> int | None:
        """The distance from which a ``by_distance`` bias is constant on each side of the query, or None."""
        return None

    @property
    def only_adds(self) -> bool:
        """Whether it only adds ``values`` and does not multiply the scores."""
        return type(self).apply is Bias.apply

    def values(self, q_positions: Int[Array, "*b q"], kv_positions: Int[Array, "*b k"]) -> Float[Array, "*b heads q k"]:
        """The tile, ``[heads, q, k]`` for positions ``[n]`` and ``[batch, heads, q, k]`` for ``[batch, 1, n]``."""
        raise TypeError(f"{type(self).__name__} does not define values")

    def _tile(self, q_positions, kv_positions):
        return self.values(q_positions, kv_positions)

    def _of_heads(self, start, size):
        return BiasOfHeads(self, start, size)

    def apply(
        self,
        scores: Float[Array, "*b heads q k"],
        q_positions: Int[Array, "*b q"],
        kv_positions: Int[Array, "*b k"],
    ) -> Float[Array, "*b heads q k"]:
        """The tile of logits from a tile of scaled scores: ``scores + values``, unless the bias multiplies them too."""
        values, scores = align_ranks(self.values(q_positions, kv_positions), scores)
        return scores + values.astype(scores.dtype)


class Contextual(Bias):
    """The base class of biases that read the queries and keys of all pairs between them (CoPE, PaTH).

    Such a bias has no ``values``. ``posjax.attention.contextual`` visits tiles from the last key to the first, and
    calls these methods.
    """

    reads_positions: ClassVar[bool] = False
    most_keys: ClassVar[int] = 256
    """The most keys of a tile."""

    def check_size(self, size: int) -> None:
        """Raises ValueError if the bias is for heads of another size."""
        raise NotImplementedError

    def tiles(self, k: Float[Array, "batch kv_heads keys size"], size: int) -> Any:
        """What it needs of the keys of each tile of ``size``: a tree of arrays whose first axis counts the tiles."""
        raise NotImplementedError

    def start(self, raw: Float[Array, "*b q size"], scaled: Float[Array, "*b q size"]) -> tuple[Any, Any]:
        """What stays for a block of queries, from them before and after the scale, and the carry at the first tile."""
        raise NotImplementedError

    def step(self, fixed: Any, carry: Any, tile: Any, allowed: Array, product: Callable) -> tuple[Array, Any]:
        """The tile of logits, and the carry for the tile before it; ``product(q, k)`` are scores."""
        raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BiasOfHeads(OfSomeHeads, Bias):
    """Some heads of a bias that has no axis of heads to cut."""

    def values(self, q_positions, kv_positions):
        """Some heads of the tile of all heads."""
        return self.kept(self.whole.values(q_positions, kv_positions))

    def apply(self, scores, q_positions, kv_positions):
        """See ``Bias.apply``. A bias that also multiplies is applied to all heads, with scores of 0 for the others."""
        if self.only_adds:
            return super().apply(scores, q_positions, kv_positions)
        shape = jax.eval_shape(self.whole.values, q_positions, kv_positions).shape
        if len(shape) < 3 or shape[-3] == 1:
            return self.whole.apply(scores, q_positions, kv_positions)
        zeros = jnp.zeros_like(scores, shape=(*scores.shape[:-3], shape[-3], *scores.shape[-2:]))
        all_scores = jax.lax.dynamic_update_slice_in_dim(zeros, scores, self.start, axis=scores.ndim - 3)
        return self.kept(self.whole.apply(all_scores, q_positions, kv_positions))

    @property
    def only_adds(self):
        """Same as ``whole``."""
        return self.whole.only_adds

    @property
    def by_distance(self):
        """Same as ``whole``."""
        return self.whole.by_distance

    @property
    def constant_from(self):
        """Same as ``whole``."""
        return self.whole.constant_from


class BiasSpec(abc.ABC):
    """The base class of the hyper-parameters of biases. A spec is a frozen, hashable dataclass.

    One that ``reads_tokens`` has a ``prepare(params, x)`` too. ``bind`` takes its results, ``[batch, heads, queries,
    size]``, as ``states``. If they are ``gated``, it takes their sums as ``q_gates`` and ``kv_gates``; if it
    ``reads_keys``, it takes those of all keys as ``kv_states``.
    """

    reads_tokens: ClassVar[bool] = False
    """Whether it is a function of the tokens: ``prepare`` computes the input of ``bind`` from them (FoX, Inkling)."""
    gated: ClassVar[bool] = False
    """Whether the results of ``prepare`` are logarithms of gates, to be summed along the sequence (FoX)."""
    reads_keys: ClassVar[bool] = False
    """Whether ``bind`` takes the results of ``prepare`` for the keys (PaTH), in place of those for the queries."""
    reads_queries: ClassVar[bool] = False
    """Whether ``bind`` takes the queries times the scale, ``[batch, heads, queries, size]``, as ``states`` (Shaw)."""
    scaled: bool = False
    """Whether the scale of a scheme multiplies ``states`` too."""
    contextual: ClassVar[bool] = False
    """Whether it reads the queries and keys between a pair, and is bound as a ``Contextual`` bias (CoPE, PaTH)."""
    shared_across_layers: bool = False
    """Whether all layers use one set of parameters."""
    shift_invariant: bool = False
    """Whether shifting all positions by one constant changes nothing."""

    @property
    def one_sided(self) -> str | None:
        """The option for bidirectional attention: ``""`` if there is none, None if no option is needed."""
        return None

    def init(self, key: Array, num_heads: int) -> dict[str, Array]:
        """Learned parameters, ``{}`` if there are none."""
        return {}

    def kept(self, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...] | None:
        """The heads, and further sizes, of what a cache must keep of every token; None if that is nothing."""
        return None

    @abc.abstractmethod
    def bind(self, params: Mapping[str, Array] | None = None, *, num_heads: int) -> Bias:
        """The bias with its parameters."""


def distance(
    q_positions: Int[Array, "*b q"], kv_positions: Int[Array, "*b k"], dtype=jnp.float32
) -> Float[Array, "*b 1 q k"]:
    """Distance ``i - j`` of every pair, positive for keys behind the query: a whole number, rounded once to ``dtype``.

    ``i - j`` may leave int32. So positions are split, ``i = 65536 a + b``, as floats: the differences of ``a`` and of
    ``b`` are exact, and only their sum is rounded.
    """
    positions = align_ranks(q_positions[..., :, None], kv_positions[..., None, :])
    (i, more_i), (j, more_j) = (_halves(p if p.ndim > 2 else p[None], dtype) for p in positions)
    return (i - j) + (more_i - more_j)


def _halves(positions: Int[Array, "*b n"], dtype) -> tuple[Float[Array, "*b n"], Float[Array, "*b n"]]:
    low = positions & 0xFFFF
    return (positions - low).astype(dtype), low.astype(dtype)


def heads_first(per_head: Float[Array, "heads"], tile: Array) -> Float[Array, "*b heads 1 1"]:
    """A value per head, with the axes of a tile ``[..., heads or 1, q, k]``."""
    return per_head.reshape((1,) * (tile.ndim - 3) + (-1, 1, 1))


def widened_leaves(tree):
    """A tree, such as a bound bias, with its narrow arrays (bfloat16, float16) in float32, the same numbers.

    The gradient of a parameter, a sum over batch, queries and keys, is then summed in float32 and rounded once.
    """

    def wide(leaf):
        dtype = jnp.result_type(leaf)
        return widened(leaf) if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else leaf

    return jax.tree.map(wide, tree)
