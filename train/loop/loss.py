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
    normaliser, picked = (
        _whole(finish, hidden, head, bias, label)
        if chunks == 1
        else _in_chunks(chunks, finish, hidden, head, bias, label)
    )
    predicted = (labels >= 0).astype(jnp.float32)
    nll, z = normaliser - picked, jnp.square(normaliser)
    return Losses(jnp.sum(nll * predicted), jnp.sum(z * predicted), jnp.sum(predicted))


@jax.custom_vjp
def _products(hidden, head):
    """``hidden head`` in float32. Its gradients are products in the dtype of the hidden states, summed in float32."""
    return jnp.matmul(hidden, head, preferred_element_type=jnp.float32)


def _products_forward(hidden, head):
    return _products(hidden, head), (hidden, head)


def _products_backward(saved, d_products):
    """Without the cast to the states' dtype, both products would run in float32, far below a chip's full rate."""
    hidden, head = saved
    d_products = d_products.astype(hidden.dtype)
    d_hidden = jnp.matmul(d_products, head.T, preferred_element_type=jnp.float32)
    d_head = jnp.einsum("...e,...v->ev", hidden, d_products, preferred_element_type=jnp.float32)
    return d_hidden.astype(hidden.dtype), d_head.astype(head.dtype)


_products.defvjp(_products_forward, _products_backward)


def _whole(finish, hidden, head, bias, label):
    """The log-normaliser of every token's logits, and the logit of its label."""
    logits = finish(_products(hidden, head), bias)
    return jax.nn.logsumexp(logits, axis=-1), jnp.take_along_axis(logits, label[..., None], axis=-1)[..., 0]


def _parts(head, chunks: int):
    """The columns of the output matrix in interleaved parts: part c has v = c, c + chunks, ...

    So every part is sharded over the devices like the whole matrix.
    """
    size, vocabulary = head.shape
    return jnp.moveaxis(head.reshape(size, vocabulary // chunks, chunks), 2, 0)


def _is_label(label, part, chunks: int, columns: int):
    """Which logit of a part is the label's, as booleans."""
    column = jnp.where(label % chunks == part, label // chunks, -1)
    return column[..., None] == jnp.arange(columns)


def _bias_parts(bias, chunks: int):
    """The parts of the bias that belong to those of the output matrix."""
    return None if bias is None else bias.reshape(-1, chunks).T


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_chunks(chunks: int, finish: Finish, hidden, head, bias, label):
    """`_whole`, computed for one part of the vocabulary at a time."""

    def part(carry, chunk):
        highest, total, picked = carry
        number, columns, own_bias = chunk
        logits = finish(_products(hidden, columns), own_bias)
        risen = jnp.maximum(highest, logits.max(-1))
        total = total * jnp.exp(highest - risen) + jnp.exp(logits - risen[..., None]).sum(-1)
        is_label = _is_label(label, number, chunks, logits.shape[-1])
        return (risen, total, picked + jnp.where(is_label, logits, 0).sum(-1)), None

    blank = jnp.zeros(label.shape, jnp.float32)
    start = (jnp.full(label.shape, -jnp.inf), blank, blank)
    parts = jnp.arange(chunks), _parts(head, chunks), _bias_parts(bias, chunks)
    (highest, total, picked), _ = jax.lax.scan(part, start, parts)
    return highest + jnp.log(total), picked


def _in_chunks_forward(chunks: int, finish: Finish, hidden, head, bias, label):
    normaliser, picked = _in_chunks(chunks, finish, hidden, head, bias, label)
    return (normaliser, picked), (hidden, head, bias, label, normaliser)


def _in_chunks_backward(chunks: int, finish: Finish, saved, cotangents):
    """With p = exp(z - normaliser): ``dz_v = p_v d_normaliser + [v = label] d_picked``."""
    hidden, head, bias, label, normaliser = saved
    d_normaliser, d_picked = (cotangent[..., None] for cotangent in cotangents)

    def part(d_hidden, chunk):
        number, columns, own_bias = chunk
        logits, through_finish = jax.vjp(finish, _products(hidden, columns), own_bias)
        is_label = _is_label(label, number, chunks, columns.shape[-1])
        d_logits = jnp.exp(logits - normaliser[..., None]) * d_normaliser + jnp.where(is_label, d_picked, 0)
        d_products, d_bias = through_finish(d_logits)
        d_products = d_products.astype(hidden.dtype)
        d_hidden = d_hidden + jnp.matmul(d_products, columns.T, preferred_element_type=jnp.float32)
        d_columns = jnp.einsum("...e,...v->ev", hidden, d_products, preferred_element_type=jnp.float32)
        return d_hidden, (d_columns.astype(head.dtype), d_bias)

    start = jnp.zeros(hidden.shape, jnp.float32)
    parts = jnp.arange(chunks), _parts(head, chunks), _bias_parts(bias, chunks)
    d_hidden, (d_parts, d_biases) = jax.lax.scan(part, start, parts)
    d_head = jnp.moveaxis(d_parts, 0, 2).reshape(head.shape)
    return d_hidden.astype(hidden.dtype), d_head, None if bias is None else d_biases.T.reshape(bias.shape), None


_in_chunks.defvjp(_in_chunks_forward, _in_chunks_backward)
