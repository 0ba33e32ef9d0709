"""A decoder as a `Predictor`, in one forward pass, and made ready to generate, on a mesh too."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from posjax import nn
from posjax.attention.placement import Placement
from posjax.training_positions import PositionSample
from train.config.settings.checks import check
from train.evaluate.mesh import computed, placement, split_cache, with_whole_head
from train.evaluate.predictor import Predictor, RowLayout
from train.model.mesh import row_shares
from train.model.sharding import LENGTH_AXES, cast_matrices, named_sharding


def predictor_of(model: nn.Decoder, seed: int, mesh: Mesh | None = None) -> tuple[Predictor, Any]:
    """The model as pure functions, and its parameters. `seed` is for positions that its scheme draws at use, if it
    draws any.

    On a mesh the functions must be called with that mesh in use (`train.evaluate.mesh.use_mesh`).
    """
    if mesh is not None:
        return _predictor_on(model, seed, mesh)
    graph, parameters = nnx.split(model)

    def hidden(parameters, tokens, length):
        _check_reach(model, length)
        inputs = _arguments_of(drawn_in_use(model, length, seed, len(tokens)))
        return nnx.merge(graph, parameters).hidden(tokens, length=length, **inputs)

    def logits(parameters, hidden):
        return nnx.merge(graph, parameters).logits(hidden)

    return Predictor(hidden, logits), parameters


def _predictor_on(model: nn.Decoder, seed: int, mesh: Mesh) -> tuple[Predictor, Any]:
    """The predictor on a mesh: rows are split over devices, and each row too."""
    parameters = nnx.to_pure_dict(nnx.state(model))
    narrow = partial(cast_matrices, axes=nn.logical_axes(model), dtype=model.config.dtype, mesh=mesh)

    def row(length):
        return RowLayout(length, placement(mesh, length).layout)

    def hidden(parameters, tokens, length):
        _check_reach(model, length)
        graph, layout = computed(model, placement=placement(mesh, length)), row(length)
        inputs = _placed(layout, _arguments_of(drawn_in_use(model, length, seed, len(tokens))))
        if layout.padded > length:
            segments = layout.apply(jnp.zeros((1, length), jnp.int32), constant_values=-1)
            inputs["segment_ids"] = jnp.broadcast_to(segments, tokens.shape)
        tokens = jax.lax.with_sharding_constraint(tokens, named_sharding(mesh, ("batch", "length")))
        return nnx.merge(graph, narrow(parameters)).hidden(tokens, length=length, **inputs)

    def logits(parameters, hidden):
        return nnx.merge(computed(model), parameters).logits(hidden)

    ready = partial(with_whole_head, tied=model.config.tied_head, dtype=model.config.dtype, mesh=mesh)
    return Predictor(hidden, logits, ready, row, row_shares(mesh.shape)), parameters


def _placed(row: RowLayout, where: dict[str, Array]) -> dict[str, Array]:
    """The values of a rule of positions in the order of a row's layout; padding tokens get the last token's values."""

    axes = {name: LENGTH_AXES[name] % x.ndim for name, x in where.items() if name in LENGTH_AXES}
    return where | {name: row.apply(where[name], axis, mode="edge") for name, axis in axes.items()}


def _check_reach(model: nn.Decoder, length: int) -> None:
    """Raises ValueError for a text that is longer than a learned embedding of positions."""
    layers = model.config.layers
    reach = layers.reach
    check(
        reach is None or reach >= length or layers.training_positions is not None,
        f"the model has {reach} learned positions",
    )


def drawn_in_use(model: nn.Decoder, length: int, seed: int, rows: int) -> PositionSample:
    """The draws of the model's rule of positions for evaluation; empty without a rule."""
    rule = model.config.layers.training_positions
    return PositionSample() if rule is None else rule.evaluate(length, key=jax.random.key(seed), batch=rows)


def _arguments_of(drawn: PositionSample) -> dict[str, Array]:
    """The draws of a rule of positions, as arguments of the model."""
    return {name: value for name, value in drawn._asdict().items() if value is not None}


def to_decode(model: nn.Decoder, mesh: Mesh | None) -> nn.Decoder:
    """The decoder for `nn.generate` and `nn.stream`: its matrices are cast to the compute dtype once.

    On a mesh, which must be in use, the compiler splits attention over the slots of the cache.
    """
    graph = computed(model, placement=Placement()) if mesh else nnx.split(model)[0]
    parameters = nnx.to_pure_dict(nnx.state(model))
    return nnx.merge(graph, cast_matrices(parameters, nn.logical_axes(model), model.config.dtype, mesh))


def empty_cache(
    model: nn.Decoder, rows: int, capacity: int, *, chunk: int, mesh: Mesh | None = None
) -> nn.DecoderCache:
    """An empty cache, as ``Decoder.init_cache`` makes it; on a mesh its slots are split too."""
    shards = 1 if mesh is None else mesh.shape["context"]
    even = -(-capacity // shards) * shards
    reach = model.config.layers.reach or even  # slots beyond it would never be used
    cache = model.init_cache(rows, min(even, max(capacity, reach)), chunk=chunk)
    return cache if mesh is None else jax.lax.with_sharding_constraint(cache, split_cache(cache, mesh))
