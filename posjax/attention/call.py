"""One call of attention: its arguments, checked once, in the form that every backend reads."""

import dataclasses
import numbers
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from posjax._axes import WithAxes, names_of
from posjax._checks import check, check_array, check_finite, check_heads, describe, is_known
from posjax._lowered import match_varying
from posjax._numbers import is_array_number, is_number, positive_number, register_numbers
from posjax._shapes import grouped
from posjax.attention.custom import check_custom, heads_of, on_device
from posjax.attention.logits import statistics_dtype
from posjax.attention.padding import without_padded_gates, without_padded_scale, without_padding
from posjax.attention.placement import Placement
from posjax.bias import Bias, ContextualBias, array_bias
from posjax.bias.base import widened_leaves
from posjax.masks import Mask, as_mask
from posjax.positions import Positions, Range, as_array
from posjax.remap import Branch, branches

RUN = 128
"""Tokens of the smallest tile of the kernels; ``Call.run`` is a multiple of it."""

_QUERIES = ("batch", "kv_heads", "group", "queries", "size")
_KEYS = ("batch", "kv_heads", "keys", "size")


@partial(jax.tree_util.register_dataclass, data_fields=["q", "k", "mask"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class RemappedPair(WithAxes):
    """A ``Branch`` with queries and keys in the layout of ``Call``."""

    q: Float[Array, "batch kv_heads group queries size"]
    k: Float[Array, "batch kv_heads keys size"]
    mask: Mask

    axes: ClassVar = {"q": _QUERIES, "k": _KEYS}


@partial(register_numbers, scalars=("softcap", "scale"), structure=("run",))
@dataclasses.dataclass(frozen=True)
class Call(WithAxes):
    """One call of attention, or a part of one, for the batch rows, tokens and heads of one device.

    Args:
        q: ``[batch, kv heads, group, queries, size]``, not multiplied by the scale: query heads grouped by key head.
        k: ``[batch, kv heads, keys, size]``.
        v: ``[batch, kv heads, keys, value size]``.
        bias: a bound bias or None.
        mask: a mask or None.
        q_positions: ``Range``, ``[queries]`` or ``[batch, queries]``. Where devices share a sequence, a ``Range`` is
            over the whole sequence.
        kv_positions: ``Range``, ``[keys]`` or ``[batch, keys]``.
        remap: the pairs of features that replace the first one in their masks.
        decay: rates ``a`` of ``sum_c q_c k_c exp(-a_c (i - j))``, ``[size]``, or None.
        softcap: ``c`` in ``c tanh(logit / c)``, or None: a number, or a scalar array in the dtype of the logits.
        scale: factor of all queries, remapped ones too: a number, or an array in the dtype of the logits, which
            broadcasts against ``q``.
        run: the length of a run, a multiple of ``RUN``, if queries and keys are several runs of consecutive tokens from
            distant parts of the sequence. Then no tile holds tokens of two runs: most pairs of such a tile might be
            hidden, and numbers relative to its first token might be large.
    """

    q: Float[Array, "batch kv_heads group queries size"]
    k: Float[Array, "batch kv_heads keys size"]
    v: Float[Array, "batch kv_heads keys value_size"]
    bias: Bias | None
    mask: Mask | None
    q_positions: Positions
    kv_positions: Positions
    remap: tuple[RemappedPair, ...] = ()
    decay: Float[Array, "size"] | None = None
    softcap: float | Float[Array, ""] | None = None
    scale: float | Float[Array, "..."] = 1.0
    run: int | None = None

    axes: ClassVar = {
        "q": _QUERIES,
        "k": _KEYS,
        "v": _KEYS,
        "scale": _QUERIES,
        "q_positions": ("batch", "queries"),
        "kv_positions": ("batch", "keys"),
    }

    @property
    def pairs(self) -> tuple[tuple[Array, Array], ...]:
        """The queries and keys of the first pair of features and of every remapped one."""
        return ((self.q, self.k), *((pair.q, pair.k) for pair in self.remap))

    @property
    def masks(self) -> tuple[Mask | None, ...]:
        """The mask, and the mask of every remapped pair."""
        return self.mask, *(pair.mask for pair in self.remap)

    @property
    def scaled(self) -> "Call":
        """The call with its queries times the scale, and a scale of 1."""
        return self.times(self.scale)

    def times(self, scale) -> "Call":
        """The call with its queries times another scale than its own, and a scale of 1."""

        def product(q):
            dtype = statistics_dtype(q)
            return (q.astype(dtype) * jnp.asarray(scale, dtype)).astype(q.dtype)

        return match_varying(dataclasses.replace(self.with_queries(product), scale=1.0))

    def with_queries(self, function: Callable[[Array], Array]) -> "Call":
        """The call with ``function`` applied to the queries of every pair of features."""
        remap = tuple(dataclasses.replace(pair, q=function(pair.q)) for pair in self.remap)
        return dataclasses.replace(self, q=function(self.q), remap=remap)

    def with_slots(self, function: Callable) -> "Call":
        """The call with ``function`` applied to the bias and to every mask that is not None."""

        def mapped(slot):
            return None if slot is None else function(slot)

        remap = tuple(dataclasses.replace(pair, mask=mapped(pair.mask)) for pair in self.remap)
        return dataclasses.replace(self, bias=mapped(self.bias), mask=mapped(self.mask), remap=remap)

    def at(self, q_positions: Positions, kv_positions: Positions) -> "Call":
        """The call at other positions."""
        return dataclasses.replace(self, q_positions=q_positions, kv_positions=kv_positions)


def call_of(
    q,
    k,
    v,
    *,
    placement: Placement,
    bias,
    mask,
    scale,
    softcap,
    remap: Branch | Sequence[Branch],
    decay,
    q_positions: Positions | None,
    kv_positions: Positions | None,
) -> Call:
    """The call of the arguments of ``attention``, whose bias, mask and scale may be those of all heads of the model.

    Raises:
        ValueError: for arguments that do not fit, naming the argument.
    """
    _check_inside(placement)
    check_shapes(q, k, v)
    check_scale(scale)
    heads = _Heads(placement, q.shape[2])
    bias = heads.of_bias(bias)
    mask = None if mask is None else as_mask(mask)
    remap = branches(remap)
    check_aligned(q, k, q_positions, _reads_positions(bias, mask, remap, decay))
    _check_no_pairs(placement, bias=bias, mask=(mask, remap))
    mask = heads.of_mask(mask)
    remap = tuple(map(heads.of_branch, remap))
    q_positions = _positions(placement, "q_positions", q_positions, q)
    kv_positions = _positions(placement, "kv_positions", kv_positions, k)
    if bias is not None:
        bias.check(q.shape[0], q.shape[1], k.shape[1])
    _check_remap(remap, decay, q, k)
    check_masks(q, k, mask, *(branch.mask for branch in remap))
    check_ahead(bias, mask, q_positions, kv_positions)
    scale = without_padded_scale(mask, heads.last(scale), q)
    q, k, v = without_padding(mask, q, k, v)
    remap = tuple(Branch(*without_padding(mask, branch.q, branch.k), branch.mask) for branch in remap)
    call = Call(
        q=grouped(q, k.shape[2]),
        k=jnp.moveaxis(k, 1, 2),
        v=jnp.moveaxis(v, 1, 2),
        bias=without_padded_gates(mask, bias),
        mask=mask,
        q_positions=q_positions,
        kv_positions=kv_positions,
        remap=tuple(RemappedPair(grouped(b.q, k.shape[2]), jnp.moveaxis(b.k, 1, 2), b.mask) for b in remap),
        decay=_rates(decay, statistics_dtype(q)),
        softcap=_softcap(softcap, q),
        scale=_grouped_scale(scale, q, k.shape[2]),
    )
    check_custom((call.bias, *call.masks), q, k, (q_positions, kv_positions))
    return match_varying(call.with_slots(on_device))


class _Heads:
    """Selects this device's ``size`` heads from arguments for all heads of the model."""

    def __init__(self, placement: Placement, size: int):
        self.size = size
        self.all = placement.all_heads(size)
        self.start = placement.first_head(size)

    def last(self, array):
        """This device's heads of an array whose last axis may be all heads."""
        if self.all == self.size or array is None or jnp.ndim(array) == 0 or array.shape[-1] != self.all:
            return array
        return jax.lax.dynamic_slice_in_dim(array, self.start, self.size, axis=-1)

    def of_mask(self, mask: Mask | None) -> Mask | None:
        if self.all == self.size or mask is None:
            return mask
        return on_device(mask).heads(self.start, self.size)

    def of_branch(self, branch: Branch) -> Branch:
        return Branch(branch.q, branch.k, self.of_mask(branch.mask))

    def of_bias(self, bias) -> Bias | None:
        """The bias, bound for this device's heads."""
        ready = bias is None or isinstance(bias, ContextualBias) or self.all == self.size
        if ready or (isinstance(bias, Bias) and heads_of(bias) == self.size):
            return bind_bias(bias, self.size)
        return bind_bias(bias, self.all).heads(self.start, self.size)


def _check_inside(placement: Placement) -> None:
    """Raises ValueError for a placement over the axes of the mesh in use, unless a ``shard_map`` over them is open."""
    mesh = jax.sharding.get_abstract_mesh()
    check(
        mesh.empty or not placement.is_open(mesh),
        f"placement: a Placement is for use inside shard_map over its axes {placement.axes}; enter it with "
        "posjax.attention.sharded.attend_on_mesh, or pass a PartitionSpec of the queries",
    )


def own_heads(placement: Placement, array, heads: int):
    """This device's ``heads`` heads of an array whose last axis may be all heads of the model; None unchanged."""
    return _Heads(placement, heads).last(array)


def sinks_of(placement: Placement, sinks, q, mask: Mask | None = None) -> Float[Array, "*b heads"] | None:
    """The logits of the sinks for this device's heads, from those of all heads of the model or of these.

    ``mask`` is that of the call: queries that it marks as padding get logits of 0.

    Raises:
        ValueError: unless ``sinks`` is None, one logit for each head, or one for each query and head.
    """
    fits = sinks is None or isinstance(sinks, jax.Array | np.ndarray)
    sinks = own_heads(placement, sinks, q.shape[2]) if fits else sinks
    fits = sinks is None or (fits and sinks.shape in (q.shape[2:3], q.shape[:3]))
    check(
        fits,
        f"sinks must have shape {q.shape[2:3]}, one logit per query head, or {q.shape[:3]}, one for each query too, "
        f"found {describe(sinks)}",
    )
    return without_padded_scale(mask, sinks, q)


def check_shapes(q, k, v) -> None:
    """Raises ValueError unless queries, keys and values fit together."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_heads(name, array)
    check(q.shape[0] == k.shape[0], f"k must have the batch of q, {q.shape[0]}, found shape {k.shape}")
    check(k.shape[:3] == v.shape[:3], f"v must have the batch, length and heads of k, {k.shape[:3]}, found {v.shape}")
    check(q.shape[3] == k.shape[3], f"k must have the head size of q, {q.shape[3]}, found shape {k.shape}")
    check(
        q.shape[2] % k.shape[2] == 0,
        f"the heads of q must be a multiple of those of k, found {q.shape[2]} and {k.shape[2]}",
    )


def bind_bias(bias, heads: int) -> Bias | None:
    """A bound bias for ``heads`` heads, from a bound one, an array, or a spec without parameters."""
    if bias is None:
        return None
    if isinstance(bias, jax.Array | np.ndarray):
        bias = array_bias(bias)
    if not isinstance(bias, Bias):
        return _bound(bias, heads)
    if not isinstance(bias, ContextualBias):
        bound_for = heads_of(bias)
        check(bound_for in (None, heads), f"bias is bound for {bound_for} heads, but q has {heads}")
    return widened_leaves(bias)


def _bound(spec, heads: int) -> Bias:
    kind = type(spec).__name__
    is_spec = hasattr(spec, "bind") and not isinstance(spec, type)
    given = f"{describe(spec)}: write {spec.__name__}(...)" if isinstance(spec, type) else kind
    check(is_spec, f"bias must be a posjax bias, the spec of one, or an array, found {given}")
    bias = spec.bind(num_heads=heads)
    check(isinstance(bias, Bias), f"bias: {kind}.bind must return a Bias, found {type(bias).__name__}")
    return bias


def check_scale(scale, name: str = "scale") -> None:
    """Raises ValueError unless ``scale`` is None, a finite number or an array.

    The numbers of an array are checked if it holds one for each head, or one in all. Factors of tokens are data, as
    queries are: those of padding may be NaN.
    """
    if scale is None:
        return
    check(
        isinstance(scale, numbers.Real | jax.Array | np.ndarray) and not isinstance(scale, bool),
        f"{name} must be a number or an array, found {describe(scale)}; named scales go in Scheme(scale=...)",
    )
    if np.ndim(scale) < 2:
        check_finite(name, scale)


def check_masks(q, k, *given: Mask | None) -> None:
    """Raises ValueError for masks that do not fit a call; before a mesh splits batch and heads, and inside it."""
    for mask in given:
        if mask is None:
            continue
        mask.check(q.shape[0], q.shape[1], k.shape[1])
        patterns = heads_of(mask)
        fits = patterns in (None, 1, q.shape[2])
        check(fits, f"mask: it has one pattern for each of {patterns} heads, but q has {q.shape[2]}")


def checked_positions(name: str, positions: Positions | None, x) -> Positions:
    """The positions of a call's queries or keys ``x``, as a range or an int32 array; from 0 if None.

    Raises ValueError unless they are integers, one for each token.
    """
    batch, length = x.shape[:2]
    if positions is None:
        return Range(0, length)
    if isinstance(positions, Range):
        check(positions.length == length, f"{name} must cover {length} tokens, found a Range of {positions.length}")
        return positions
    positions = positions if isinstance(positions, jax.Array) else np.asarray(positions)
    check(jnp.issubdtype(positions.dtype, jnp.integer), f"{name} must be integers, found {positions.dtype}")
    hint = f"; for one position a row write {name}[:, None]" if length == 1 and positions.shape == (batch,) else ""
    check(
        positions.shape in ((length,), (1, length), (batch, length)),
        f"{name} must have shape {(length,)} or {(batch, length)}, found {positions.shape}{hint}",
    )
    positions = as_array(positions)
    return positions.squeeze(0) if positions.shape == (1, length) else positions


def check_aligned(q, k, q_positions: Positions | None, reads_positions: bool) -> None:
    """Raises ValueError if queries and keys differ in number, positions matter, and ``q_positions`` is not given.

    The queries may be the last tokens (with a cache) or the first ones, and nothing in the call tells which.
    """
    queries, keys = q.shape[1], k.shape[1]
    fewer = queries < keys
    which_tokens, start = ("are the last of all tokens", f"{keys} - {queries}") if fewer else ("start at 0", "0")
    check(
        q_positions is not None or queries == keys or not reads_positions,
        f"q_positions must be given for {queries} queries and {keys} keys if positions matter; for queries that "
        f"{which_tokens} write q_positions=Range({start}, {queries}), with posjax.positions.Range",
    )


def check_ahead(bias: Bias | None, mask: Mask | None, q_positions: Positions, kv_positions: Positions) -> None:
    """Raises ValueError for a bias that grows without bound if the first query is known to see a key ahead.

    That is known for positions that are ranges and a mask without arrays; other calls are not checked.
    """
    if bias is None or not bias.grows_ahead:
        return
    key = _seen_ahead(mask, q_positions, kv_positions)
    check(
        key is None,
        f"bias: this {type(bias).__name__} grows without bound for keys ahead, and the first query sees the key at "
        f"position {key}; use mask=Causal(), or symmetric=True if every token sees both sides",
    )


def _seen_ahead(mask: Mask | None, q_positions: Positions, kv_positions: Positions) -> int | None:
    """The position of a key ahead that the first query is known to see, or None."""
    ranges = all(isinstance(p, Range) and p.is_static for p in (q_positions, kv_positions))
    if not ranges or jax.tree.leaves(mask):
        return None
    first = q_positions.start
    stop = kv_positions.start + kv_positions.length
    ahead = np.arange(max(first + 1, kv_positions.start), stop).astype(np.int32)
    seen = np.ones(ahead.shape, bool) if mask is None else mask.allowed(np.array([first], np.int32), ahead)
    if isinstance(seen, jax.core.Tracer) or not np.any(seen):
        return None
    return int(ahead[np.argmax(np.any(seen, axis=tuple(range(np.ndim(seen) - 1))))])


def _reads_positions(bias: Bias | None, mask: Mask | None, remap, decay) -> bool:
    read = any(slot.reads_positions for slot in (bias, mask) if slot is not None)
    return read or bool(remap) or decay is not None


def _check_no_pairs(placement: Placement, **slots) -> None:
    """Raises ValueError for arrays over pairs of tokens if devices share a sequence: they cannot be split."""
    if placement.shards == 1:
        return
    over_pairs = [
        name for name, slot in slots.items() if any({"queries", "keys"} <= set(names) for names in names_of(slot))
    ]
    check(
        not over_pairs,
        f"{' and '.join(over_pairs)}: an array over pairs of tokens is not supported if the {placement.shards} devices "
        f"of axis {placement.context!r} share a row; use masks and biases of positions or of tokens (masks.Segments "
        "for padding)",
    )


def _positions(placement: Placement, name: str, positions: Positions | None, x) -> Positions:
    """The checked positions of queries or keys ``x``: a ``Range`` over the whole sequence, or this device's array."""
    if placement.shards == 1:
        return checked_positions(name, positions, x)
    tokens = x.shape[1]
    whole = placement.whole(x.shape[1])
    if positions is None:
        return Range(0, whole)
    if not isinstance(positions, Range):
        return checked_positions(name, placement.local(positions, tokens), x)
    check(
        positions.length == whole and positions.is_static,
        f"positions must be a Range over the whole sequence of {whole} tokens whose start is known, or an array "
        f"over the {tokens} tokens of this device; found {positions}",
    )
    return positions


def _check_remap(remap: tuple[Branch, ...], decay, q, k) -> None:
    for branch in remap:
        shapes = (branch.q.shape, branch.k.shape)
        wanted = (q.shape, k.shape)
        check(shapes == wanted, f"remap: queries and keys must have the shapes of q and k, {wanted}, found {shapes}")
    if decay is not None:
        check_array("decay", decay)
        wanted = q.shape[-1:]
        fits = decay.shape == wanted
        check(fits, f"decay must have shape {wanted}, one rate per feature, found {decay.shape}")
        check(
            not remap, "decay: the decay of xPos reads true distances, which remapped branches replace; leave one out"
        )


def _rates(decay, dtype) -> Float[Array, "size"] | None:
    """The rates of decay as an array without a gradient, none below 0.

    Raises ValueError for a negative or infinite rate; a traced negative one counts as 0.
    """
    if decay is None:
        return None
    if is_known(decay):
        lowest = np.min(np.asarray(decay, np.float64), initial=np.inf)
        check(lowest >= 0, f"decay must not be negative: its rates are those of exp(-a (i - j)), found {lowest:g}")
        check_finite("decay", decay)
    return jax.lax.stop_gradient(jnp.maximum(jnp.asarray(decay, dtype), 0))


def _softcap(softcap, q: Array) -> float | Float[Array, ""] | None:
    """The soft cap of a call: None, a number, or a scalar array in the dtype of the logits, perhaps learned.

    Raises:
        ValueError: unless it is positive and finite; only checked if its value is known.
    """
    if softcap is None:
        return None
    softcap = positive_number("softcap", softcap)
    return softcap.astype(statistics_dtype(q)) if is_array_number(softcap) else softcap


def _grouped_scale(scale, q, kv_heads: int) -> float | Float[Array, "..."]:
    """The scale as a number, or as an array of factors that broadcasts against grouped queries."""
    if scale is None or is_number(scale):
        return q.shape[-1] ** -0.5 if scale is None else float(scale)
    scale = jnp.asarray(widened_leaves(scale), statistics_dtype(q))
    if scale.ndim == 0:
        return scale
    sizes = zip(reversed(scale.shape), reversed(q.shape[:3]), strict=False)
    fits = scale.ndim <= 3 and all(size in (1, wanted) for size, wanted in sizes)
    check(fits, f"scale must broadcast to [batch, queries, heads] = {q.shape[:3]}, found {scale.shape}")
    return grouped(jnp.broadcast_to(scale, q.shape[:3])[..., None], kv_heads)
