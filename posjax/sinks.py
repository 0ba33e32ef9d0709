"""Attention sinks without a token: one logit per head that takes part in the normalisation and has no value.

``attention(sinks=...)`` takes the logits ``[heads]``; the specs are ``Sinks``.

With a sink a head may attend to nothing; without sinks, softmax models use the first tokens for that. Sinks work with
every other slot, because a sink has no position and no scale.
"""

import abc
import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from posjax._checks import params_of


class Sinks(abc.ABC):
    """The base class of the specs. A spec is a frozen, hashable dataclass."""

    def init(self, key: Array, num_heads: int) -> dict[str, Array]:
        """Learned parameters of one layer, ``{}`` if there are none."""
        return {}

    @abc.abstractmethod
    def logits(self, params, num_heads: int) -> Float[Array, "heads"]:
        """One logit for each head, float32."""


@dataclasses.dataclass(frozen=True)
class SoftmaxPlusOne(Sinks):
    """``exp(z_j) / (1 + sum exp(z))``: softmax with one added to the denominator (Miller, "Attention is off by one").

    Softmax_1, or the zero sink of StreamingLLM (arXiv 2309.17453): a key of zeros with a value of zeros.
    """

    def logits(self, params, num_heads):
        """Zeros."""
        return jnp.zeros(num_heads, jnp.float32)


@dataclasses.dataclass(frozen=True)
class LearnedSinks(Sinks):
    """``exp(z_j) / (exp(s_h) + sum exp(z))`` with a learned ``s_h`` for each head and layer (gpt-oss).

    The logits start at zero, where this is ``SoftmaxPlusOne``. No scale multiplies them.
    """

    def init(self, key: Array, num_heads: int) -> dict[str, Float[Array, "heads"]]:
        """``{"sinks": [heads]}`` of zeros, float32."""
        return {"sinks": jnp.zeros(num_heads, jnp.float32)}

    def logits(self, params, num_heads: int) -> Float[Array, "heads"]:
        """The learned logits.

        Raises:
            ValueError: if ``params`` are not those of ``init`` for ``num_heads``.
        """
        (sinks,) = params_of(params, self, sinks=(num_heads,))
        return sinks.astype(jnp.float32)
