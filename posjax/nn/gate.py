"""The output gate of attention as a Flax NNX module."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from posjax.nn.config import DecoderConfig
from posjax.nn.parameters import bias_parameter, parameter, plus, to_heads


class OutputGate(nnx.Module):
    """Multiplies the outputs of the heads by ``sigmoid(x W + b)`` of the layer's input (Qiu et al., arXiv 2505.06708).

    Args:
        config: of this layer; ``attention_gate`` is ``"elementwise"``, one number for every channel, or ``"head"``, one
            for every head.
        size: the channels of a head's output.
        rngs: random streams.
    """

    def __init__(self, config: DecoderConfig, size: int, *, rngs: nnx.Rngs):
        elementwise = config.attention_gate == "elementwise"
        heads = config.num_heads * config.scheme.copies
        shape = (heads, size) if elementwise else (heads,)
        axes = ("heads", "head_dim")[: len(shape)]
        width = config.model_dim
        self.weight = parameter(rngs.params(), (width, *shape), ("embed", *axes), width**-0.5)
        self.bias = bias_parameter(shape, axes) if "gate" in config.biases else None

    def __call__(
        self, x: Float[Array, "batch length embed"], out: Float[Array, "batch length heads size"]
    ) -> Float[Array, "batch length heads size"]:
        """The outputs of the heads behind the gate; the gate is computed in float32."""
        weight = self.weight[...]
        logits = plus(to_heads(x, weight) if weight.ndim == 3 else x @ weight.astype(x.dtype), self.bias)
        opened = jax.nn.sigmoid(logits.astype(jnp.float32)).astype(out.dtype)
        return out * (opened if weight.ndim == 3 else opened[..., None])
