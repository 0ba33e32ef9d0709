"""A decoder as a `Predictor`: in one forward pass, or token after token."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from posjax import nn
from posjax._checks import check
from posjax.sampling import Drawn
from train.evaluate.predictor import NOT_FINITE, Predictor, best

_CHUNK = 64  # tokens of a prompt at a time


def predictor_of(model: nn.Decoder, seed: int) -> tuple[Predictor, Any]:
    """The model as pure functions, and its parameters. `seed` is that of positions drawn in use, if its scheme does."""
    graph, parameters = nnx.split(model)

    def hidden(parameters, tokens, length):
        _check_reach(model, length)
        where = _given(drawn_in_use(model, length, seed, len(tokens)))
        return nnx.merge(graph, parameters).hidden(tokens, length=length, **where)

    def logits(parameters, hidden):
        return nnx.merge(graph, parameters).logits(hidden)

    def greedy(parameters, prompts, new):
        total = prompts.shape[1] + new
        step = decoding(graph, drawn_in_use(model, total, seed, len(prompts)), total)
        return _greedy(step, parameters, prompts, cache_for(graph, parameters, prompts, total), new)

    return Predictor(hidden, logits, greedy), parameters


def _check_reach(model: nn.Decoder, length: int) -> None:
    """Raises ValueError for a text that is longer than a learned embedding of positions."""
    layers = model.config.layers
    reach = getattr(layers.embedding, "reach", length)
    check(reach >= length or layers.positions is not None, f"the model has {reach} learned positions")


def drawn_in_use(model: nn.Decoder, length: int, seed: int, rows: int) -> Drawn:
    """What the model's rule of positions draws in use; nothing without a rule."""
    rule = model.config.layers.positions
    return Drawn() if rule is None else rule.evaluate(length, key=jax.random.key(seed), batch=rows)


def _given(drawn: Drawn) -> dict[str, Array]:
    """What a rule of positions says, as arguments of the model."""
    return {name: value for name, value in drawn._asdict().items() if value is not None}


Step = Callable[[Any, Any, Int[Array, "rows chunk"], Array], tuple[Float[Array, "rows chunk vocabulary"], Any]]
"""``step(parameters, cache, tokens, valid)`` gives logits and the cache with these tokens."""


def decoding(graph: nnx.GraphDef, drawn: Drawn, total: int) -> Step:
    """A step of decoding `total` tokens. The length is frozen at that, from the first token on."""

    def step(parameters, cache, tokens, valid):
        index = jnp.minimum(cache.used[:, None] + jnp.arange(tokens.shape[1]), total - 1)
        where = _at(drawn, index, total)
        return nnx.merge(graph, parameters).decode(tokens, cache, valid=valid, length=total, **where)

    return step


def cache_for(graph: nnx.GraphDef, parameters: Any, prompts: Int[Array, "rows prompt"], total: int) -> Any:
    """An empty cache for `total` tokens, of which `read` takes the prompts."""
    rows, size = prompts.shape
    return nnx.merge(graph, parameters).init_cache(rows, total, chunk=min(_CHUNK, size))


def read(
    step: Step, parameters: Any, cache: Any, prompts: Int[Array, "rows prompt"]
) -> tuple[Float[Array, "rows vocabulary"], Any]:
    """Reads prompts in chunks into an empty cache: the logits of the token after each, and the cache."""
    rows, size = prompts.shape
    chunk = min(_CHUNK, size)
    padded = jnp.pad(prompts, ((0, 0), (0, -size % chunk)))
    valid = jnp.broadcast_to(jnp.arange(padded.shape[1]) < size, padded.shape)
    parts = tuple(jnp.moveaxis(x.reshape(rows, -1, chunk), 1, 0) for x in (padded, valid))
    column = (size - 1) % chunk  # of the prompt's last token, in its chunk

    def part(carry, tokens_and_valid):
        logits, cache = step(parameters, carry[1], *tokens_and_valid)
        return (logits[:, column], cache), None

    # The logits of the last chunk alone are kept: those of all chunks would be as many as the vocabulary is large.
    nothing = jax.eval_shape(part, (None, cache), jax.tree.map(lambda x: x[0], parts))[0][0]
    return jax.lax.scan(part, (jnp.zeros(nothing.shape, nothing.dtype), cache), parts)[0]


def _greedy(
    step: Step, parameters: Any, prompts: Int[Array, "rows prompt"], cache: Any, new: int
) -> Int[Array, "rows new"]:
    """The likeliest token after the prompts, again and again."""
    everyone = jnp.ones((len(prompts), 1), bool)

    def write(carry, _):
        token, cache = carry
        logits, cache = step(parameters, cache, token[:, None], everyone)
        following = jnp.where(token == NOT_FINITE, NOT_FINITE, best(logits[:, 0]))
        return (following, cache), token

    logits, cache = read(step, parameters, cache, prompts)
    return jax.lax.scan(write, (best(logits), cache), None, length=new)[1].T


def _at(drawn: Drawn, index: Int[Array, "rows tokens"], total: int) -> dict[str, Array]:
    """What a rule of positions says in use of the tokens of these indices, in rows of `total` tokens."""
    found = _given(drawn)
    if "positions" in found:
        ids = jnp.broadcast_to(found["positions"], (len(index), total))
        found["positions"] = jnp.take_along_axis(ids, index, axis=1)
    return found
