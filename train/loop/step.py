"""One update: loss, gradients, optimizer; compiled over a mesh."""

import zlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float, Int32, Key, UInt32

from posjax.layout import Layout
from posjax.nn.decoder import Loads
from posjax.nn.experts import balance_loss
from posjax.scheme import Layers, Scheme
from train.config import Config
from train.data.packing import Batch
from train.data.tokenizer import Tokenizer
from train.loop.loss import Losses, token_losses
from train.loop.optimizer import FROZEN, TRAINED, Rates, learning_rate, make_optimizer, param_labels
from train.model.build import Setup
from train.model.sharding import (
    LENGTH_AXES,
    cast_matrices,
    named_sharding,
    optimizer_shardings,
    tree_shardings,
)
from train.model.state import Guard, TrainState, selected

_Found = tuple[Losses, Loads]


class StepMetrics(NamedTuple):
    """The metrics of an update, as scalars on the devices."""

    loss: Float[Array, ""]  # nats per token, without the z-loss
    gradient_norm: Float[Array, ""]  # before clipping, of the trained parameters
    learning_rate: Float[Array, ""]
    skipped: Int32[Array, ""]
    skipped_in_row: Int32[Array, ""]
    loads: Loads  # of the experts of every layer, over the batch


def mask_tokens(
    key: Key[Array, ""],
    tokens: Int32[Array, "rows length"],
    segment_ids: Int32[Array, "rows length"],
    rate: float,
    tokenizer: Tokenizer,
) -> tuple[Int32[Array, "rows length"], Int32[Array, "rows length"]]:
    """Tokens, a share `rate` of them replaced by the mask token, and labels: the replaced tokens, and -1 at all others.

    The masked-token loss of Devlin et al. 2019, section 3.1, without its random and unchanged replacements.
    """
    special = jnp.asarray([tokenizer.bos, tokenizer.eos, tokenizer.mask, tokenizer.padding])
    maskable = (segment_ids >= 0) & ~jnp.isin(tokens, special)
    chosen = maskable & jax.random.bernoulli(key, rate, tokens.shape)
    return jnp.where(chosen, tokenizer.mask, tokens), jnp.where(chosen, tokens, -1)


def draw_positions(scheme: Scheme | Layers, key: Key[Array, ""], batch: Batch, layout: Layout) -> dict[str, Array]:
    """The values that a scheme's rule draws for a batch, as arguments of the model; empty if it has no rule.

    Drawn ids run through a whole row, not through each document, since documents do not see each other. The values are
    reordered to the `layout` of the batch.
    """
    rule = scheme.training_positions
    if rule is None:
        return {}
    return {
        name: layout.apply(value, LENGTH_AXES[name]) if name in LENGTH_AXES else value
        for name, value in rule.draw(key, *batch.tokens.shape)._asdict().items()
        if value is not None
    }


def redraw(setup: Setup, key: Key[Array, ""], step: Int32[Array, ""], parameters: Any) -> Any:
    """The parameters with new random features (Performer's projections) every ``redraw_every`` steps."""
    kernel, every = getattr(setup.scheme, "linear", None), setup.config.train.redraw_every
    if kernel is None or not kernel.random or not every:
        return parameters

    def renew(path, leaf):
        if not _is_drawn(path):
            return leaf
        leaf_key = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        drawn = jax.vmap(lambda k: kernel.draw(k, leaf.shape[-1]))(jax.random.split(leaf_key, leaf.shape[0]))
        due = (step > 0) & (step % every == 0)
        return jnp.where(due, drawn, leaf)

    return jax.tree_util.tree_map_with_path(renew, parameters)


def _is_drawn(path: tuple[Any, ...]) -> bool:
    """Whether the parameter at a path of the tree holds random features."""
    return jax.tree_util.keystr(path).endswith("['linear']['projection']")


@dataclass(frozen=True)
class Program:
    """The functions that a stage's config compiles to, over a mesh.

    ``initialize(seed)`` gives the first state, ``begin(parameters)`` the first state with these parameters.
    ``update(given, state, batch)`` gives the next state and the metrics, and donates the buffers of the given state.
    ``loss(parameters, batch)`` gives the ``Losses`` of a batch. ``abstract`` holds the shapes, dtypes and shardings of
    a state, and ``given`` the seed and the rates of the config: trainings that differ in these alone compile once.
    """

    given: "Given"
    initialize: Any
    begin: Any
    update: Any
    loss: Any
    abstract: TrainState


