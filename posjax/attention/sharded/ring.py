"""Ring attention: keys are sent around a ring, and every group of devices attends to them part by part (2310.01889).

With ``n`` groups, in step ``s`` group ``r`` holds the keys of group ``r - s`` modulo ``n``; it sends them before it
reads them, so that a compiler can send the next keys during compute. Every step merges the results of its keys into
those of the keys so far (see ``posjax.attention.backend``).

The backward pass is a second ring. With the weights ``P = exp(S - L)`` and ``D = rowsum(dO * O) - dL`` of the *whole*
sequence the gradients of each part are independent,

    dV = P^T dO,   dS = P * (dO V^T - D),   dQ += dS K,   dK = dS^T Q

and the sums of key gradients are sent with their keys until they return to their own group. Neither pass holds more
than two groups' keys, so memory does not grow with the number of groups. A part is skipped if the mask hides all its
pairs.

Half of the heads are sent in the other direction, so that links are used in both. The sums of key gradients of one half
are sent while the kernel of the other half runs.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from posjax._axes import Names, each
from posjax._lowered import full_varying_like, no_gradient, split_symbolic_zeros
from posjax._numbers import is_number
from posjax.attention.call import Call
from posjax.attention.logits import LANES, merge_heads, split_heads, statistics_dtype
from posjax.attention.platform import Backends, add, backends_of_parts, merge, per_query_of
from posjax.attention.rows import PerQuery, Rows, mark_for_checkpoint
from posjax.attention.sharded.line import SequenceSplit
from posjax.masks import block_bounds
from posjax.positions import Range

_TOKENS = (-2, -1, -1, -1)
"""The axes of the queries in ``Rows`` and in ``PerQuery``."""


class RingConfig(NamedTuple):
    """The static part: the split of the sequence, and the backends."""

    line: SequenceSplit
    backends: Backends


def ring(line: SequenceSplit, implementation: str | None, call: Call) -> Rows:
    """The results of this group's queries over the keys of all groups.

    The leaves of the call vary over the same mesh axes.
    """
    halves = _split_heads(call) if line.shards > 2 and call.k.shape[1] % 2 == 0 else (call,)
    results = _ring(RingConfig(line, backends_of_parts(implementation, halves[0])), halves)
    out, *numbers = zip(*results, strict=True)
    outputs = _outputs(call)
    out = outputs.unpacked(jnp.concatenate(out, 1 if outputs.heads is None else -1))
    return Rows(out, *(jnp.concatenate(each, 1) for each in numbers))


def _split_heads(call: Call) -> tuple[Call, Call]:
    """The calls of the first and of the second half of the heads."""
    heads = call.q.shape[1] // 2
    group = call.q.shape[2]

    def half(array, names: Names, n: int):
        return _half(array, names.index("kv_heads"), n) if "kv_heads" in names else array

    def part(n: int) -> Call:
        arrays = each(call, partial(half, n=n))
        return arrays.with_slots(lambda slot: slot.heads(n * heads * group, heads * group))

    return part(0), part(1)


def _half(array, axis: int, n: int):
    """A half along an axis; heads are split in the layout of ``merge_heads``, so that the transpose makes no copy."""
    if array.shape[axis] == 1:
        return array
    size = array.shape[axis] // 2
    if axis != 1 or array.shape[-1] % LANES:
        return jax.lax.split(array, (size, size), axis)[n]
    flat = merge_heads(array)
    heads = (size, *array.shape[2:-2])
    columns = flat.shape[-1] // 2
    return split_heads(jax.lax.split(flat, (columns, columns), flat.ndim - 1)[n], heads)


def _attended(config: RingConfig, calls: tuple[Call, ...]) -> tuple:
    """The results of every call, outputs packed; the keys of the calls are sent in alternating directions."""
    halves = _halves(config, calls)
    state = [(half.keys, half.nothing_yet()) for half in halves]

    def body(state, distance):
        sent = [half.sent(keys) for half, (keys, _) in zip(halves, state, strict=True)]
        merged = [half.merged(distance, *each) for half, each in zip(halves, state, strict=True)]
        return list(zip(sent, merged, strict=True)), None

    state, _ = jax.lax.scan(body, state, jnp.arange(config.line.shards - 1))
    last = config.line.shards - 1
    return tuple(half.output(half.merged(last, *each)) for half, each in zip(halves, state, strict=True))


_ring = jax.custom_vjp(_attended, nondiff_argnums=(0,))


def _halves(config: RingConfig, calls: tuple[Call, ...]) -> list["_Half"]:
    return [_Half.of(config, call, 1 - 2 * n) for n, call in enumerate(calls)]


class _Side(NamedTuple):
    """Whether a leaf of a call belongs to the keys, and its axis of tokens, None for a leaf that all tokens share.

    ``heads``: the head axes of features that kernels read in the layout of ``merge_heads``. They are stored and sent
    packed in that layout, because another one would cost a copy in every step. ``gathered``: whether the leaf is
    gathered instead of sent. Integers for each key (positions, segments) are gathered: they are small, and a compiler
    limits the number of simultaneous transfers.
    """

    of_keys: bool = False
    axis: int | None = None
    heads: tuple[int, ...] | None = None
    gathered: bool = False

    @property
    def is_sent(self) -> bool:
        """Whether the leaf is sent around the ring."""
        return self.of_keys and not self.gathered

    def packed(self, array):
        """The array in the layout in which it is stored and sent."""
        return array if self.heads is None else merge_heads(array)

    def unpacked(self, array):
        """The array in the layout of ``Call``."""
        return array if self.heads is None else split_heads(array, self.heads)


def _outputs(call: Call) -> _Side:
    """The side of outputs and their gradients."""
    return _Side(False, -2, call.q.shape[1:3] if call.v.shape[-1] % LANES == 0 else None)


def _sides(tree: Any) -> list[_Side]:
    """The side of every leaf."""

    def side(array, names):
        tokens = next((name for name in ("keys", "queries") if name in names), None)
        if tokens is None or isinstance(array, Range):
            return array
        heads = array.shape[1:-2] if "size" in names and array.shape[-1] % LANES == 0 else None
        of_keys = tokens == "keys"
        is_whole = not jnp.issubdtype(array.dtype, jnp.inexact)
        return _Side(of_keys, names.index(tokens) - len(names), heads, of_keys and is_whole)

    leaves = jax.tree.leaves(each(tree, side), is_leaf=lambda leaf: isinstance(leaf, _Side))
    return [leaf if isinstance(leaf, _Side) else _Side() for leaf in leaves]


@dataclasses.dataclass(frozen=True)
class _Half:
    """A call for half of the heads, or all, whose keys are sent around the ring in one direction.

    Args:
        config: the static part of the ring.
        step: 1 or -1.
        sides: the sides of the leaves.
        structure: the structure of the call.
        leaves: the packed leaves of the call; gathered ones are ``[devices, ...]``.
    """

    config: RingConfig
    step: int
    sides: list[_Side]
    structure: Any
    leaves: list

    @staticmethod
    def of(config: RingConfig, call: Call, step: int) -> "_Half":
        """The half for a call, whose keys are sent in the direction ``step``."""
        leaves, structure = jax.tree.flatten(call)
        sides = _sides(call)

        def stored(side: _Side, leaf):
            return jax.lax.all_gather(leaf, config.line.axis) if side.gathered else side.packed(leaf)

        return _Half(config, step, sides, structure, [stored(*each) for each in zip(sides, leaves, strict=True)])

    @property
    def line(self) -> SequenceSplit:
        """The split of the sequence."""
        return self.config.line

    @property
    def keys(self) -> list:
        """The leaves that are sent."""
        return [leaf for leaf, side in zip(self.leaves, self.sides, strict=True) if side.is_sent]

    def with_keys(self, keys: list, source) -> list:
        """The packed leaves of the call with the keys of group ``source``; ``keys`` are those that were sent here."""
        keys = iter(keys)
        device = source * self.line.width

        def chosen(side: _Side, leaf):
            return leaf[device] if side.gathered else next(keys) if side.is_sent else leaf

        return [chosen(side, leaf) for side, leaf in zip(self.sides, self.leaves, strict=True)]

    def call(self, leaves: list) -> Call:
        """The call of packed leaves."""
        return self.structure.unflatten([side.unpacked(leaf) for side, leaf in zip(self.sides, leaves, strict=True)])

    def sent(self, arrays: list) -> list:
        """The arrays of the group that precedes this one in the direction ``step``."""
        devices = self.line.shards * self.line.width
        by = self.step * self.line.width
        return jax.lax.ppermute(arrays, self.line.axis, [(n, (n + by) % devices) for n in range(devices)])

    def source(self, distance):
        """The group whose keys this group holds in a step."""
        return (self.line.shard - self.step * distance) % self.line.shards

    @property
    def outputs(self) -> _Side:
        """See ``_outputs``."""
        return _outputs(self.own)

    @property
    def own(self) -> Call:
        """The call of this group's own keys."""
        return self.call(self.with_keys(self.keys, self.line.shard))

    def nothing_yet(self) -> Rows:
        """The results before the first keys."""
        call = self.own
        dtype = statistics_dtype(call.q)
        rows = call.q.shape[:-1]
        out = full_varying_like((*rows, call.v.shape[-1]), dtype, call.q)
        rest = full_varying_like(rows, dtype, call.q)
        nothing = full_varying_like(rows, dtype, call.q, -jnp.inf)
        return Rows(self.outputs.packed(out), nothing, rest, nothing)

    def output(self, so_far: Rows) -> Rows:
        """The results with the output in the dtype of the values."""
        return so_far._replace(out=so_far.out.astype(self.own.v.dtype))

    def merged(self, distance, keys: list, so_far: Rows) -> Rows:
        """The results so far, merged with those of the keys of a step."""
        source = self.source(distance)
        line = self.line
        outputs = self.outputs
        leaves = self.with_keys(keys, source)

        def pair(i, j, so_far):
            rows = Rows(*map(line.cut(i), so_far, _TOKENS))

            def compute(part, rows):
                rows = rows._replace(out=outputs.unpacked(rows.out))
                results = merge(self.config.backends, part, rows)
                return results._replace(out=outputs.packed(results.out))

            merged = self.unless_empty(leaves, (i, j), source, compute, rows)
            return Rows(*map(partial(line.stored, i), so_far, merged, _TOKENS))

        return _over_pairs(line, pair, so_far)

    def added(self, distance, keys: list, per_query: PerQuery, wanted: list[bool], d_keys: list, d_own: list) -> tuple:
        """Sums of gradients of the keys of a step, and of all other leaves, after adding the gradients of this step."""
        source = self.source(distance)
        line = self.line
        outputs = self.outputs
        leaves = self.with_keys(keys, source)
        sides = [side for side, want in zip(self.sides, wanted, strict=True) if want]
        d_keys, d_own = iter(d_keys), iter(d_own)
        per_query = per_query._replace(d_lse=jnp.where(jnp.equal(distance, 0), per_query.d_lse, 0))

        def pair(i, j, sums):
            # Sum pieces, not whole arrays, which would be zero outside a piece.
            pieces = [_piece(line, side, (i, j), array) for side, array in zip(sides, sums, strict=True)]
            rows = PerQuery(*map(line.cut(i), per_query, _TOKENS))
            rows = rows._replace(d_lse=jnp.where(jnp.equal(j, 0), rows.d_lse, 0))

            def compute(part, pieces):
                unpacked = [side.unpacked(array) for side, array in zip(sides, pieces, strict=True)]
                so_far = self.sums(wanted, unpacked, part.run)
                of_rows = rows._replace(d_out=outputs.unpacked(rows.d_out))
                more = jax.tree.leaves(add(self.config.backends, part, of_rows, so_far))
                return [side.packed(array) for side, array in zip(sides, more, strict=True)]

            more = self.unless_empty(leaves, (i, j), source, compute, pieces)
            return [_stored(line, side, (i, j), *both) for side, *both in zip(sides, sums, more, strict=True)]

        sums = _over_pairs(line, pair, [next(d_keys if side.of_keys else d_own) for side in sides])
        both = list(zip(sides, sums, strict=True))
        return [array for side, array in both if side.of_keys], [array for side, array in both if not side.of_keys]

    def unless_empty(self, leaves: list, at: tuple, source, compute: Callable, so_far):
        """``compute(part, so_far)``, or ``so_far`` if the mask hides every pair according to the bounds of positions.

        Args:
            leaves: the packed leaves of the call. They enter ``jax.lax.cond`` packed: the compiler would store unpacked
                ones in another layout, which costs a copy.
            at: the indices of the query piece and of the key piece.
            source: the group of the keys.
            compute: takes the call of these pieces and ``so_far``.
            so_far: the results so far.
        """
        pieces = [_piece(self.line, side, at, leaf) for side, leaf in zip(self.sides, leaves, strict=True)]

        def part():
            return self.line.placed(self.call(pieces), *at, source)

        def computed(so_far):
            return compute(part(), so_far)

        some = _any_pair(part())
        if isinstance(some, bool):
            return computed(so_far) if some else so_far
        return jax.lax.cond(some, computed, lambda so_far: so_far, so_far)

    def sums(self, wanted: list[bool], arrays: list, run: int | None) -> Call:
        """Sums of gradients in the form of the call of a step, None for positions and if not wanted."""
        rest = iter(arrays)
        sums = self.structure.unflatten([next(rest) if want else None for want in wanted])
        return dataclasses.replace(sums, q_positions=None, kv_positions=None, scale=1.0, run=run)

    def zeros(self, wanted: list[bool], *, of_keys: bool) -> list:
        """Initial sums of gradients."""
        chosen = zip(self.leaves, self.sides, wanted, strict=True)
        leaves = [leaf for leaf, side, want in chosen if want and side.of_keys == of_keys]
        return [full_varying_like(leaf.shape, statistics_dtype(leaf), leaf) for leaf in leaves]


