"""Sandwich: the inner product of sinusoidal embeddings as a bias (Chi et al., arXiv 2212.10356)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from posjax._angles import angles, exact
from posjax._checks import check_choice, check_even, check_positive
from posjax.bias.base import Bias, BiasSpec, heads_first

_BASE = 10_000.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SinusoidBias(Bias):
    """``b_h(i, j) = factors_h (sum_t cos((i - j) theta_t) - c)`` with ``theta_t = 10000^(-2 t / dbar)``.

    The cosine of a difference is an inner product, ``cos i cos j + sin i sin j``: a tile costs one product of matrices
    of width ``dbar`` for all heads, at any positions; its scores cost ``heads`` products of the head size. The angles
    are exact; the sum has an error of about 1e-5.
    """

    factors: Float[Array, "heads"]
    dbar: int = dataclasses.field(metadata={"static": True})
    variant: str = dataclasses.field(metadata={"static": True})

    axes: ClassVar = {"factors": ("heads",)}
    by_distance: ClassVar[bool] = True

    def values(self, q_positions, kv_positions):
        """``factors_h (sum_t cos((i - j) theta_t) - c)``, by one product of matrices for all heads."""
        first = int(self.variant == "from_one")
        thetas = exact(_BASE ** (-2.0 * np.arange(first, first + self.dbar // 2) / self.dbar))

        def embedding(positions):
            angle = angles(positions, thetas)
            return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)

        q, k = embedding(q_positions), embedding(kv_positions)
        total = jnp.einsum("...qd,...kd->...qk", q, k, precision="highest")
        total = total if total.ndim > 2 else total[None]
        return heads_first(self.factors, total) * (total - (self.dbar / 2 if self.variant == "from_one" else 0.0))


@dataclasses.dataclass(frozen=True)
class Sandwich(BiasSpec):
    """Spec of Sandwich (Chi et al., arXiv 2212.10356), without parameters, for causal and bidirectional attention.

    ``b_h(i, j) = (sum_{t=1}^{dbar/2} cos((i - j) 10000^(-2 t / dbar)) - dbar / 2) / (8 h / H)`` for ``h = 1..H``: 0 at
    distance 0, falling on average, but oscillating and bounded. For ``dbar = 128`` the numerator is -1.447, -19.34,
    -33.32 and -53.39 at distances 1, 10, 100 and 1000.

    Args:
        dbar: number of sines and cosines, even. 128 is the paper's according to Attention Gym; NeMo uses the head size.
        variant: public code disagrees on the sum. ``"from_one"`` is the one above (NeMo). ``"from_zero"`` runs over
            ``t = 0..dbar/2 - 1`` and does not subtract ``dbar / 2`` (Attention Gym, after the paper's appendix E).
        factor: multiplies the sum, the same in every head. None is the paper's ``H / (8 h)``. With ``"from_zero"``, the
            head size ``d`` as ``dbar`` and ``sqrt(2 / (pi d))`` as factor, the bias is the mean logit of untrained
            strict CoCA at each distance, if queries and ``t`` are standard normal before the ``relu``. With half of
            that factor it falls with distance as the mean logit of slack CoCA does.
    """

    dbar: int = 128
    variant: str = "from_one"
    factor: float | None = None
    shift_invariant = True

    def __post_init__(self):
        check_even("dbar", self.dbar)
        check_choice("Sandwich variant", self.variant, ("from_one", "from_zero"))
        if self.factor is not None:
            check_positive("factor", self.factor)

    def bind(self, params: dict[str, Array] | None = None, *, num_heads: int) -> SinusoidBias:
        """The bias for ``num_heads`` heads."""
        from_paper = num_heads / (8.0 * np.arange(1, num_heads + 1))
        factors = from_paper if self.factor is None else np.full(num_heads, self.factor)
        return SinusoidBias(jnp.asarray(factors, jnp.float32), self.dbar, self.variant)