class Given(NamedTuple):
    """What an update is told about its training: arguments of the compiled program, the same on all devices."""

    seed: UInt32[Array, ""]
    rates: Rates


def given_of(setup: Setup, config: Config) -> Given:
    """The seed and the rates of a config, which may differ in them from that of the setup."""
    return Given(np.uint32(config.seed), Rates.of(config.train, setup.axes))


def build_program(setup: Setup) -> Program:
    """The program of a stage, not yet compiled. Raises ValueError for an invalid model, scheme or mesh."""
    mesh, given = setup.mesh, given_of(setup, setup.config)
    shapes = jax.eval_shape(partial(initialize, setup), given.seed)
    parameters = tree_shardings(mesh, setup.axes, shapes.parameters)
    replicated = named_sharding(mesh, ())
    shardings = TrainState(
        replicated,
        parameters,
        optimizer_shardings(mesh, shapes.optimizer, shapes.parameters, parameters),
        Guard(replicated, replicated, replicated),
        _averaged_part(setup, parameters),
    )
    return Program(
        given,
        jax.jit(partial(initialize, setup), out_shardings=shardings),
        jax.jit(partial(_begin, setup), out_shardings=shardings),
        jax.jit(partial(update, setup), donate_argnums=1, out_shardings=(shardings, None)),
        jax.jit(lambda parameters, batch: _losses(setup, parameters, batch, {})[0]),
        jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings),
    )


def initialize(setup: Setup, seed: UInt32[Array, ""]) -> TrainState:
    """The first state of a training, whose parameters are drawn from the seed."""
    return _begin(setup, nnx.to_pure_dict(nnx.state(setup.model(seed))))


def _begin(setup: Setup, parameters: Any) -> TrainState:
    zero = jnp.zeros((), jnp.int32)
    guard = Guard(jnp.zeros((), jnp.float32), zero, zero)
    optimizer = make_optimizer(setup.config.train, setup.axes)  # its first state does not depend on the rates
    average = jax.tree.map(jnp.copy, _averaged_part(setup, parameters))  # updates take the memory of both
    return TrainState(zero, parameters, optimizer.init(parameters), guard, average)


def _averaged_part(setup: Setup, tree: Any) -> Any:
    """The leaves of a tree of parameters that ``train.ema`` averages: the trained ones, without random features.

    None without ``train.ema``.
    """
    train = setup.config.train
    if not train.ema:
        return None
    labels = param_labels(train, setup.axes)
    return selected(
        tree, jax.tree_util.tree_map_with_path(lambda path, label: label != FROZEN and not _is_drawn(path), labels)
    )


