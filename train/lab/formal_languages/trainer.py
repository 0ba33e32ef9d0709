"""Training and testing one scheme on one language."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Int32, Key

from posjax import nn
from posjax._checks import check
from posjax.training_positions import PositionRule
from train.config import SchemeConfig
from train.lab.formal_languages.config import LanguagesConfig
from train.lab.formal_languages.generators import PAD, VOCABULARY_SIZE, Example, Language
from train.model.build import build_scheme
from train.runtime.reuse import keep_memory_on_cpu

Rule = PositionRule | int | None
"""A scheme's rule of positions; or the number of axes, if its features read several; or None for token indices."""


def build(entry: SchemeConfig, config: LanguagesConfig) -> tuple[nn.DecoderConfig, Rule]:
    """The bidirectional model of an entry, and its rule of positions, taken from the first layer if layers differ."""
    sizes = {name: getattr(config, name) for name in ("num_layers", "model_dim", "num_heads")}
    built = build_scheme(entry, config.num_layers)
    decoder = nn.DecoderConfig(VOCABULARY_SIZE, **sizes, causal=False, scheme=built, implementation="dense")
    first = decoder.layers.kinds[0]
    num_axes = 1 if first.features is None else first.features.num_axes
    return decoder, first.training_positions if num_axes == 1 else num_axes


@functools.partial(jax.jit, static_argnums=(0, 3))
def positions_of(rule: Rule, key: Key[Array, ""], example: Example, training: bool) -> dict[str, Array]:
    """The positions of a batch's tokens, as keyword arguments of ``Decoder``.

    With two axes a token of a grid is at (row, column), with three at (time, row, column): the question at 0, the grid
    at time 1, as M-RoPE places an image after one token of text.
    """
    if rule is None:
        return {}
    if isinstance(rule, int):
        check(example.grid is not None and rule < 4, f"strings have one axis, grids two or three; found {rule}")
        time = example.grid.any(-1, keepdims=True).astype(jnp.int32)
        return {"coordinates": jnp.concatenate([time, example.grid], axis=-1)[..., -rule:]}
    batch, size = example.tokens.shape
    for_rule, for_gaps = jax.random.split(key)
    drawn = rule.draw(for_rule, batch, size) if training else rule.evaluate(size, key=for_rule, batch=batch)
    if training and drawn.positions is not None:
        drawn = drawn._replace(positions=_leave_out(for_gaps, drawn.positions, example.tokens != PAD))
    return {name: value for name, value in drawn._asdict().items() if value is not None}


def _leave_out(
    key: Key[Array, ""], ids: Int32[Array, "batch size"], used: Bool[Array, "batch size"]
) -> Int32[Array, "batch size"]:
    """Removes a random id of the row for each padding token: otherwise short strings would always get the lowest
    ids."""
    kept = jnp.argsort(jax.random.uniform(key, ids.shape), axis=1) < used.sum(1, keepdims=True)
    return jnp.sort(jnp.where(kept, ids, jnp.iinfo(jnp.int32).max), axis=1)


def draw(language: Language, rule: Rule, key: Key[Array, ""], batch: int, length: int, training: bool):
    """A batch of examples, in training of all lengths up to the given one, and the positions of their tokens."""
    for_example, for_positions = jax.random.split(key)
    example = language.sample(for_example, batch, length, training)
    return example, positions_of(rule, for_positions, example, training)


def check_fit(language: Language, entry: SchemeConfig, config: LanguagesConfig) -> None:
    """Raises ValueError for a scheme that cannot be built, or that refuses positions or a length of the examples."""
    keep_memory_on_cpu()
    longest, lengths = config.lengths(language)
    decoder, rule = build(entry, config)
    graph, state = nnx.split(nnx.eval_shape(lambda: nn.Decoder(decoder, rngs=nnx.Rngs(0))))
    for length, training in ((longest, True), *((length, False) for length in lengths)):
        sample = functools.partial(draw, language, rule, batch=config.batch, length=length, training=training)
        batch = jax.eval_shape(sample, jax.random.key(0))
    jax.eval_shape(functools.partial(count, graph), state, *batch)


def optimizer(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """Adam after clipping, with a warm-up over a tenth of the steps and half a cosine down to 0."""
    rate = optax.warmup_cosine_decay_schedule(0.0, learning_rate, steps // 10, steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))


def _logits(graph: Any, state: Any, example: Example, where: dict[str, Array]):
    return nnx.merge(graph, state)(example.tokens, segment_ids=jnp.where(example.tokens == PAD, -1, 0), **where)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def update(graph: Any, rates: tuple[float, int], state: Any, moments: Any, example: Example, where: dict[str, Array]):
    """One step of `optimizer(*rates)` on the mean loss of all targets: the next parameters and moments."""

    def loss(state):
        logits = _logits(graph, state, example, where)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, example.targets)
        return jnp.mean(losses, where=example.weights)

    changes, moments = optimizer(*rates).update(jax.grad(loss)(state), moments, state)
    return optax.apply_updates(state, changes), moments


@functools.partial(jax.jit, static_argnums=0)
def count(graph: Any, state: Any, example: Example, where: dict[str, Array]):
    """The number of right answers, and of all answers."""
    right = _logits(graph, state, example, where).argmax(-1) == example.targets
    return jnp.sum(right, where=example.weights), jnp.sum(example.weights)


def train_and_test(language: Language, entry: SchemeConfig, config: LanguagesConfig) -> dict[int, float]:
    """The accuracy of a scheme trained on a language, at each length: the share of all answers that are right."""
    longest, lengths = config.lengths(language)
    decoder, rule = build(entry, config)
    graph, state = nnx.split(nnx.jit(lambda: nn.Decoder(decoder, rngs=nnx.Rngs(config.seed)))())
    rates = config.learning_rate, config.steps
    moments = optimizer(*rates).init(state)
    for_training, for_tests = jax.random.split(jax.random.key(config.seed))
    for step in range(config.steps):
        batch = draw(language, rule, jax.random.fold_in(for_training, step), config.batch, longest, True)
        state, moments = update(graph, rates, state, moments, *batch)
    accuracies = {}
    for length in lengths:
        keys = jax.random.split(jax.random.fold_in(for_tests, length), config.test_batches)
        counts = [count(graph, state, *draw(language, rule, key, config.batch, length, False)) for key in keys]
        accuracies[length] = float(sum(right for right, _ in counts) / sum(asked for _, asked in counts))
    return accuracies
