"""From a call of attention to the kernels, and from their results back.

A remapped call is computed in parts, one for each pair of features: a part has the mask of the pairs of tokens that its
features score, so its kernel visits only their tiles. The results are merged, and the gradients are added up.
"""

import dataclasses
import operator
from functools import partial, reduce

import jax
import jax.numpy as jnp

from posjax._lowered import no_gradient
from posjax._numbers import rounded_sum
from posjax.attention.call import Call
from posjax.attention.formulas import LN2, LOG2E, bias_form, dissect
from posjax.attention.gpu import mosaic
from posjax.attention.gpu.backward import backward_keys, backward_queries
from posjax.attention.gpu.biases import FORMS, BiasSums
from posjax.attention.gpu.diagonals import diagonals, sums_by_distance
from posjax.attention.gpu.forward import Results, forward
from posjax.attention.gpu.inputs import (
    BLOCK,
    Inputs,
    KernelConfig,
    Options,
    TileSizes,
    Tiling,
    rows_of_numbers,
    tiling,
)
from posjax.attention.gpu.ring import OfQueries
from posjax.attention.logits import flat_heads
from posjax.attention.rows import PerQuery, Rows
from posjax.attention.tiles import Blocks, TilePlan, lengthen, lengthened_rows, pad, plan_tiles
from posjax.masks import Mask
from posjax.positions import Range

_UNIT = 32
"""Sizes of heads are padded to multiples of it."""
_PROCESSORS = 132
"""Of an H100: so many blocks of threads run at once."""
_FEWEST, _MOST_SHARES = 4, 32
"""The fewest blocks of keys of a share, and the most shares."""


def effects_of(interpret) -> frozenset:
    """The side effects of a kernel that is interpreted."""

    def copy(x):
        def body(source, target, _):
            target[...] = source[...]

        out = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
        return mosaic.run(body, x, out_type=out, scratch=None, grid={"all": 1}, name="copy", interpret=interpret)

    return frozenset(jax.make_jaxpr(copy)(jax.ShapeDtypeStruct((128,), jnp.float32)).effects)


def forward_rows(x: Call, options: Options, so_far: Rows | None = None) -> Rows:
    """The results for each query; merged into ``so_far``, those over other keys, in float32."""
    parts = _parts(x)
    shares = _shares(x)
    wide = len(parts) > 1 or shares > 1 or so_far is not None
    prepared = [_prepared(part, options) for part in parts]
    results = []
    for part, each in zip(parts, prepared, strict=True):
        results += _forward(part, *each, shares, wide)
    constant = _constant(x, *prepared[0])
    if so_far is not None:
        top, rest = _plus(so_far.subtracted, so_far.rest * LOG2E, -constant)
        results.append(Results(so_far.out, top, jnp.where(jnp.isneginf(top), 0, jnp.exp2(rest))))
    out, top, total = _merged(results)
    blind = total == 0
    lse, rest = rounded_sum(top, jnp.log2(jnp.where(blind, 1, total)))
    subtracted, rest = _plus(jnp.where(blind, -jnp.inf, lse), rest, constant)
    out = out if so_far is not None else out.astype(x.v.dtype)
    return Rows(out, subtracted * LN2, rest * LN2, subtracted)


def _constant(x: Call, inputs: Inputs, config: KernelConfig):
    """What the bias adds to all logits of each query, beside what the kernels add; in the layout of ``Rows.lse``."""
    constant = config.bias.of_queries(config, inputs)
    if constant is None:
        return jnp.zeros((), jnp.float32)
    constant = constant[..., : x.q.shape[3]]
    return constant.reshape(constant.shape[0], *x.q.shape[1:3], -1)


def _plus(lse, rest, constant) -> tuple:
    """A log-sum-exp in two numbers, as in ``Rows``, plus a constant of each query."""
    total, lost = rounded_sum(lse, constant)
    return total, jnp.where(jnp.isneginf(lse), 0, rest + lost)


def gradients(x: Call, options: Options, per_query: PerQuery, *, of_bias: bool, wide: bool = False) -> Call:
    """The cotangent of a call; ``wide``: that of queries, keys and values in float32."""
    # The values have a gradient from every part: these are added before they are rounded.
    several = len(x.pairs) > 1
    parts = (_gradients(x, n, options, per_query, of_bias, wide or several) for n in range(len(x.pairs)))
    sums = reduce(partial(jax.tree.map, _sum), parts)
    return jax.tree.map(_rounded, sums, x) if several and not wide else sums


