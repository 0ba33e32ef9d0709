"""Multi-head latent attention with a decoupled rotation, around the same schemes as other attention."""

from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from posjax.nn.attention import Attention
from posjax.nn.config import DecoderConfig
from posjax.nn.gate import OutputGate
from posjax.nn.lora import adapted, project
from posjax.nn.norms import RMSNorm
from posjax.nn.parameters import bias_parameter, parameter, plus, scheme_parameters, to_heads


class LatentAttention(Attention):
    """Attention whose keys and values are computed from one small latent for each token (DeepSeek-V2, arXiv 2405.04434,
    section 2.1).

    With the tokens x, norms N, and the rotation R(p) of a scheme's features, head h has

        c = N(W_c x)                    the latent of a token, ``rank`` numbers
        r = W_r x                       its rotated key, the same for all heads
        q_h = [W_qr,h a ; W_q,h a]      with a = N(W_a x), or a = x without ``query_rank``
        k_h = [r ; W_k,h c],            v_h = W_v,h c
        z_h(i, j) = (<R(p_i) q_h,r(i), R(p_j) r(j)> + <q_h,c(i), k_h,c(j)>) / sqrt(rotated + unrotated)

    The rotated channels come first, so that features over heads of ``rotated`` channels leave the others as they are.
    Everything else in the scheme (masks, biases, scales, remapped distances) is that of any attention.

    Training and long chunks of a prompt expand keys and values as above. Decoding stores only ``[r ; c]`` of each
    token, and with few new tokens it moves the matrices to the queries and outputs, which computes the same:

        <q_h,c, W_k,h c> = <W_k,h^T q_h,c, c>,      sum_j p_ij W_v,h c(j) = W_v,h sum_j p_ij c(j)

    That is attention of all heads over one key head of ``rotated + rank`` channels, whose last ``rank`` are the value.

    Args:
        config: of this layer, with ``latent``; see ``DecoderConfig.of_layer``.
        rngs: random streams.
    """

    PROJECTIONS: ClassVar = dict.fromkeys(("latent", "k_rotated", "query_latent", "q", "q_rotated", "k", "v"), 1) | {
        "o": 2
    }

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config, self.scheme = config, config.scheme
        width, heads, spec = config.model_dim, config.num_heads, config.latent
        biased = "qkv" in config.biases

        def matrix(*shape, axes):
            return parameter(rngs.params(), shape, axes, shape[0] ** -0.5)

        self.latent = matrix(width, spec.rank, axes=("embed", "latent"))
        self.latent_norm = RMSNorm(spec.rank, "latent", spec.norm)
        self.k_rotated = matrix(width, spec.rotated, axes=("embed", "head_dim"))
        self.latent_bias = bias_parameter((spec.rank,), ("latent",)) if biased else None
        self.k_rotated_bias = bias_parameter((spec.rotated,), ("head_dim",)) if biased else None
        into, axis = (width, "embed") if spec.query_rank is None else (spec.query_rank, "rank")
        has_latent = spec.query_rank is not None
        self.query_latent = matrix(width, into, axes=("embed", "latent")) if has_latent else None
        self.query_norm = RMSNorm(into, "latent", spec.norm) if has_latent else None
        self.query_latent_bias = bias_parameter((into,), ("latent",)) if biased and has_latent else None
        of_heads = partial(matrix, axes=("rank", "heads", "head_dim"))
        self.q = matrix(into, heads, spec.unrotated, axes=(axis, "heads", "head_dim"))
        self.q_rotated = matrix(into, heads, spec.rotated, axes=(axis, "heads", "head_dim"))
        self.k = of_heads(spec.rank, heads, spec.unrotated)
        self.v = of_heads(spec.rank, heads, spec.value)
        stddev = (heads * spec.value * 2 * config.num_layers) ** -0.5
        self.o = parameter(rngs.params(), (heads, spec.value, width), ("heads", "head_dim", "embed"), stddev)
        made = config.scheme.init(rngs.params(), heads, spec.rotated, model_dim=width)
        self.learned = scheme_parameters(made)
        self.o_bias = bias_parameter((width,), ("embed",)) if "output" in config.biases else None
        self.gate = None if config.attention_gate is None else OutputGate(config, spec.value, rngs=rngs)
        self.adapters = nnx.Dict()

    def _project(self, x) -> list:
        """Queries, keys and values of every head."""
        return [self._queries(x), *self._expanded(self._stored(x))]

    def _queries(self, x) -> Float[Array, "batch length heads size"]:
        """The queries, their rotated channels first."""
        if self.query_latent is not None:
            x = self.query_norm(plus(project(self, "query_latent", x), self.query_latent_bias))
        if not self.adapters.keys().isdisjoint(("q", "q_rotated")):
            return jnp.concatenate([project(self, "q_rotated", x), project(self, "q", x)], axis=-1)
        return to_heads(x, jnp.concatenate([self.q_rotated[...], self.q[...]], axis=-1))

    def _stored(self, x) -> Float[Array, "batch length 1 stored"]:
        """What a cache holds of every token: the key that the features rotate, and the latent."""
        latent = self.latent_norm(plus(project(self, "latent", x), self.latent_bias))
        rotated = plus(project(self, "k_rotated", x), self.k_rotated_bias)
        return jnp.concatenate([rotated, latent], axis=-1)[..., None, :]

    def _expanded(self, stored) -> tuple[Array, Array]:
        """Keys and values of every head."""
        rotated = self.config.latent.rotated
        shared, latent = stored[..., :rotated], stored[..., 0, rotated:]
        k, v = project(self, "k", latent), project(self, "v", latent)
        return jnp.concatenate([jnp.broadcast_to(shared, (*k.shape[:-1], rotated)), k], axis=-1), v

    def _step(self, x, cache: Any, **arguments) -> tuple[Array, Any]:
        q, stored = self._queries(x), self._stored(x)
        if self._expands(x.shape[1]):
            return self.scheme.decode(q, stored, None, cache, read=self._expanded, **arguments)
        rotated = self.config.latent.rotated
        absorbed = jnp.einsum("bthd,rhd->bthr", q[..., rotated:], adapted(self, "k").astype(q.dtype))
        q = jnp.concatenate([q[..., :rotated], absorbed], axis=-1)
        out, cache = self.scheme.decode(q, stored, None, cache, read=_as_values, **arguments)
        return jnp.einsum("bthr,rhd->bthd", out[..., rotated:], adapted(self, "v").astype(out.dtype)), cache

    def _expands(self, tokens: int) -> bool:
        """Whether expanding the keys of a long cache takes less time than wider scores and sums for these tokens.

        Both cost ``rank (unrotated + value)`` for each token that they expand or absorb; a pair of a query and a key
        costs ``2 (rotated + rank)`` absorbed, and ``rotated + unrotated + value`` expanded. A symbolic number of tokens
        counts as few.
        """
        spec = self.config.latent
        expanded = spec.unrotated + spec.value
        saved = 2 * spec.stored - spec.rotated - expanded
        return isinstance(tokens, int) and tokens * saved > spec.rank * expanded


def _as_values(stored):
    """The stored keys as keys and as values. A value without the rotated key would be a copy of the cache."""
    return stored, stored
