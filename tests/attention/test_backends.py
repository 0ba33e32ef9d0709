"""Every backend over one grid: forward and every gradient, in float64, against NumPy and against each other."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from attention.grid import (
    BATCH,
    CASES,
    IDS,
    RATES,
    SIZE,
    VALUE_SIZE,
    WIDE,
    Beyond,
    Case,
    call,
    called,
    gradients,
    inputs,
    outputs_and_gradients,
    results,
    use_tiles,
    weights_of,
)
from attention.tiles import in_tiles

import posjax
from posjax import masks
from posjax._shapes import grouped
from posjax.attention import attention
from posjax.attention.api import BACKENDS
from posjax.attention.operands import Operands, RemappedPair
from posjax.bias import T5, ALiBi
from posjax.masks import Causal, FirstTokens, Segments, Window
from posjax.positions import Range, as_array

cases = pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.wide) for case in WIDE)], ids=lambda case: case.name
)
backends = pytest.mark.parametrize("backend", BACKENDS)


def wide(*values):
    return pytest.param(*values, marks=pytest.mark.wide)


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def pairs_of(case: Case, values: dict, placed: dict) -> tuple:
    """The values of bias, mask and branches for every pair of tokens."""
    at = placed["q_positions"], placed["kv_positions"]
    tokens = [p if p.ndim == 1 else p[:, None] for p in map(as_array, at)]
    bias = case.bias and case.bias.bind(values.get("bias"), num_heads=case.heads)
    where = [masks.materialise(mask, *at) for mask in placed["remap"]]
    return (
        None if bias is None else bias.values(*tokens),
        None if placed["mask"] is None else masks.materialise(placed["mask"], *at),
        [w if w.ndim == 4 else w[None, None] for w in where],
    )


def placed(case: Case) -> dict:
    """Masks and positions."""
    q_positions = Range(0, case.queries) if case.q_positions is None else case.q_positions
    kv_positions = Range(0, case.keys) if case.kv_positions is None else case.kv_positions
    return {"q_positions": q_positions, "kv_positions": kv_positions, "mask": case.mask, "remap": case.remap}


def oracle(case: Case, values: dict, pairs: tuple | None = None):
    """Output and log-sum-exp, and the keys that no query sees, ``[batch, keys]``."""
    at = placed(case)
    bias, allowed, where = jax.device_get(pairs or jax.jit(partial(pairs_of, case))(values, at))
    out, lse = oracles.attention(
        values["q"],
        values["k"],
        values["v"],
        bias=bias,
        allowed=allowed,
        softcap=case.softcap,
        sinks=values.get("sinks"),
        remap=[(values[f"q{n}"], values[f"k{n}"], w) for n, w in enumerate(where)],
        decay=decays(at["q_positions"], at["kv_positions"]) if case.decay else None,
    )
    seen = np.broadcast_to(True if allowed is None else allowed, (BATCH, case.heads, case.queries, case.keys))
    return out, lse, ~seen.any((1, 2))


def decays(q_positions, kv_positions):
    """``exp(-a (i - j))`` as ``[batch or 1, 1, q, k, size]``; packed rows have one for each row of the batch."""
    q, k = (
        np.asarray(p) if not isinstance(p, Range) else p.start + np.arange(p.length)
        for p in (q_positions, kv_positions)
    )
    distance = q[..., :, None] - k[..., None, :]
    return np.exp(-RATES * distance[..., None]).reshape(-1, 1, *distance.shape[-2:], SIZE)


@cases
def test_every_backend_is_the_oracle_forward_and_backward(case, monkeypatch):
    """Rows that see nothing give zero. They have zero gradients, and so have keys that no query sees."""
    use_tiles(monkeypatch, case)
    values = inputs(case)

    @jax.jit
    def everything(values, at):
        return {name: results(case, name, values) for name in BACKENDS}, pairs_of(case, values, at)

    run, pairs = jax.device_get(everything(values, placed(case)))
    want_out, want_lse, unseen = oracle(case, values, pairs)
    blind = np.isneginf(want_lse)
    found = {}
    for backend in BACKENDS:
        out, lse, found[backend] = run[backend]
        chex.assert_shape(out, (BATCH, case.queries, case.heads, VALUE_SIZE))
        chex.assert_shape(lse, (BATCH, case.queries, case.heads))
        chex.assert_type([out, lse], np.float64)
        np.testing.assert_allclose(out, want_out, atol=1e-12)
        np.testing.assert_allclose(lse, want_lse, atol=1e-12)
        for nothing in (out[blind], found[backend]["q"][blind], found[backend]["k"][unseen]):
            np.testing.assert_array_equal(nothing, 0)
    want = found.pop("dense")
    chex.assert_tree_all_finite(want)
    assert all(np.abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(want)), "a gradient that is zero shows nothing"
    for got in found.values():
        chex.assert_trees_all_close(got, want, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("name", ["packed", "soft cap in chunks", wide("symmetric alibi")])
def test_dense_gradients_are_finite_differences_of_the_oracle(name):
    case = called(name)
    values = inputs(case)
    gradient = jax.device_get(gradients(case, "dense", values))

    def numpy_loss(values):
        out, lse, _ = oracle(case, values)
        return (out * weights_of(out.shape)).sum() + np.sin(lse[np.isfinite(lse)]).sum()

    rng = np.random.default_rng(5)
    direction = jax.tree.map(lambda x: rng.standard_normal(x.shape), values)
    step = 1e-5
    ahead, behind = (jax.tree.map(lambda x, d, s=s: x + s * d, values, direction) for s in (step, -step))
    slope = (numpy_loss(ahead) - numpy_loss(behind)) / (2 * step)
    inner = sum(jax.tree.leaves(jax.tree.map(lambda g, d: (g * d).sum(), gradient, direction)))
    np.testing.assert_allclose(inner, slope, rtol=1e-6)


@pytest.mark.wide
@backends
def test_rows_that_see_nothing_give_zero_and_zero_gradients(backend, monkeypatch):
    case = dataclasses.replace(called("packed"), sinks=False)
    use_tiles(monkeypatch, case)
    values = inputs(case)
    out, lse, gradient = jax.device_get(outputs_and_gradients(case, backend, values))
    blind = IDS < 0
    assert blind.any()
    np.testing.assert_array_equal(out[blind], 0)
    assert np.isneginf(lse[blind]).all()
    chex.assert_tree_all_finite(gradient)
    np.testing.assert_array_equal(gradient["q"][blind], 0)
    np.testing.assert_array_equal(gradient["k"][blind], 0)


@backends
@pytest.mark.parametrize("dtype", [wide(jnp.float32), jnp.bfloat16])
def test_lower_precisions(backend, dtype, monkeypatch):
    case = called("alibi")
    use_tiles(monkeypatch, case)
    values = jax.tree.map(lambda x: x.astype(dtype), inputs(case))
    out, lse, gradient = jax.device_get(outputs_and_gradients(case, backend, values))
    chex.assert_type([out, lse], [dtype, jnp.float32])
    want, *_ = oracle(case, jax.tree.map(lambda x: x.astype(np.float64), values))
    np.testing.assert_allclose(out.astype(np.float64), want, atol=2e-6 if dtype == jnp.float32 else 2e-2)
    chex.assert_trees_all_equal_dtypes(gradient, values)


def test_empty_tiles_are_not_visited():
    """Tiles that the mask hides hold NaN. No result does, forward or backward: the tiles were not multiplied."""
    values = inputs(Case("window", queries=64, keys=64))
    poison = {name: values[name].copy() for name in "kv"}
    for array in poison.values():
        array[:, :16] = np.nan
    sees_none = slice(24, None)

    def run(q, k, v):
        operands = Operands(
            grouped(q, 2),
            jnp.moveaxis(k, 1, 2),
            jnp.moveaxis(v, 1, 2),
            None,
            Causal() & Window(8),
            Range(0, 64),
            Range(0, 64),
        )
        return in_tiles(operands, 8, 8)[0][..., sees_none, :]

    @jax.jit
    def both_ways(*arrays):
        out, transpose = jax.vjp(run, *arrays)
        return out, *transpose(jnp.ones_like(out))

    out, d_q, d_k, d_v = jax.device_get(both_ways(values["q"], poison["k"], poison["v"]))
    chex.assert_tree_all_finite([out, d_q[:, sees_none], d_k[:, 32:], d_v[:, 32:]])


def test_tiles_on_one_side_of_a_boundary_compute_one_pair_of_features():
    """NaN in remapped keys of near pairs, and in near keys of tiles with only remapped pairs, reaches no result."""
    values = inputs(Case("remap", queries=64, keys=64, remap=(Beyond(32),)))
    q, v = values["q"], values["v"]
    near_keys, far_queries = slice(40, None), slice(40, None)

    def run(q, k, v, q_remapped, k_remapped):
        remap = (RemappedPair(grouped(q_remapped, 2), jnp.moveaxis(k_remapped, 1, 2), Beyond(32)),)
        pair = grouped(q, 2), jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2)
        return in_tiles(Operands(*pair, None, Causal(), Range(0, 64), Range(0, 64), remap), 8, 8)[0]

    @jax.jit
    def both_ways(*arrays):
        out, transpose = jax.vjp(run, *arrays)
        return out, transpose(jnp.ones_like(out))

    poisoned, near = values["k0"].copy(), values["k"].copy()
    poisoned[:, near_keys] = near[:, :8] = np.nan
    chex.assert_tree_all_finite(both_ways(q, values["k"], v, values["q0"], poisoned))
    out, _ = jax.device_get(both_ways(q, near, v, values["q0"], values["k0"]))
    chex.assert_tree_all_finite(out[..., far_queries, :])
    assert np.isnan(out[..., :32, :]).any(), "there the near keys are needed"


def test_by_default_attention_takes_memory_linear_in_the_length():
    """The compiler's own plan for forward and backward at 4096 tokens: far below one n x n array of 64 MiB."""
    shapes = [jax.ShapeDtypeStruct((1, 4096, 1, 8), jnp.float32)] * 3

    def run(q, k, v):
        return attention(q, k, v, bias=ALiBi(), mask=Causal()).sum()

    plan = jax.jit(jax.grad(run, (0, 1, 2))).lower(*shapes).compile().memory_analysis()
    assert plan.temp_size_in_bytes < 16 * 2**20