def _rounded(gradient, leaf):
    return gradient if gradient.dtype == jax.dtypes.float0 else gradient.astype(leaf.dtype)


def _sum(a, b):
    return a if a.dtype == jax.dtypes.float0 else a + b


def _parts(x: Call) -> list[Call]:
    """For each pair of features the call with the pairs of tokens that these features score."""
    if not x.remap:
        return [x]
    remapped = reduce(operator.or_, (pair.mask for pair in x.remap))
    first = dataclasses.replace(x, mask=_both(x.mask, ~remapped), remap=())
    others = (dataclasses.replace(first, q=pair.q, k=pair.k, mask=_both(x.mask, pair.mask)) for pair in x.remap)
    return [first, *others]


def _both(mask: Mask | None, other: Mask) -> Mask:
    return other if mask is None else mask & other


def _merged(results: list[Results]) -> Results:
    """The results over several sets of keys."""
    if len(results) == 1:
        return results[0]
    # A total of 0 has any maximum.
    top = reduce(jnp.maximum, (jnp.where(each.total > 0, each.top, -jnp.inf) for each in results))
    top = jnp.where(jnp.isneginf(top), 0, top)
    weights = [jnp.where(each.total > 0, jnp.exp2(each.top - top) * each.total, 0) for each in results]
    total = sum(weights)
    out = sum(each.out * weight[..., None] for each, weight in zip(results, weights, strict=True))
    return Results(out / jnp.where(total == 0, 1, total)[..., None], top, total)


