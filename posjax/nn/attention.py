"""Attention of a block as a Flax NNX module: a thin layer over the pure functions.

Parameters of all modules are float32 and carry the logical names of their axes (``"embed"``, ``"heads"``, ``"mlp"``,
...), which a trainer maps to mesh axes; see ``logical_axes``.
"""

import dataclasses
import math
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from posjax._mesh import explicit_spec, has_explicit, mesh_of
from posjax.attention.placement import Placement
from posjax.attention.sharded import attend_on_mesh
from posjax.masks import Mask
from posjax.nn.config import DecoderConfig
from posjax.nn.gate import OutputGate
from posjax.nn.lora import project
from posjax.nn.norms import projection_norm
from posjax.nn.parameters import (
    bias_parameter,
    on_any_mesh,
    parameter,
    placement_of,
    plain,
    plus,
    scheme_parameters,
)
from posjax.norms import rms_norm
from posjax.positions import Positions
from posjax.scheme import Scheme


@dataclasses.dataclass(frozen=True)
class LayerInputs:
    """The inputs of every layer besides the activations.

    Args:
        positions: of the tokens.
        mask: the model's mask besides causality, such as segments; or None.
        visible: how many keys each token may see.
        length: the current length, for schemes that read it.
        shared: the parameters that all layers share, by scheme.
        coordinates: positions for the features only; see ``Scheme.attend``.
        valid: False at padding, for decoding; None if everything is valid.
        counted: which tokens count in the loads of experts; None if all do.
    """

    positions: Positions
    mask: Mask | None
    visible: Int[Array, "*b length"]
    length: int | Int[Array, "..."]
    shared: dict[Scheme, dict[str, dict[str, Array]]]
    coordinates: Array | None = None
    valid: Bool[Array, "batch length"] | None = None
    counted: Bool[Array, "batch length"] | None = None


