"""The protocol of each slot of a scheme.

A spec is a frozen, hashable dataclass with the methods and attributes of the protocol; its class does not matter. Only
masks must be of the class ``masks.Mask``.
"""

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

from jaxtyping import Array, Float, Int

from posjax.bias import Bias
from posjax.masks import Mask
from posjax.positions import Positions
from posjax.training_positions import PositionRule

SlotParams = Mapping[str, Array] | None


class Learns(Protocol):
    """The protocol of all specs with parameters."""

    def init(self, key: Array, **sizes: int) -> dict[str, Array]:
        """Learned parameters of one layer, ``{}`` if there are none.

        ``sizes`` are ``num_heads``, ``num_kv_heads``, ``head_dim`` and ``model_dim``, as far as the signature has them.
        """


class EmbeddingSlot(Learns, Protocol):
    """Added to the token embeddings. A spec with ``max_length`` has a ``reach`` too: how many positions it encodes."""

    shift_invariant: bool

    def embed(self, params: SlotParams, positions: Positions, model_dim: int) -> Float[Array, "*b length model_dim"]:
        """The embedding of each position, float32."""


class NormSlot(Learns, Protocol):
    """A norm of queries and keys before their features."""

    def apply(self, params: SlotParams, q: Array, k: Array) -> tuple[Array, Array]:
        """Normed queries and keys, of the same shapes and dtypes."""


class FeatureSlot(Learns, Protocol):
    """Maps of queries, keys, values and outputs by their own positions; see ``posjax.Features`` for each member."""

    frequencies: Any
    widths: tuple[float, float]
    cached: str
    decays: bool
    num_axes: int
    reads_length: bool
    shift_invariant: bool
    softmax_scale: float
    own_head_dim: int | None
    one_sided: str | None

    def query_size(self, head_dim: int) -> int:
        """Width of a head's query projection."""

    def key_size(self, head_dim: int) -> int:
        """Width of a head's key projection."""

    def head_dim(self, key_size: int) -> int:
        """The size of a head whose key projection is this wide."""

    def query(self, params: SlotParams, q: Array, positions: Positions, *, head_dim: int, length=None) -> Array:
        """``phi``: the mapped queries."""

    def key(self, params: SlotParams, k: Array, positions: Positions, *, head_dim: int, length=None) -> Array:
        """``psi``: the mapped keys."""

    def value(self, params: SlotParams, v: Array, positions: Positions, *, head_dim: int, length=None) -> Array:
        """The mapped values."""

    def output(self, params: SlotParams, out: Array, positions: Positions, *, head_dim: int, length=None) -> Array:
        """The mapped outputs."""

    def compact(self, k: Array) -> Array:
        """The form of a key that a cache stores if it cannot store ``psi``."""

    def heads(self, params: SlotParams, which: Int[Array, "kv_heads"]) -> SlotParams:
        """The parameters of the key heads ``which``."""

    def decay(self, head_dim: int) -> Float[Array, "size"] | None:
        """Rates of decay, or None."""


class ScaleSlot(Learns, Protocol):
    """A factor of every query."""

    shift_invariant: bool

    def factor(self, params: SlotParams, *, positions: Array, visible: Array, num_heads: int) -> Array:
        """``c_h(i)``, float32, of queries at ``positions`` that see ``visible`` keys, int32 ``[*b, length]``.

        It broadcasts to ``[*b, length, heads]``.
        """


class BiasSlot(Learns, Protocol):
    """A bias; see ``bias.BiasSpec`` for each member. A bias that ``reads_tokens`` has a ``prepare`` too."""

    reads_tokens: bool
    contextual: bool
    shared_across_layers: bool
    shift_invariant: bool
    one_sided: str | None

    def bind(self, params: SlotParams = None, *, num_heads: int, **gates: Array) -> Bias:
        """The bias with its parameters."""


class RemapSlot(Protocol):
    """Other features for distant pairs."""

    shift_invariant: bool
    one_sided: str | None

    def check(self, features: FeatureSlot | None) -> None:
        """Raises ValueError for features that it does not support."""

    def mask(self) -> Mask | None:
        """The mask of the remap, or None."""

    def branches(self, features: FeatureSlot, params: SlotParams, q, k, q_positions, kv_positions, **sizes) -> tuple:
        """``phi``, ``psi`` and the ``remap.Branch`` values that replace them for remapped pairs."""


class SinkSlot(Learns, Protocol):
    """Logits without values."""

    def logits(self, params: SlotParams, num_heads: int) -> Float[Array, "heads"]:
        """One logit for each head, float32."""


class LinearSlot(Learns, Protocol):
    """A kernel of linear attention; see ``linear.LinearKernel`` for each member."""

    of_inner_product: bool
    random: bool

    def size(self, head_dim: int) -> int:
        """The width m of the kernel's features."""

    def query(self, params: SlotParams, q: Array) -> Float[Array, "batch length heads m"]:
        """``phi``: the features of the queries."""

    def key(self, params: SlotParams, k: Array) -> tuple[Float[Array, "batch length kv_heads m"], Array | None]:
        """``psi``, the features of the keys, and their log scale or None."""


PROTOCOLS: dict[str, type] = {
    "embedding": EmbeddingSlot,
    "norm": NormSlot,
    "features": FeatureSlot,
    "scale": ScaleSlot,
    "bias": BiasSlot,
    "remap": RemapSlot,
    "sinks": SinkSlot,
    "linear": LinearSlot,
    "training_positions": PositionRule,
}


def lacking(slot_name: str, spec: Any) -> list[str]:
    """The members of a slot's protocol that a spec, or its class, lacks: methods, then attributes."""
    methods, attributes = _members(PROTOCOLS.get(slot_name, Protocol))
    missing = [f"{name}()" for name in methods if not callable(getattr(spec, name, None))]
    return missing + [name for name in attributes if not hasattr(spec, name)]


def _members(protocol: type) -> tuple[list[str], list[str]]:
    """The names of a protocol's methods and attributes, those of its base classes first."""
    kinds = [kind for kind in reversed(protocol.__mro__) if kind.__module__.startswith("posjax.")]
    methods = [name for kind in kinds for name, member in vars(kind).items() if inspect.isfunction(member)]
    attributes = [name for kind in kinds for name in inspect.get_annotations(kind)]
    return [name for name in methods if not name.startswith("_")], attributes
