"""The loss of hidden states under an output matrix, optionally without a full array of [tokens, vocabulary]."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from train.config.settings.checks import check_chunks

Finish = Callable[[Array, Array | None], Array]
"""An elementwise function from products and a bias to logits, such as ``posjax.nn.DecoderConfig.finish_logits``."""


def as_they_are(products: Array, bias: Array | None) -> Array:
    """The products as logits, for heads without a bias."""
    return products


class Losses(NamedTuple):
    """Sums over the predicted tokens, float32.

    Attributes:
      nll: negative log-likelihoods, in nats.
      z: squared log-normalisers of the logits.
      count: how many tokens are predicted.
    """

    nll: Float[Array, ""]
    z: Float[Array, ""]
    count: Float[Array, ""]


def token_losses(
    hidden: Float[Array, "*tokens size"],
    head: Float[Array, "size vocabulary"],
    labels: Int[Array, "*tokens"],
    chunks: int = 1,
    bias: Float[Array, "vocabulary"] | None = None,
    finish: Finish = as_they_are,
) -> Losses:
    """The sums of the losses of all tokens, for logits ``z = finish(hidden head, bias)``:

        nll = log sum_v exp(z_v) - z_label,      z = (log sum_v exp(z_v))^2

    Labels below 0 are not predicted. With several `chunks` the logits are computed for one part of the vocabulary at a
    time, and recomputed in the backward pass; only one part exists at a time. Dividing once, after all sums, gives
    every token the same weight.

    Raises:
      ValueError: if the chunks do not divide the vocabulary.
    """
    check_chunks(head.shape[1], chunks)
    label = jnp.maximum(labels, 0)
    normaliser, picked = (_whole if chunks == 1 else partial(_in_chunks, chunks))(finish, hidden, head, bias, label)
    predicted = (labels >= 0).astype(jnp.float32)
    nll, z = normaliser - picked, jnp.square(normaliser)
    return Losses(jnp.sum(nll * predicted), jnp.sum(z * predicted), jnp.sum(predicted))


def _whole(finish, hidden, head, bias, label):
    """The log-normaliser of every token's logits, and the logit of its label."""
    logits = finish(jnp.matmul(hidden, head, preferred_element_type=jnp.float32), bias)
    return jax.nn.logsumexp(logits, axis=-1), jnp.take_along_axis(logits, label[..., None], axis=-1)[..., 0]


def _in_chunks(chunks: int, finish: Finish, hidden, head, bias, label):
    """`_whole`, computed for one part of the vocabulary at a time.

    Part c has the logits v = c, c + chunks, ..., so every part is sharded over the devices like the whole matrix.
    """
    hidden, (size, vocabulary) = hidden.astype(jnp.float32), head.shape  # gradients of the parts add up in float32

    @jax.checkpoint
    def part(chunk):
        number, columns, own_bias = chunk
        logits = finish(_products(hidden, columns), own_bias)
        column = jnp.where(label % chunks == number, label // chunks, -1)
        is_label = column[..., None] == jnp.arange(logits.shape[-1])
        return jax.nn.logsumexp(logits, axis=-1), jnp.where(is_label, logits, 0).sum(-1)

    columns = jnp.moveaxis(head.reshape(size, vocabulary // chunks, chunks), 2, 0)
    biases = None if bias is None else bias.reshape(-1, chunks).T
    normalisers, picked = jax.lax.map(part, (jnp.arange(chunks), columns, biases))
    return jax.nn.logsumexp(normalisers, axis=0), picked.sum(0)


@jax.custom_vjp
def _products(hidden, columns):
    """``hidden columns`` in float32, and its gradient; both are multiplied in the dtype of the columns."""
    return jnp.matmul(hidden.astype(columns.dtype), columns, preferred_element_type=jnp.float32)


def _products_forward(hidden, columns):
    return _products(hidden, columns), (hidden, columns)


def _products_backward(saved, d_products):
    hidden, columns = saved
    d_products = d_products.astype(columns.dtype)
    d_hidden = jnp.matmul(d_products, columns.T, preferred_element_type=jnp.float32)
    multiply = partial(jnp.einsum, "...e,...v->ev", preferred_element_type=jnp.float32)
    return d_hidden, multiply(hidden.astype(columns.dtype), d_products).astype(columns.dtype)


_products.defvjp(_products_forward, _products_backward)
