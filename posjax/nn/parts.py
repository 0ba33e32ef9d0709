"""Parameters with named axes, and how modules live on meshes."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from posjax._numbers import level
from posjax.attention.operands import LANES
from posjax.attention.sharded import Placement
from posjax.attention.sharded.automatic import explicit_spec, has_explicit, on_auto_axes


def parameter(key: Array, shape: tuple[int, ...], axes: tuple[str, ...], stddev: float) -> nnx.Param:
    """A normal float32 parameter whose axes have logical names."""
    return nnx.Param(stddev * jax.random.normal(key, shape, jnp.float32), logical_axes=axes)


def bias_parameter(shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
    """A float32 parameter of zeros whose axes have logical names."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), logical_axes=axes)


def plus(x: Float[Array, "*b"], bias: nnx.Param | None) -> Float[Array, "*b"]:
    """``x + bias`` over the last axes, added in float32, so that the gradient of the bias is summed so too."""
    if bias is None:
        return x
    wide, bias = level(x.astype(jnp.float32), bias[...].astype(jnp.float32))
    return (wide + bias).astype(x.dtype)


def to_heads(x: Float[Array, "*b embed"], weight: Float[Array, "embed heads size"]) -> Float[Array, "*b heads size"]:
    """``x W`` for every head.

    Where ``_side_by_side`` it is one matrix product, whose heads lie as the kernels of attention read them: a compiler
    that saw the heads would put one after the other, which takes a TPU twice as long.
    """
    weight = weight.astype(x.dtype)
    if not _side_by_side(x.shape[:-1], weight.shape[2], weight.shape[0]):
        return jnp.einsum("...e,ehd->...hd", x, weight)
    flat = jax.lax.optimization_barrier(weight.reshape(weight.shape[0], -1))
    return (x @ flat).reshape(*x.shape[:-1], *weight.shape[1:])


def from_heads(x: Float[Array, "*b heads size"], weight: Float[Array, "heads size embed"]) -> Float[Array, "*b embed"]:
    """``x W`` summed over all heads, as ``to_heads``."""
    weight = weight.astype(x.dtype)
    if not _side_by_side(x.shape[:-2], *weight.shape[1:]):
        return jnp.einsum("...hd,hde->...e", x, weight)
    flat = jax.lax.optimization_barrier(weight.reshape(-1, weight.shape[2]))
    return x.reshape(*x.shape[:-2], -1) @ flat


def _side_by_side(tokens: tuple[int, ...], size: int, embed: int) -> bool:
    """Whether heads should lie side by side: of many tokens, and if each of them fills whole lanes of a TPU.

    The weight is put in order for it, which takes longer than the product of a few tokens. A symbolic number is few.
    """
    known = all(isinstance(count, int) for count in tokens)
    return known and size % LANES == 0 and math.prod(tokens) >= embed


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
    if mesh.empty or not placement.is_open(mesh):
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
