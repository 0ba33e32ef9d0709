"""From the operands of an attention call to the kernels and back."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap
from jax.custom_derivatives import SymbolicZero

from posjax._checks import check
from posjax._numbers import is_array_number
from posjax.attention.operands import Operands, bias_form, named
from posjax.attention.padding import lengthen, pad
from posjax.attention.tiles import Blocks, plan
from posjax.attention.tpu.backward import LN2, Saved, backward
from posjax.attention.tpu.blocks import Target, cheapest_backward, cheapest_forward, divide, fit, target
from posjax.attention.tpu.call import Call, Inputs, Tables
from posjax.attention.tpu.forward import forward
from posjax.attention.tpu.schedule import by_keys, by_queries
from posjax.attention.tpu.terms import LANES, Pattern, dissect, mask_refusal, unskewed
from posjax.masks import And, Causal, Mask, traced_sizes
from posjax.positions import Range, as_array

LOG2E = math.log2(math.e)


def tpu(
    x: Operands,
    blocks: tuple[Blocks, Blocks] | None = None,
    bounded: bool | None = None,
    on: Target | None = None,
    interpret=False,
    given: tuple | None = None,
) -> tuple:
    """Attention by the kernels; ``x.q`` includes ``log2 e`` beside its scale.

    Args:
        x: the operands.
        blocks: the largest blocks of the forward and of the backward kernel; the cheapest on the chip when left out.
        bounded: whether a bound of the logits may take the place of their running maximum; as the chip likes it when
            left out.
        on: the chip; that of this machine when left out.
        interpret: ``pltpu.InterpretParams`` to run without a TPU.
        given: see ``posjax.attention.dense.dense``.

    Raises:
        ValueError: for what the kernels do not take, saying why.
    """
    check((why := refusal(x)) is None, f"implementation='tpu': {why}")
    queries, keys = x.q.shape[3], x.k.shape[2]
    on = target() if on is None else on
    forward_blocks = fit(blocks[0], queries, keys) if blocks else cheapest_forward(on, x)
    padded = pad(x, forward_blocks.q, forward_blocks.k)
    lengths = padded.q.shape[3], padded.k.shape[2]
    backward_blocks = divide(blocks[1], *lengths) if blocks else cheapest_backward(on, padded)
    bounded = on.wide if bounded is None else bounded
    call, inputs = _call(padded, forward_blocks, backward_blocks, bounded, on, interpret)
    if given is None:
        out, lse = attend(call, inputs)
    else:
        more = padded.q.shape[3] - queries
        # An infinite log-sum-exp gives the queries that padding adds weights of 0.
        lse = lengthen(given[1] * LOG2E, more, axis=3, constant_values=jnp.inf)
        out, lse = _attend_part(call, inputs, _flat(lengthen(given[0], more, axis=3)), _flat(lse))
    split = (x.k.shape[1], -1)
    out = out.reshape(out.shape[0], *split, *out.shape[2:])[..., :queries, :]
    return out, lse.reshape(lse.shape[0], *split, lse.shape[-1])[..., :queries] / LOG2E


# Queries and keys of the largest blocks of the backward kernel together.
_LARGEST_BLOCKS = 4096


def refusal(x: Operands) -> str | None:
    """Why the kernels do not take these operands, or None."""
    if not all(isinstance(size, int) for size in x.q.shape):
        return "a size of the queries is symbolic, and a kernel is compiled for sizes that are known; use 'blockwise'"
    if x.decay is not None:
        return "xPos decays every feature by its own factor within a tile; use 'blockwise'"
    if x.q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"q must be bfloat16 or float32, found {x.q.dtype}"
    for mask in (x.mask, *(branch.where for branch in x.far)):
        if traced := traced_sizes(mask):
            return f"{traced[0]} is an array, and a kernel is compiled for sizes that are Python ints; use 'blockwise'"
        if (why := mask_refusal(mask)) is not None:
            return f"{why}; use 'blockwise'"
    if is_array_number(x.softcap):
        return "softcap is an array, and a kernel is compiled for a Python float; use 'blockwise'"
    if bias_form(x) == "other":
        return f"{type(x.bias).__name__} is no number for each key and no function of distance alone; use 'blockwise'"
    if bias_form(x) == "relative" and not (isinstance(x.q_positions, Range) and isinstance(x.kv_positions, Range)):
        return (
            "a bias by distance needs positions that are ranges (within segments they may run on: distances are the "
            "same); use 'blockwise'"
        )
    if bias_form(x) in ("linear", "relative") and _leaves_int32(x):
        return "distances leave int32, in which the kernels count them; use 'blockwise'"
    if bias_form(x) == "relative" and _sums_by_distance(x) > target().vmem // 2:
        return "the gradient of a bias by distance does not fit in fast memory at this length; use 'blockwise'"
    return None


def _leaves_int32(x: Operands) -> bool:
    """Whether queries and keys are known to stand more than int32 holds apart."""
    if not all(isinstance(p, Range) and p.is_static for p in (x.q_positions, x.kv_positions)):
        return False
    apart = x.q_positions.start - x.kv_positions.start
    return apart + x.q_positions.length >= 2**31 or apart - x.kv_positions.length < -(2**31)


def _sums_by_distance(x: Operands) -> int:
    """Bytes of two copies of what the backward kernel sums for each distance and head of a group: 8 float32 numbers."""
    first, stop = _band(x, _LARGEST_BLOCKS)
    return 2 * x.q.shape[2] * (stop - first) * LANES * 32


def _band(x: Operands, reach: int) -> tuple[int, int]:
    """Rows of 128 distances, of those from ``-keys`` to ``queries``, where a bias by distance varies.

    Tiles that lie partly there read up to ``reach`` distances, their queries and keys together, beyond.
    """
    queries, keys = x.q.shape[3], x.k.shape[2]
    rows = -(-(queries + keys) // LANES)
    starts = [p.start for p in (x.q_positions, x.kv_positions)]
    edge = x.bias.constant_from
    if edge is None or not all(isinstance(start, int) for start in starts):
        return 0, rows
    middle, aside = keys - (starts[0] - starts[1]), edge + reach + LANES
    # Never less than one tile reads, wherever the band lies.
    least = min(rows, reach // LANES)
    first = min(max(0, (middle - aside) // LANES), rows - least)
    return first, max(min(rows, -(-(middle + aside) // LANES)), first + least)


def _call(
    x: Operands, forward_blocks: Blocks, backward_blocks: Blocks, bounded: bool, on: Target, interpret
) -> tuple[Call, Inputs]:
    form = bias_form(x)
    ranged = tuple(isinstance(p, Range) for p in (x.q_positions, x.kv_positions))
    formula, *numbers = dissect(x.mask)
    formulas = []
    for branch in x.far:
        where, *more = dissect(branch.where)
        formulas.append(where)
        numbers = [a + b for a, b in zip(numbers, more, strict=True)]
    q_numbers, k_numbers = (
        tuple(_row(a) for a in ([] if is_range else [positions]) + found)
        for found, positions, is_range in zip(numbers, (x.q_positions, x.kv_positions), ranged, strict=True)
    )
    ahead = x.q_positions.start - x.kv_positions.start if all(ranged) else 0
    constant_from = x.bias.constant_from if form == "relative" else None
    plans = [plan(x, blocks, constant_from=constant_from, ahead=ahead) for blocks in (forward_blocks, backward_blocks)]
    bias = _bias_numbers(x, form, ahead)
    tables = [_tables(x, blocks, form, bias) for blocks in (forward_blocks, backward_blocks)]
    bounded = bounded and _can_be_bounded(x, form)
    call = Call(
        forward_blocks,
        backward_blocks,
        plans[0].kinds,
        plans[1].kinds,
        Pattern(formula, tuple(formulas)),
        len(q_numbers),
        len(k_numbers),
        ranged,
        form,
        None if x.softcap is None else x.softcap * LOG2E,
        bounded,
        on.wide and x.q.dtype == jnp.bfloat16 and x.q.shape[-1] == LANES,
        _band(x, backward_blocks.q + backward_blocks.k) if form == "relative" else (0, 0),
        on.vmem,
        interpret,
    )
    starts = [p.start if isinstance(p, Range) else 0 for p in (x.q_positions, x.kv_positions)]
    inputs = Inputs(
        jnp.stack([_flat(q) for q, _ in x.pairs], axis=2),
        jnp.stack([k for _, k in x.pairs], axis=2),
        x.v,
        jnp.stack([jnp.asarray(s, jnp.int32) for s in starts]),
        Tables(by_queries(plans[0]), *tables[0]),
        Tables(by_keys(plans[1]), *tables[1]),
        q_numbers,
        k_numbers,
        bias,
        None,
    )
    if bounded:
        own = _of_queries(call, inputs, inputs.forward, forward_blocks)
        inputs = inputs._replace(bound=_bound(x, form, bias, own))
    return call, inputs


def _flat(q):
    """Query heads ``[batch, kv heads, group, ...]`` on one axis."""
    return q.reshape(q.shape[0], -1, *q.shape[3:])


def _row(numbers):
    """``[tokens]`` or ``[batch, tokens]`` as int32 ``[batch or 1, 1, 1, tokens]``."""
    numbers = jnp.asarray(numbers, jnp.int32)
    return numbers.reshape(-1, 1, 1, numbers.shape[-1])


def _bias_numbers(x: Operands, form: str | None, ahead) -> dict:
    bias = x.bias
    if form == "linear":
        return {"slopes": bias.slopes.astype(jnp.float32) * -LOG2E}
    if form == "gates":
        return {"q": bias.q_gates[:, :, None] * LOG2E, "k": bias.kv_gates[:, :, None] * LOG2E}
    if form != "relative":
        return {}
    queries, keys = x.q.shape[3], x.k.shape[2]

    def values(distances):
        found = bias.values(jnp.asarray(distances, jnp.int32), jnp.zeros(1, jnp.int32))[..., 0].astype(jnp.float32)
        return jnp.broadcast_to(found, (x.q.shape[1] * x.q.shape[2], len(distances))) * LOG2E

    edge = bias.constant_from or 0
    return {"values": values(ahead + np.arange(queries + keys) - keys), "edges": values(np.array([edge, -edge]))}


def _can_be_bounded(x: Operands, form: str | None) -> bool:
    """Whether a bound of the logits is known: for one pair of features, and ALiBi with no key ahead."""
    return not x.far and (form in (None, "relative") or (form == "linear" and _is_causal(x.mask)))


def _is_causal(mask: Mask | None) -> bool:
    return isinstance(mask, Causal) or (isinstance(mask, And) and (_is_causal(mask.left) or _is_causal(mask.right)))


def _bound(x: Operands, form: str | None, bias: dict, own):
    """``|q| max |k|``, by Cauchy-Schwarz, plus the most that the bias adds, for every query; ``own`` is left out.

    In place of a running maximum it saves finding one. It may be so far above the logits that all weights vanish; then
    the kernel computes the row again.
    """
    heads = x.q.shape[1] * x.q.shape[2]
    longest = _lengths(x.k).max(-1)[:, :, None, None]
    most = jnp.zeros(heads, jnp.float32)
    if form == "relative":
        most = jnp.maximum(bias["values"].max(-1), bias["edges"].max(-1))
    if form == "linear":
        farthest = as_array(x.q_positions).max() - as_array(x.kv_positions).min()
        most = jnp.maximum(0, bias["slopes"] * farthest.astype(jnp.float32))
    # A little more, for the roundings of either side.
    scores = _flat(_lengths(x.q) * longest * (1 + 2.0**-10))
    bound = scores + most[:, None] if x.softcap is None else jnp.full_like(scores, x.softcap * LOG2E)
    return jax.lax.stop_gradient(bound - own)[:, :, None]


def _lengths(x):
    return jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum(-1))


def _tables(x: Operands, blocks: Blocks, form: str | None, bias: dict) -> tuple:
    """Origins of the blocks of queries and keys, from which a linear bias or gates are counted."""
    if form == "gates":
        return tuple(bias[side][..., ::size] for side, size in (("q", blocks.q), ("k", blocks.k)))
    if form != "linear":
        return None, None
    return tuple(_row(as_array(p)[..., ::size]) for p, size in ((x.q_positions, blocks.q), (x.kv_positions, blocks.k)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(call: Call, x: Inputs):
    """Output and base-2 log-sum-exp, ``[batch, heads, queries, value size]`` and ``[batch, heads, queries]``."""
    # A copy in a kernel names every index of its source: what ``vmap`` maps over is taken one by one.
    out, lse = sequential_vmap(partial(forward, call))(x)
    return out, lse[:, :, 0]


@partial(jax.tree_util.register_dataclass, data_fields=["x", "out", "lse"], meta_fields=["of_bias"])
@dataclasses.dataclass(frozen=True)
class _Residuals:
    """What the backward pass needs, and whether anybody wants the gradient of the bias."""

    x: Inputs
    out: jax.Array
    lse: jax.Array
    of_bias: bool


def _attend_forward(call: Call, x: Inputs):
    of_bias = any(leaf.perturbed for leaf in jax.tree.leaves(x.bias, is_leaf=_is_primal))
    x = jax.tree.map(lambda leaf: leaf.value, x, is_leaf=_is_primal)
    out, lse = named(*attend(call, x))
    return (out, lse), _Residuals(x, out, lse, of_bias)


def _is_primal(leaf) -> bool:
    return hasattr(leaf, "perturbed")


def _attend_backward(call: Call, saved: _Residuals, cotangents):
    x, out, lse = saved.x, saved.out, saved.lse
    d_out, d_lse = map(_instantiated, cotangents)
    # A row that sees nothing is constant: an infinite log-sum-exp gives it weights of 0.
    blind = jnp.isneginf(lse)
    d_lse = jnp.where(blind, 0, d_lse)
    correction = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - d_lse * LOG2E
    lse = jnp.where(blind, jnp.inf, lse - _of_queries(call, x, x.backward, call.backward))
    rows = Saved(d_out, lse[:, :, None], correction[:, :, None])
    found = sequential_vmap(partial(backward, call, of_bias=saved.of_bias))(x, rows)
    zeros = jax.tree.map(_no_gradient, x)
    bias = zeros.bias | (_d_bias(call, x, found.bias, d_lse) if saved.of_bias else {})
    return (zeros._replace(q=(found.q * LN2).astype(x.q.dtype), k=found.k, v=found.v, bias=bias),)


def _instantiated(cotangent):
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


def _no_gradient(leaf):
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return jnp.zeros_like(leaf)
    return np.zeros(leaf.shape, jax.dtypes.float0)


def _of_queries(call: Call, x: Inputs, tables: Tables, blocks: Blocks):
    """What a linear bias or gates add to all logits of a query, from the origin of its block, as ``[.., queries]``."""
    queries = x.q.shape[3]
    if call.bias not in ("linear", "gates"):
        return 0.0
    if call.bias == "gates":
        own = x.bias["q"]
    else:
        own = x.starts[0] + jnp.arange(queries)[None, None, None] if call.ranged[0] else x.q_numbers[0]
    origins = jnp.repeat(tables.q_origins, blocks.q, axis=-1)
    ahead = (own - origins)[:, :, 0].astype(jnp.float32)
    return ahead if call.bias == "gates" else x.bias["slopes"][None, :, None] * ahead


def _d_bias(call: Call, x: Inputs, found: tuple, d_lse) -> dict:
    """Gradients of the numbers of the bias from what the kernel has summed up."""
    heads = x.q.shape[1]
    if call.bias == "linear":
        return {"slopes": found[0].sum((0, 3, 4)).reshape(heads) * LN2}
    if call.bias == "gates":
        # A softmax does not see what is added to a whole row; its log-sum-exp does.
        return {"q": d_lse[:, :, None], "k": found[0].reshape(x.bias["k"].shape) * LN2}
    if call.bias == "relative":
        skewed, edges = (a.sum(0).reshape(heads, *a.shape[3:]) * LN2 for a in found)
        values = unskewed(skewed, skewed.shape[1] * LANES)
        before = call.band[0] * LANES
        after = x.bias["values"].shape[1] - before - values.shape[1]
        return {"values": jnp.pad(values, ((0, 0), (before, after))), "edges": edges.sum(-1)}
    return {}


attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_part(call: Call, x: Inputs, out, lse):
    """``out`` and ``lse`` of whole rows as they are, with the gradients of ``x``, which holds some of their keys."""
    return out, lse


def _attend_part_forward(call: Call, *arguments):
    of_bias = any(leaf.perturbed for leaf in jax.tree.leaves(arguments[0].bias, is_leaf=_is_primal))
    x, out, lse = jax.tree.map(lambda leaf: leaf.value, arguments, is_leaf=_is_primal)
    return (out, lse), _Residuals(x, out, lse, of_bias)


def _attend_part_backward(call: Call, saved: _Residuals, cotangents):
    return *_attend_backward(call, saved, cotangents), *map(_no_gradient, (saved.out, saved.lse))


_attend_part.defvjp(_attend_part_forward, _attend_part_backward, symbolic_zeros=True)
