"""A trained model as pure functions, and what is asked of it: what the next tokens cost, and which are likeliest.

Logits are made for the places that are asked about, a part of them at a time. So no array of
[rows, length, vocabulary] is kept, however long the rows are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

NOT_FINITE = -1
"""In place of the likeliest token, where the model gives no finite logits."""

_LOGITS = 2**26  # at a time: 256 MiB of float32


@dataclass(frozen=True)
class Predictor:
    """A language model as pure functions of its parameters. `length` and `new` are Python integers.

    hidden(parameters, tokens [rows, length], length) -> [rows, length, width]. Refuses lengths with ValueError.
    logits(parameters, hidden [rows, places, width]) -> [rows, places, vocabulary] of the tokens that follow.
    greedy(parameters, prompts [rows, prompt], new) -> tokens [rows, new] that follow, the likeliest one each time, and
    `NOT_FINITE` from where on there is none.
    """

    hidden: Callable[[Any, Int[Array, "rows length"], int], Float[Array, "rows length width"]]
    logits: Callable[[Any, Float[Array, "rows places width"]], Float[Array, "rows places vocabulary"]]
    greedy: Callable[[Any, Int[Array, "rows prompt"], int], Int[Array, "rows new"]] | None = None


def next_nll(
    predictor: Predictor, parameters: Any, tokens: Int[Array, "rows length+1"], length: int
) -> Float[Array, "rows length"]:
    """What every token but the first costs given those before it: ``logsumexp(logits) - logits[token]``, in nats."""

    def nll(hidden, targets):
        logits = predictor.logits(parameters, hidden).astype(jnp.float32)
        return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]

    hidden = predictor.hidden(parameters, tokens[:, :-1], length)
    return _in_parts(nll, _vocabulary(predictor, parameters, hidden), hidden, tokens[:, 1:])


def likeliest_next(
    predictor: Predictor, parameters: Any, tokens: Int[Array, "rows length"], at: Int[Array, "rows places"], length: int
) -> Int[Array, "rows places"]:
    """The likeliest token to follow each of the tokens `at` these places of the rows, given the row up to it."""

    def likeliest(hidden):
        return best(predictor.logits(parameters, hidden))

    hidden = predictor.hidden(parameters, tokens, length)
    asked = jnp.take_along_axis(hidden, at[..., None], axis=1)
    return _in_parts(likeliest, _vocabulary(predictor, parameters, hidden), asked)


def best(logits: Float[Array, "*places vocabulary"]) -> Int[Array, "*places"]:
    """The likeliest token; `NOT_FINITE` where any logit is NaN or infinite."""
    return jnp.where(jnp.isfinite(logits).all(-1), jnp.argmax(logits, axis=-1), NOT_FINITE)


def _vocabulary(predictor: Predictor, parameters: Any, hidden: Float[Array, "rows length width"]) -> int:
    return jax.eval_shape(predictor.logits, parameters, hidden[:, :1]).shape[-1]


def _in_parts(function: Callable[..., Array], vocabulary: int, *arrays: Array) -> Array:
    """``function(*arrays)`` over parts of the second axis, one after the other, of at most `_LOGITS` logits each."""
    rows, places = arrays[0].shape[:2]
    size = max(1, _LOGITS // (rows * vocabulary))
    if places <= size:
        return function(*arrays)
    count = math.ceil(places / size)

    def split(x):
        padded = jnp.pad(x, ((0, 0), (0, count * size - places), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(rows, count, size, *x.shape[2:]), 1, 0)

    parts = jax.lax.map(lambda part: function(*part), tuple(map(split, arrays)))
    return jnp.moveaxis(parts, 0, 1).reshape(rows, count * size)[:, :places]
