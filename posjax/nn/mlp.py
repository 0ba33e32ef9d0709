"""The hidden layer of a block."""

from functools import partial
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from posjax.nn.config import DecoderConfig
from posjax.nn.lora import project
from posjax.nn.parameters import bias_parameter, on_any_mesh, parameter, plus
from posjax.nn.specs import ACTIVATIONS


class MLP(nnx.Module):
    """The hidden layer of a block: ``config.activation`` is one of ``specs.ACTIVATIONS``.

    Args:
        config: of this layer.
        rngs: random streams.
        experts: ``(count,)``, the leading axis of every parameter, for several MLPs; ``()`` for a single MLP.
    """

    PROJECTIONS: ClassVar = {"gate": 1, "up": 1, "down": 1}

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, experts: tuple[int, ...] = ()):
        self.config = config
        width = config.model_dim
        hidden = config.mlp_dim
        lead = ("experts",) * len(experts)
        gated = config.gated
        biased = "mlp" in config.biases
        into = partial(parameter, shape=(*experts, width, hidden), axes=(*lead, "embed", "mlp"), stddev=width**-0.5)
        self.up = into(rngs.params())
        self.gate = into(rngs.params()) if gated else None
        stddev = (hidden * 2 * config.num_layers) ** -0.5
        self.down = parameter(rngs.params(), (*experts, hidden, width), (*lead, "mlp", "embed"), stddev)
        self.up_bias = bias_parameter((*experts, hidden), (*lead, "mlp")) if biased else None
        self.gate_bias = bias_parameter((*experts, hidden), (*lead, "mlp")) if biased and gated else None
        self.down_bias = bias_parameter((*experts, width), (*lead, "embed")) if biased else None
        learned = ACTIVATIONS[config.activation].learned
        numbers = {name: nnx.Param(jnp.float32(value), logical_axes=()) for name, value in learned.items()}
        self.activation = nnx.Dict(numbers) if numbers else None
        self.adapters = nnx.Dict()

    def __call__(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch length embed"]:
        return on_any_mesh(type(self)._mixed, self, x)

    def with_load(
        self, x: Float[Array, "batch length embed"], counted: Bool[Array, "batch length"] | None = None
    ) -> tuple[Float[Array, "batch length embed"], None]:
        """The output, and None: one MLP has no experts whose load could be counted."""
        return self(x), None

    def _mixed(self, x):
        up = plus(project(self, "up", x), self.up_bias)
        gate = () if self.gate is None else (plus(project(self, "gate", x), self.gate_bias),)
        return plus(project(self, "down", self._hidden(*gate, up)), self.down_bias)

    def _hidden(self, *parts):
        """The hidden units, from ``gate x``, if there is a gate, and ``up x``."""
        return ACTIVATIONS[self.config.activation].hidden(*parts, **self._learned)

    @property
    def _learned(self) -> dict[str, Array]:
        """The numbers that the activation learns."""
        return {} if self.activation is None else {name: leaf[...] for name, leaf in self.activation.items()}