def _piece(line: SequenceSplit, side: _Side, at: tuple, array):
    """The piece of an array for a query piece and a key piece; the whole array if it has no axis of tokens."""
    return array if side.axis is None else line.cut(at[side.of_keys])(array, side.axis)


def _stored(line: SequenceSplit, side: _Side, at: tuple, whole, piece):
    """The array with a piece replaced."""
    return piece if side.axis is None else line.stored(at[side.of_keys], whole, piece, side.axis)


def _any_pair(call: Call):
    """Whether the mask may allow a pair, by the bounds of positions; a bool if they are known when tracing."""
    if call.mask is None:
        return True
    of_queries = block_bounds(call.q_positions, call.q.shape[3])
    some, _ = call.mask.tiles(of_queries, block_bounds(call.kv_positions, call.k.shape[2]))
    return bool(some.any()) if isinstance(some, np.ndarray) else some.any()


def _over_pairs(line: SequenceSplit, function: Callable, carry):
    """Folds ``function(i, j, carry)`` over all pairs of a query piece and a key piece."""
    if line.chunks == 1:
        return function(0, 0, carry)
    pairs = jnp.asarray(np.indices((line.chunks, line.chunks)).reshape(2, -1).T, jnp.int32)
    return jax.lax.scan(lambda carry, pair: (function(*pair, carry), None), carry, pairs)[0]


