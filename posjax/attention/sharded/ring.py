"""Ring attention: keys go round, and every group of devices attends to them part by part (Liu et al., 2310.01889).

With ``n`` groups, in step ``s`` group ``r`` holds the keys of group ``r - s`` modulo ``n``; it sends them on before it
reads them, so that a compiler can move the next keys while it computes. Parts are merged by their log-sum-exp,

    L = log(e^L_1 + e^L_2),   O = O_1 e^(L_1 - L) + O_2 e^(L_2 - L)

The backward pass goes round again. With the weights ``P = exp(S - L)`` and ``D = rowsum(dO * O) - dL`` of the *whole*
row, which alone are saved beside the device's own tokens, every part gives its share of the gradients by itself,

    dV = P^T dO,   dS = P * (dO V^T - D),   dQ += dS K,   dK = dS^T Q

and those of the keys travel with their keys until they are home. Neither pass holds more than two groups' keys, so
memory does not grow with the number of groups. A part whose pairs the mask hides is passed over.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from posjax.attention.api import run
from posjax.attention.operands import like_zeros, named, no_gradient, statistics_dtype, taken_apart
from posjax.attention.sharded.parts import Call, Line
from posjax.axes import map_tokens
from posjax.masks import extent


class RingConfig(NamedTuple):
    """What is known when tracing: how the row lies, and the backend."""

    line: Line
    implementation: str | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring(config: RingConfig, call: Call) -> tuple:
    """Output and log-sum-exp of this group's queries over the keys of all groups; every leaf varies alike."""
    return _forward(config, call)


def _forward(config: RingConfig, call: Call) -> tuple:
    x, dtype = call.x, statistics_dtype(call.x.q)
    are_keys = [leaf.of_keys for leaf in _sides(call)]
    rows = x.q.shape[:-1]
    start = (
        like_zeros((*rows, x.v.shape[-1]), dtype, x.q),
        like_zeros(rows, dtype, x.q, -jnp.inf),
    )

    def step(source, keys, travelling, so_far):
        moved = _replaced(call, are_keys, keys)

        def pair(i, j, so_far):
            part = config.line.part(moved, i, j, source)
            own = tuple(config.line.cut(i)(array, axis) for array, axis in zip(so_far, (-2, -1), strict=True))
            merged = _unless_empty(part, lambda: _merged(own, run(config.implementation, *_parts(part), True)), own)
            return tuple(map(partial(config.line.stored, i), so_far, merged, (-2, -1)))

        return travelling, _over_pairs(config.line, pair, so_far)

    _, (out, lse) = _round(config.line, step, _chosen(call, are_keys), [], start)
    return out.astype(x.v.dtype), lse


def _parts(part: Call) -> tuple:
    return part.x, part.scale


def _merged(first: tuple, second: tuple) -> tuple:
    """Both parts of a row as one; a part that sees nothing has an infinite log-sum-exp."""
    lse = jnp.logaddexp(first[1], second[1])
    finite = jnp.where(jnp.isneginf(lse), 0, lse)
    out = sum(part.astype(lse.dtype) * jnp.exp(own - finite)[..., None] for part, own in (first, second))
    return out, lse


def _unless_empty(part: Call, compute: Callable, otherwise):
    """``compute()``, or ``otherwise`` where the extents of positions say that the mask hides every pair."""
    x = part.x
    if x.mask is None:
        return compute()
    some, _ = x.mask.tiles(extent(x.q_positions, x.q.shape[3]), extent(x.kv_positions, x.k.shape[2]))
    if isinstance(some, np.ndarray):
        return compute() if some.any() else otherwise
    return jax.lax.cond(some.any(), compute, lambda: otherwise)


def _over_pairs(line: Line, function: Callable, carry):
    """Folds ``function(i, j, carry)`` over all pairs of a query piece and a key piece."""
    if line.chunks == 1:
        return function(0, 0, carry)
    pairs = jnp.asarray(np.indices((line.chunks, line.chunks)).reshape(2, -1).T, jnp.int32)
    return jax.lax.scan(lambda carry, pair: (function(*pair, carry), None), carry, pairs)[0]


def _round(line: Line, step: Callable, keys: list, travelling: list, carry) -> tuple:
    """Folds ``step(source, keys, travelling, carry)`` over the keys of all groups, from the own ones backwards.

    ``travelling`` belongs to the keys and goes with them, one step behind, so that neither transfer waits for the step;
    in the end it is at home again.
    """

    def body(state, distance):
        keys, travelling, carry = state
        following, travelling = _sent_on(line, keys), _sent_on(line, travelling)
        return (following, *step((line.shard - distance) % line.shards, keys, travelling, carry)), None

    state, _ = jax.lax.scan(body, (keys, travelling, carry), jnp.arange(line.shards - 1))
    keys, travelling, carry = state
    travelling, carry = step((line.shard + 1) % line.shards, keys, _sent_on(line, travelling), carry)
    return _sent_on(line, travelling), carry


def _sent_on(line: Line, arrays: list) -> list:
    """What the group before this one holds."""
    devices = line.shards * line.width
    return jax.lax.ppermute(arrays, line.axis, [(n, (n + line.width) % devices) for n in range(devices)])