def update(setup: Setup, given: Given, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
    """The state after a batch, and its metrics; random draws depend only on the seed and the step."""
    key = jax.random.fold_in(jax.random.key(given.seed), state.step)
    for_batch, for_features = jax.random.split(key)
    before = redraw(setup, for_features, state.step, state.parameters)
    (losses, loads), gradients = _gradients(setup, for_batch, before, batch)
    loss, norm = losses.nll / jnp.maximum(losses.count, 1), optax.tree.norm(gradients)
    schedule = learning_rate(setup.config.train, given.rates.peak)
    rate = jnp.asarray(schedule(state.step - state.guard.skipped), jnp.float32)

    optimizer = make_optimizer(setup.config.train, setup.axes, given.rates)
    updates, moments = optimizer.update(gradients, state.optimizer, before)
    sound, guard = _guard(setup, state.guard, loss, norm)
    updated = _moved_corrections(setup, optax.apply_updates(before, updates), loads)
    average = _moved_average(setup, state.average, updated)
    held = (before, state.optimizer, state.average)
    parameters, moments, average = optax.tree.where(sound, (updated, moments, average), held)
    following = TrainState(state.step + 1, parameters, moments, guard, average)
    return following, StepMetrics(loss, norm, rate, guard.skipped, guard.in_row, loads)


def _moved_average(setup: Setup, average: Any, parameters: Any) -> Any:
    """The averages after an update: ``ema * average + (1 - ema) * parameter``, with the ``train.ema`` of the config."""
    updated = _averaged_part(setup, parameters)
    return updated and optax.incremental_update(updated, average, 1 - setup.config.train.ema)


def _moved_corrections(setup: Setup, parameters: Any, loads: Loads) -> Any:
    """The parameters with the corrections of routers moved towards even loads, if they are trained:

        c_e <- c_e + correction_rate sign(mean load - load_e)

    So experts are balanced without a loss (Wang et al., arXiv 2408.15664; DeepSeek V3).
    """
    rate = setup.config.train.correction_rate

    def moved(path, leaf, label):
        if getattr(path[-1], "key", None) != "correction" or label == FROZEN:
            return leaf
        _, pattern, number, *_ = (part.key for part in path)
        tokens = loads[pattern][number].tokens
        return leaf + rate * jnp.sign(tokens.mean(-1, keepdims=True) - tokens).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(moved, parameters, param_labels(setup.config.train, setup.axes))


def _guard(setup: Setup, before: Guard, loss, norm) -> tuple[Array, Guard]:
    """Whether to apply an update, and the statistics after it.

    An update is skipped if its loss or gradient norm is not finite, or if the norm is more than ``spike_factor`` times
    the running mean ``m <- 0.95 m + 0.05 norm``. After ``stop_after_skips`` skips in a row all updates are skipped,
    until the loop notices and stops.
    """
    train = setup.config.train
    sound = jnp.isfinite(loss) & jnp.isfinite(norm) & (before.in_row < train.stop_after_skips)
    if train.spike_factor:
        sound &= (before.norm == 0) | (norm <= train.spike_factor * before.norm)
    mean = jnp.where(before.norm == 0, norm, 0.95 * before.norm + 0.05 * norm)
    skipped = (~sound).astype(jnp.int32)
    in_row = jnp.where(sound, 0, before.in_row + 1)
    return sound, Guard(jnp.where(sound, mean, before.norm), before.skipped + skipped, in_row)


def _gradients(setup: Setup, key, parameters: Any, batch: Batch) -> tuple[_Found, Any]:
    """The losses of a batch and the gradient of their mean over its tokens, computed in ``accumulate`` parts."""
    count = setup.config.train.accumulate
    batch = _prepared(setup, key, batch)
    predicted = jnp.maximum(jnp.sum(batch.labels >= 0), 1)

    def drawn(number, rows: Batch):
        return draw_positions(setup.scheme, jax.random.fold_in(key, number), rows, setup.placement.layout)

    if count == 1:
        return _of_piece(setup, parameters, predicted, _BatchPart(batch, drawn(0, batch)))
    batch = _in_parts(setup, batch)
    first = jax.tree.map(lambda x: x[0], batch)
    pieces = _BatchPart(batch, jax.lax.map(lambda number: drawn(number, first), jnp.arange(count)))
    # Not if `tensor` is split too: XLA's partitioner then crashes on gathers.
    by_replica = setup.mesh.shape["replica"] > 1 and setup.mesh.shape["tensor"] == 1
    add_up = _added_by_replica if by_replica else _added
    return add_up(setup, parameters, predicted, pieces)


class _BatchPart(NamedTuple):
    """Rows of a batch, and the scheme's draws for them, by the names of the model's arguments."""

    rows: Batch
    drawn: dict[str, Array]


def _of_piece(
    setup: Setup, parameters: Any, predicted, piece: _BatchPart, across: str | None = None
) -> tuple[_Found, Any]:
    """The losses of some rows, and the gradient of their sum divided by the number of predicted tokens of the batch.

    The gradient of a frozen parameter is a single zero, which takes no memory. The balance loss of experts is that of
    these rows, and of those on the other devices of the axis ``across``.
    """
    train = setup.config.train
    labels = param_labels(train, setup.axes)

    def objective(trained):
        own = jax.tree.map(lambda *each: each[0] if each[2] == TRAINED else each[1], trained, parameters, labels)
        losses, loads = found = _losses(setup, own, piece.rows, piece.drawn)
        loss = (losses.nll + train.z_loss * losses.z) / predicted
        if weight := setup.balance_weight:
            loss += weight / train.accumulate * balance_loss(setup.decoder.experts, loads, across)
        return loss, jax.lax.stop_gradient(found)

    zero = jnp.zeros((), jnp.float32)
    trained = jax.tree.map(lambda leaf, label: leaf if label == TRAINED else zero, parameters, labels)
    gradients, found = jax.grad(objective, has_aux=True)(trained)
    return found, gradients


def _added(
    setup: Setup, parameters: Any, predicted, pieces: _BatchPart, across: str | None = None
) -> tuple[_Found, Any]:
    """The sum of `_of_piece` over all parts, computed one after the other."""
    one = partial(_of_piece, setup, parameters, predicted, across=across)

    def add(so_far, part):
        return jax.tree.map(jnp.add, so_far, one(part)), None

    shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], pieces))
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(add, start, pieces)[0]


