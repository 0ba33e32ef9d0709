"""The parts of a decoder as Flax NNX modules: thin layers over the pure functions.

Parameters are float32 and carry the logical names of their axes (``"embed"``, ``"heads"``, ``"mlp"``, ...), which a
trainer maps to mesh axes; see ``logical_axes``.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from posjax._numbers import level
from posjax.attention.sharded import Placement, attend_on_mesh
from posjax.attention.sharded.automatic import axes_of, explicit_spec, has_explicit, mesh_of, on_auto_axes
from posjax.masks import Mask
from posjax.nn.config import DecoderConfig
from posjax.positions import Positions
from posjax.scheme import Scheme


@dataclasses.dataclass(frozen=True)
class Context:
    """What every layer reads beside the activations.

    Args:
        positions: of the tokens.
        mask: what the model allows beside causality, such as segments; or None.
        visible: how many keys each token may see.
        length: the current length, for schemes that read it.
        shared: the parameters that all layers share, by scheme.
        coordinates: positions for the features alone; see ``Scheme.attend``.
        valid: False at padding, for decoding.
    """

    positions: Positions
    mask: Mask | None
    visible: Int[Array, "*b length"]
    length: int | Int[Array, "..."]
    shared: dict[Scheme, dict[str, dict[str, Array]]]
    coordinates: Array | None = None
    valid: Bool[Array, "batch length"] | None = None


def parameter(key: Array, shape: tuple[int, ...], axes: tuple[str, ...], stddev: float) -> nnx.Param:
    """A normal float32 parameter whose axes have logical names."""
    return nnx.Param(stddev * jax.random.normal(key, shape, jnp.float32), logical_axes=axes)


def scheme_parameters(params: dict[str, dict[str, Array]]) -> nnx.Dict:
    """A scheme's learned parameters as a module tree; they are small, and their axes have no names."""

    def wrap(value):
        return nnx.Param(value, logical_axes=(None,) * value.ndim)

    return nnx.Dict(
        {slot: nnx.Dict({name: wrap(value) for name, value in made.items()}) for slot, made in params.items()}
    )


def plain(params: nnx.Dict) -> dict[str, dict[str, Array]]:
    """The arrays of ``scheme_parameters`` again."""
    return {slot: {name: leaf[...] for name, leaf in made.items()} for slot, made in params.items()}