@partial(jax.tree_util.register_dataclass, data_fields=["calls", "rows"], meta_fields=["wanted"])
@dataclasses.dataclass(frozen=True)
class _Saved:
    """Residuals of the forward pass, and for which leaves of every call gradients are wanted."""

    calls: tuple[Call, ...]
    rows: tuple
    wanted: tuple[tuple[bool, ...], ...]


def _ring_forward(config: RingConfig, calls):
    taken = [split_symbolic_zeros(call) for call in calls]
    calls = tuple(call for call, _ in taken)
    wanted = tuple(_differentiable(*each) for each in taken)
    # Not ``_ring``: forward over reverse needs forward mode, which ``_ring`` lacks and ``_attended`` has.
    rows = tuple(map(mark_for_checkpoint, _attended(config, calls)))
    return rows, _Saved(calls, rows, wanted)


def _differentiable(call: Call, wanted: list[bool]) -> tuple[bool, ...]:
    leaves = zip(wanted, jax.tree.leaves(call), strict=True)
    return tuple(want and jnp.issubdtype(leaf.dtype, jnp.inexact) for want, leaf in leaves)


def _ring_backward(config: RingConfig, saved: _Saved, cotangents):
    halves = _halves(config, saved.calls)
    per_query = [_per_query(config, half, *each) for half, *each in zip(halves, saved.rows, cotangents, strict=True)]
    # The gradient of the scale follows from that of the scaled queries.
    wanted = [_summed(call, want) for call, want in zip(saved.calls, saved.wanted, strict=True)]
    keys = [half.keys for half in halves]
    d_keys, d_own = ([w.zeros(want, of_keys=k) for w, want in zip(halves, wanted, strict=True)] for k in (True, False))
    share = partial(_shares, halves, per_query, wanted)
    body = partial(_round, halves, share)
    state, _ = jax.lax.scan(body, (keys, d_keys, d_own), jnp.arange(config.line.shards - 1))
    keys, d_keys, d_own = state
    d_keys, d_own = share(config.line.shards - 1, keys, d_keys, d_own)
    d_keys[0] = halves[0].sent(d_keys[0])
    each_half = zip(saved.calls, halves, wanted, d_keys, d_own, strict=True)
    return (tuple(_cotangent(*of_half) for of_half in each_half),)


