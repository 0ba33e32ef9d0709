"""Linear attention in linear time: causal, chunk by chunk, and bidirectional.

    o_i = sum_j w_ij v_j / sum_j w_ij,    w_ij = phi_i . psi_j exp(c_j + G_i - G_j)    over the keys j that i may see

Queries and keys are features (``posjax.linear.feature_maps``), ``c`` is the log scale of a key. The sums over j are
products of ``phi_i`` with a state, ``S = sum_j exp(c_j) psi_j v_j^T`` and ``z = sum_j exp(c_j) psi_j``: linear time,
and one state of fixed size when decoding (Katharopoulos et al., arXiv 2006.16236, section 3). Sums are stored divided
by ``exp(M)``, where ``M`` is the largest ``c`` so far. This factor cancels, nothing overflows, and no later key is
read.

``G_i`` is the sum of the log decays ``g <= 0`` of the tokens up to i, in causal attention; without decays it is 0. The
decay of a head may be a number (retention, Sun et al., arXiv 2307.08621), or come from every token (gated linear
attention, Yang et al., arXiv 2312.06635, with one gate for a head). It multiplies the state, ``S <- exp(g_i) S``.

With ``q_numerator`` and ``k_numerator`` the numerator has its own features, with RoPE applied.

Segments: ids ``[batch, length]`` of packed documents. A document is contiguous: its id does not appear again after
another id. Negative ids are padding: they see nothing, are seen by nothing and do not change a state. A query that sees
nothing, or has no weight on the keys it sees, gives exactly 0 with zero gradients.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from posjax._checks import check, check_count, check_counts, check_heads
from posjax._lowered import vary, varying
from posjax._numbers import at_least_float32
from posjax._shapes import grouped, in_blocks, joined, ungrouped, zeros_at
from posjax.linear.segments import last_segment, same_segment, segments_of


@partial(jax.tree_util.register_dataclass, data_fields=["s", "z", "log_scale", "segment"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class LinearState:
    """The state of causal attention after the last token of every batch row, for the last document of the row.

    Args:
        s: ``exp(-M) sum_j exp(c_j) psi_j v_j^T``, with the numerator's ``psi``; at least float32.
        z: ``exp(-M) sum_j exp(c_j) psi_j``.
        log_scale: ``M``.
        segment: int32, the id of the document; -1 if there is none yet.
    """

    s: Float[Array, "batch kv_heads m value_size"]
    z: Float[Array, "batch kv_heads m"]
    log_scale: Float[Array, "batch kv_heads"]
    segment: Int[Array, "batch"]


def empty_state(
    batch: int, num_kv_heads: int, size: int, value_size: int, *, numerator_size: int | None = None, dtype=jnp.float32
) -> LinearState:
    """The state before the first token, for features of width ``size`` (the numerator's width may differ).

    Raises:
        ValueError: for a number that is not whole and above 0.
    """
    check_counts(batch=batch, num_kv_heads=num_kv_heads, size=size, value_size=value_size)
    sizes = (batch, num_kv_heads)
    return LinearState(
        jnp.zeros((*sizes, size if numerator_size is None else numerator_size, value_size), dtype),
        jnp.zeros((*sizes, size), dtype),
        jnp.full(sizes, _lowest(dtype), dtype),
        jnp.full(batch, -1, jnp.int32),
    )


class _Tokens(NamedTuple):
    """Checked inputs, heads before tokens, query heads grouped by key head."""

    phi: Float[Array, "batch kv_heads group q m"]
    psi: Float[Array, "batch kv_heads k m"]
    v: Float[Array, "batch kv_heads k value_size"]
    log_scale: Float[Array, "batch kv_heads k"]
    log_decay: Float[Array, "batch kv_heads k"] | None
    ids: Int[Array, "batch q"]
    phi_numerator: Float[Array, "batch kv_heads group q n"] | None
    psi_numerator: Float[Array, "batch kv_heads k n"] | None

    @property
    def dtype(self):
        """Dtype of sums: at least float32."""
        return at_least_float32(self.phi.dtype, self.psi.dtype, self.log_scale.dtype)

    @property
    def numerator(self):
        """The features of the numerator, in the dtype of sums."""
        pair = self.denominator if self.phi_numerator is None else (self.phi_numerator, self.psi_numerator)
        return tuple(a.astype(self.dtype) for a in pair)

    @property
    def denominator(self):
        """The features of the denominator, in the dtype of sums."""
        return self.phi.astype(self.dtype), self.psi.astype(self.dtype)


_TOKEN_AXES = _Tokens(phi=3, psi=2, v=2, log_scale=2, log_decay=2, ids=1, phi_numerator=3, psi_numerator=2)


class _Sums(NamedTuple):
    """Numerator and denominator of every query, both divided by ``exp(log_scale)``."""

    numerator: Float[Array, "batch kv_heads group q value_size"]
    denominator: Float[Array, "batch kv_heads group q"]
    log_scale: Float[Array, "batch kv_heads q"]


_SUM_AXES = _Sums(numerator=3, denominator=3, log_scale=2)


def chunked(
    phi: Float[Array, "batch length heads m"],
    psi: Float[Array, "batch length kv_heads m"],
    v: Float[Array, "batch length kv_heads value_size"],
    *,
    log_scale: Float[Array, "batch length kv_heads"] | None = None,
    log_decay: Float[Array, "batch length kv_heads"] | None = None,
    q_numerator: Float[Array, "batch length heads n"] | None = None,
    k_numerator: Float[Array, "batch length kv_heads n"] | None = None,
    segment_ids: Int[Array, "batch length"] | None = None,
    state: LinearState | None = None,
    chunk_size: int = 128,
) -> tuple[Float[Array, "batch length heads value_size"], LinearState]:
    """Causal linear attention, chunk by chunk: a matrix for the keys of the chunk, the state for the keys before it.

    Time ``O(n (m value_size + chunk_size (m + value_size)))`` and memory ``O(n)``, forward and backward; the backward
    pass recomputes each chunk from the state before it. There must be as many keys as queries. The output has the dtype
    of ``v``.

    Args:
        phi, psi: features of queries and keys; ``heads`` a multiple of ``kv_heads``.
        v: values.
        log_scale: ``c``, the second result of ``LinearKernel.key``; zero if absent.
        log_decay: ``g``, at most 0; zero if absent.
        q_numerator, k_numerator: features of the numerator if they differ from ``phi`` and ``psi``; both or neither.
        segment_ids: see this module.
        state: the state after the earlier tokens, from an earlier call; empty if absent. Without ``segment_ids`` the
            tokens continue the document of the state.
        chunk_size: tokens per chunk. The backward pass stores one state per chunk. With 1 this is the recurrence
            ``S_i = S_{i-1} + psi_i v_i^T``.

    Returns:
        The output, and the state after the last token, for a later call.

    Raises:
        ValueError: for shapes that do not fit each other, and a ``chunk_size`` that is not positive.
    """
    check_count("chunk_size", chunk_size)
    x = _tokens(phi, psi, v, log_scale, q_numerator, k_numerator, segment_ids, state, log_decay=log_decay)
    state, out = _scan(x, _start(x, state), chunk_size, partial(_divide, dtype=v.dtype))
    return ungrouped(_join(out, phi.shape[1], 3)), state


def bidirectional(
    phi: Float[Array, "batch length heads m"],
    psi: Float[Array, "batch kv_length kv_heads m"],
    v: Float[Array, "batch kv_length kv_heads value_size"],
    *,
    log_scale: Float[Array, "batch kv_length kv_heads"] | None = None,
    q_numerator: Float[Array, "batch length heads n"] | None = None,
    k_numerator: Float[Array, "batch kv_length kv_heads n"] | None = None,
    segment_ids: Int[Array, "batch length"] | None = None,
    chunk_size: int = 128,
) -> Float[Array, "batch length heads value_size"]:
    """Linear attention over all keys, in ``O(n)``: one state for all queries, which may be of another sequence.

    With ``segment_ids`` it makes two causal passes: over the keys up to each query, and backwards over the later keys.
    Arguments as in :func:`chunked`.
    """
    check_count("chunk_size", chunk_size)
    x = _tokens(phi, psi, v, log_scale, q_numerator, k_numerator, segment_ids, square=segment_ids is not None)
    if segment_ids is None:
        whole = _absorb(_start(x, None), x._replace(ids=jnp.zeros((psi.shape[0], psi.shape[1]), jnp.int32)))
        return ungrouped(_divide(_read(whole, x), v.dtype))
    return ungrouped(_divide(_both_ways(x, chunk_size), v.dtype))


def _lowest(dtype) -> float:
    """A number below every log scale, but finite, so that an empty state needs no special case."""
    return float(jnp.finfo(dtype).min) / 4


def _within(x: _Tokens, allowed: Bool[Array, "#batch q k"]) -> _Sums:
    """Sums over the allowed keys of ``x`` itself, divided by the exponential of their largest scale."""
    allowed = allowed[:, None]
    scale = x.log_scale[:, :, None, :]
    highest = jax.lax.stop_gradient(jnp.where(allowed, scale, _lowest(x.dtype)).max(-1))
    factor = _exp(allowed, scale - highest[..., None])[:, :, None]
    weights = _scores(*x.denominator) * factor
    numerator = weights if x.phi_numerator is None else _scores(*x.numerator) * factor
    return _Sums(_product("bkrj,bkjv->bkrv", numerator, x.v.astype(x.dtype)), weights.sum(-1), highest)


def _scores(phi, psi):
    return _product("bkrm,bkjm->bkrj", phi, psi)


def _product(equation: str, x: Float[Array, "batch kv_heads group q n"], y: Array) -> Array:
    """``einsum`` of ``x``, whose axes of the group and of the queries are one axis ``r`` of the equation, and ``y``.

    So neither a product nor its gradients have more than four axes of their own. Every ``vmap`` adds one, and on CPUs
    jaxlib 0.10.2 ends the process at a product with eight.
    """
    batch, kv_heads, group, queries, _ = x.shape
    product = jnp.einsum(equation, x.reshape(batch, kv_heads, group * queries, x.shape[-1]), y)
    return product.reshape(batch, kv_heads, group, queries, *product.shape[3:])


def _exp(where, x):
    """``exp(x)`` where ``where`` is true; elsewhere 0, without a gradient."""
    return jnp.exp(jnp.where(where, x, -jnp.inf))


def _read(state: LinearState, x: _Tokens) -> _Sums:
    """Sums over the tokens of the state, for the queries of the same document; divided by the state's scale."""
    seen = (x.ids == state.segment[:, None])[:, None]
    numerator = _product("bkrm,bkmv->bkrv", x.numerator[0], state.s)
    denominator = _product("bkrm,bkm->bkr", x.denominator[0], state.z)
    scale = jnp.where(seen, state.log_scale[..., None], _lowest(x.dtype))
    return _Sums(jnp.where(seen[:, :, None, :, None], numerator, 0), jnp.where(seen[:, :, None], denominator, 0), scale)


def _add(a: _Sums, b: _Sums) -> _Sums:
    """Both sums, rescaled to the larger of their scales."""
    highest = jax.lax.stop_gradient(jnp.maximum(a.log_scale, b.log_scale))
    factors = [jnp.exp(part.log_scale - highest)[:, :, None] for part in (a, b)]
    numerator = sum(part.numerator * factor[..., None] for part, factor in zip((a, b), factors, strict=True))
    denominator = sum(part.denominator * factor for part, factor in zip((a, b), factors, strict=True))
    return _Sums(numerator, denominator, highest)


def _absorb(state: LinearState, x: _Tokens) -> LinearState:
    """The state after the keys of ``x``, for the last document in ``x``; for the state's own if all is padding."""
    segment = last_segment(x.ids, state.segment)
    same = segment == state.segment
    member = (x.ids == segment[:, None]) & (x.ids >= 0)
    lowest = _lowest(x.dtype)
    highest = jnp.where(member[:, None], x.log_scale, lowest).max(-1)
    highest = jax.lax.stop_gradient(jnp.maximum(highest, jnp.where(same[:, None], state.log_scale, lowest)))
    old_factor = _exp(same[:, None], state.log_scale - highest)
    factor = _exp(member[:, None], x.log_scale - highest[..., None])[..., None]
    psi, psi_numerator = (pair[1] * factor for pair in (x.denominator, x.numerator))
    more = jnp.einsum("bkjm,bkjv->bkmv", psi_numerator, x.v.astype(x.dtype))
    s = state.s * old_factor[..., None, None] + more
    z = state.z * old_factor[..., None] + psi.sum(2)
    return LinearState(s, z, highest, segment)


def _divide(sums: _Sums, dtype) -> Float[Array, "batch kv_heads group q value_size"]:
    """The numerator divided by the denominator; exactly 0 if the denominator is 0."""
    seen = sums.denominator > 0
    out = sums.numerator / jnp.where(seen, sums.denominator, 1)[..., None]
    return jnp.where(seen[..., None], out, 0).astype(dtype)


def _scan(x: _Tokens, state: LinearState, size: int, finish, *, diagonal: bool = True):
    """The state after all tokens, and ``finish`` of every chunk's sums over the keys before each query.

    With ``diagonal`` the sums include the query's own key.
    """

    @partial(jax.checkpoint, prevent_cse=False)
    def step(before: LinearState, chunk: _Tokens):
        chunk, decayed = _from_start(chunk)
        within = _within(chunk, jnp.tril(same_segment(chunk.ids), 0 if diagonal else -1))
        after = _absorb(before, chunk)
        after = after if decayed is None else dataclasses.replace(after, log_scale=after.log_scale + decayed)
        return after, finish(_add(within, _read(before, chunk)))

    return jax.lax.scan(step, state, _split(x, size))


def _from_start(x: _Tokens) -> tuple[_Tokens, Float[Array, "batch kv_heads"] | None]:
    """A chunk whose decays are in the scales of its keys, ``c_j - G_j``, and the sum of its decays, None without any.

    ``G`` is counted from the start of the chunk. The factor ``exp(G_i)`` of a query cancels.
    """
    if x.log_decay is None:
        return x, None
    sums = x.log_decay.astype(x.dtype).cumsum(-1)
    return x._replace(log_scale=x.log_scale - sums, log_decay=None), sums[..., -1]


def _both_ways(x: _Tokens, size: int) -> _Sums:
    """Sums over all keys of each query's document: the keys up to the query, and the keys after it."""

    def sums(x, diagonal):
        chunks = _scan(x, _start(x, None), size, lambda chunk_sums: chunk_sums, diagonal=diagonal)[1]
        return [_join(a, x.ids.shape[1], axis) for a, axis in zip(chunks, _SUM_AXES, strict=True)]

    ahead = map(jnp.flip, sums(_each(jnp.flip, x), False), _SUM_AXES)
    return _add(_Sums(*sums(x, True)), _Sums(*ahead))


def _split(x: _Tokens, size: int) -> _Tokens:
    """Chunks of ``size`` tokens along a new first axis; the last chunk is padded."""
    size = min(size, x.ids.shape[1])

    def split(a, axis):
        widths = [(0, 0)] * a.ndim
        widths[axis] = (0, -a.shape[axis] % size)
        return in_blocks(jnp.pad(a, widths, constant_values=-1 if a is x.ids else 0), axis, size)

    return _each(split, x)


def _join(chunks, length: int, axis: int):
    """The inverse of ``_split``, cut to ``length`` tokens along ``axis``."""
    return jax.lax.slice_in_dim(joined(chunks, axis), 0, length, axis=axis)


def _each(function, x: _Tokens) -> _Tokens:
    """``x`` with ``function(array, token axis)`` in place of every array."""
    return _Tokens(*(a if a is None else function(a, axis) for a, axis in zip(x, _TOKEN_AXES, strict=True)))


def _start(x: _Tokens, state: LinearState | None) -> LinearState:
    """The initial state, varying over the same mesh axes as the tokens, as the carry of a loop must."""
    if state is None:
        batch, kv_heads, _, size = x.psi.shape
        width = x.numerator[1].shape[-1]
        state = empty_state(batch, kv_heads, size, x.v.shape[-1], numerator_size=width, dtype=x.dtype)
    _check_state(x, state)
    axes = frozenset().union(*map(varying, jax.tree.leaves((x, state))))
    return jax.tree.map(partial(vary, axes=axes), state)


def _check_state(x: _Tokens, state: LinearState) -> None:
    batch, kv_heads, _, size = x.psi.shape
    sizes = {"s": (x.numerator[1].shape[-1], x.v.shape[-1]), "z": (size,), "log_scale": ()}
    for name, wanted in {name: (batch, kv_heads, *rest) for name, rest in sizes.items()}.items():
        shape = getattr(state, name).shape
        check(shape == wanted, f"state.{name} must have shape {wanted}, found {shape}")
    check(state.segment.shape == (batch,), f"state.segment must have shape {(batch,)}, found {state.segment.shape}")


def _tokens(
    phi, psi, v, log_scale, q_numerator, k_numerator, segment_ids, state=None, *, log_decay=None, square=True
) -> _Tokens:
    """Checks the arguments of a form and transposes them; ``square`` requires as many keys as queries."""
    _check_arrays(phi, psi, v, q_numerator, k_numerator, square)
    x = _Tokens(
        phi=grouped(phi, psi.shape[2]),
        psi=_heads_first(psi),
        v=_heads_first(v),
        log_scale=_heads_first(_of_keys("log_scale", log_scale, psi)),
        log_decay=None if log_decay is None else _heads_first(_of_keys("log_decay", log_decay, psi)),
        ids=segments_of(segment_ids, phi.shape[:2], None if state is None else state.segment),
        phi_numerator=None if q_numerator is None else grouped(q_numerator, psi.shape[2]),
        psi_numerator=_heads_first(k_numerator),
    )
    return _without_padding(x) if phi.shape[1] == psi.shape[1] else x


def _heads_first(a: Array | None) -> Array | None:
    return None if a is None else a.swapaxes(1, 2)


def _of_keys(name: str, given: Array | None, psi: Array) -> Float[Array, "batch length kv_heads"]:
    """A number for every key, zeros if not given."""
    wanted = psi.shape[:3]
    if given is None:
        return jnp.zeros(wanted, at_least_float32(psi.dtype))
    check(given.shape == wanted, f"{name} must have shape {wanted}, found {given.shape}")
    return given


def _without_padding(x: _Tokens) -> _Tokens:
    """``x`` with zeros at padding, which may hold NaN: ``0 * NaN`` is NaN."""
    return _each(lambda a, axis: zeros_at(x.ids < 0, a, tokens=axis), x)._replace(ids=x.ids)


def _check_arrays(phi, psi, v, q_numerator, k_numerator, square: bool) -> None:
    for name, a in (("phi", phi), ("psi", psi), ("v", v)):
        check_heads(name, a)
    check(phi.shape[::3] == psi.shape[::3], f"phi {phi.shape} and psi {psi.shape} must agree in batch and size")
    check(
        phi.shape[2] % psi.shape[2] == 0, f"phi has {phi.shape[2]} heads, not a multiple of the {psi.shape[2]} of psi"
    )
    check(v.shape[:3] == psi.shape[:3], f"v {v.shape} must have the batch, length and heads of psi {psi.shape}")
    one_length = phi.shape[1] == psi.shape[1]
    check(
        one_length or not square,
        f"causal attention and segments need as many keys as queries, found {phi.shape[1]} "
        f"queries and {psi.shape[1]} keys",
    )
    check((q_numerator is None) == (k_numerator is None), "q_numerator and k_numerator must be given together")
    if q_numerator is not None:
        fit = q_numerator.shape[:3] == phi.shape[:3] and k_numerator.shape[:3] == psi.shape[:3]
        fit &= q_numerator.shape[3] == k_numerator.shape[3]
        check(
            fit,
            f"q_numerator {q_numerator.shape} and k_numerator {k_numerator.shape} must have the same size, and the "
            f"other axes of phi {phi.shape} and psi {psi.shape}",
        )