class Attention(nnx.Module):
    """Multi-head attention with any scheme: four projections around ``Scheme.attend``.

    Args:
        config: of this layer; see ``DecoderConfig.of_layer``.
        rngs: random streams.
    """

    PROJECTIONS: ClassVar = {"q": 1, "k": 1, "v": 1, "o": 2}
    """The number of axes of inputs of every projection that can have an adapter."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config, self.scheme = config, config.scheme
        scheme = config.scheme
        width = config.model_dim
        size = config.head_dim
        heads = config.num_heads
        kv_heads = config.num_kv_heads
        into = partial(parameter, stddev=width**-0.5)
        shapes = {
            "q": (width, heads, scheme.query_size(size)),
            "k": (width, kv_heads, scheme.key_size(size)),
            "v": (width, kv_heads, size),
        }
        self.q = into(rngs.params(), shapes["q"], ("embed", "heads", "head_dim"))
        self.k = into(rngs.params(), shapes["k"], ("embed", "kv_heads", "head_dim"))
        projected = "qk" if config.keys_as_values else "qkv"
        self.v = into(rngs.params(), shapes["v"], ("embed", "kv_heads", "head_dim")) if "v" in projected else None
        outputs = heads * scheme.copies
        stddev = (outputs * size * 2 * config.num_layers) ** -0.5
        self.o = parameter(rngs.params(), (outputs, size, width), ("heads", "head_dim", "embed"), stddev)
        made = scheme.init(rngs.params(), heads, size, num_kv_heads=kv_heads, model_dim=width)
        self.learned = scheme_parameters(made)
        axes = {"q": ("heads", "head_dim"), "k": ("kv_heads", "head_dim"), "v": ("kv_heads", "head_dim")}
        biased = projected if "qkv" in config.biases else ""
        biases = [bias_parameter(shapes[name][1:], axes[name]) if name in biased else None for name in "qkv"]
        self.q_bias, self.k_bias, self.v_bias = biases
        self.q_norm, self.k_norm = (projection_norm(config, shapes[name][1:], axes[name]) for name in "qk")
        self.o_bias = bias_parameter((width,), ("embed",)) if "output" in config.biases else None
        self.gate = None if config.attention_gate is None else OutputGate(config, size, rngs=rngs)
        self.adapters = nnx.Dict()

    def __call__(
        self,
        x: Float[Array, "batch length embed"],
        *,
        positions: Positions | None = None,
        mask: Mask | None = None,
        visible: Int[Array, "*b length"] | None = None,
        length: int | Int[Array, "..."] | None = None,
        coordinates: Array | None = None,
        shared: dict[str, dict[str, Array]] | None = None,
    ) -> Float[Array, "batch length embed"]:
        """Self-attention of ``x``; the other arguments are those of ``Scheme.attend``.

        ``shared`` holds the parameters that all layers share (``Scheme.init_shared``).
        """
        settings = {"positions": positions, "mask": mask, "visible": visible, "length": length}
        settings |= {"coordinates": coordinates, "shared": shared or {}}
        attend = partial(Attention._attended, placement=self._placement(x), split=has_explicit(x))
        return on_any_mesh(attend, self, x, settings)

    def _placement(self, x) -> Placement:
        return placement_of(self.config.placement, x, self.q[...])

    def _attended(self, x, settings: dict, *, placement: Placement, split: bool):
        """Attention, whose projections the compiler splits; with ``split`` it must not split attention itself."""
        mesh = jax.sharding.get_abstract_mesh()
        params = plain(self.learned) | settings["shared"]
        if placement.axes and not mesh.empty:
            placement = placement.for_key_heads(mesh.shape, self.config.num_kv_heads)
        undivided = PartitionSpec() if split else None
        options = {"length": settings["length"], "placement": undivided if placement.is_empty else placement}
        arrays = {k: v for k, v in settings.items() if not isinstance(v, int) and k != "shared"}
        arrays |= {"gates": self.scheme.prepare(params, x, layout=self.config.placement.layout)}
        attend = partial(self._attend, options)
        return self._merge(attend_on_mesh(attend, placement, params, self._project(x), arrays), x)

    def decode(
        self, x: Float[Array, "batch tokens embed"], cache: Any, inputs: LayerInputs
    ) -> tuple[Float[Array, "batch tokens embed"], Any]:
        """Attention of new tokens over a cache, and the cache with the new tokens; see ``Scheme.decode``."""
        settings = {"index": inputs.visible - 1, "valid": inputs.valid, "positions": inputs.positions}
        settings |= {"coordinates": inputs.coordinates, "length": inputs.length}
        settings |= {"shared": inputs.shared.get(self.scheme, {})}
        decoded = partial(Attention._decoded, partition=self._partition(x))
        return on_any_mesh(
            decoded, self, x, cache, settings, like=(explicit_spec(x), jax.tree.map(explicit_spec, cache))
        )

    def _partition(self, x) -> PartitionSpec | None:
        """The spec of the queries over the mesh; None without a mesh, or if it does not divide the batch evenly."""
        placement = self._placement(x)
        mesh = mesh_of(x)
        if mesh is None or not set(placement.axes) <= set(mesh.axis_names) - set(mesh.manual_axes):
            return None
        rows = math.prod(mesh.shape[axis] for axis in placement.batch)
        is_split = (placement.axes or has_explicit(x)) and x.shape[0] % rows == 0
        return PartitionSpec(placement.batch or None, None, placement.heads) if is_split else None

    def _decoded(self, x, cache, settings: dict, *, partition: PartitionSpec | None):
        params = plain(self.learned) | settings["shared"]
        start = cache.own.total if self.scheme.gated else None
        arguments = {name: value for name, value in settings.items() if name != "shared"}
        arguments["gates"] = self.scheme.prepare(params, x, start=start, valid=arguments["valid"])
        arguments |= self.config.logit_options
        out, cache = self._step(x, cache, params=params, placement=partition, **arguments)
        return self._merge(out, x), cache

    def _step(self, x, cache, **arguments):
        """The outputs of the heads for new tokens, and the cache with them; for the arguments see ``Scheme.decode``."""
        return self.scheme.decode(*self._project(x), cache, **arguments)

    def _project(self, x) -> list:
        """Queries, keys and values, before the norm of the scheme."""
        clip = self.config.clip_qkv
        names = "qkv" if self.v is not None else "qk"
        projected = [plus(project(self, name, x), getattr(self, f"{name}_bias")) for name in names]
        q, k, v = projected if self.v is not None else (*projected, projected[1])
        v = rms_norm(v, eps=self.config.norm.eps) if self.config.value_norm else v
        q, k = (q, k) if self.q_norm is None else (self.q_norm(q), self.k_norm(k))
        return [q, k, v] if clip is None else [jnp.clip(x, -clip, clip) for x in (q, k, v)]

    def _merge(self, out, x):
        out = out if self.gate is None else self.gate(x, out)
        return plus(project(self, "o", out), self.o_bias)

    def _attend(self, settings: dict, params: dict, projected: list, arrays: dict):
        """``Scheme.attend`` for the batch rows of one device; ``settings`` are not traced, so an int stays an int."""
        arguments = settings | arrays
        positions, gates = arguments.pop("positions"), arguments.pop("gates")
        return self.scheme.attend(
            *projected,
            **arguments,
            params=params,
            causal=self.config.causal,
            q_positions=positions,
            kv_positions=positions,
            gates=None if gates is None else (gates, gates),
            implementation=self.config.implementation,
            **self.config.logit_options,
        )
