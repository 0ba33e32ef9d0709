"""The output gate of attention as a Flax NNX module."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from posjax.nn.config import DecoderConfig
from posjax.nn.lora import project
from posjax.nn.parameters import bias_parameter, parameter, plus


class OutputGate(nnx.Module):
    """Multiplies the outputs of the heads by ``sigmoid(x W + b)`` of the layer's input (Qiu et al., arXiv 2505.06708).

    Args:
        config: of this layer; ``attention_gate`` is ``"elementwise"``, one number for every channel, or ``"head"``, one
            for every head.
        size: the channels of a head's output.
        rngs: random streams.
    """

    PROJECTIONS: ClassVar = {"weight": 1}

    def __init__(self, config: DecoderConfig, size: int, *, rngs: nnx.Rngs):
        elementwise = config.attention_gate == "elementwise"
        heads = config.num_heads * config.scheme.copies
        shape = (heads, size) if elementwise else (heads,)
        axes = ("heads", "head_dim")[: len(shape)]
        width = config.model_dim
        self.weight = parameter(rngs.params(), (width, *shape), ("embed", *axes), width**-0.5)
        self.bias = bias_parameter(shape, axes) if "gate" in config.biases else None
        self.adapters = nnx.Dict()

    def __call__(
        self, x: Float[Array, "batch length embed"], out: Float[Array, "batch length heads size"]
    ) -> Float[Array, "batch length heads size"]:
        """The outputs of the heads behind the gate; the gate is computed in float32."""
        logits = plus(project(self, "weight", x), self.bias)
        opened = jax.nn.sigmoid(logits.astype(jnp.float32)).astype(out.dtype)
        return out * (opened if opened.ndim == out.ndim else opened[..., None])