def _added_by_replica(setup: Setup, parameters: Any, predicted, pieces: _BatchPart) -> tuple[_Found, Any]:
    """`_added` for the rows of each replica, summed over the replicas.

    So gradients cross the network between slices once per step, not once per part.
    """
    of_one, rows = replace(setup, mesh=without(setup.mesh, "replica")), pieces.rows.tokens.shape[1:]

    def spec_of(leaf):
        return PartitionSpec(None, "replica") if leaf.shape[1:3] == rows else PartitionSpec()

    def of_replica(parameters, predicted, pieces):
        return jax.lax.psum(_added(of_one, parameters, predicted, pieces, "replica"), "replica")

    # Unchecked: all replicas share the parameters, so a check would sum each part's gradient over replicas at once.
    return jax.shard_map(
        of_replica,
        mesh=setup.mesh,
        axis_names={"replica"},
        in_specs=(PartitionSpec(), PartitionSpec(), jax.tree.map(spec_of, pieces)),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(parameters, predicted, pieces)


def without(mesh: Mesh, axis: str) -> AbstractMesh:
    """The mesh without one axis, as a function inside a ``shard_map`` over that axis sees it."""
    sizes = {name: size for name, size in mesh.shape.items() if name != axis}
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def _prepared(setup: Setup, key, batch: Batch) -> Batch:
    """The batch as the model sees it: with masked tokens, if the model is trained to predict those."""
    if setup.config.model.causal:
        return batch
    rate, tokenizer = setup.config.train.mask_rate, setup.tokenizer
    # Drawn in the tokens' own order, so the result does not depend on the layout.
    in_order = (setup.placement.layout.restore(array) for array in (batch.tokens, batch.segment_ids))
    tokens, labels = map(setup.placement.layout.apply, mask_tokens(key, *in_order, rate, tokenizer))
    return batch._replace(tokens=tokens, labels=labels)


def _in_parts(setup: Setup, batch: Batch) -> Batch:
    """The rows in interleaved parts, ``[parts, rows, length]``, so that no row moves to another device."""
    count = setup.config.train.accumulate
    sharding = named_sharding(setup.mesh, (None, "batch", "length")).spec

    def deal(x):
        return jax.lax.with_sharding_constraint(jnp.swapaxes(x.reshape(-1, count, x.shape[1]), 0, 1), sharding)

    return jax.tree.map(deal, batch)


def _losses(setup: Setup, parameters: Any, batch: Batch, drawn: dict[str, Array]) -> _Found:
    """The losses of some rows, with the scheme's draws for them, and the loads of experts."""
    model = nnx.merge(nnx.graphdef(setup.abstract), _cast(setup, parameters))
    # Positions in documents come with the batch: computed from segment ids they would need communication if rows are
    # split.
    positions = {} if model.config.layers.counts_in_row else {"positions": batch.positions}
    hidden, loads = model.hidden_and_loads(batch.tokens, segment_ids=batch.segment_ids, **(positions | drawn))
    head = model.output_matrix.astype(hidden.dtype)
    chunks, finish = setup.config.train.loss_chunks, model.config.finish_logits
    return token_losses(hidden, head, batch.labels, chunks, model.output_bias, finish), loads


def _cast(setup: Setup, parameters: Any) -> Any:
    """The parameters as the model uses them, with matrices cast before communication."""
    return cast_matrices(parameters, setup.axes, jnp.dtype(setup.config.model.compute_dtype), setup.mesh)
