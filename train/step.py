"""One update: loss, gradients, optimizer; compiled over a mesh."""

import zlib
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Int32, Key

from posjax.nn import logical_axes
from train.config import Config, TrainConfig
from train.data import MASK, Batch
from train.model import build_model, build_scheme
from train.sharding import named_sharding, optimizer_shardings, tree_shardings


@partial(jax.tree_util.register_dataclass, data_fields=["step", "parameters", "optimizer"], meta_fields=[])
@dataclass(frozen=True)
class TrainState:
    """All that an update changes. `parameters` is the plain nested dict of the model's parameters, in float32."""

    step: Int32[Array, ""]
    parameters: Any
    optimizer: Any


class StepMetrics(NamedTuple):
    """What an update reports, as float32 scalars on the devices."""

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]  # before clipping
    learning_rate: Float[Array, ""]


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """The rate of update number n, from 0: a line up to the peak, reached by update ``warmup_steps``, and half a cosine
    down to the final share of it, reached by the last update. The first update already moves.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if config.warmup_steps else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.steps,
        end_value=config.learning_rate * config.final_learning_rate,
    )
    return lambda count: schedule(count + 1)


def make_optimizer(config: TrainConfig, axes: Any) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019) after clipping by the global norm.

    Only the model's matrices decay: parameters with two named axes or more in `axes`, a tree of logical axis names, not
    counting the layers'. So norms, biases, scalars and what a position scheme learns do not.
    """
    decays = jax.tree.map(
        lambda names: len(set(names) - {None, "layers"}) > 1, axes, is_leaf=lambda node: isinstance(node, tuple)
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(learning_rate(config), config.beta1, config.beta2, weight_decay=config.weight_decay, mask=decays),
    )


def token_loss(
    logits: Float[Array, "*axes vocabulary"], labels: Int[Array, "*axes"]
) -> tuple[Float[Array, ""], Int32[Array, ""]]:
    """The summed negative log-likelihood in nats, and the number of tokens it is summed over.

    Labels below 0 are not predicted. Dividing once, after all sums, weights every token alike.
    """
    predicted = labels >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(predicted, labels, 0))
    return jnp.sum(losses, where=predicted), jnp.sum(predicted)


def mask_tokens(
    key: Key[Array, ""], tokens: Int32[Array, "rows length"], segment_ids: Int32[Array, "rows length"], rate: float
) -> tuple[Int32[Array, "rows length"], Int32[Array, "rows length"]]:
    """Tokens with a share `rate` of the bytes replaced by MASK, and labels that are -1 everywhere else.

    The masked-token loss of Devlin et al. 2019, section 3.1, without its random and unchanged replacements.
    """
    maskable = (segment_ids >= 0) & (tokens < 256)
    chosen = maskable & jax.random.bernoulli(key, rate, tokens.shape)
    return jnp.where(chosen, MASK, tokens), jnp.where(chosen, tokens, -1)


def draw_positions(config: Config, key: Key[Array, ""], batch: Batch) -> dict[str, Array]:
    """Where the tokens of a batch stand, as arguments of the model: counted in each document, or as the scheme draws.

    Drawn ids run through a row, across its documents, which do not see each other.
    """
    rule = build_scheme(config.scheme, config.model.num_layers).positions
    where = {"positions": batch.positions}
    if rule is not None:
        drawn = rule.draw(key, *batch.tokens.shape)
        where |= {name: value for name, value in drawn._asdict().items() if value is not None}
    return where


def redraw(config: Config, key: Key[Array, ""], step: Int32[Array, ""], parameters: Any) -> Any:
    """The parameters with new random features (Performer's projections) every ``redraw_every`` steps."""
    kernel = getattr(build_scheme(config.scheme, config.model.num_layers), "linear", None)
    if kernel is None or not kernel.random or not config.train.redraw_every:
        return parameters

    def renew(path, leaf):
        if not jax.tree_util.keystr(path).endswith("['linear']['projection']"):
            return leaf
        own = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        drawn = jax.vmap(lambda k: kernel.draw(k, leaf.shape[-1]))(jax.random.split(own, leaf.shape[0]))
        due = (step > 0) & (step % config.train.redraw_every == 0)
        return jnp.where(due, drawn, leaf)

    return jax.tree_util.tree_map_with_path(renew, parameters)


@dataclass(frozen=True)
class Program:
    """What a config compiles to over a mesh.

    ``initialize()`` gives the first state. ``update(state, batch)`` gives the next state and the metrics, and takes
    the buffers of the state it is given. ``abstract`` holds the shapes, dtypes and shardings of a state.
    """

    initialize: Any
    update: Any
    abstract: TrainState


def build_program(config: Config, mesh: Mesh) -> Program:
    """Compiles nothing yet; raises ValueError for a model or a scheme that cannot be built."""
    model = nnx.eval_shape(lambda: build_model(config))
    graph, _ = nnx.split(model)
    axes = logical_axes(model)
    optimizer = make_optimizer(config.train, axes)
    initialize = partial(_initialize, config, optimizer)
    shapes = jax.eval_shape(initialize)
    parameters = tree_shardings(mesh, axes)
    shardings = TrainState(
        named_sharding(mesh, ()), parameters, optimizer_shardings(mesh, optimizer, shapes.optimizer, parameters)
    )
    return Program(
        jax.jit(initialize, out_shardings=shardings),
        jax.jit(partial(_update, config, graph, optimizer), donate_argnums=0, out_shardings=(shardings, None)),
        jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings),
    )


def _initialize(config: Config, optimizer: optax.GradientTransformation) -> TrainState:
    parameters = nnx.to_pure_dict(nnx.state(build_model(config)))
    return TrainState(jnp.zeros((), jnp.int32), parameters, optimizer.init(parameters))


def _update(
    config: Config, graph: nnx.GraphDef, optimizer: optax.GradientTransformation, state: TrainState, batch: Batch
) -> tuple[TrainState, StepMetrics]:
    tokens, labels = batch.tokens, batch.labels
    key = jax.random.fold_in(jax.random.key(config.seed), state.step)
    for_masks, for_positions, for_features = jax.random.split(key, 3)
    if not config.model.causal:
        tokens, labels = mask_tokens(for_masks, batch.tokens, batch.segment_ids, config.train.mask_rate)
    where = draw_positions(config, for_positions, batch)

    def mean_loss(parameters):
        model = nnx.merge(graph, parameters)
        logits = model(tokens, segment_ids=batch.segment_ids, **where)
        total, count = token_loss(logits, labels)
        return total / jnp.maximum(count, 1)

    before = redraw(config, for_features, state.step, state.parameters)
    loss, gradients = jax.value_and_grad(mean_loss)(before)
    updates, moments = optimizer.update(gradients, state.optimizer, before)
    following = TrainState(state.step + 1, optax.apply_updates(before, updates), moments)
    rate = jnp.asarray(learning_rate(config.train)(state.step), jnp.float32)
    return following, StepMetrics(loss, optax.tree.norm(gradients), rate)
