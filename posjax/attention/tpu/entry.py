"""From the operands of an attention call to the kernels and back."""

import dataclasses
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.custom_derivatives import SymbolicZero

from posjax._checks import check
from posjax._numbers import is_array_number
from posjax.attention.operands import Operands, PerQuery, named, no_gradient, taken_apart
from posjax.attention.padding import lengthen, pad
from posjax.attention.tiles import Blocks, plan
from posjax.attention.tpu.backward import backward
from posjax.attention.tpu.biases import ByDistance, form_of
from posjax.attention.tpu.blocks import Target, cheapest_backward, cheapest_forward, divide, fit, target
from posjax.attention.tpu.call import LN2, LOG2E, Inputs, KernelConfig, Tiling
from posjax.attention.tpu.forward import forward
from posjax.attention.tpu.schedule import lists
from posjax.attention.tpu.terms import LANES, Pattern, dissect, mask_refusal
from posjax.masks import traced_sizes
from posjax.positions import Range


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
    on = target() if on is None else on
    queries, padded = x.q.shape[3], _padded(x, blocks, on)
    config, inputs = _prepared(*padded, on.wide if bounded is None else bounded, on, interpret)
    if given is None:
        out, lse = attend(config, inputs)
    else:
        more = inputs.q.shape[3] - queries
        # An infinite log-sum-exp gives the queries that padding adds weights of 0.
        lse = lengthen(given[1] * LOG2E, more, axis=3, constant_values=jnp.inf)
        out, lse = _attend_part(config, inputs, _flat(lengthen(given[0], more, axis=3)), _flat(lse))
    split = (x.k.shape[1], -1)
    out = out.reshape(out.shape[0], *split, *out.shape[2:])[..., :queries, :]
    return out, lse.reshape(lse.shape[0], *split, lse.shape[-1])[..., :queries] / LOG2E


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
    if (form := form_of(x)) is None:
        return f"{type(x.bias).__name__} is no number for each key and no function of distance alone; use 'blockwise'"
    return form.refusal(x)


def needs_ranges(x: Operands) -> bool:
    """Whether the kernels take the bias of a call only where positions are ranges."""
    return form_of(x) is ByDistance


def _padded(x: Operands, blocks: tuple[Blocks, Blocks] | None, on: Target) -> tuple[Operands, tuple[Blocks, Blocks]]:
    """The operands of whole blocks, and the blocks of the forward and of the backward kernel."""
    of_forward = fit(blocks[0], x.q.shape[3], x.k.shape[2]) if blocks else cheapest_forward(on, x)
    x = pad(x, of_forward.q, of_forward.k)
    of_backward = divide(blocks[1], x.q.shape[3], x.k.shape[2]) if blocks else cheapest_backward(on, x)
    return x, (of_forward, of_backward)