class _Side(NamedTuple):
    """Whose tokens a leaf of a call has, and along which axis: none for what all tokens share."""

    of_keys: bool = False
    axis: int | None = None


def _sides(call: Call) -> list[_Side]:
    """For every leaf. What belongs to the keys travels."""
    marked = map_tokens(call, lambda array, axis: _Side(False, axis), lambda array, axis: _Side(True, axis))
    leaves = jax.tree.leaves(marked, is_leaf=lambda leaf: isinstance(leaf, _Side))
    return [leaf if isinstance(leaf, _Side) else _Side() for leaf in leaves]


def _chosen(tree, which: list[bool]) -> list:
    return [leaf for leaf, own in zip(jax.tree.leaves(tree), which, strict=True) if own]


def _replaced(tree, which: list[bool], values: list):
    """The tree with other leaves where ``which`` says so."""
    leaves, structure = jax.tree.flatten(tree)
    values = iter(values)
    return structure.unflatten([next(values) if new else leaf for leaf, new in zip(leaves, which, strict=True)])


@partial(jax.tree_util.register_dataclass, data_fields=["call", "out", "lse"], meta_fields=["wanted"])
@dataclasses.dataclass(frozen=True)
class _Saved:
    """What the backward pass needs, and which leaves anybody wants the gradients of."""

    call: Call
    out: jax.Array
    lse: jax.Array
    wanted: tuple[bool, ...]


def _ring_forward(config: RingConfig, call: Call):
    call, perturbed = taken_apart(call)
    leaves = zip(perturbed, jax.tree.leaves(call), strict=True)
    wanted = tuple(moves and jnp.issubdtype(leaf.dtype, jnp.inexact) for moves, leaf in leaves)
    out, lse = named(*_forward(config, call))
    return (out, lse), _Saved(call, out, lse, wanted)


def _ring_backward(config: RingConfig, saved: _Saved, cotangents):
    call, rows, line = saved.call, (saved.out, saved.lse), config.line
    d_out, d_lse = (like_zeros(c.shape, c.dtype, saved.out) if isinstance(c, SymbolicZero) else c for c in cotangents)
    # A row that sees nothing is constant.
    d_rows = d_out, jnp.where(jnp.isneginf(saved.lse), 0, d_lse)
    sides = _sides(call)
    are_keys = [side.of_keys for side in sides]
    of_keys, of_own = (
        [want and key is which for want, key in zip(saved.wanted, are_keys, strict=True)] for which in (True, False)
    )
    axes = [[side.axis for side, chosen in zip(sides, which, strict=True) if chosen] for which in (of_keys, of_own)]

    def step(source, keys, d_keys, d_own):
        moved = _replaced(call, are_keys, keys)

        def pair(i, j, so_far):
            # Gradients are of pieces: those of whole arrays would be zeros but for a piece, and added as such.
            pieces = map_tokens(moved, line.cut(i), line.cut(j))
            whole, d_whole = (tuple(map(line.cut(i), pair, (-2, -1))) for pair in (rows, d_rows))
            own = [_cut(line, n, *lists) for n, *lists in zip((j, i), axes, so_far, strict=True)]

            def attended(values):
                part = _replaced(_replaced(pieces, of_keys, values[0]), of_own, values[1])
                return run(config.implementation, *_parts(line.placed(part, i, j, source)), True, whole)

            def added():
                values = [_chosen(pieces, of_keys), _chosen(pieces, of_own)]
                found = jax.vjp(attended, values)[1](d_whole)[0]
                return jax.tree.map(lambda a, b: a + b.astype(a.dtype), own, found)

            found = _unless_empty(line.placed(pieces, i, j, source), added, own)
            return [_stored(line, n, *lists) for n, *lists in zip((j, i), axes, so_far, found, strict=True)]

        # From zeros, not from what arrives: so the kernels need not wait for it.
        share, d_own = _over_pairs(line, pair, [nothing[0], d_own])
        return jax.tree.map(jnp.add, d_keys, share), d_own

    nothing = [list(map(_accumulator, _chosen(call, which))) for which in (of_keys, of_own)]
    d_keys, d_own = _round(line, step, _chosen(call, are_keys), *nothing)
    found = _replaced(jax.tree.map(no_gradient, call), of_keys, d_keys)
    found = _replaced(found, of_own, d_own)
    return (jax.tree.map(_like, found, call),)


def _cut(line: Line, n, axes: list, arrays: list) -> list:
    """Piece ``n`` of arrays; without an axis of tokens they are whole."""
    return [array if axis is None else line.cut(n)(array, axis) for axis, array in zip(axes, arrays, strict=True)]


def _stored(line: Line, n, axes: list, wholes: list, pieces: list) -> list:
    """The arrays with others in the place of piece ``n``."""
    arrays = zip(axes, wholes, pieces, strict=True)
    return [piece if axis is None else line.stored(n, whole, piece, axis) for axis, whole, piece in arrays]


def _accumulator(leaf):
    return like_zeros(leaf.shape, statistics_dtype(leaf), leaf)


def _like(gradient, leaf):
    return gradient if gradient.dtype == jax.dtypes.float0 else gradient.astype(leaf.dtype)


ring.defvjp(_ring_forward, _ring_backward, symbolic_zeros=True)
