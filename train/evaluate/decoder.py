"""A decoder as a `Predictor`: in one forward pass, or token after token."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from posjax import nn
from posjax.sampling import Drawn
from train.evaluate.predictor import NOT_FINITE, Predictor, best

_CHUNK = 64  # tokens of a prompt at a time


def predictor_of(model: nn.Decoder, seed: int) -> tuple[Predictor, Any]:
    """The model as pure functions, and its parameters. `seed` is that of positions drawn in use, if its scheme does."""
    graph, parameters = nnx.split(model)
    rule = model.config.layers.positions

    def drawn(length, rows):
        return Drawn() if rule is None else rule.evaluate(length, key=jax.random.key(seed), batch=rows)

    def hidden(parameters, tokens, length):
        where = {"length": length, **_given(drawn(length, len(tokens)))}
        return nnx.merge(graph, parameters).hidden(tokens, **where)

    def logits(parameters, hidden):
        return nnx.merge(graph, parameters).logits(hidden)

    def greedy(parameters, prompts, new):
        return _greedy(graph, parameters, prompts, new, drawn(prompts.shape[1] + new, len(prompts)))

    return Predictor(hidden, logits, greedy), parameters


def _given(drawn: Drawn) -> dict[str, Array]:
    """What a rule of positions says, as arguments of the model."""
    return {name: value for name, value in drawn._asdict().items() if value is not None}


def _greedy(
    graph: nnx.GraphDef, parameters: Any, prompts: Int[Array, "rows prompt"], new: int, drawn: Drawn
) -> Int[Array, "rows new"]:
    """The prompts in chunks, then the likeliest token, again and again. The length is frozen at that of the whole."""
    rows, size = prompts.shape
    total, chunk = size + new, min(_CHUNK, size)
    column = (size - 1) % chunk  # of the prompt's last token, in its chunk

    def step(cache, tokens, valid):
        index = jnp.minimum(cache.used[:, None] + jnp.arange(tokens.shape[1]), total - 1)
        where = {"length": total, **_at(drawn, index, total)}
        return nnx.merge(graph, parameters).decode(tokens, cache, valid=valid, **where)

    def read(carry, part):
        logits, cache = step(carry[1], *part)
        return (best(logits[:, column]), cache), None

    def write(carry, _):
        token, cache = carry
        logits, cache = step(cache, token[:, None], jnp.ones((rows, 1), bool))
        following = jnp.where(token == NOT_FINITE, NOT_FINITE, best(logits[:, 0]))
        return (following, cache), token

    padded = jnp.pad(prompts, ((0, 0), (0, -size % chunk)))
    valid = jnp.broadcast_to(jnp.arange(padded.shape[1]) < size, padded.shape)
    parts = tuple(jnp.moveaxis(x.reshape(rows, -1, chunk), 1, 0) for x in (padded, valid))
    nothing = jnp.zeros(rows, jnp.int32)
    cache = nnx.merge(graph, parameters).init_cache(rows, total, chunk=chunk)
    carry, _ = jax.lax.scan(read, (nothing, cache), parts)
    return jax.lax.scan(write, carry, None, length=new)[1].T


def _at(drawn: Drawn, index: Int[Array, "rows tokens"], total: int) -> dict[str, Array]:
    """What a rule of positions says in use of the tokens of these indices, in rows of `total` tokens."""
    found = _given(drawn)
    if "positions" in found:
        ids = jnp.broadcast_to(found["positions"], (len(index), total))
        found["positions"] = jnp.take_along_axis(ids, index, axis=1)
    return found
