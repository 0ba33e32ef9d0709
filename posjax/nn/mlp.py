"""The hidden layer of a block: one MLP, or a mixture of experts."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from posjax.nn.config import DecoderConfig
from posjax.nn.parameters import bias_parameter, on_any_mesh, parameter, plus
from posjax.nn.specs import ACTIVATIONS


class MLP(nnx.Module):
    """The hidden layer of a block: ``config.activation`` is one of ``specs.ACTIVATIONS``.

    Args:
        config: of this layer.
        rngs: random streams.
        experts: ``(count,)``, the leading axis of every parameter, for several MLPs; ``()`` for a single MLP.
    """

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

    def __call__(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch length embed"]:
        return on_any_mesh(type(self)._mixed, self, x)

    def _mixed(self, x):
        up = _product(x, self.up, self.up_bias)
        gate = () if self.gate is None else (_product(x, self.gate, self.gate_bias),)
        return _product(ACTIVATIONS[self.config.activation].hidden(*gate, up), self.down, self.down_bias)


def _product(x, matrix: nnx.Param, bias: nnx.Param | None):
    return plus(x @ matrix[...].astype(x.dtype), bias)


class ExpertsMLP(MLP):
    """A mixture of experts: several MLPs, of which a router chooses a few for every token. No token is dropped.

    The output is ``sum over the chosen e of w_e mlp_e(x)``, with ``w`` the softmax of the chosen logits (gpt-oss,
    Mixtral).

    The router's logits are ``router x + bias``, float32; the ``per_token`` largest are chosen. Tokens are sorted by
    their experts, so that every expert multiplies only its own tokens (``jax.lax.ragged_dot``): the cost is always that
    of ``per_token`` MLPs. Parameters have a leading axis of experts.

    Args:
        config: of this layer, with ``experts``.
        rngs: random streams.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        width, count = config.model_dim, config.experts.count
        self.router = parameter(rngs.params(), (width, count), ("embed", "experts"), width**-0.5)
        self.router_bias = bias_parameter((count,), ("experts",)) if "mlp" in config.biases else None
        super().__init__(config, rngs=rngs, experts=(count,))

    def _mixed(self, x):
        """The mixture; every device computes its own tokens. If the hidden units are split, partial sums are added."""
        placement = self.config.placement
        mesh = jax.sharding.get_abstract_mesh()
        graph, state = nnx.split(self)
        if mesh.empty or not placement.is_open(mesh) or not self._fits(x, mesh):
            return self._of_tokens(x, None)
        rows = PartitionSpec(placement.batch or None, placement.context, None)
        split = placement.heads

        def spec(leaf):
            return PartitionSpec(*(split if axis == "mlp" else None for axis in leaf.get_metadata("logical_axes")))

        specs = jax.tree.map(spec, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))

        def of_device(state, x):
            return nnx.merge(graph, state)._of_tokens(x, split)

        open_axes = set(mesh.axis_names) - set(mesh.manual_axes)
        return jax.shard_map(of_device, in_specs=(specs, rows), out_specs=rows, axis_names=open_axes)(state, x)

    def _fits(self, x, mesh) -> bool:
        """Whether batch, tokens and hidden units can be split evenly over the devices."""
        split = self.config.placement.split_axes
        rows, tokens, hidden = (math.prod(mesh.shape[axis] for axis in axes) for axes in split)
        return x.shape[0] % rows == 0 and x.shape[1] % tokens == 0 and self.config.mlp_dim % hidden == 0

    def _of_tokens(self, x, split):
        """The mixture for the tokens of one device, with hidden units split over the mesh axes ``split``."""
        tokens = x.reshape(-1, x.shape[-1])
        spec = self.config.experts
        chosen, weights = self._route(tokens)
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        sizes = jnp.bincount(chosen.reshape(-1), length=spec.count).astype(jnp.int32)
        token_index = order // spec.per_token
        experts = chosen.reshape(-1)[order]
        outputs = self._of_experts(tokens[token_index], sizes, experts, split) * weights.reshape(-1)[order, None]
        summed = jnp.zeros(tokens.shape, jnp.float32).at[token_index].add(outputs)
        return summed.astype(x.dtype).reshape(x.shape)

    def _route(self, tokens) -> tuple[Int[Array, "tokens chosen"], Float[Array, "tokens chosen"]]:
        """The experts of every token, and their weights."""
        logits = jnp.matmul(tokens, self.router[...].astype(tokens.dtype), preferred_element_type=jnp.float32)
        logits = logits if self.router_bias is None else logits + self.router_bias[...].astype(jnp.float32)[None]
        largest, chosen = jax.lax.top_k(logits, self.config.experts.per_token)
        return chosen, jax.nn.softmax(largest, axis=-1)

    def _of_experts(self, x, sizes, experts, split):
        """For every row the output of its expert, float32; rows are sorted by expert."""

        def product(x, matrix, bias):
            out = jax.lax.ragged_dot(x, matrix[...].astype(x.dtype), sizes, preferred_element_type=jnp.float32)
            return out if bias is None else out + bias[...].astype(jnp.float32)[experts]

        up = product(x, self.up, self.up_bias).astype(x.dtype)
        gate = () if self.gate is None else (product(x, self.gate, self.gate_bias).astype(x.dtype),)
        out = product(ACTIVATIONS[self.config.activation].hidden(*gate, up), self.down, None)
        out = out if split is None else jax.lax.psum(out, split)
        return out if self.down_bias is None else out + self.down_bias[...].astype(jnp.float32)[experts]
