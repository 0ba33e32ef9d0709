"""xPos: rotation with an exponential decay of each pair (Sun et al., arXiv:2212.10554)."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from posjax._checks import check_positive
from posjax.rotary.feature import Rotary


@dataclass(frozen=True)
class XPos(Rotary):
    """RoPE whose pair t is damped with distance; with w the rotary width and zeta_t = (2t + gamma w) / ((1 + gamma) w),

        score(i, j) = sum_t zeta_t^((i - j) / scale_base) (R(i) q . R(j) k)_t

    Channels that are not rotated are not damped. The features are those of RoPE, and the attention engine applies the
    decay (:meth:`decay`): a factor zeta^(i / scale_base) of the queries and its inverse on the keys would overflow
    float32 about 36,000 positions from their centre.

    gamma: 0.4 in the paper; the larger, the less decay. scale_base: 512.
    Raises ValueError unless both are positive.
    """

    gamma: float = 0.4
    scale_base: float = 512.0

    def __post_init__(self):
        super().__post_init__()
        check_positive("gamma", self.gamma)
        check_positive("scale_base", self.scale_base)

    @property
    def one_sided(self) -> str:
        """Why xPos is for causal attention only."""
        return "xPos grows exponentially towards keys ahead of the query: its paper defines it for causal attention"

    def decay(self, head_dim: int) -> Float[np.ndarray, "head_dim"]:
        """``-ln(zeta_t) / scale_base`` of each feature channel, per position, float64 on the host."""
        width = self.frequencies.rotary_dim(head_dim)
        zeta = (np.arange(0, width, 2) + self.gamma * width) / ((1 + self.gamma) * width)
        rates = -np.log(zeta) / self.scale_base
        rates = np.tile(rates, 2) if self.pairing == "half" else np.repeat(rates, 2)
        return np.pad(rates, (0, head_dim - width))
