"""Attention over parts of the keys: merged outputs and summed gradients equal those over all keys.

The reference is ``dense`` with autodiff.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.tiles import of_tiles
from jax.experimental.pallas import tpu as pltpu

from posjax.attention.call import Call, RemappedPair
from posjax.attention.formulas import LOG2E
from posjax.attention.gpu.backend import GPU, Options
from posjax.attention.platform import BACKENDS as EVERYWHERE
from posjax.attention.rows import Rows
from posjax.attention.tiles import Blocks
from posjax.attention.tpu import entry
from posjax.attention.tpu.backend import TPU
from posjax.attention.tpu.blocks import TARGETS
from posjax.bias import FoX, LinearBias
from posjax.masks import Beyond, Causal, Segments
from posjax.positions import Range

TOKENS, KV_HEADS, GROUP = 100, 1, 2
HALF = TOKENS // 2
SCALE = 0.3


def on_tpu(chip: str, bounded: bool) -> TPU:
    """The kernels in interpret mode, where memory that was never written holds NaN."""
    interpret = pltpu.InterpretParams(uninitialized_memory="nan")
    return TPU(entry.Options(1.0, (Blocks(128, 128, 128),) * 2, bounded, TARGETS[chip], interpret))


def on_gpu() -> GPU:
    """The kernels for GPUs in their interpreter."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return GPU(Options(plgpu.InterpretGPUParams()))


NEEDS_NEW_JAX = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernels need a newer jax")
BACKENDS = {
    "dense": EVERYWHERE["dense"],
    "blockwise": of_tiles(32, 48),
    "tpu": on_tpu("TPU v5 lite", False),
    "tpu with a bound": on_tpu("TPU v6 lite", True),
}
APART, BESIDE = 64, 128
"""Sizes of heads that lie one after the other in a kernel for TPUs, and of heads that lie side by side."""
# Two documents and padding, whose rows see nothing.
IDS = np.where(np.arange(TOKENS) > 90, -1, np.arange(TOKENS) // 60).astype(np.int32)[None]


def values(size: int, dtype=np.float32) -> dict:
    """Queries, keys, values, parameters of biases, and cotangents."""
    rng = np.random.default_rng(0)
    of_queries = (1, KV_HEADS, GROUP, TOKENS)
    shapes = {"q": (*of_queries, size), "k": (1, KV_HEADS, TOKENS, size), "v": (1, KV_HEADS, TOKENS, size)}
    shapes |= {"d_out": (*of_queries, size), "d_lse": of_queries, "q_remapped": shapes["q"], "k_remapped": shapes["k"]}
    made = {name: rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes.items()}
    gates = np.cumsum(-0.05 * rng.uniform(size=(1, KV_HEADS * GROUP, TOKENS)), -1).astype(np.float32)
    return made | {"slopes": np.array([0.5, 0.01], np.float32), "q_gates": gates, "kv_gates": gates}


LEARNED = {"alibi": ("slopes",), "fox": ("q_gates", "kv_gates"), "remap": ("q_remapped", "k_remapped")}
OF_KEYS = ("k", "v", "kv_gates", "k_remapped")


def call(floats: dict, ids, start) -> Call:
    """All queries over the keys from ``start`` on, whose documents are ``ids``."""
    bias, remap = None, ()
    if "slopes" in floats:
        bias = LinearBias(floats["slopes"])
    elif "q_gates" in floats:
        gates = {name: floats[name] for name in LEARNED["fox"]}
        bias = FoX().bind(num_heads=KV_HEADS * GROUP, **gates)
    else:
        remap = (RemappedPair(floats["q_remapped"], floats["k_remapped"], Beyond(40)),)
    at = Range(0, TOKENS), Range(start, ids.shape[1])
    mask = Causal() & Segments(IDS, ids)
    return Call(floats["q"], floats["k"], floats["v"], bias, mask, *at, remap, scale=SCALE)


def halves(floats: dict) -> list[tuple]:
    """The arguments of ``call`` for either half of the keys."""
    cuts = [slice(start, start + HALF) for start in (0, HALF)]
    own = [{n: a[:, :, cut] if n in OF_KEYS else a for n, a in floats.items()} for cut in cuts]
    return [(part, IDS[:, cut], cut.start) for part, cut in zip(own, cuts, strict=True)]


def of_whole_rows(made: dict, names: tuple) -> tuple:
    """Output, log-sum-exp and the gradients of all inputs."""

    def run(floats):
        return EVERYWHERE["dense"].forward(call(floats, IDS, 0))

    floats = {name: jnp.asarray(made[name]) for name in ("q", "k", "v", *names)}

    def rows_and_gradients(floats):
        rows, transpose = jax.vjp(run, floats)
        return rows, transpose(cotangents(made, rows))[0]

    return jax.device_get(jax.jit(rows_and_gradients)(floats))


def cotangents(made: dict, rows: Rows) -> Rows:
    """The gradients of outputs and of every log-sum-exp that is finite."""
    d_lse = jnp.where(jnp.isneginf(rows.lse), 0, made["d_lse"].astype(np.float32))
    return Rows(jnp.asarray(made["d_out"]), d_lse, jnp.zeros_like(d_lse), jnp.zeros_like(d_lse))


@pytest.mark.parametrize(
    ("name", "bias", "size"),
    [
        ("dense", "remap", 8),
        ("blockwise", "fox", 8),
        pytest.param("tpu", "alibi", BESIDE, marks=pytest.mark.wide),
        ("tpu", "fox", APART),
        pytest.param("tpu with a bound", "remap", APART, marks=pytest.mark.wide),
        pytest.param("gpu", "fox", APART, marks=[pytest.mark.wide, NEEDS_NEW_JAX]),
        pytest.param("gpu", "remap", APART, marks=[pytest.mark.wide, NEEDS_NEW_JAX]),
        pytest.param("gpu", "alibi", APART, marks=[pytest.mark.wide, NEEDS_NEW_JAX]),
    ],
)
def test_parts_are_merged_into_whole_rows_and_their_gradients_add_up(name, bias, size):
    """Keys have the gradients of their own part, and everything else has the sum of both.

    Some queries see no key of the first part.
    """
    narrow = name == "gpu"
    made, learned = values(size, jnp.bfloat16 if narrow else np.float32), LEARNED[bias]
    backend = on_gpu() if narrow else BACKENDS[name]
    tolerance = 2e-2 if narrow else 2e-5
    exact = {name: np.asarray(array, np.float32) for name, array in made.items()}
    rows, want = of_whole_rows(exact, learned)
    floats = {name: jnp.asarray(made[name]) for name in ("q", "k", "v", *learned)}

    def run(floats):
        shape = floats["q"].shape
        nothing = jnp.full(shape[:-1], -jnp.inf)
        merged = Rows(jnp.zeros(shape, jnp.float32), nothing, jnp.zeros(shape[:-1]), nothing)
        x = call(floats, IDS, 0)
        per_query = backend.per_query_of(x, in_base_of(backend, rows), cotangents(made, rows))

        def step(so_far, part):
            x, (merged, d_q) = call(*part), so_far
            merged = backend.merge(x, merged)
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), differentiable_leaves(x))
            counted_once = per_query._replace(d_lse=per_query.d_lse * (part[-1] == 0))
            sums = backend.add(x, counted_once, dataclasses.replace(zeros, q=d_q))
            return (merged, sums.q), {"k": sums.k, "v": sums.v} | of_parameters(sums, learned)

        both = jax.tree.map(lambda *parts: jnp.stack(parts), *halves(floats))
        (merged, d_q), parts = jax.lax.scan(step, (merged, jnp.zeros(shape, jnp.float32)), both)
        # Gradients of queries are those of scaled queries.
        summed = {name: parts[name].sum(0) for name in learned if name not in OF_KEYS}
        summed |= {name: SCALE * summed[name] for name in ("q_remapped",) if name in summed}
        joined = {name: jnp.concatenate(parts[name], 2) for name in OF_KEYS if name in floats}
        return merged, joined | summed | {"q": SCALE * d_q}

    merged, got = jax.device_get(jax.jit(run)(floats))
    assert merged.out.dtype == jnp.float32
    for one, other in zip(merged[:2], rows[:2], strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=tolerance)
    assert sorted(got) == sorted(want)
    for key in want:
        size = np.abs(want[key]).max()
        np.testing.assert_allclose(got[key], want[key], atol=tolerance / 2 * size, err_msg=key)


