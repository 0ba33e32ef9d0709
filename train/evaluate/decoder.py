"""A decoder as a `Predictor`, in one forward pass, and its steps, token after token."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from posjax import nn
from posjax.attention.placement import Placement
from posjax.training_positions import PositionSample
from train.config.settings.checks import check
from train.evaluate.mesh import computed, placement, split_cache, with_whole_head
from train.evaluate.predictor import Predictor, RowLayout
from train.model.mesh import BATCH_AXES
from train.model.sharding import LENGTH_AXES, cast_matrices, named_sharding

_CHUNK = 256  # tokens of a prompt that are read at once: each chunk reads all parameters


def predictor_of(model: nn.Decoder, seed: int, mesh: Mesh | None = None) -> tuple[Predictor, Any]:
    """The model as pure functions, and its parameters. `seed` is for positions that its scheme draws at use, if it
    draws any.

    On a mesh the functions must be called with that mesh in use (`train.evaluate.mesh.on`).
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
    rows = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    return Predictor(hidden, logits, ready, row, rows), parameters


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


Step = Callable[[Any, Any, Int[Array, "rows chunk"], Array], tuple[Float[Array, "rows chunk vocabulary"], Any]]
"""``step(parameters, cache, tokens, valid)`` gives logits and the cache extended by these tokens."""


def decoding(graph: nnx.GraphDef, drawn: PositionSample, total: int) -> Step:
    """A step of decoding `total` tokens. The scheme sees `total` as the length, from the first token on."""

    def step(parameters, cache, tokens, valid):
        index = jnp.minimum(cache.used[:, None] + jnp.arange(tokens.shape[1]), total - 1)
        positions = _at(drawn, index, total)
        return nnx.merge(graph, parameters).decode(tokens, cache, valid=valid, length=total, **positions)

    return step


def to_decode(model: nn.Decoder, mesh: Mesh | None) -> tuple[nnx.GraphDef, Callable[[Any], Any]]:
    """The graph of a decoder for decoding, and a function that converts parameters of `predictor_of` to this graph's.

    On a mesh the compiler splits attention over the slots of the cache; it can do so in the dense implementation, where
    it sees all logits.
    """
    narrow = partial(cast_matrices, axes=nn.logical_axes(model), dtype=model.config.dtype, mesh=mesh)
    if mesh is None:
        return nnx.split(model)[0], narrow
    return computed(model, placement=Placement(), implementation="dense"), narrow


def cache_for(
    graph: nnx.GraphDef, parameters: Any, prompts: Int[Array, "rows prompt"], total: int, mesh: Mesh | None = None
) -> Any:
    """An empty cache for `total` tokens, into which `read` reads the prompts; on a mesh its slots are split too."""
    (rows, size), model = prompts.shape, nnx.merge(graph, parameters)
    shards = 1 if mesh is None else mesh.shape["context"]
    even = -(-total // shards) * shards
    reach = model.config.layers.reach or even  # slots beyond it would never be used
    cache = model.init_cache(rows, min(even, max(total, reach)), chunk=min(_CHUNK, size))
    return cache if mesh is None else jax.lax.with_sharding_constraint(cache, split_cache(cache, mesh))


def read(
    step: Step, parameters: Any, cache: Any, prompts: Int[Array, "rows prompt"]
) -> tuple[Float[Array, "rows vocabulary"], Any]:
    """Reads prompts in chunks into an empty cache; returns the logits of the token after each prompt, and the cache."""
    rows, size = prompts.shape
    chunk = min(_CHUNK, size)
    padded = jnp.pad(prompts, ((0, 0), (0, -size % chunk)))
    valid = jnp.broadcast_to(jnp.arange(padded.shape[1]) < size, padded.shape)
    parts = tuple(jnp.moveaxis(x.reshape(rows, -1, chunk), 1, 0) for x in (padded, valid))
    column = (size - 1) % chunk  # of the prompt's last token, in its chunk

    def part(carry, tokens_and_valid):
        logits, cache = step(parameters, carry[1], *tokens_and_valid)
        return (logits[:, column], cache), None

    # Only one column of logits is kept of each chunk: all logits together would be as large as tokens x vocabulary.
    abstract = jax.eval_shape(part, (None, cache), jax.tree.map(lambda x: x[0], parts))[0][0]
    return jax.lax.scan(part, (jnp.zeros(abstract.shape, abstract.dtype), cache), parts)[0]


def _at(drawn: PositionSample, index: Int[Array, "rows tokens"], total: int) -> dict[str, Array]:
    """The values of a rule of positions for the tokens with these indices, in rows of `total` tokens."""
    found = _arguments_of(drawn)
    if "positions" in found:
        ids = jnp.broadcast_to(found["positions"], (len(index), total))
        found["positions"] = jnp.take_along_axis(ids, index, axis=1)
    return found
