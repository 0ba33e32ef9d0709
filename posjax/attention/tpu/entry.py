"""From a call of attention to the kernels, and from their results back."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap

from posjax._checks import check
from posjax._lowered import no_gradient
from posjax._numbers import rounded_sum
from posjax.attention.call import Call
from posjax.attention.formulas import LN2, LOG2E, NOT_OF_BOOLEANS, OPERATIONS, bias_form, dissect, kernel_refusal
from posjax.attention.logits import flat_heads, merge_heads, split_heads
from posjax.attention.rows import PerQuery, Rows
from posjax.attention.tiles import Blocks, lengthen, lengthened_rows, pad, plan_tiles
from posjax.attention.tpu.backward import backward
from posjax.attention.tpu.biases import FORMS, form_of
from posjax.attention.tpu.blocks import Target, cheapest_backward, cheapest_forward, divide, fit, target
from posjax.attention.tpu.correction import row_sums_of_heads
from posjax.attention.tpu.forward import forward
from posjax.attention.tpu.inputs import Inputs, KernelConfig, Tiling
from posjax.attention.tpu.terms import LANES, Pattern
from posjax.attention.tpu.tile_lists import lists
from posjax.masks import And, Causal, Chunked, Mask, Segments, Window
from posjax.positions import Range


@dataclasses.dataclass(frozen=True)
class Options:
    """How the kernels run.

    Args:
        factor: the factor of the queries, ``log2 e`` included; 1 if they have been multiplied already.
        blocks: the largest blocks of the forward and of the backward kernel; the cheapest on the chip when left out.
        bounded: whether a bound of the logits may replace their running maximum; the best for the chip when left out.
        on: the chip; that of the mesh in use or of this machine when left out.
        interpret: ``pltpu.InterpretParams`` to run without a TPU.
    """

    factor: float = 1.0
    blocks: tuple[Blocks, Blocks] | None = None
    bounded: bool | None = None
    on: Target | None = None
    interpret: Any = False


def forward_rows(x: Call, options: Options, so_far: Rows | None = None) -> Rows:
    """The results for each query.

    Args:
        x: the call.
        options: how the kernel runs.
        so_far: the results over other keys, in float32; those of the keys of ``x`` are merged into them.

    Raises:
        ValueError: for calls that the kernels do not support, with the reason.
    """
    inputs, config = _prepared(x, options, so_far is not None)
    rows = None if so_far is None else _kernel_rows(config, inputs, so_far)
    # DMA copies index every axis of their source, so ``vmap`` runs the kernel for one element at a time.
    out, lse = sequential_vmap(partial(forward, config))(inputs, rows)
    heads = x.q.shape[1:3]
    queries = x.q.shape[3]
    subtracted, rest = (
        numbers.reshape(-1, *heads, numbers.shape[-1])[..., :queries]
        for numbers in _plus(lse[:, :, 0], lse[:, :, 1], config.bias.of_queries(config, inputs, 0))
    )
    return Rows(split_heads(out, heads)[..., :queries, :], subtracted * LN2, rest * LN2, subtracted)


def _kernel_rows(config: KernelConfig, x: Inputs, so_far: Rows) -> tuple:
    """The results so far in the form of the forward kernel."""
    more = x.q.shape[3] - so_far.lse.shape[-1]
    constant = config.bias.of_queries(config, x, 0)
    numbers = (flat_heads(lengthen(each, more, axis=3)) for each in (so_far.subtracted, so_far.rest * LOG2E))
    lse = _plus(*numbers, None if constant is None else -constant)
    return merge_heads(lengthen(so_far.out, more, axis=3)), jnp.stack(lse, axis=2)


def _plus(lse, rest, constant) -> tuple:
    """A log-sum-exp in two numbers, as in ``Rows``, plus the constant that the bias adds to all logits of a query."""
    if constant is None:
        return lse, rest
    total, lost = rounded_sum(lse, constant)
    return total, jnp.where(jnp.isneginf(lse), 0, rest + lost)


def row_sums(a, b, dtype, interpret=False):
    """``posjax.attention.rows.row_sums`` by a kernel, in float32."""
    heads = a.shape[1:3]
    queries = a.shape[3]
    arrays = (merge_heads(lengthen(array, -queries % LANES, axis=3)) for array in (a, b))
    sums = sequential_vmap(partial(row_sums_of_heads, math.prod(heads), interpret=interpret))(*arrays)
    return sums.reshape(-1, *heads, sums.shape[-1])[..., :queries]


def gradients(x: Call, options: Options, per_query: PerQuery, *, of_bias: bool = True) -> Call:
    """The cotangent of a call.

    Args:
        x: the call.
        options: how the kernel runs.
        per_query: see ``PerQuery``.
        of_bias: whether the gradient of the bias is wanted; it is 0 if not.

    Raises:
        ValueError: for calls that the kernels do not support, with the reason.
    """
    inputs, transpose, config = _transposable(x, options, running=False)
    kernel_gradients, bias = _gradients(config, inputs, per_query, None, of_bias)
    return transpose(bias._replace(q=kernel_gradients.q, k=kernel_gradients.k, v=kernel_gradients.v))[0]


def add_gradients(
    x: Call, options: Options, per_query: PerQuery, so_far: tuple, *, of_bias: bool = True
) -> tuple[tuple, Call]:
    """Float32 sums of gradients of scaled queries, of keys and of values, after adding those from the keys of ``x``.

    Args:
        x: the call, with one pair of features.
        options: how the kernel runs.
        per_query: see ``PerQuery``.
        so_far: the sums.
        of_bias: see ``gradients``.

    Returns:
        The sums, and all other gradients, with 0 for ``q``, ``k`` and ``v``.
    """
    inputs, transpose, config = _transposable(x, options, running=True)
    q, k, v = (merge_heads(lengthen(a, b.shape[-2] - a.shape[-2], -2)) for a, b in zip(so_far, inputs[:3], strict=True))
    kernel_gradients, bias = _gradients(config, inputs, per_query, (q[:, :, None], k[:, :, None], v), of_bias)
    sums = kernel_gradients.q[:, :, 0], kernel_gradients.k[:, :, 0], kernel_gradients.v
    sums = (split_heads(a, b.shape[1:-2])[..., : b.shape[-2], :] for a, b in zip(sums, so_far, strict=True))
    return tuple(sums), transpose(bias)[0]


def _gradients(config: KernelConfig, x: Inputs, per_query: PerQuery, so_far: tuple | None, of_bias: bool) -> tuple:
    """The results of the backward kernel, and cotangents of its inputs, 0 except for the bias."""
    d_out, *rows = lengthened_rows(per_query, x.q.shape[3])
    lse, correction, d_lse = map(flat_heads, rows)
    constant = config.bias.of_queries(config, x, 1)
    lse = lse if constant is None else lse - constant
    kernel_per_query = PerQuery(merge_heads(d_out), lse[:, :, None], correction[:, :, None])
    kernel_gradients = sequential_vmap(partial(backward, config, of_bias=of_bias))(x, kernel_per_query, so_far)
    zeros = jax.tree.map(no_gradient, x)
    bias = config.bias.gradients(x, kernel_gradients.bias, d_lse / LOG2E) if of_bias else {}
    return kernel_gradients, zeros._replace(bias=zeros.bias | bias)


def _transposable(x: Call, options: Options, running: bool) -> tuple[Inputs, Callable, KernelConfig]:
    """``_prepared`` and its transpose, from cotangents of the inputs to a tuple of that of the call."""
    return jax.vjp(partial(_prepared, options=options, running=running), x, has_aux=True)


def refusal(x: Call) -> str | None:
    """Why the kernels do not support these calls, or None."""
    if x.q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"q must be bfloat16 or float32, found {x.q.dtype}"
    return kernel_refusal(x, FORMS, OPERATIONS | {NOT_OF_BOOLEANS}) or form_of(x).refusal(x)


def is_plain(x: Call) -> bool:
    """Whether the results of a call need no care before its backward pass: see ``posjax.attention.rows.per_query_of``.

    Every query sees itself, and its bias is 0 there (ALiBi, FoX) or there is none. So log-sum-exps are not far below
    the scores, which no additive mask hides. What rounding them loses, 6e-8 of the score, is less than what rounding
    the weights to bfloat16 loses, up to scores of 30,000.
    """
    places = x.q_positions, x.kv_positions
    same = all(isinstance(each, Range) and each.is_static for each in places) and places[0] == places[1]
    narrow = x.q.dtype == jnp.bfloat16
    return same and narrow and bias_form(x) in ("none", "linear", "gates") and not x.remap and _sees_itself(x.mask)


def _sees_itself(mask: Mask | None) -> bool:
    """Whether a mask is known to allow every token to see itself. Padding that is finite counts as a token."""
    if isinstance(mask, And):
        return all(map(_sees_itself, mask.parts))
    return mask is None or isinstance(mask, Causal | Window | Chunked) or (isinstance(mask, Segments) and mask.finite)


def needs_ranges(x: Call) -> bool:
    """Whether the kernels support the bias of a call only if positions are ranges."""
    return bias_form(x) == "by distance"


def _padded(
    x: Call, blocks: tuple[Blocks, Blocks] | None, on: Target, running: bool
) -> tuple[Call, tuple[Blocks, Blocks]]:
    """The call padded to whole blocks, and the blocks of the forward and of the backward kernel."""
    of_forward = fit(blocks[0], x.q.shape[3], x.k.shape[2]) if blocks else cheapest_forward(on, x, running)
    x = pad(x, of_forward.q, of_forward.k)
    of_backward = divide(blocks[1], x.q.shape[3], x.k.shape[2]) if blocks else cheapest_backward(on, x, running)
    return x, (of_forward, of_backward)


def _prepared(x: Call, options: Options, running: bool) -> tuple[Inputs, KernelConfig]:
    """The arrays of a call, and its static part; ``running`` if it adds to earlier results."""
    why = refusal(x)
    check(why is None, f"implementation='tpu': {why}")
    on = target() if options.on is None else options.on
    places = x.q_positions, x.kv_positions
    ahead = places[0].start - places[1].start if all(isinstance(p, Range) for p in places) else 0
    # Ranges that padding would lead out of int32 become arrays here.
    x, blocks = _padded(x, options.blocks, on, running)
    ranged = isinstance(x.q_positions, Range), isinstance(x.kv_positions, Range)
    starts = [p.start if isinstance(p, Range) else 0 for p in (x.q_positions, x.kv_positions)]
    spare = on.wide and x.q.dtype == jnp.bfloat16 and x.q.shape[-1] == LANES
    bias = form_of(x).of(x, spare, blocks[1].q + blocks[1].k, ahead)
    of_queries, of_keys = (plan_tiles(x, each, constant_from=bias.constant_from, ahead=ahead) for each in blocks)
    of_keys = of_keys.with_every_query
    bias_numbers = bias.numbers(x, ahead)
    bounded = on.wide if options.bounded is None else options.bounded
    most = bias.most(x, bias_numbers) if bounded else None
    pattern, numbers = _pattern(x)
    config = KernelConfig(
        heads=x.q.shape[1] * x.q.shape[2],
        kv_heads=x.q.shape[1],
        size=x.q.shape[-1],
        value_size=x.v.shape[-1],
        tilings=(
            Tiling(blocks[0], of_queries.kinds, x.q.shape[3] // blocks[0].q),
            Tiling(blocks[1], of_keys.kinds, x.k.shape[2] // blocks[1].k),
        ),
        pattern=pattern,
        ranged=ranged,
        bias=bias,
        softcap=None if x.softcap is None else x.softcap * LOG2E,
        factor=options.factor,
        bounded=most is not None,
        spare=spare,
        vmem=on.vmem,
        interpret=options.interpret,
    )
    inputs = _inputs(x, starts, (lists(of_queries), lists(of_keys.transposed)), numbers, bias_numbers)
    return inputs if most is None else inputs._replace(bound=_bound(x, inputs.k, most)), config


def _inputs(x: Call, starts: list, visits: tuple, numbers: tuple, of_bias: dict) -> Inputs:
    """The arrays of a call, without the bound."""
    q, k = (_together([merge_heads(array) for array in arrays]) for arrays in zip(*x.pairs, strict=True))
    starts = jnp.stack([jnp.asarray(start, jnp.int32) for start in starts])
    return Inputs(q, k, merge_heads(x.v), starts, visits, numbers, of_bias, None)


def _pattern(x: Call) -> tuple[Pattern, tuple]:
    """Mask and branches without their arrays, and the numbers of the queries and of the keys, positions first."""
    formula, *numbers = dissect(x.mask)
    formulas = []
    for branch in x.remap:
        branch_formula, *more = dissect(branch.mask)
        formulas.append(branch_formula)
        numbers = [a + b for a, b in zip(numbers, more, strict=True)]
    positions = ([] if isinstance(p, Range) else [p] for p in (x.q_positions, x.kv_positions))
    rows = tuple(tuple(map(_row, position + of_masks)) for position, of_masks in zip(positions, numbers, strict=True))
    return Pattern(formula, tuple(formulas)), rows


def _together(arrays: list):
    """The arrays of all pairs of features on a new axis; a single one is not copied."""
    return arrays[0][:, :, None] if len(arrays) == 1 else jnp.stack(arrays, axis=2)


def _row(numbers):
    """``[tokens]`` or ``[batch, tokens]`` as int32 ``[batch or 1, 1, 1, tokens]``."""
    numbers = jnp.asarray(numbers, jnp.int32)
    return numbers.reshape(-1, 1, 1, numbers.shape[-1])


def _bound(x: Call, k, most):
    """For every head the norm of the longest key of each pair of features, and the most that the bias adds.

    ``k`` is that of ``Inputs``. The matrix unit sums the squares in that layout.
    """
    side_by_side = k.shape[-1] // x.k.shape[-1]
    sums = np.kron(np.eye(side_by_side), np.ones((x.k.shape[-1], 1)))
    # Without the barrier XLA would compute them in another layout, and copy them.
    squares = jnp.square(jax.lax.optimization_barrier(k).astype(jnp.float32)).astype(k.dtype)
    longest_squared = jnp.einsum(
        "bhpnc,cm->bhmpn", squares, sums.astype(k.dtype), preferred_element_type=jnp.float32
    ).max(-1)
    longest = jnp.sqrt(longest_squared.reshape(x.k.shape[0], x.k.shape[1], -1))
    of_heads = jnp.repeat(longest, x.q.shape[2], axis=1)
    most = jnp.broadcast_to(most[:, None], (*of_heads.shape[:2], 1))
    return jax.lax.stop_gradient(jnp.concatenate([of_heads, most], -1))[:, :, None]
