"""Segment ids of packed documents, as the forms of linear attention read them: negative ids are padding."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from posjax._checks import check


def segments_of(
    segment_ids: Int[Array, "batch length"] | None, shape: tuple[int, int], document: Int[Array, "batch"] | None
) -> Int[Array, "batch length"]:
    """The segment ids of tokens ``[batch, length]``. Without ids all tokens of a row are one document.

    Args:
        segment_ids: the ids, or None.
        shape: batch and length of the tokens.
        document: the last document of the state that the tokens continue, negative if it holds none; None without one.

    Raises:
        ValueError: for ids of another shape, or that are not integers.
    """
    if segment_ids is None:
        row = jnp.zeros(shape[0], jnp.int32) if document is None else jnp.maximum(document, 0)
        return jnp.broadcast_to(row[:, None], shape)
    fits = jnp.issubdtype(segment_ids.dtype, jnp.integer) and segment_ids.shape == shape
    check(fits, f"segment_ids must be integers {shape}, found {segment_ids.dtype} {segment_ids.shape}")
    return segment_ids.astype(jnp.int32)


def same_segment(ids: Int[Array, "batch n"]) -> Bool[Array, "batch n n"]:
    """Whether two tokens are of the same document."""
    return (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None]


def last_segment(ids: Int[Array, "batch n"], before: Int[Array, "batch"]) -> Int[Array, "batch"]:
    """The document of the last token that is not padding; ``before`` if all are."""
    valid = ids >= 0
    order = jnp.where(valid, jnp.arange(ids.shape[1]), -1)
    last = jnp.take_along_axis(ids, jnp.maximum(order.max(1, keepdims=True), 0), axis=1)[:, 0]
    return jnp.where(valid.any(1), last, before)