LONG = np.sort(np.random.default_rng(0).integers(0, 4, (BATCH, 600))).astype(np.int32)


@pytest.mark.parametrize(
    "mask",
    [
        Causal() & Segments(LONG) & (Window(200) | FirstTokens(4)),
        wide(Causal() & Segments(LONG)),
        wide(Causal() & (Window(200) | FirstTokens(4))),
    ],
    ids=["packed and lambda", "packed", "lambda"],
)
def test_default_tiles_beyond_one_tile(mask):
    values = inputs(Case("long", queries=600, keys=600, heads=2, kv_heads=1), np.float32)

    def run(values, implementation=None):
        return attention(*values, bias=ALiBi(), mask=mask, implementation=implementation)

    arguments = values["q"], values["k"], values["v"]

    @partial(jax.jit, static_argnums=1)
    def both_ways(values, implementation):
        out, transpose = jax.vjp(partial(run, implementation=implementation), values)
        return out, transpose(jnp.ones_like(out))

    (want, slopes), (got, found) = (both_ways(arguments, name) for name in ("dense", None))
    chex.assert_trees_all_close(got, want, atol=1e-5)
    chex.assert_trees_all_close(found, slopes, atol=1e-4)
    assert not np.array_equal(got, want), "the two were computed differently"


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, wide(np.int8), wide(np.uint32)])
def test_positions_of_any_integer_dtype(dtype):
    case = Case("narrow", queries=100, keys=100, bias=ALiBi(symmetric=True), mask=Window(9), blocks=(16, 32))
    where = np.arange(100).astype(dtype)
    case, plain = dataclasses.replace(case, q_positions=where, kv_positions=where), case
    values = inputs(case)

    @jax.jit
    def run(values):
        return call(plain, values, "dense"), [call(case, values, backend) for backend in BACKENDS]

    want, found = run(values)
    for got in found:
        chex.assert_trees_all_close(got, want, atol=1e-12)


