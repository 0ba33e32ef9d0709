"""The short causal convolution in front of a delta layer: each channel's own few weights over its last few tokens.

    y_t = sum over s < width of  w_s x_(t - width + 1 + s)

Segments are those of ``posjax.linear.forms``. Tokens of other documents count as zeros, and so does padding. Padding
before or after the tokens of a call changes nothing; padding between two tokens of one document takes a place.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from posjax._checks import check, check_counts
from posjax._shapes import zeros_at
from posjax.linear.segments import last_segment, segments_of


class Recent(NamedTuple):
    """The last ``width - 1`` tokens of every row.

    Args:
        x: the tokens, in order; zeros where the document has fewer.
        segment: int32, the id of the document; -1 if there is none yet.
    """

    x: Float[Array, "batch recent channels"]
    segment: Int[Array, "batch"]


def empty_recent(batch: int, width: int, channels: int, *, dtype=jnp.float32) -> Recent:
    """The state before the first token, for a convolution over ``width`` tokens.

    Raises:
        ValueError: for a number that is not whole and above 0.
    """
    check_counts(batch=batch, width=width, channels=channels)
    return Recent(jnp.zeros((batch, width - 1, channels), dtype), jnp.full(batch, -1, jnp.int32))


def short_convolution(
    x: Float[Array, "batch length channels"],
    weights: Float[Array, "width channels"],
    *,
    segment_ids: Int[Array, "batch length"] | None = None,
    state: Recent | None = None,
) -> tuple[Float[Array, "batch length channels"], Recent]:
    """The convolution, float32, and the state after the last token; see this module for the formula.

    Args:
        x: the tokens.
        weights: ``w``, those of the token itself last.
        segment_ids: see this module.
        state: the state after the earlier tokens, from an earlier call; empty if absent. Without ``segment_ids`` the
            tokens continue its document.

    Raises:
        ValueError: for shapes that do not fit each other.
    """
    (batch, length, channels), width = x.shape, weights.shape[0]
    check(weights.shape == (width, channels), f"weights must be [width, {channels}], found {weights.shape}")
    state = empty_recent(batch, width, channels, dtype=x.dtype) if state is None else state
    shape = batch, width - 1, channels
    check(state.x.shape == shape, f"state.x must have shape {shape}, found {state.x.shape}")
    ids = segments_of(segment_ids, (batch, length), state.segment)
    x = zeros_at(ids < 0, x)
    tokens = jnp.concatenate([state.x.astype(x.dtype), x], axis=1)
    documents = jnp.concatenate([jnp.broadcast_to(state.segment[:, None], shape[:2]), ids], axis=1)
    y = jnp.zeros(x.shape, jnp.float32)
    for s in range(width):
        here = slice(s, s + length)
        same = (documents[:, here] == ids)[..., None]
        y += jnp.where(same, tokens[:, here].astype(jnp.float32), 0) * weights[s].astype(jnp.float32)
    return zeros_at(ids < 0, y), _after(tokens, documents, state)


def _after(tokens: Array, documents: Array, before: Recent) -> Recent:
    """The state after the last token that is not padding."""
    recent = before.x.shape[1]
    ids = documents[:, recent:]
    segment = last_segment(ids, before.segment)
    order = jnp.where(ids >= 0, jnp.arange(1, ids.shape[1] + 1), 0)
    # As many tokens as there are up to the last that is not padding; with none, those of the state.
    at = order.max(1, keepdims=True) + jnp.arange(recent)
    same = jnp.take_along_axis(documents, at, axis=1) == segment[:, None]
    x = jnp.take_along_axis(tokens, at[..., None], axis=1)
    return Recent(jnp.where(same[..., None], x, 0).astype(before.x.dtype), segment)
