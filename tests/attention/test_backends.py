"""Every backend over one grid: forward and every gradient, in float64, against NumPy and against each other."""

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
    RATES,
    SIZE,
    VALUE_SIZE,
    WIDE,
    Beyond,
    Case,
    call,
    inputs,
    results,
    use_tiles,
)

from posjax import masks
from posjax.attention import attention
from posjax.attention.platform import BACKENDS
from posjax.bias import ALiBi
from posjax.masks import Causal, FirstTokens, Segments, Window
from posjax.positions import Range, as_array

cases = pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.wide) for case in WIDE)], ids=lambda case: case.name
)


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


def test_empty_tiles_are_not_visited(monkeypatch):
    """Tiles that the mask hides hold NaN. No result does, forward or backward: the tiles were not multiplied."""
    case = Case("window", queries=64, keys=64, mask=Causal() & Window(8), blocks=(8, 8))
    use_tiles(monkeypatch, case)
    values = inputs(case)
    sees_none = slice(24, None)
    for name in "kv":
        values[name][:, :16] = np.nan

    @jax.jit
    def both_ways(values):
        out, transpose = jax.vjp(lambda x: call(case, x, "blockwise")[0][:, sees_none], values)
        return out, *transpose(jnp.ones_like(out))

    out, found = jax.device_get(both_ways(values))
    chex.assert_tree_all_finite([out, found["q"][:, sees_none], found["k"][:, 32:], found["v"][:, 32:]])


def test_tiles_on_one_side_of_a_boundary_compute_one_pair_of_features(monkeypatch):
    """NaN in remapped keys of near pairs, and in near keys of tiles with only remapped pairs, reaches no result."""
    case = Case("remap", queries=64, keys=64, remap=(Beyond(32),), mask=Causal(), blocks=(8, 8))
    use_tiles(monkeypatch, case)
    values = inputs(case)

    @jax.jit
    def both_ways(values):
        out, transpose = jax.vjp(lambda x: call(case, x, "blockwise")[0], values)
        return out, transpose(jnp.ones_like(out))

    near, remapped = values["k"].copy(), values["k0"].copy()
    near[:, :8] = remapped[:, 40:] = np.nan
    chex.assert_tree_all_finite(both_ways(values | {"k0": remapped}))
    out, _ = jax.device_get(both_ways(values | {"k": near}))
    chex.assert_tree_all_finite(out[:, 40:])
    assert np.isnan(out[:, :32]).any(), "there the near keys are needed"


LONG = np.sort(np.random.default_rng(0).integers(0, 4, (BATCH, 600))).astype(np.int32)


def test_default_tiles_beyond_one_tile():
    mask = Causal() & Segments(LONG) & (Window(200) | FirstTokens(4))
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


@pytest.mark.parametrize("start", [2**31 - 13, jnp.int32(2**31 - 13)], ids=["static", "array"])
def test_the_last_positions_of_int32_do_not_overflow(start, monkeypatch):
    """The last tile has padding, whose positions would be beyond them."""
    end = Range(start, 13)
    case = Case("end", bias=ALiBi(), mask=Causal() & Window(5), q_positions=end, kv_positions=end)
    use_tiles(monkeypatch, case)
    got, want = jax.jit(lambda values: [call(case, values, name) for name in ("blockwise", "dense")])(inputs(case))
    chex.assert_trees_all_close(got, want, atol=1e-12)


def test_scale_per_query_and_head():
    values = inputs(Case("scale"))
    q, k, v = values["q"], values["k"], values["v"]
    scale = np.random.default_rng(0).uniform(size=(13, 4))
    got, plain = jax.jit(lambda *x: [attention(*x, scale=s) for s in (scale, 0.3)])(q, k, v)
    want, _ = oracles.attention(q * scale[..., None], k, v, scale=1.0)
    np.testing.assert_allclose(got, want, atol=1e-12)
    np.testing.assert_allclose(plain, oracles.attention(q, k, v, scale=0.3)[0], atol=1e-12)
