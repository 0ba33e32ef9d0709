"""Scale-invariant attention: a factor and an offset of each logit by its distance (arXiv 2505.17083)."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from posjax._checks import check, check_positive
from posjax._numbers import align_ranks
from posjax.bias.base import Bias, BiasSpec, distance


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScaleInvariantBias(Bias):
    """``z a_t + m_t`` with ``t = |i - j|``; see ``ScaleInvariant``. ``values`` is only the offset ``m_t``."""

    spec: "ScaleInvariant" = dataclasses.field(metadata={"static": True})

    def values(self, q_positions, kv_positions):
        """The offset ``m_t``, ``[1, q, k]`` or with a leading batch: the same for all heads."""
        return self._parts(q_positions, kv_positions)[1]

    def apply(self, scores, q_positions, kv_positions):
        """``a_t z + m_t``."""
        scores, factor, offset = align_ranks(scores, *self._parts(q_positions, kv_positions))
        return scores * factor.astype(scores.dtype) + offset.astype(scores.dtype)

    def _parts(self, q_positions, kv_positions) -> tuple[Float[Array, "*b 1 q k"], Float[Array, "*b 1 q k"]]:
        """``a_t`` and ``m_t``, the same for all heads."""
        t = jnp.abs(distance(q_positions, kv_positions, jnp.float32))
        square = 2 * jnp.log1p(t / self.spec.tau) + self.spec.start
        return jnp.sqrt(square), self.spec.beta / self.spec.alpha - square


@dataclasses.dataclass(frozen=True)
class ScaleInvariant(BiasSpec):
    """Spec of scale-invariant attention (arXiv 2505.17083), without parameters, for causal and bidirectional attention.

    The logit at distance ``t`` becomes ``a_t z + m_t`` with

        a_t^2 = 2 (log(t / tau + 1) - log alpha + beta / alpha),   m_t = beta / alpha - a_t^2

    By default ``alpha = beta = sqrt(e)``: ``a_t = sqrt(1 + 2 log(t / tau + 1))``, ``m_t = -2 log(t / tau + 1)``, so a
    token's own logit is unchanged. For ``z ~ N(0, 1)`` then ``E[exp(a_t z + m_t)] = alpha / (t / tau + 1)``, so that
    every range of distances ``[n, c n]`` keeps its total weight as ``n`` grows. Its authors use it on top of RoPE
    without its lowest frequencies, at an effective base of 1024.

    Args:
        tau: the distance, in positions, from which it has an effect.
        alpha: weight of the token itself.
        beta: constant of the entropy: for a logit ``l = a_t z + m_t``, ``E[l exp(l)] = beta / (t / tau + 1)``.
    """

    tau: float = 10.0
    alpha: float = math.exp(0.5)
    beta: float = math.exp(0.5)
    shift_invariant = True

    def __post_init__(self):
        for name in ("tau", "alpha", "beta"):
            check_positive(name, getattr(self, name))
        check(
            self.start >= 0,
            f"beta must be at least alpha log alpha = {self.alpha * math.log(self.alpha):.4g}, found {self.beta}",
        )

    @property
    def start(self) -> float:
        """``a_0^2 = 2 (beta / alpha - log alpha)``."""
        return 2 * (self.beta / self.alpha - math.log(self.alpha))

    def bind(self, params: dict[str, Array] | None = None, *, num_heads: int) -> ScaleInvariantBias:
        """The factor and the offset, the same for any number of heads."""
        return ScaleInvariantBias(self)