def _round(halves: list[_Half], share: Callable, state: tuple, distance) -> tuple:
    """A step of the backward pass: keys are sent, and the gradients of all calls are added."""
    keys, d_keys, d_own = state
    sent = [half.sent(each) for half, each in zip(halves, keys, strict=True)]
    d_keys, d_own = share(distance, keys, d_keys, d_own)
    return (sent, d_keys, d_own), None


def _shares(
    halves: list[_Half], per_query: list, wanted: list, distance, keys: list, d_keys: list, d_own: list
) -> tuple:
    """Adds the gradients of a step. The sums of one call are sent while the kernel of the other call runs.

    A single call adds its gradients to the received sums after its kernel, so the kernel need not wait for the sums.
    """
    first, *others = halves
    arriving = first.sent(d_keys[0])
    if not others:
        nothing = first.zeros(wanted[0], of_keys=True)
        more, first_own = first.added(distance, keys[0], per_query[0], wanted[0], nothing, d_own[0])
        return [jax.tree.map(jnp.add, arriving, more)], [first_own]
    second_keys, second_own = halves[1].added(distance, keys[1], per_query[1], wanted[1], d_keys[1], d_own[1])
    first_keys, first_own = first.added(distance, keys[0], per_query[0], wanted[0], arriving, d_own[0])
    return [first_keys, halves[1].sent(second_keys)], [first_own, second_own]


