"""A trained model as pure functions, and its uses: the loss of the next tokens, and the likeliest tokens.

Logits are computed only for needed positions, one part at a time. So no array of [rows, length, vocabulary] is kept,
however long the rows are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from posjax.layout import CONTIGUOUS, Layout

NOT_FINITE = -1
"""Replaces the likeliest token if the logits are not finite."""

_LOGITS = 2**26  # maximal number of logits on a device at a time: 256 MiB of float32


@dataclass(frozen=True)
class RowLayout:
    """How the tokens of a row are arranged over devices: padded, in the order of ``layout``."""

    length: int
    layout: Layout = CONTIGUOUS

    @property
    def padded(self) -> int:
        """The number of tokens with padding."""
        unit = self.layout.shards * self.layout.chunks
        return -(-self.length // unit) * unit

    def apply(self, x: Array, axis: int = 1, **padding: Any) -> Array:
        """Values of the tokens along an axis, padded as by ``jnp.pad`` and reordered to the layout."""
        widths = [(0, 0)] * x.ndim
        widths[axis] = 0, self.padded - self.length
        return self.layout.apply(jnp.pad(x, widths, **padding), axis)

    def restore(self, x: Array) -> Array:
        """The inverse of `apply`, along the second axis."""
        return self.layout.restore(x, 1)[:, : self.length]

    def padded_indices(self, tokens: Int[Array, "rows tokens"]) -> Int[Array, "rows tokens"]:
        """The indices of tokens in the layout."""
        return jnp.asarray(np.argsort(self.layout.order(self.padded)))[tokens]


@dataclass(frozen=True)
class Predictor:
    """A language model as pure functions of its parameters. `length` and `new` are Python integers.

    hidden(parameters, tokens [rows, padded], length) -> [rows, padded, width], for rows arranged by `row`. Raises
    ValueError for lengths that the model refuses. logits(parameters, hidden [rows, padded, width]) -> [rows, padded,
    vocabulary] of the tokens that follow. ready(parameters) -> parameters for many calls of `logits`. row(length) gives
    the layout of rows over devices. `rows` is the number of devices that share the rows of a batch; it must divide the
    number of rows.
    """

    hidden: Callable[[Any, Int[Array, "rows padded"], int], Float[Array, "rows padded width"]]
    logits: Callable[[Any, Float[Array, "rows padded width"]], Float[Array, "rows padded vocabulary"]]
    ready: Callable[[Any], Any] = lambda parameters: parameters
    row: Callable[[int], RowLayout] = RowLayout
    rows: int = 1

    def filled(self, rows: int) -> int:
        """The smallest number of rows, at least this many, that the devices share evenly."""
        return -(-rows // self.rows) * self.rows


def next_nll(
    predictor: Predictor, parameters: Any, tokens: Int[Array, "rows length+1"], length: int
) -> Float[Array, "rows length"]:
    """The loss of every token except the first, given those before it, in nats."""
    row, ready = predictor.row(length), predictor.ready(parameters)

    def nll(hidden, targets):
        return loss_of(predictor.logits(ready, hidden), targets)

    hidden = predictor.hidden(parameters, row.apply(tokens[:, :-1]), length)
    return row.restore(_in_parts(predictor, row, nll, ready, hidden, row.apply(tokens[:, 1:])))


def next_at(
    predictor: Predictor,
    parameters: Any,
    tokens: Int[Array, "rows length+1"],
    at: Int[Array, "rows asked"],
    length: int,
) -> tuple[Int[Array, "rows asked"], Float[Array, "rows asked"]]:
    """The likeliest token after each of the positions `at` of the rows, and the loss of the token that is there, both
    given the row up to this position."""
    return after(predictor, parameters, tokens[:, :-1], at, jnp.take_along_axis(tokens, at + 1, axis=1), length)


def after(
    predictor: Predictor,
    parameters: Any,
    tokens: Int[Array, "rows length"],
    at: Int[Array, "rows asked"],
    targets: Int[Array, "rows asked"],
    length: int,
) -> tuple[Int[Array, "rows asked"], Float[Array, "rows asked"]]:
    """The likeliest token after each of the positions `at` of the rows, and the loss of a target there, both given the
    row up to this position."""
    row, ready = predictor.row(length), predictor.ready(parameters)

    def following(hidden, targets):
        logits = predictor.logits(ready, hidden)
        return best(logits), loss_of(logits, targets)

    hidden = predictor.hidden(parameters, row.apply(tokens), length)
    asked = jnp.take_along_axis(hidden, row.padded_indices(at)[..., None], axis=1)
    return _in_parts(predictor, RowLayout(at.shape[1]), following, ready, asked, targets)


def loss_of(
    logits: Float[Array, "*positions vocabulary"], targets: Int[Array, "*positions"]
) -> Float[Array, "*positions"]:
    """``logsumexp(logits) - logits[target]``, in nats."""
    logits = logits.astype(jnp.float32)
    return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]


def best(logits: Float[Array, "*positions vocabulary"]) -> Int[Array, "*positions"]:
    """The likeliest token; `NOT_FINITE` if any logit is NaN or infinite."""
    return jnp.where(jnp.isfinite(logits).all(-1), jnp.argmax(logits, axis=-1), NOT_FINITE)


def _in_parts(
    predictor: Predictor, row: RowLayout, function: Callable[..., Any], ready: Any, hidden: Array, *more: Array
) -> Any:
    """``function(hidden, *more)``, arrays of [rows, tokens], over parts of the second axis, each with a bounded number
    of logits on a device.

    Every device has a share of every part, since the tokens of a shard are contiguous.
    """
    (rows, padded, _), shards = hidden.shape, row.layout.shards
    vocabulary = jax.eval_shape(predictor.logits, ready, hidden[:, :1]).shape[-1]
    per_shard = padded // shards
    size = max(1, _LOGITS // (-(-rows // predictor.rows) * vocabulary))
    if per_shard <= size:
        return function(hidden, *more)
    count = math.ceil(per_shard / size)

    def split(x):
        x = x.reshape(rows, shards, per_shard, *x.shape[2:])
        x = jnp.pad(x, ((0, 0), (0, 0), (0, count * size - per_shard), *((0, 0),) * (x.ndim - 3)))
        x = jnp.moveaxis(x.reshape(rows, shards, count, size, *x.shape[3:]), 2, 0)
        return x.reshape(count, rows, shards * size, *x.shape[4:])

    def joined(parts):
        parts = jnp.moveaxis(parts.reshape(count, rows, shards, size), 0, 2)
        return parts.reshape(rows, shards, count * size)[:, :, :per_shard].reshape(rows, padded)

    return jax.tree.map(joined, jax.lax.map(lambda part: function(*part), tuple(map(split, (hidden, *more)))))
