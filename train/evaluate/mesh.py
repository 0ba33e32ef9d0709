"""The devices that a model is measured on, and how rows, parameters and caches are sharded over them."""

import dataclasses
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from posjax import nn
from posjax.attention.cache import Cache
from posjax.attention.placement import Placement
from posjax.layout import Layout
from posjax.nn.decoder import DecoderCache
from train.config import Config
from train.config.settings.checks import check
from train.config.settings.evaluate import EvaluateMesh
from train.model.build import scheme_of
from train.model.mesh import BATCH_AXES, EXPERT, mesh_from_sizes, mesh_shape
from train.model.sharding import named_sharding


def mesh_for(config: Config, rows: int, devices: list | None = None) -> Mesh | None:
    """The mesh of ``evaluate.mesh``; None for one device. See `sizes_for`.

    Raises ValueError as `sizes_for` does, and if a process would have no device.
    """
    devices = jax.devices() if devices is None else devices
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    sizes = sizes_for(config, rows, len(devices), slices)
    alone = len({device.process_index for device in devices}) == 1
    return None if alone and math.prod(sizes.values()) == 1 else mesh_from_sizes(sizes, devices, EvaluateMesh.key)


def sizes_for(config: Config, rows: int, devices: int, slices: int = 1) -> dict[str, int]:
    """The number of devices along each axis of ``evaluate.mesh``.

    Without the key the mesh has all devices: batches of ``rows`` rows are split over as many devices as possible, and
    every row over the remaining ones.

    Raises ValueError for axes that the devices cannot fill, and for a split of rows that the scheme does not support.
    """
    sizes = mesh_shape(config.evaluate.mesh or _chosen(config, rows, devices, slices), devices)
    check(
        sizes["context"] == 1 or not _is_linear(config),
        f"{EvaluateMesh.key}.context: linear attention cannot split a row",
    )
    return sizes


def _chosen(config: Config, rows: int, devices: int, slices: int) -> EvaluateMesh:
    per_slice = devices // slices
    if _is_linear(config):
        return EvaluateMesh(replica=slices, data=1, fsdp=per_slice)
    fsdp = max(n for n in range(1, per_slice + 1) if per_slice % n == 0 and slices * n <= max(rows, slices))
    return EvaluateMesh(replica=slices, data=1, fsdp=fsdp, context=per_slice // fsdp)


def _is_linear(config: Config) -> bool:
    scheme = scheme_of(config)
    return any(each.linear is not None for each in getattr(scheme, "schemes", (scheme,)))


def use_mesh(mesh: Mesh | None) -> AbstractContextManager:
    """Runs the body of a `with` on the mesh; without a mesh, on the first device."""
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def placement(mesh: Mesh, length: int) -> Placement:
    """The layout of rows of a length over the mesh in a full forward pass.

    Split rows are in a zigzag, so that all devices have the same work under a causal mask.
    """
    shards = mesh.shape["context"]
    return Placement(
        batch=tuple(axis for axis in BATCH_AXES if axis in mesh.shape),
        context="context" if shards > 1 else None,
        heads="tensor" if mesh.shape["tensor"] > 1 else None,
        layout=Layout("zigzag" if length >= 2 * shards else "contiguous", shards),
        experts=EXPERT if EXPERT in mesh.shape else None,
    )


def computed(model: nn.Decoder, **changes: Any) -> nnx.GraphDef:
    """The graph of a decoder with the same parameters; `changes` are config fields that say how it is computed."""
    config = dataclasses.replace(model.config, **changes)
    return nnx.split(nnx.eval_shape(lambda: nn.Decoder(config, rngs=nnx.Rngs(0))))[0]


def whole(x: Array) -> Array:
    """The array, replicated over all devices of the mesh in use, so that every process can read it."""
    in_use = not jax.sharding.get_abstract_mesh().empty
    return jax.lax.with_sharding_constraint(x, PartitionSpec()) if in_use else x


def with_whole_head(parameters: Any, tied: bool, dtype: Any, mesh: Mesh) -> Any:
    """Parameters with the output matrix sharded over the vocabulary only; gathered once, for many products."""
    name, axes = ("embed", ("vocab", None)) if tied else ("head", (None, "vocab"))
    sharding = named_sharding(mesh, axes, parameters[name].shape)
    return {**parameters, name: jax.lax.with_sharding_constraint(parameters[name].astype(dtype), sharding)}


def split_cache(cache: DecoderCache, mesh: Mesh) -> DecoderCache:
    """The shardings of a decoder's cache, as the same structure: rows, key heads and slots are split.

    `cache` has arrays or their shapes.
    """

    def sharding_of(leaf: Any, *axes: str | None) -> NamedSharding | None:
        return None if leaf is None else named_sharding(mesh, ("layers", "batch", *axes)[: leaf.ndim], leaf.shape)

    def shardings_of_layer(kept: Any) -> Any:
        if not isinstance(kept, Cache):
            return jax.tree.map(lambda leaf: sharding_of(leaf, *(None,) * (leaf.ndim - 2)), kept)
        axes_of = {"k": ("kv_heads", "length", None), "v": ("kv_heads", "length", None)}
        axes_of |= {
            "positions": ("length",),
            "ids": ("length",),
            "gates": ("heads", "length", None),
            "total": ("heads",),
        }
        return dataclasses.replace(
            kept, **{name: sharding_of(getattr(kept, name), *axes) for name, axes in axes_of.items()}
        )

    stacks = jax.tree.map(shardings_of_layer, cache.stacks, is_leaf=lambda node: isinstance(node, Cache))
    return dataclasses.replace(cache, stacks=stacks, used=named_sharding(mesh, ("batch",), cache.used.shape))
