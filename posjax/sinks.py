"""Attention sinks without a token: one logit per head that takes part in the normalisation and has no value.

``attention(sinks=...)`` takes the logits, ``[heads]`` or one for each query too; the specs are ``Sinks``.

With a sink a head may attend to nothing; without sinks, softmax models use the first tokens for that. Sinks work with
every other slot, because a sink has no position and no scale.
"""

import abc
import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from posjax._checks import check_rank, params_of
from posjax._numbers import at_least_float32


class Sinks(abc.ABC):
    """The base class of the specs. A spec is a frozen, hashable dataclass.

    One that ``reads_tokens`` has a ``prepare(params, x)`` too, whose results ``[batch, heads, queries]`` are the logits
    of the sinks of every query.
    """

    reads_tokens: ClassVar[bool] = False
    """Whether the logits are functions of the tokens: those of ``prepare``, not of ``logits``."""

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


@dataclasses.dataclass(frozen=True)
class TokenSinks(Sinks):
    """``exp(z_ij) / (exp(s_hi) + sum_j exp(z_ij))`` with ``s_hi = w_h . x_i``: each token has its own sinks.

    This is Inkling 2's, from its code in transformers; ``x`` are the tokens that the queries are projected from. The
    logits start at zero, where this is ``SoftmaxPlusOne``. No scale multiplies them.
    """

    reads_tokens: ClassVar[bool] = True

    def init(self, key: Array, num_heads: int, model_dim: int) -> dict[str, Float[Array, "model_dim heads"]]:
        """``{"w": [model_dim, heads]}`` of zeros, float32."""
        return {"w": jnp.zeros((model_dim, num_heads), jnp.float32)}

    def prepare(self, params, x: Float[Array, "batch length model_dim"]) -> Float[Array, "batch heads length"]:
        """The logits of all tokens, at least float32.

        Raises:
            ValueError: if ``params`` are not those of ``init``, or for tokens of another size.
        """
        check_rank("x", x, 3, "[batch, length, model_dim]")
        (w,) = params_of(params, self, w=(x.shape[2], "heads"))
        dtype = at_least_float32(x.dtype, w.dtype)
        return jnp.einsum("bnd,dh->bhn", x.astype(dtype), w.astype(dtype), precision="highest")

    def logits(self, params, num_heads):
        """Raises TypeError: the logits differ between tokens; see ``prepare``."""
        raise TypeError("the logits of TokenSinks are those of prepare")