def _prepared(
    x: Operands, blocks: tuple[Blocks, Blocks], bounded: bool, on: Target, interpret
) -> tuple[KernelConfig, Inputs]:
    """What is static in a call, and its arrays."""
    ranged = isinstance(x.q_positions, Range), isinstance(x.kv_positions, Range)
    starts = [p.start if isinstance(p, Range) else 0 for p in (x.q_positions, x.kv_positions)]
    ahead = starts[0] - starts[1] if all(ranged) else 0
    spare = on.wide and x.q.dtype == jnp.bfloat16 and x.q.shape[-1] == LANES
    bias = form_of(x).of(x, spare, blocks[1].q + blocks[1].k)
    of_queries, of_keys = (plan(x, each, constant_from=bias.constant_from, ahead=ahead) for each in blocks)
    of_bias = bias.numbers(x, ahead)
    most = bias.most(x, of_bias) if bounded else None
    pattern, numbers = _pattern(x)
    config = KernelConfig(
        tilings=(
            Tiling(blocks[0], of_queries.kinds, x.q.shape[3] // blocks[0].q),
            Tiling(blocks[1], of_keys.kinds, x.k.shape[2] // blocks[1].k),
        ),
        pattern=pattern,
        ranged=ranged,
        bias=bias,
        softcap=None if x.softcap is None else x.softcap * LOG2E,
        bounded=most is not None,
        spare=spare,
        vmem=on.vmem,
        interpret=interpret,
    )
    inputs = _inputs(x, starts, (lists(of_queries), lists(of_keys.transposed)), numbers, of_bias)
    return config, inputs if most is None else inputs._replace(bound=_bound(x, config, inputs, most))


def _inputs(x: Operands, starts: list, visits: tuple, numbers: tuple, of_bias: dict) -> Inputs:
    """The arrays of a call, but for a bound."""
    q = jnp.stack([_flat(q) for q, _ in x.pairs], axis=2)
    k = jnp.stack([k for _, k in x.pairs], axis=2)
    starts = jnp.stack([jnp.asarray(start, jnp.int32) for start in starts])
    return Inputs(q, k, x.v, starts, visits, numbers, of_bias, None)


def _pattern(x: Operands) -> tuple[Pattern, tuple]:
    """Mask and branches without their arrays, and the numbers of the queries and of the keys, positions first."""
    formula, *numbers = dissect(x.mask)
    formulas = []
    for branch in x.far:
        where, *more = dissect(branch.where)
        formulas.append(where)
        numbers = [a + b for a, b in zip(numbers, more, strict=True)]
    positions = ([] if isinstance(p, Range) else [p] for p in (x.q_positions, x.kv_positions))
    rows = tuple(tuple(map(_row, own + found)) for own, found in zip(positions, numbers, strict=True))
    return Pattern(formula, tuple(formulas)), rows


def _flat(q):
    """Query heads ``[batch, kv heads, group, ...]`` on one axis."""
    return q.reshape(q.shape[0], -1, *q.shape[3:])


def _row(numbers):
    """``[tokens]`` or ``[batch, tokens]`` as int32 ``[batch or 1, 1, 1, tokens]``."""
    numbers = jnp.asarray(numbers, jnp.int32)
    return numbers.reshape(-1, 1, 1, numbers.shape[-1])


def _bound(x: Operands, config: KernelConfig, inputs: Inputs, most):
    """``|q| max |k|``, by Cauchy-Schwarz, of any pair of features, plus the most that the bias adds, for every query.

    What the bias adds to all logits of a query is left out. In place of a running maximum it saves finding one. It may
    be so far above the logits that all weights vanish; then the kernel computes the row again.
    """
    of_pairs = [_lengths(q) * _lengths(k).max(-1)[:, :, None, None] for q, k in x.pairs]
    # A little more, for the roundings of either side.
    scores = _flat(reduce(jnp.maximum, of_pairs) * (1 + 2.0**-10))
    bound = scores + most[:, None] if x.softcap is None else jnp.full_like(scores, config.softcap)
    return jax.lax.stop_gradient(_with_own(config, inputs, bound, 0, -1))[:, :, None]


def _lengths(x):
    return jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum(-1))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(config: KernelConfig, x: Inputs):
    """Output and base-2 log-sum-exp, ``[batch, heads, queries, value size]`` and ``[batch, heads, queries]``."""
    # A copy in a kernel names every index of its source: what ``vmap`` maps over is taken one by one.
    out, lse = sequential_vmap(partial(forward, config))(x)
    return out, _with_own(config, x, lse[:, :, 0], 0, 1)


def _with_own(config: KernelConfig, x: Inputs, numbers, side: int, sign: int):
    """Numbers of the queries with, or without, what the bias adds to all logits of each."""
    own = config.bias.of_queries(config, x, side)
    return numbers if own is None else numbers + sign * own


@partial(jax.tree_util.register_dataclass, data_fields=["x", "out", "lse"], meta_fields=["of_bias"])
@dataclasses.dataclass(frozen=True)
class _Residuals:
    """What the backward pass needs, and whether anybody wants the gradient of the bias."""

    x: Inputs
    out: jax.Array
    lse: jax.Array
    of_bias: bool


def _attend_forward(config: KernelConfig, x: Inputs):
    (x, _), (_, wanted) = taken_apart(x), taken_apart(x.bias)
    out, lse = named(*attend(config, x))
    return (out, lse), _Residuals(x, out, lse, any(wanted))


def _attend_backward(config: KernelConfig, saved: _Residuals, cotangents):
    x, out, lse = saved.x, saved.out, saved.lse
    d_out, d_lse = map(_instantiated, cotangents)
    # A row that sees nothing is constant: an infinite log-sum-exp gives it weights of 0.
    blind = jnp.isneginf(lse)
    d_lse = jnp.where(blind, 0, d_lse)
    correction = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - d_lse * LOG2E
    lse = jnp.where(blind, jnp.inf, _with_own(config, x, lse, 1, -1))
    per_query = PerQuery(d_out, lse[:, :, None], correction[:, :, None])
    found = sequential_vmap(partial(backward, config, of_bias=saved.of_bias))(x, per_query)
    zeros = jax.tree.map(no_gradient, x)
    bias = zeros.bias | (config.bias.gradients(x, found.bias, d_lse) if saved.of_bias else {})
    return (zeros._replace(q=(found.q * LN2).astype(x.q.dtype), k=found.k, v=found.v, bias=bias),)


def _instantiated(cotangent):
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_part(config: KernelConfig, x: Inputs, out, lse):
    """``out`` and ``lse`` of whole rows as they are, with the gradients of ``x``, which holds some of their keys."""
    return out, lse


def _attend_part_forward(config: KernelConfig, *arguments):
    ((x, out, lse), _), (_, wanted) = taken_apart(arguments), taken_apart(arguments[0].bias)
    return (out, lse), _Residuals(x, out, lse, any(wanted))


def _attend_part_backward(config: KernelConfig, saved: _Residuals, cotangents):
    return *_attend_backward(config, saved, cotangents), *map(no_gradient, (saved.out, saved.lse))


_attend_part.defvjp(_attend_part_forward, _attend_part_backward, symbolic_zeros=True)
