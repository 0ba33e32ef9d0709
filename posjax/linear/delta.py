"""Gated DeltaNet (Yang et al., arXiv 2412.06464): a state that forgets, and corrects what it holds for a key.

    S_t = exp(g_t) (1 - beta_t k_t k_t^T) S_(t-1) + beta_t k_t v_t^T,      o_t = S_t^T q_t

The state S of a head is a matrix from keys to values. ``g_t <= 0`` is the log of a decay, and ``beta_t`` the rate at
which the value of ``k_t`` in the state moves towards ``v_t`` (the delta rule; with ``|k_t| = 1`` and ``beta_t = 1`` it
is replaced). ``beta_t = 0`` and ``g_t = 0`` leave the state as it is.

Chunks (the WY form, section 3.3 of the paper): with ``G_i`` the sum of g up to token i of a chunk and S the state
before the chunk, what the tokens of the chunk write is ``S_i = exp(G_i) S + sum_(j <= i) exp(G_i - G_j) k_j u_j^T``,
where the rows of U solve one triangular system:

    u_i + beta_i sum_(j < i) exp(G_i - G_j) (k_i . k_j) u_j = beta_i (v_i - exp(G_i) S^T k_i)

So a chunk takes a few matrix products, and a pass over n tokens takes n / chunk_size steps.

Segments are those of ``posjax.linear.forms``: ids ``[batch, length]`` of documents packed into rows. The state begins
anew with every document; negative ids are padding, which leaves the state as it is and gets 0.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from posjax._checks import check, check_count, check_counts, check_heads
from posjax._lowered import vary, varying
from posjax._numbers import at_least_float32
from posjax._shapes import in_blocks, joined, zeros_at
from posjax._triangular import inverse_of_unit_triangle
from posjax.linear.segments import last_segment, same_segment, segments_of


class Memory(NamedTuple):
    """The state after the last token of every row, for the last document of the row.

    Args:
        s: S, at least float32.
        segment: int32, the id of the document; -1 if there is none yet.
    """

    s: Float[Array, "batch heads size value_size"]
    segment: Int[Array, "batch"]


def empty_memory(batch: int, heads: int, size: int, value_size: int, *, dtype=jnp.float32) -> Memory:
    """The state before the first token.

    Raises:
        ValueError: for a number that is not whole and above 0.
    """
    check_counts(batch=batch, heads=heads, size=size, value_size=value_size)
    return Memory(jnp.zeros((batch, heads, size, value_size), dtype), jnp.full(batch, -1, jnp.int32))


class _Chunk(NamedTuple):
    """Tokens with heads before tokens."""

    q: Float[Array, "batch key_heads n size"]
    k: Float[Array, "batch key_heads n size"]
    v: Float[Array, "batch heads n value_size"]
    log_decay: Float[Array, "batch heads n"]
    rate: Float[Array, "batch heads n"]
    ids: Int[Array, "batch n"]


_TOKEN_AXES = _Chunk(q=2, k=2, v=2, log_decay=2, rate=2, ids=1)


def gated_delta(
    q: Float[Array, "batch length key_heads size"],
    k: Float[Array, "batch length key_heads size"],
    v: Float[Array, "batch length heads value_size"],
    log_decay: Float[Array, "batch length heads"],
    rate: Float[Array, "batch length heads"],
    *,
    segment_ids: Int[Array, "batch length"] | None = None,
    state: Memory | None = None,
    chunk_size: int = 64,
) -> tuple[Float[Array, "batch length heads value_size"], Memory]:
    """The gated delta rule, chunk by chunk; see this module for the formula.

    Time ``O(n size (value_size + chunk_size))`` for a head and memory ``O(n)``, forward and backward: the backward pass
    stores one state for each chunk and recomputes the rest. Sums are at least float32; the output has the dtype of
    ``v``.

    Args:
        q, k: queries and keys. ``heads`` is a multiple of ``key_heads``; neighbouring heads share a query and a key.
        v: values.
        log_decay: g, at most 0.
        rate: beta.
        segment_ids: see this module.
        state: the state after the earlier tokens, from an earlier call; empty if absent. Without ``segment_ids`` the
            tokens continue the document of the state.
        chunk_size: tokens per chunk; with 1 this is the recurrence.

    Returns:
        The output, and the state after the last token, for a later call.

    Raises:
        ValueError: for shapes that do not fit each other, and a ``chunk_size`` that is not positive.
    """
    check_count("chunk_size", chunk_size)
    _check_shapes(q, k, v, log_decay, rate)
    length, dtype = q.shape[1], at_least_float32(q.dtype, k.dtype, v.dtype, log_decay.dtype)
    ids = segments_of(segment_ids, q.shape[:2], None if state is None else state.segment)
    x = _Chunk(*(a.swapaxes(1, 2) for a in (q, k, v, log_decay, rate)), ids)
    x = _each(lambda a, axis: zeros_at(ids < 0, a, tokens=axis), x)._replace(ids=ids)
    step = jax.checkpoint(partial(_step, dtype=dtype, out=v.dtype), prevent_cse=False)
    state, out = jax.lax.scan(step, _start(x, state, dtype), _split(x, min(chunk_size, length)))
    return jax.lax.slice_in_dim(joined(out, 2), 0, length, axis=2).swapaxes(1, 2), state


def _step(before: Memory, x: _Chunk, *, dtype, out) -> tuple[Memory, Float[Array, "batch heads n value_size"]]:
    """The state after a chunk, and the outputs of its tokens."""
    each = x.v.shape[1] // x.k.shape[1]
    q, k = (jnp.repeat(a.astype(dtype), each, axis=1) for a in (x.q, x.k))
    v, decay, rate = (a.astype(dtype) for a in x[2:5])
    continues = (x.ids == before.segment[:, None])[:, None]
    between = _sums_between(decay)
    factor = _exp(jnp.tril(same_segment(x.ids))[:, None], between)
    carried = _exp(continues, decay.cumsum(-1))[..., None]
    held = carried * jnp.einsum("bhik,bhkv->bhiv", k, before.s)
    products = rate[..., None] * factor * jnp.einsum("bhik,bhjk->bhij", k, k)
    u = _solve(products, rate[..., None] * (v - held))
    scores = factor * jnp.einsum("bhik,bhjk->bhij", q, k)
    read = carried * jnp.einsum("bhik,bhkv->bhiv", q, before.s) + jnp.einsum("bhij,bhjv->bhiv", scores, u)
    segment = last_segment(x.ids, before.segment)
    written = _exp((x.ids == segment[:, None])[:, None] & (x.ids >= 0)[:, None], between[:, :, -1])[..., None] * k
    kept = _exp((segment == before.segment)[:, None], decay.sum(-1))[..., None, None]
    return Memory(kept * before.s + jnp.einsum("bhjk,bhjv->bhkv", written, u), segment), read.astype(out)


def _sums_between(x: Float[Array, "batch heads n"]) -> Float[Array, "batch heads n n"]:
    """``sum of x_l over j < l <= i`` at ``[i, j]``, 0 where ``j >= i``.

    The difference of two sums from the start of the chunk would lose the digits of a small sum behind a large one.
    """
    n = x.shape[-1]
    later = jnp.arange(n)[:, None] > jnp.arange(n)[None]
    return jnp.where(later, x[..., :, None], 0).cumsum(-2)


def _exp(where: Bool[Array, "*b"], x: Array) -> Array:
    """``exp(x)`` where ``where`` is true; elsewhere 0, without a gradient."""
    return jnp.exp(jnp.where(where, x, -jnp.inf))


def _solve(products: Float[Array, "batch heads n n"], right: Float[Array, "batch heads n v"]) -> Array:
    """``u`` with ``u + L u = right``, for ``L`` the part of ``products`` below the diagonal."""
    if right.shape[2] == 1:
        return right
    return jnp.einsum("bhij,bhjv->bhiv", inverse_of_unit_triangle(products), right)


def _split(x: _Chunk, size: int) -> _Chunk:
    """Chunks of ``size`` tokens along a new first axis; the last chunk is padded."""

    def split(a, axis):
        widths = [(0, 0)] * a.ndim
        widths[axis] = (0, -a.shape[axis] % size)
        return in_blocks(jnp.pad(a, widths, constant_values=-1 if a is x.ids else 0), axis, size)

    return _each(split, x)


def _each(function, x: _Chunk) -> _Chunk:
    """``x`` with ``function(array, token axis)`` in place of every array."""
    return _Chunk(*map(function, x, _TOKEN_AXES))


def _start(x: _Chunk, state: Memory | None, dtype) -> Memory:
    """The initial state, varying over the same mesh axes as the tokens, as the carry of a loop must."""
    shape = (*x.v.shape[:2], x.k.shape[-1], x.v.shape[-1])
    state = empty_memory(*shape, dtype=dtype) if state is None else state
    check(state.s.shape == shape, f"state.s must have shape {shape}, found {state.s.shape}")
    check(state.segment.shape == shape[:1], f"state.segment must have shape {shape[:1]}, found {state.segment.shape}")
    axes = frozenset().union(*map(varying, jax.tree.leaves((x, state))))
    return Memory(vary(state.s.astype(dtype), axes), vary(state.segment, varying(x.ids) | varying(state.segment)))


def _check_shapes(q, k, v, log_decay, rate) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_heads(name, array)
    check(q.shape == k.shape, f"q and k must have the same shape, found {q.shape} and {k.shape}")
    check(v.shape[:2] == k.shape[:2], f"v must have the batch and length of k {k.shape}, found {v.shape}")
    check(v.shape[2] % k.shape[2] == 0, f"v has {v.shape[2]} heads, not a multiple of the {k.shape[2]} of k")
    for name, array in (("log_decay", log_decay), ("rate", rate)):
        check(array.shape == v.shape[:3], f"{name} must have shape {v.shape[:3]}, found {array.shape}")