def _per_query(config: RingConfig, half: _Half, rows: Rows, cotangents: Rows) -> PerQuery:
    """The input of the backward pass for each query, with packed gradients of outputs."""
    materialized = [
        full_varying_like(c.shape, c.dtype, rows.out) if isinstance(c, SymbolicZero) else c for c in cotangents
    ]
    unpacked = [each._replace(out=half.outputs.unpacked(each.out)) for each in (rows, Rows(*materialized))]
    per_query = per_query_of(config.backends, half.own, *unpacked)
    return per_query._replace(d_out=half.outputs.packed(per_query.d_out))


def _summed(call: Call, wanted: tuple[bool, ...]) -> list[bool]:
    """Which leaves have sums of gradients: those that are wanted, and the queries, but not the scale, if it is."""
    if is_number(call.scale):
        return list(wanted)
    numbered = jax.tree.structure(call).unflatten(range(len(wanted)))
    queries = {q for q, _ in numbered.pairs}
    of_scale = wanted[numbered.scale]
    of_queries = [want or (of_scale and n in queries) for n, want in enumerate(wanted)]
    return [want and n != numbered.scale for n, want in enumerate(of_queries)]


def _cotangent(call: Call, half: _Half, wanted: list[bool], d_keys: list, d_own: list) -> Call:
    """The cotangent of a call, from the sums of gradients."""
    d_keys, d_own = iter(d_keys), iter(d_own)
    zeros = jax.tree.leaves(jax.tree.map(no_gradient, call))
    chosen = zip(zeros, half.sides, wanted, strict=True)
    leaves = [s.unpacked(next(d_keys if s.of_keys else d_own)) if want else zero for zero, s, want in chosen]
    return jax.tree.map(_like, _unscaled(call, half.structure.unflatten(leaves)), call)


def _unscaled(call: Call, sums: Call) -> Call:
    """The gradients of queries and scale, from those of scaled queries."""

    def of_both(q, d_q) -> tuple:
        return jax.vjp(lambda q, scale: q * scale, q.astype(d_q.dtype), jnp.asarray(call.scale, d_q.dtype))[1](d_q)

    first, *others = (of_both(q, d_q) for (q, _), (d_q, _) in zip(call.pairs, sums.pairs, strict=True))
    remap = tuple(dataclasses.replace(pair, q=q) for pair, (q, _) in zip(sums.remap, others, strict=True))
    scale = call.scale if is_number(call.scale) else sum(d_scale for _, d_scale in (first, *others))
    return dataclasses.replace(sums, q=first[0], remap=remap, scale=scale)


def _like(gradient, leaf):
    return gradient if gradient.dtype == jax.dtypes.float0 else gradient.astype(leaf.dtype)


_ring.defvjp(_ring_forward, _ring_backward, symbolic_zeros=True)