def placed(x: Float[Array, "batch length embed"], placement: Placement) -> Float[Array, "batch length embed"]:
    """``x``, split over the mesh in use as the placement says; as it is where there is no mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if not placement.axes or mesh.empty or mesh.manual_axes:
        return x
    placement.check_axes(mesh.shape)
    place = jax.sharding.reshard if mesh.explicit_axes else jax.lax.with_sharding_constraint
    return place(x, PartitionSpec(placement.batch or None, placement.context, None))


def on_any_mesh(function: Callable[..., Any], module: nnx.Module, x: Array, *more: Any, like: Any = None) -> Any:
    """``function(module, x, *more)`` where the compiler splits everything, on meshes with Explicit axes too.

    What it returns lies like ``x``, or as a tree of specs says.
    """
    if not has_explicit(nnx.state(module), x, more):
        return function(module, x, *more)
    graph, state = nnx.split(module)

    def run(state, *arguments):
        return function(nnx.merge(graph, state), *arguments)

    return on_auto_axes(run, state, x, *more, like=explicit_spec(x) if like is None else like)


class RMSNorm(nnx.Module):
    """``x / rms(x) * gain`` over the last axis, in float32 (Zhang and Sennrich, arXiv 1910.07467)."""

    def __init__(self, size: int, axis: str = "embed"):
        self.gain = nnx.Param(jnp.ones(size, jnp.float32), logical_axes=(axis,))

    def __call__(self, x: Float[Array, "*b size"]) -> Float[Array, "*b size"]:
        return on_any_mesh(RMSNorm._normed, self, x)

    def _normed(self, x):
        wide = x.astype(jnp.float32)
        rms = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
        normed, gain = level(wide * rms, self.gain[...])
        return (normed * gain).astype(x.dtype)


class Attention(nnx.Module):
    """Multi-head attention with any scheme: four projections around ``Scheme.attend``.

    Args:
        config: the decoder's shape; ``scheme`` in it is not read.
        scheme: the scheme of this layer.
        rngs: random streams.
    """

    def __init__(self, config: DecoderConfig, scheme: Scheme, *, rngs: nnx.Rngs):
        self.config, self.scheme = config, scheme
        width, size, heads, kv_heads = config.model_dim, config.head_dim, config.num_heads, config.num_kv_heads
        into = partial(parameter, stddev=width**-0.5)
        shapes = {
            "q": (width, heads, scheme.query_size(size)),
            "k": (width, kv_heads, scheme.key_size(size)),
            "v": (width, kv_heads, size),
        }
        self.q = into(rngs.params(), shapes["q"], ("embed", "heads", "head_dim"))
        self.k = into(rngs.params(), shapes["k"], ("embed", "kv_heads", "head_dim"))
        self.v = into(rngs.params(), shapes["v"], ("embed", "kv_heads", "head_dim"))
        stddev = (heads * size * 2 * config.num_layers) ** -0.5
        self.o = parameter(rngs.params(), (heads, size, width), ("heads", "head_dim", "embed"), stddev)
        made = scheme.init(rngs.params(), heads, size, num_kv_heads=kv_heads, model_dim=width)
        self.learned = scheme_parameters(made)

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
        """That of the config; where it names nothing, what the types of the tokens and of the projection say."""
        if self.config.placement.axes or self.config.placement.layout.moves:
            return self.config.placement
        rows, heads = axes_of(explicit_spec(x)[0]), axes_of(explicit_spec(self.q[...])[1])
        # Parameters may be split over the axis of the rows too (FSDP): they are gathered where they are used.
        return Placement(batch=rows, heads=tuple(axis for axis in heads if axis not in rows) or None)

    def _attended(self, x, settings: dict, *, placement: Placement, split: bool):
        """Attention where the compiler splits the projections; ``split`` if it must not be left to split the rest."""
        mesh, params = jax.sharding.get_abstract_mesh(), plain(self.learned) | settings["shared"]
        if placement.axes and not mesh.empty:
            placement = placement.for_key_heads(mesh.shape, self.config.num_kv_heads)
        where = {"across": placement} if placement.axes or placement.layout.moves else {}
        where |= {"partition": PartitionSpec() if split and not where else None}
        arrays = {k: v for k, v in settings.items() if not isinstance(v, int) and k != "shared"}
        arrays |= {"gates": self._gates(params, x)}
        attend = partial(self._attend, {"length": settings["length"]} | where)
        return self._merge(attend_on_mesh(attend, placement, params, self._project(x), arrays))

    def decode(
        self, x: Float[Array, "batch tokens embed"], kept: Any, context: Context
    ) -> tuple[Float[Array, "batch tokens embed"], Any]:
        """Attention of new tokens over a cache, and the cache with them in it; see ``Scheme.decode``."""
        settings = {"index": context.visible - 1, "valid": context.valid, "positions": context.positions}
        settings |= {"coordinates": context.coordinates, "length": context.length}
        settings |= {"shared": context.shared.get(self.scheme, {})}
        decoded = partial(Attention._decoded, partition=self._partition(x))
        return on_any_mesh(decoded, self, x, kept, settings, like=(explicit_spec(x), jax.tree.map(explicit_spec, kept)))

    def _partition(self, x) -> PartitionSpec | None:
        """How the queries lie over the mesh, if rows and heads can be shared by its devices."""
        placement, mesh = self._placement(x), mesh_of(x)
        if mesh is None or not set(placement.axes) <= set(mesh.axis_names) - set(mesh.manual_axes):
            return None
        rows = math.prod(mesh.shape[axis] for axis in placement.batch)
        shared = (placement.axes or has_explicit(x)) and x.shape[0] % rows == 0
        return PartitionSpec(placement.batch or None, None, placement.heads) if shared else None

    def _decoded(self, x, kept, settings: dict, *, partition: PartitionSpec | None):
        params = plain(self.learned) | settings["shared"]
        start = kept.total if self.scheme.reads_tokens else None
        given = {name: value for name, value in settings.items() if name != "shared"}
        given["gates"] = self.scheme.prepare(params, x, start=start, valid=given["valid"])
        out, kept = self.scheme.decode(*self._project(x), kept, params=params, partition=partition, **given)
        return self._merge(out), kept

    def _gates(self, params, x):
        return self.scheme.prepare(params, x, layout=self.config.placement.layout)

    def _project(self, x) -> list:
        return [jnp.einsum("bte,ehd->bthd", x, w[...].astype(x.dtype)) for w in (self.q, self.k, self.v)]

    def _merge(self, out):
        return jnp.einsum("bthd,hde->bte", out, self.o[...].astype(out.dtype))

    def _attend(self, settings: dict, params: dict, projected: list, arrays: dict):
        """``Scheme.attend`` on the rows of one device; a ``length`` that is a Python number stays one."""
        given = settings | arrays
        positions, gates = given.pop("positions"), given.pop("gates")
        return self.scheme.attend(
            *projected,
            **given,
            params=params,
            causal=self.config.causal,
            q_positions=positions,
            kv_positions=positions,
            gates=None if gates is None else (gates, gates),
            implementation=self.config.implementation,
        )


class MLP(nnx.Module):
    """``down(silu(gate x) * up x)`` for SwiGLU (Shazeer, arXiv 2002.05202), ``down(gelu(up x))`` for GELU."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        width, hidden = config.model_dim, config.mlp_dim
        into = partial(parameter, shape=(width, hidden), axes=("embed", "mlp"), stddev=width**-0.5)
        self.up = into(rngs.params())
        self.gate = into(rngs.params()) if config.activation == "swiglu" else None
        stddev = (hidden * 2 * config.num_layers) ** -0.5
        self.down = parameter(rngs.params(), (hidden, width), ("mlp", "embed"), stddev)

    def __call__(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch length embed"]:
        return on_any_mesh(MLP._mixed, self, x)

    def _mixed(self, x):
        up = x @ self.up[...].astype(x.dtype)
        hidden = jax.nn.gelu(up) if self.gate is None else jax.nn.silu(x @ self.gate[...].astype(x.dtype)) * up
        return hidden @ self.down[...].astype(x.dtype)


class Block(nnx.Module):
    """Pre-norm block: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, config: DecoderConfig, scheme: Scheme, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.model_dim)
        self.attention = Attention(config, scheme, rngs=rngs)
        self.mlp_norm = RMSNorm(config.model_dim)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: Float[Array, "batch length embed"], context: Context) -> Float[Array, "batch length embed"]:
        """One layer; ``context`` is the same for all."""
        x = x + self.attention(
            self.attention_norm(x),
            positions=context.positions,
            mask=context.mask,
            visible=context.visible,
            length=context.length,
            coordinates=context.coordinates,
            shared=context.shared.get(self.attention.scheme, {}),
        )
        return x + self.mlp(self.mlp_norm(x))

    def decode(
        self, x: Float[Array, "batch tokens embed"], kept: Any, context: Context
    ) -> tuple[Float[Array, "batch tokens embed"], Any]:
        """One layer on new tokens, and its cache with them in it."""
        found, kept = self.attention.decode(self.attention_norm(x), kept, context)
        x = x + found
        return x + self.mlp(self.mlp_norm(x)), kept
