"""Attention for the queries of one device over the keys of all devices that share the sequence, inside ``shard_map``.

``posjax.attention`` calls ``context_attention`` too: a device that holds whole sequences needs no ``shard_map``.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from posjax._axes import names_of
from posjax._checks import check
from posjax._numbers import is_number
from posjax.attention import api
from posjax.attention.checks import check_ahead, check_scale, check_sinks, checked_positions
from posjax.attention.operands import RUN, Operands, statistics_dtype, vary_alike
from posjax.attention.own import heads_of, on_device
from posjax.attention.padding import without_padded_scale
from posjax.attention.rows import Rows
from posjax.attention.sharded.choice import Sizes
from posjax.attention.sharded.exchange import gathered, ulysses
from posjax.attention.sharded.line import Call, Line, join
from posjax.attention.sharded.neighbour import neighbour
from posjax.attention.sharded.placement import Placement
from posjax.attention.sharded.ring import ring
from posjax.bias import Bias, ContextualBias
from posjax.masks import Mask, as_mask
from posjax.positions import Positions, Range
from posjax.remap import Branch, branches


def context_attention(
    q: Float[Array, "batch queries heads size"],
    k: Float[Array, "batch keys kv_heads size"],
    v: Float[Array, "batch keys kv_heads value_size"],
    *,
    placement: Placement,
    bias=None,
    mask: Mask | Bool[Array, "..."] | None = None,
    scale: float | Float[Array, "..."] | None = None,
    sinks: Float[Array, "all_heads"] | None = None,
    softcap: float | Float[Array, ""] | None = None,
    remap: Branch | Sequence[Branch] = (),
    decay: Float[Array, "size"] | None = None,
    q_positions: Positions | None = None,
    kv_positions: Positions | None = None,
    implementation: str | None = None,
    return_residuals: bool = False,
) -> Float[Array, "batch queries heads value_size"] | tuple[Array, Array]:
    """``posjax.attention`` of whole sequences, for the queries, keys and heads of this device inside ``shard_map``.

    Results, gradients and arguments are those of ``attention`` for the whole sequence, but arguments with an axis of
    tokens (positions, the arrays of masks and biases, a scale) hold the tokens of this device, in the order of
    ``placement.layout``.

    Args:
        q, k, v: the tokens and heads of this device.
        placement: the mesh axes of the sequence and the heads, and the strategy. Axes that do not exist count as one
            device.
        bias: a spec; a bias bound for all heads of the model; or, for instance with arrays of tokens (FoX), a bias
            bound for this device's heads.
        mask: its head axis, if it has one, is that of all heads of the model.
        scale: its head axis, if it has one, is that of all heads of the model or of this device's heads.
        sinks: one logit for every head of the model.
        q_positions: a ``Range`` over the whole sequence with a known start, from 0 when left out; or an array over the
            tokens of this device.
        kv_positions: the same for the keys.
        softcap, remap, decay, implementation, return_residuals: see ``attention``.

    Raises:
        ValueError: as ``attention``, and for a strategy that cannot split the call, with the reason.
    """
    api.check_shapes(q, k, v)
    check_scale(scale)
    heads = _Heads(placement, q.shape[2])
    bias, mask, remap = heads.of_bias(bias), None if mask is None else as_mask(mask), branches(remap)
    api.check_aligned(q, k, q_positions, api.reads_positions(bias, mask, remap, decay))
    _check_no_pairs(placement, bias=bias, mask=(mask, remap))
    mask, remap = heads.of_mask(mask), tuple(map(heads.of_branch, remap))
    positions = (
        _positions(placement, "q_positions", q_positions, q),
        _positions(placement, "kv_positions", kv_positions, k),
    )
    x = api.operands(q, k, v, bias=bias, mask=mask, remap=remap, decay=decay, softcap=softcap, positions=positions)
    scale = api.grouped_scale(without_padded_scale(mask, heads.last(scale), q), q, k.shape[2])
    sinks = heads.last(sinks)
    check_sinks(sinks, q.shape[2])
    check_ahead(x.bias, x.mask, *positions)
    call = Call(x, scale if is_number(scale) else jnp.asarray(scale, statistics_dtype(q)))
    with_lse = return_residuals or sinks is not None
    return api.finished(_spread(placement, vary_alike(call), implementation, with_lse), sinks, return_residuals)


class _Heads:
    """Selects this device's ``size`` heads from arguments for all heads of the model."""

    def __init__(self, placement: Placement, size: int):
        self.size, self.all, self.start = size, placement.all_heads(size), placement.first_head(size)

    def last(self, array):
        """This device's heads of an array whose last axis may be all heads."""
        if self.all == self.size or array is None or jnp.ndim(array) == 0 or array.shape[-1] != self.all:
            return array
        return jax.lax.dynamic_slice_in_dim(array, self.start, self.size, axis=-1)

    def of_mask(self, mask):
        if self.all == self.size or not isinstance(mask, Mask):
            return mask
        return on_device(mask).heads(self.start, self.size)

    def of_branch(self, branch: Branch) -> Branch:
        return Branch(branch.q, branch.k, self.of_mask(branch.mask))

    def of_bias(self, bias) -> Bias | None:
        """The bias, bound for this device's heads."""
        ready = bias is None or isinstance(bias, ContextualBias) or self.all == self.size
        if ready or (isinstance(bias, Bias) and heads_of(bias) == self.size):
            return api.bind_bias(bias, self.size)
        return api.bind_bias(bias, self.all).heads(self.start, self.size)


