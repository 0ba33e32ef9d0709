"""FIRE: functional interpolation for relative positions (Li et al., arXiv 2310.04418)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from posjax._checks import check_count, check_flags, check_positive, params_of
from posjax._numbers import align_ranks, widened
from posjax.bias.base import Bias, BiasSpec, distance, heads_first

_EPSILON = 1e-6


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InterpolatedBias(Bias):
    """``b_h(i, j) = (relu(x w1 + b1) w2 + b2)_h`` of the one number ``x = psi(i - j) / (psi(max(i, |l L0|)) + 1e-6)``.

    ``psi(r) = log(|c r| + 1)`` with a learned ``c``; ``l`` is the learned ``multiplier`` of the ``threshold`` ``L0``.
    """

    c: Float[Array, ""]
    multiplier: Float[Array, ""]
    w1: Float[Array, "width"]
    b1: Float[Array, "width"]
    w2: Float[Array, "width heads"]
    b2: Float[Array, "heads"]
    threshold: float = dataclasses.field(metadata={"static": True})

    axes: ClassVar = {"w2": (None, "heads"), "b2": ("heads",)}

    def values(self, q_positions, kv_positions):
        """The network at the relative distance of each pair, ``[heads, q, k]`` or with a leading batch."""
        x = self._relative(q_positions, kv_positions).squeeze(-3)
        x, w1, b1 = align_ranks(x[..., None], widened(self.w1), widened(self.b1))
        out = jnp.einsum("...qkw,wh->...hqk", jax.nn.relu(x * w1 + b1), widened(self.w2), precision="highest")
        return out + heads_first(widened(self.b2), out)

    def _relative(self, q_positions, kv_positions) -> Float[Array, "*b 1 q k"]:
        c, multiplier = widened(self.c), widened(self.multiplier)

        def psi(r):
            return jnp.log1p(jnp.abs(c * r))

        r = distance(q_positions, kv_positions, c.dtype)
        longest = jnp.maximum(q_positions.astype(c.dtype), jnp.abs(multiplier * self.threshold))
        above, below = align_ranks(psi(r), psi(longest)[..., None])
        return above / (below + _EPSILON)


@dataclasses.dataclass(frozen=True)
class FIRE(BiasSpec):
    """Spec of FIRE (Li et al., arXiv 2310.04418): a small learned network of the distance relative to the length.

    ``b_h(i, j) = MLP_h( psi(i - j) / (psi(max(i, |l L0|)) + 1e-6) )`` with ``psi(r) = log(|c r| + 1)``. For causal
    attention its argument lies in [0, 1] at any length. It depends on the position of the query, so shifting all
    positions changes it: positions count from 0 at the start of each document. For keys ahead it takes ``|i - j|``, so
    it does not distinguish the sides, and its argument may exceed 1.

    A tile costs ``width`` numbers per pair, and ``width`` more multiplications per pair and head.

    Args:
        width: hidden units of the network 1 -> width -> heads, both layers with biases, ReLU between them.
        c: initial value of the learned ``c``.
        threshold: ``L0``, fixed; its learned multiplier ``l`` starts at 1.
        shared_across_layers: one network for all layers, which the paper calls FIRE-S. This name implies that plain
            FIRE has one network per layer.
    """

    width: int = 32
    c: float = 0.1
    threshold: float = 512.0
    shared_across_layers: bool = False

    def __post_init__(self):
        check_flags(self)
        check_count("FIRE width", self.width)
        check_positive("FIRE c", self.c)
        check_positive("FIRE threshold", self.threshold)

    def init(self, key: Array, num_heads: int) -> dict[str, Array]:
        """``c, multiplier: []``, ``w1, b1: [width]``, ``w2: [width, heads]``, ``b2: [heads]``, float32.

        Weights and biases are uniform within ``1 / sqrt(inputs)``, PyTorch's default, as in the public code.
        """
        numbers = {"c": jnp.float32(self.c), "multiplier": jnp.float32(1.0)}
        shapes = self._shapes(num_heads)
        keys = jax.random.split(key, 4)
        for name, k in zip(("w1", "b1", "w2", "b2"), keys, strict=True):
            bound = 1.0 if name.endswith("1") else self.width**-0.5
            numbers[name] = jax.random.uniform(k, shapes[name], jnp.float32, -bound, bound)
        return numbers

    def bind(self, params: dict[str, Array] | None = None, *, num_heads: int) -> InterpolatedBias:
        """The bias with its network.

        Raises:
            ValueError: if ``params`` does not hold it, or holds it for another number of heads.
        """
        return InterpolatedBias(*params_of(params, self, **self._shapes(num_heads)), self.threshold)

    def _shapes(self, num_heads: int) -> dict[str, tuple[int, ...]]:
        width = self.width
        return {
            "c": (),
            "multiplier": (),
            "w1": (width,),
            "b1": (width,),
            "w2": (width, num_heads),
            "b2": (num_heads,),
        }
