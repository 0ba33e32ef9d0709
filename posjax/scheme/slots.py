"""What each slot of a scheme asks of its specs.

A spec is a frozen, hashable dataclass. What counts is what it can do, not where its class comes from: ``lacking`` reads
the protocols below, which are the one place that says it. Masks alone are of one class, ``masks.Mask``.
"""

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

from jaxtyping import Array, Float, Int

from posjax.bias import Bias
from posjax.masks import Mask
from posjax.positions import Positions
from posjax.sampling import Sampling

SlotParams = Mapping[str, Array] | None


class Learns(Protocol):
    """What all specs with parameters offer."""

    def init(self, key: Array, **sizes: int) -> dict[str, Array]:
        """Learned parameters of one layer, ``{}`` where there are none.

        ``sizes`` are those that its signature names, of ``num_heads``, ``num_kv_heads``, ``head_dim`` and
        ``model_dim``.
        """


class EmbeddingSlot(Learns, Protocol):
    """What is added to the token embeddings. Where it has a ``max_length``, its ``reach`` is how far it tells."""

    shift_invariant: bool

    def embed(self, params: SlotParams, positions: Positions, model_dim: int) -> Float[Array, "*b length model_dim"]:
        """The embedding of each position, float32."""


class NormSlot(Learns, Protocol):
    """A norm of queries and keys before their features."""

    def apply(self, params: SlotParams, q: Array, k: Array) -> tuple[Array, Array]:
        """Queries and keys, of the shapes and dtypes that they had."""


class FeatureSlot(Learns, Protocol):
    """Maps of queries, keys, values and outputs by their own positions; ``posjax.Features`` says what each is."""

    frequencies: Any
    widths: tuple[float, float]
    cached: str
    decays: bool
    axes: int
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
        """``phi``."""

    def key(self, params: SlotParams, k: Array, positions: Positions, *, head_dim: int, length=None) -> Array:
        """``psi``."""

    def value(self, params: SlotParams, v: Array, positions: Positions, *, head_dim: int, length=None) -> Array:
        """The map of the values."""

    def output(self, params: SlotParams, out: Array, positions: Positions, *, head_dim: int, length=None) -> Array:
        """The map of what attention gives."""

    def compact(self, k: Array) -> Array:
        """What a cache holds of a key that it cannot hold mapped."""

    def heads(self, params: SlotParams, which: Int[Array, "kv_heads"]) -> SlotParams:
        """The parameters of some key heads."""

    def decay(self, head_dim: int) -> Float[Array, "size"] | None:
        """Rates of decay, or None."""


class ScaleSlot(Learns, Protocol):
    """A factor of every query."""

    shift_invariant: bool

    def factor(self, params: SlotParams, *, positions: Array, visible: Array, num_heads: int) -> Array:
        """``c_h(i)``, float32, of queries that stand at ``positions`` and see ``visible`` keys, int32 ``[*b, length]``.

        It broadcasts to ``[*b, length, heads]``.
        """


class BiasSlot(Learns, Protocol):
    """A bias; ``bias.BiasSpec`` says what each fact is. One that ``reads_tokens`` has a ``prepare`` too."""

    reads_tokens: bool
    contextual: bool
    shared_across_layers: bool
    shift_invariant: bool
    one_sided: str | None

    def bind(self, params: SlotParams = None, *, num_heads: int, **gates: Array) -> Bias:
        """The bias with its parameters."""


class FarSlot(Protocol):
    """Other features for distant pairs."""

    shift_invariant: bool
    one_sided: str | None

    def check(self, features: FeatureSlot | None) -> None:
        """Raises ValueError for features that it cannot take at other positions."""

    def mask(self) -> Mask | None:
        """What it hides."""

    def branches(self, features: FeatureSlot, params: SlotParams, q, k, q_positions, kv_positions, **sizes) -> tuple:
        """``phi``, ``psi`` and the ``far.Branch`` values that replace them."""


class SinkSlot(Learns, Protocol):
    """Logits without values."""

    def logits(self, params: SlotParams, num_heads: int) -> Float[Array, "heads"]:
        """One logit for each head, float32."""


class LinearSlot(Learns, Protocol):
    """A kernel of linear attention; ``linear.LinearKernel`` says what each is."""

    of_inner_product: bool
    random: bool

    def size(self, head_dim: int) -> int:
        """The width m of its features."""

    def query(self, params: SlotParams, q: Array) -> Float[Array, "batch length heads m"]:
        """``phi``."""

    def key(self, params: SlotParams, k: Array) -> tuple[Float[Array, "batch length kv_heads m"], Array | None]:
        """``psi`` and the logarithm of what was taken out of it, or None."""


PROTOCOLS: dict[str, type] = {
    "embedding": EmbeddingSlot,
    "norm": NormSlot,
    "features": FeatureSlot,
    "scale": ScaleSlot,
    "bias": BiasSlot,
    "far": FarSlot,
    "sinks": SinkSlot,
    "linear": LinearSlot,
    "positions": Sampling,
}


def lacking(slot_name: str, spec: Any) -> list[str]:
    """What a slot asks of its specs and this one, or its class, does not have: methods, then facts."""
    methods, facts = _asked(PROTOCOLS.get(slot_name, Protocol))
    missing = [f"{name}()" for name in methods if not callable(getattr(spec, name, None))]
    return missing + [name for name in facts if not hasattr(spec, name)]


def _asked(protocol: type) -> tuple[list[str], list[str]]:
    """The methods and the facts of a protocol by name, those that it shares with others first."""
    kinds = [kind for kind in reversed(protocol.__mro__) if kind.__module__.startswith("posjax.")]
    methods = [name for kind in kinds for name, member in vars(kind).items() if inspect.isfunction(member)]
    facts = [name for kind in kinds for name in inspect.get_annotations(kind)]
    return [name for name in methods if not name.startswith("_")], facts