def of_parameters(sums: Call, names: tuple) -> dict:
    """The gradients of the learned parameters."""
    if sums.remap:
        return {"q_remapped": sums.remap[0].q, "k_remapped": sums.remap[0].k}
    return {name: getattr(sums.bias, name) for name in names}


def in_base_of(backend, rows: Rows) -> Rows:
    """The results of the dense backend as the backend has them: kernels have logits in base 2."""
    return rows._replace(subtracted=rows.lse * LOG2E) if isinstance(backend, TPU | GPU) else rows


def differentiable_leaves(x: Call) -> Call:
    """The call, with None for every leaf that has no gradient."""
    x = dataclasses.replace(x, q_positions=None, kv_positions=None, scale=1.0)
    return jax.tree.map(lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else None, x)


def test_a_part_that_sees_nothing_leaves_everything_as_it_was():
    """Also where the bound is so far above the log-sum-exp so far that sums relative to it would underflow."""
    made, backend = values(BESIDE), BACKENDS["tpu with a bound"]
    x = call({name: made[name] for name in ("q", "k", "v", "slopes")}, IDS, 0)
    hidden = dataclasses.replace(x, k=1e6 * x.k, mask=Causal(), kv_positions=Range(TOKENS, TOKENS))
    lse = jnp.asarray(made["d_lse"]) - 200
    rows = in_base_of(backend, Rows(jnp.asarray(made["d_out"]), lse, jnp.zeros_like(lse), lse))
    got = jax.device_get(jax.jit(partial(backend.merge, hidden))(rows))
    for one, other in zip(got[:2], rows[:2], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    exact = [np.float64(each.subtracted) + np.float64(each.rest) * LOG2E for each in (got, rows)]
    np.testing.assert_allclose(*exact, rtol=1e-8)