def _shares(x: Call) -> int:
    """In how many shares the keys of each head are computed, so that a few queries occupy the whole GPU."""
    batch, kv_heads, group, queries, _ = x.q.shape
    if queries > BLOCK:
        return 1
    at_once = _PROCESSORS // (batch * kv_heads * group)
    return max(1, min(at_once, x.k.shape[2] // (_FEWEST * BLOCK), _MOST_SHARES))


def _forward(x: Call, inputs: Inputs, config: KernelConfig, shares: int, wide: bool) -> list[Results]:
    """The results of every share of the keys of a part, in the layouts of ``Rows``."""
    tiles = _tiling(x, config, Blocks(BLOCK, config.sizes.forward))
    out, *statistics = forward(config, inputs, tiles, shares=shares, wide=wide)
    out = jnp.moveaxis(out, 1, 2)[..., : x.q.shape[3], : x.v.shape[-1]]
    statistics = (each[..., : x.q.shape[3]] for each in statistics)
    batch, *heads = x.q.shape[:3]
    arrays = [each.reshape(shares, batch, *heads, *each.shape[2:]) for each in (out, *statistics)]
    return [Results(*(each[n] for each in arrays)) for n in range(shares)]


def _gradients(x: Call, part: int, options: Options, per_query: PerQuery, of_bias: bool, wide: bool) -> Call:
    """The cotangent of a call from one of its parts."""
    zeros = jax.tree.map(no_gradient, x)
    x = _parts(x)[part]
    inputs, config = _prepared(x, options)
    per_query = per_query._replace(lse=per_query.lse - _constant(x, inputs, config))
    d_out, lse, correction, d_lse = lengthened_rows(per_query, inputs.q.shape[1])
    d_out = _by_tokens(flat_heads(d_out)).astype(x.v.dtype)
    rows = OfQueries(d_out, jnp.stack([flat_heads(lse), flat_heads(correction)], axis=2))
    by_queries = _tiling(x, config, Blocks(BLOCK, config.sizes.queries))
    by_keys = _tiling(x, config, Blocks(config.sizes.keys, BLOCK), by_keys=True)
    dq, of_queries, of_pairs = backward_queries(config, inputs, rows, by_queries, wide=wide, of_bias=of_bias)
    transposed = config.bias.by_keys(inputs)
    dk, dv, of_keys = backward_keys(config, transposed, rows, by_keys, wide=wide, of_bias=of_bias)
    q, k, v = (_like(*pair) for pair in ((dq, x.q), (dk, x.k), (dv, x.v)))
    bias = zeros.bias
    if of_bias:
        of_distances = _of_distances(x, inputs, config, rows) if config.bias.by_distance else None
        # The gradient of the log-sum-exp is that of all parts together, so it counts once.
        of_pairs = None if of_pairs is None else _visited(x, config, of_pairs)
        sums = BiasSums(of_queries, of_keys, flat_heads(d_lse) * (part == 0), of_pairs, of_distances)
        bias = _of_bias(x, config, config.bias.gradients(inputs, sums))
    if part == 0:
        return dataclasses.replace(zeros, q=q, k=k, v=v, bias=bias)
    remap = list(zeros.remap)
    remap[part - 1] = dataclasses.replace(remap[part - 1], q=q, k=k)
    return dataclasses.replace(zeros, v=v, bias=bias, remap=tuple(remap))


def _like(gradient, x):
    """A gradient ``[batch, tokens, heads, size]``, without padding and in the layout of ``x``."""
    tokens, size = x.shape[-2:]
    return jnp.moveaxis(gradient[:, :tokens, :, :size], 1, 2).reshape(x.shape)


def _of_bias(x: Call, config: KernelConfig, gradients: dict):
    """The cotangent of a bias from that of its numbers."""

    def numbers(bias):
        return config.bias.numbers(_padded(dataclasses.replace(x, bias=bias)), _ahead(x))

    return jax.vjp(numbers, x.bias)[1](gradients)[0]


def _visited(x: Call, config: KernelConfig, of_pairs):
    """Numbers of pairs, 0 in the tiles that the kernel for the queries does not visit."""
    blocks = Blocks(BLOCK, config.sizes.queries)
    tiles = jnp.asarray(_plan(x, config, blocks).grid)[:, None]
    return jnp.where(tiles.repeat(blocks.q, -2).repeat(blocks.k, -1) > 0, of_pairs, 0)


def _of_distances(x: Call, inputs: Inputs, config: KernelConfig, rows: OfQueries) -> jax.Array:
    blocks = Blocks(BLOCK, config.sizes.queries)
    along = diagonals(_plan(x, config, blocks), blocks, config.bias.constant_from, _ahead(x))
    return sums_by_distance(config, inputs, rows, along)


def _padded(x: Call) -> Call:
    """The call with whole blocks of tokens."""
    return pad(x, BLOCK, BLOCK)


def _tiling(x: Call, config: KernelConfig, blocks: Blocks, by_keys: bool = False) -> Tiling:
    """The tiles of a kernel whose rows are blocks of queries, or of keys."""
    plan = _plan(x, config, blocks)
    return tiling(blocks, plan.transposed if by_keys else plan)


def _plan(x: Call, config: KernelConfig, blocks: Blocks) -> TilePlan:
    return plan_tiles(_padded(x), blocks, constant_from=config.bias.constant_from, ahead=_ahead(x))


def _ahead(x: Call):
    """The distance of the first query from the first key, if positions are ranges."""
    places = x.q_positions, x.kv_positions
    return places[0].start - places[1].start if all(isinstance(each, Range) for each in places) else 0


def _prepared(x: Call, options: Options) -> tuple[Inputs, KernelConfig]:
    """The arrays of a call with one pair of features and a positive number as its scale, and its static part."""
    # Ranges that padding leads out of int32 become arrays below.
    ahead = _ahead(x)
    x = _padded(x)
    formula, *numbers = dissect(x.mask)
    places = x.q_positions, x.kv_positions
    ranged = tuple(isinstance(each, Range) for each in places)
    starts = jnp.stack([jnp.asarray(each.start if isinstance(each, Range) else 0, jnp.int32) for each in places])
    positions = ([] if isinstance(each, Range) else [each] for each in places)
    bias = FORMS[bias_form(x)].of(x)
    config = KernelConfig(
        group=x.q.shape[2],
        formula=formula,
        ranged=ranged,
        bias=bias,
        softcap=None if x.softcap is None else x.softcap * LOG2E,
        factor=x.scale * LOG2E,
        sizes=options.sizes or TileSizes.of(max(x.q.shape[-1], x.v.shape[-1])),
        interpret=options.interpret,
    )
    inputs = Inputs(
        *(_by_tokens(array) for array in (flat_heads(x.q), x.k, x.v)),
        starts=starts,
        numbers=tuple(rows_of_numbers(p + n) for p, n in zip(positions, numbers, strict=True)),
        bias=bias.numbers(x, ahead),
    )
    return inputs, config


def _by_tokens(x):
    """``[batch, heads, tokens, size]`` as ``[batch, tokens, heads, size]``, the size padded with zeros."""
    return lengthen(jnp.moveaxis(x, 1, 2), -x.shape[-1] % _UNIT, axis=-1)
