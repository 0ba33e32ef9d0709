"""The block of a decoder as a Flax NNX module, and how it adds its parts to the residual stream."""

import operator
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from posjax._numbers import align_ranks
from posjax.nn.attention import Attention, LayerInputs
from posjax.nn.config import DecoderConfig
from posjax.nn.delta import DeltaMixer
from posjax.nn.experts import ExpertsMLP, Load
from posjax.nn.latent import LatentAttention
from posjax.nn.mlp import MLP
from posjax.nn.norms import make_norm


class Block(nnx.Module):
    """Attention, or a layer of Gated DeltaNet, and an MLP around the residual stream, combined by ``config.residual``.

    Args:
        config: of this layer; see ``DecoderConfig.of_layer``.
        rngs: random streams.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.residual = residual = config.residual
        norm = partial(make_norm, config.model_dim, config.norm)
        before, after = residual.norm != "after", residual.norm != "before"
        self.attention_norm = norm() if before and residual.first_norm else None
        delta = config.scheme.is_delta
        kind = Attention if config.latent is None else LatentAttention
        self.attention = None if delta else kind(config, rngs=rngs)
        self.delta = DeltaMixer(config, rngs=rngs) if delta else None
        self.attention_after = norm() if after else None
        apart = config.experts is not None and config.experts.norms
        self.mlp_norm = norm() if before and not residual.shared_norm and not apart else None
        self.mlp = (MLP if config.experts is None else ExpertsMLP)(config, rngs=rngs)
        self.mlp_after = norm() if after else None
        self.scale = nnx.Param(jnp.ones(1, jnp.float32), logical_axes=(None,)) if residual.learned_scale else None

    def __call__(
        self, x: Float[Array, "batch length embed"], inputs: LayerInputs
    ) -> Float[Array, "batch length embed"]:
        """The residual stream after this layer; ``inputs`` are the same for all layers."""
        return self.with_load(x, inputs)[0]

    def with_load(
        self, x: Float[Array, "batch length embed"], inputs: LayerInputs
    ) -> tuple[Float[Array, "batch length embed"], Load | None]:
        """The residual stream after this layer, and the load of its experts; None without experts."""
        normed = self.attention_input(x)
        return self._joined(x, normed, self._attended(normed, inputs), inputs.counted)

    def _attended(self, normed, inputs: LayerInputs):
        if self.delta is not None:
            return self.delta(normed, mask=inputs.mask)
        return self.attention(
            normed,
            positions=inputs.positions,
            mask=inputs.mask,
            visible=inputs.visible,
            length=inputs.length,
            coordinates=inputs.coordinates,
            shared=inputs.shared.get(self.attention.scheme, {}),
        )

    def decode(
        self, x: Float[Array, "batch tokens embed"], cache: Any, inputs: LayerInputs
    ) -> tuple[Float[Array, "batch tokens embed"], Any]:
        """The residual stream of new tokens after this layer, and the layer's cache with these tokens."""
        normed = self.attention_input(x)
        mixer = self.attention if self.delta is None else self.delta
        attended, cache = mixer.decode(normed, cache, inputs)
        return self._joined(x, normed, attended)[0], cache

    def attention_input(self, x: Float[Array, "batch tokens embed"]) -> Float[Array, "batch tokens embed"]:
        """The input of attention, from the residual stream."""
        return _through(self.attention_norm, x)

    def _joined(self, x, normed, attended, counted=None):
        """The residual stream after the layer, and the load of its experts.

        ``x`` is the residual stream before; attention maps ``normed`` to ``attended``.
        """
        with_attention = x + self._scaled(_through(self.attention_after, attended))
        read = x if self.residual.parallel else with_attention
        read = normed if self.residual.shared_norm else _through(self.mlp_norm, read)
        out, load = self.mlp.with_load(read, counted)
        after = with_attention + self._scaled(_through(self.mlp_after, out))
        if self.scale is not None:
            after = operator.mul(*align_ranks(after, self.scale[...].astype(after.dtype)))
        return after, load

    def _scaled(self, x):
        return x if self.residual.scale == 1 else x * self.residual.scale


def _through(norm: nnx.Module | None, x: Array) -> Array:
    return x if norm is None else norm(x)
