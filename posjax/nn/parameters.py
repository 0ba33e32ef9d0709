"""Parameters with named axes, and modules on meshes."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from posjax._mesh import axes_of, explicit_spec, has_explicit, on_auto_axes
from posjax._numbers import align_ranks
from posjax.attention.logits import LANES
from posjax.attention.placement import Placement


def parameter(key: Array, shape: tuple[int, ...], axes: tuple[str, ...], stddev: float) -> nnx.Param:
    """A normal float32 parameter whose axes have logical names."""
    return nnx.Param(stddev * jax.random.normal(key, shape, jnp.float32), logical_axes=axes)


def bias_parameter(shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
    """A float32 parameter of zeros whose axes have logical names."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), logical_axes=axes)


def plus(x: Float[Array, "*b"], bias: nnx.Param | None) -> Float[Array, "*b"]:
    """``x + bias`` over the last axes, added in float32, so that the gradient of the bias is summed in float32 too."""
    if bias is None:
        return x
    wide, bias = align_ranks(x.astype(jnp.float32), bias[...].astype(jnp.float32))
    return (wide + bias).astype(x.dtype)


def to_heads(x: Float[Array, "*b embed"], weight: Float[Array, "embed heads size"]) -> Float[Array, "*b heads size"]:
    """``x W`` for every head.

    If ``_merges_heads`` allows it, this is one matrix product whose result is in the layout of ``merge_heads``, which
    the kernels of attention read. With a head axis the compiler would choose another layout, which takes twice as long
    on a TPU.
    """
    weight = weight.astype(x.dtype)
    if not _merges_heads(x.shape[:-1], weight.shape[2], weight.shape[0]):
        return jnp.einsum("...e,ehd->...hd", x, weight)
    flat = jax.lax.optimization_barrier(weight.reshape(weight.shape[0], -1))
    return (x @ flat).reshape(*x.shape[:-1], *weight.shape[1:])


def from_heads(x: Float[Array, "*b heads size"], weight: Float[Array, "heads size embed"]) -> Float[Array, "*b embed"]:
    """``x W`` summed over all heads, for ``x`` in the layout of ``to_heads``."""
    weight = weight.astype(x.dtype)
    if not _merges_heads(x.shape[:-2], *weight.shape[1:]):
        return jnp.einsum("...hd,hde->...e", x, weight)
    flat = jax.lax.optimization_barrier(weight.reshape(-1, weight.shape[2]))
    return x.reshape(*x.shape[:-2], -1) @ flat


def _merges_heads(tokens: tuple[int, ...], size: int, embed: int) -> bool:
    """Whether the product should be in the layout of ``merge_heads``: for many tokens and heads that fill TPU lanes.

    The weight is copied to that layout, which takes longer than the product of a few tokens. A symbolic size counts
    as few tokens.
    """
    known = all(isinstance(count, int) for count in tokens)
    return known and size % LANES == 0 and math.prod(tokens) >= embed


def scheme_parameters(params: dict[str, dict[str, Array]]) -> nnx.Dict:
    """A scheme's learned parameters as a module tree. They are small, and their axes have no logical names."""

    def wrap(value):
        return nnx.Param(value, logical_axes=(None,) * value.ndim)

    return nnx.Dict(
        {slot: nnx.Dict({name: wrap(value) for name, value in arrays.items()}) for slot, arrays in params.items()}
    )


def plain(params: nnx.Dict) -> dict[str, dict[str, Array]]:
    """The inverse of ``scheme_parameters``."""
    return {slot: {name: leaf[...] for name, leaf in leaves.items()} for slot, leaves in params.items()}


def placed(x: Float[Array, "batch length embed"], placement: Placement) -> Float[Array, "batch length embed"]:
    """``x``, split over the mesh in use by the placement; unchanged without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not placement.is_open(mesh):
        return x
    placement.check_axes(mesh.shape)
    place = jax.sharding.reshard if mesh.explicit_axes else jax.lax.with_sharding_constraint
    return place(x, PartitionSpec(placement.batch or None, placement.context, None))


def placement_of(placement: Placement, x: Array, weight: Float[Array, "embed heads size"]) -> Placement:
    """The placement of a config; if that is empty, the split in the array types of ``x`` and of a projection."""
    if not placement.is_empty:
        return placement
    rows = axes_of(explicit_spec(x)[0])
    heads = axes_of(explicit_spec(weight)[1])
    # Parameters may be split over the batch axis too (FSDP); they are gathered for use.
    return Placement(batch=rows, heads=tuple(axis for axis in heads if axis not in rows) or None)


def on_any_mesh(function: Callable[..., Any], module: nnx.Module, x: Array, *more: Any, like: Any = None) -> Any:
    """Runs ``function(module, x, *more)`` with all mesh axes Auto, even if the mesh has Explicit axes.

    The result has the sharding of ``x``, or of ``like``, a tree of specs.
    """
    if not has_explicit(nnx.state(module), x, more):
        return function(module, x, *more)
    graph, state = nnx.split(module)

    def run(state, *arguments):
        return function(nnx.merge(graph, state), *arguments)

    return on_auto_axes(run, state, x, *more, like=explicit_spec(x) if like is None else like)