@pytest.mark.parametrize("start", [2**31 - 13, jnp.int32(2**31 - 13)], ids=["static", "array"])
def test_the_last_positions_of_int32_do_not_overflow(start, monkeypatch):
    """The last tile has padding, whose positions would be beyond them."""
    end = Range(start, 13)
    case = Case("end", bias=ALiBi(), mask=Causal() & Window(5), q_positions=end, kv_positions=end)
    use_tiles(monkeypatch, case)
    got, want = jax.jit(lambda values: [call(case, values, name) for name in ("blockwise", "dense")])(inputs(case))
    chex.assert_trees_all_close(got, want, atol=1e-12)


def test_gqa_is_repeated_keys():
    values = inputs(Case("gqa", mask=Causal()))
    repeated = values | {name: np.repeat(values[name], 2, axis=2) for name in "kv"}
    run = jax.jit(partial(attention, mask=Causal()))
    got, want = (run(x["q"], x["k"], x["v"]) for x in (values, repeated))
    chex.assert_trees_all_close(got, want, atol=1e-12)


def test_scale_per_query_and_head():
    values = inputs(Case("scale"))
    q, k, v = values["q"], values["k"], values["v"]
    scale = np.random.default_rng(0).uniform(size=(13, 4))
    got, plain = jax.jit(lambda *x: [attention(*x, scale=s) for s in (scale, 0.3)])(q, k, v)
    want, _ = oracles.attention(q * scale[..., None], k, v, scale=1.0)
    np.testing.assert_allclose(got, want, atol=1e-12)
    np.testing.assert_allclose(plain, oracles.attention(q, k, v, scale=0.3)[0], atol=1e-12)