def _check_no_pairs(placement: Placement, **slots) -> None:
    """Raises ValueError for arrays over pairs of tokens if devices share a sequence: they cannot be split."""
    if placement.shards == 1:
        return
    found = [name for name, slot in slots.items() if any({"queries", "keys"} <= set(names) for names in names_of(slot))]
    check(
        not found,
        f"{' and '.join(found)}: an array over pairs of tokens is not supported if the {placement.shards} devices "
        f"of axis {placement.context!r} share a row; use masks and biases of positions or of tokens (masks.Segments "
        "for padding)",
    )


def _positions(placement: Placement, name: str, positions: Positions | None, x) -> Positions:
    """The checked positions of queries or keys ``x``: a ``Range`` over the whole sequence, or this device's array."""
    if placement.shards == 1:
        return checked_positions(name, positions, x)
    tokens, whole = x.shape[1], placement.whole(x.shape[1])
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


def _spread(placement: Placement, call: Call, implementation: str | None, with_lse: bool) -> Rows:
    """The results of a call by the strategy of the placement."""
    shards, length = placement.shards, placement.whole(call.x.q.shape[3])

    def attend(call: Call) -> Rows:
        return api.run(implementation, call.x, call.scale, with_lse)

    if shards == 1:
        # One device may still hold a sequence in the layout for several devices.
        line = Line(None, 1, 1, placement.layout, length)
        return ulysses(line, call, attend) if placement.layout.reorders else attend(call)
    layout = placement.layout_over(shards)
    layout.check(length)
    sizes = _sizes(call, placement, length)
    strategy = placement.chosen(sizes)
    line = Line(placement.context, shards, 1, layout, length)
    if strategy == "all-gather":
        return _by_pieces(line, gathered(line, call), attend)
    if strategy == "neighbour":
        return neighbour(line, call, sizes.window, attend)
    if strategy == "ring":
        return ring(_joined(line, call.x), implementation, call)
    width = shards if strategy == "ulysses" else placement.ulysses
    line = _joined(Line(placement.context, shards // width, width, layout, length), call.x)
    return ulysses(line, call, attend if line.shards == 1 else partial(ring, line, implementation))


def _joined(line: Line, x: Operands) -> Line:
    """The line, with both runs of a zigzag in one call for every step of a ring, if backends support that.

    A run must be a multiple of the smallest tile.
    """
    joins = line.groups.kind == "zigzag" and line.piece % RUN == 0 and not api.needs_ranges(x)
    return dataclasses.replace(line, split=not joins)


def _sizes(call: Call, placement: Placement, length: int) -> Sizes:
    """The sizes of a call, for the choice of a strategy."""
    x = call.x
    bounds = None if x.mask is None else x.mask.kept_keys
    return Sizes(
        batch=x.q.shape[0],
        length=length,
        heads=x.q.shape[1] * x.q.shape[2],
        kv_heads=x.q.shape[1],
        shards=placement.shards,
        features=sum(k.shape[-1] for _, k in x.pairs) + x.v.shape[-1],
        query_features=sum(q.shape[-1] for q, _ in x.pairs) + x.v.shape[-1],
        itemsize=x.q.dtype.itemsize,
        window=bounds[1] if bounds is not None and bounds[0] == 0 else None,
        counts=isinstance(x.bias, ContextualBias),
        layout=placement.layout_over(placement.shards),
        ulysses=placement.ulysses,
    )


def _by_pieces(line: Line, call: Call, run: Callable) -> Rows:
    """The results of ``run`` for one query piece after the other, over all keys: the positions of each are a range."""
    if not isinstance(call.x.q_positions, Range):
        return run(call)
    return join([run(line.queries(call, n)) for n in range(line.chunks)])