def test_a_sink_is_a_zero_key_and_value_with_its_logit():
    """SoftMax-plus-one: a sink logit of 0 is one more key with logit 0 and value 0."""
    values = inputs(Case("plus one"))
    q, k, v = values["q"], values["k"], values["v"]
    zero = np.zeros_like(k[:, :1])
    more = np.concatenate([k, zero], 1), np.concatenate([v, zero[..., :VALUE_SIZE]], 1)
    got, want = jax.jit(lambda: (attention(q, k, v, sinks=np.zeros(4)), attention(q, *more)))()
    chex.assert_trees_all_close(got, want, atol=1e-12)


def test_agrees_with_jax_nn():
    values = inputs(Case("jax"), np.float32)
    q, k = values["q"], values["k"]
    v = np.pad(values["v"], ((0, 0),) * 3 + ((0, SIZE - VALUE_SIZE),))

    @jax.jit
    def run(*x):
        bias = ALiBi().bind(num_heads=4).values(jnp.arange(13), jnp.arange(13))[None]
        found = [attention(*x, bias=ALiBi(), mask=Causal(), implementation=backend) for backend in BACKENDS]
        return jax.nn.dot_product_attention(*x, bias=bias, is_causal=True), found

    want, found = run(q, k, v)
    for got in found:
        chex.assert_trees_all_close(got, want, atol=1e-6)


def bad(**changes):
    values = {"q": (2, 5, 4, 8), "k": (2, 7, 2, 8), "v": (2, 7, 2, 8)}
    values |= {name: shape for name, shape in changes.items() if name in values}
    options = {name: value for name, value in changes.items() if name not in values}
    return lambda: attention(*(np.zeros(shape, np.float32) for shape in values.values()), **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (bad(q=(5, 4, 8)), r"q must have 4 axes \[batch, length, heads, size\], found shape \(5, 4, 8\)"),
        (bad(k=(3, 7, 2, 8), v=(3, 7, 2, 8)), r"k must have the batch of q, 2"),
        (bad(v=(2, 6, 2, 8)), r"v must have the batch, length and heads of k, \(2, 7, 2\)"),
        (bad(k=(2, 7, 2, 9)), "k must have the head size of q, 8"),
        (bad(k=(2, 7, 3, 8), v=(2, 7, 3, 8)), "multiple of those of k, found 4 and 3"),
        (bad(k=(2, 0, 2, 8), v=(2, 0, 2, 8)), "k must hold at least one token"),
        (bad(mask=True), "mask must be a posjax.masks.Mask or a boolean array, found True"),
        (bad(bias=3.0), "bias must be a posjax bias, the spec of one, or an array, found float"),
        (bad(bias=T5()), "params must hold 'table'"),
        (bad(bias=ALiBi().bind(num_heads=2)), "bias is bound for 2 heads, but q has 4"),
        (bad(softcap="30"), "softcap must be positive, found '30'"),
        (bad(mask=Segments(IDS)), r"Segments q_ids must have shape \(2, 5\), found \(2, 13\)"),
        (bad(mask=Segments(np.zeros((2, 5)), np.zeros((2, 7)))), "Segments q_ids must be integers"),
        (bad(softcap=-1.0), "softcap must be positive, found -1.0"),
        (bad(sinks=np.zeros(2)), r"sinks must have shape \(4,\)"),
        (bad(scale=np.zeros(3)), r"scale must broadcast to \[batch, queries, heads\]"),
        (bad(q_positions=np.arange(7)), r"q_positions must have shape \(5,\) or \(2, 5\), found \(7,\)"),
        (bad(kv_positions=Range(0, 5)), "kv_positions must cover 7 tokens, found a Range of 5"),
        (bad(q_positions=np.zeros(5)), "q_positions must be integers"),
        (bad(implementation="blokwise"), "did you mean 'blockwise'"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_integers_are_refused():
    x = np.zeros((1, 2, 1, 4), np.int32)
    with pytest.raises(ValueError, match="q must be of a floating dtype, found int32"):
        attention(x, x, x)


def test_public_name():
    assert posjax.attention is attention
