"""Window sizes, sink counts and soft caps as traced arrays: layers with different values share one program."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from attention.tiles import of_tiles

import posjax as pj
from posjax import masks
from posjax.attention.api import BACKENDS
from posjax.attention.sharded.choice import Sizes, strategy_refusal
from posjax.masks import Causal, Chunked, FirstTokens, Window

BATCH, LENGTH, HEADS, KV_HEADS, SIZE = 2, 13, 4, 2, 8
backends = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def _float64_and_small_tiles(monkeypatch):
    monkeypatch.setitem(BACKENDS, "blockwise", of_tiles(4, 6))
    with jax.enable_x64(True):
        yield


def projections():
    draw = np.random.default_rng(3)
    return tuple(draw.normal(size=(BATCH, LENGTH, heads, SIZE)) for heads in (HEADS, KV_HEADS, KV_HEADS))


def allowed(mask):
    positions = np.arange(LENGTH)
    return np.asarray(masks.materialise(mask, positions, positions))


@backends
def test_layers_of_a_scan_differ_in_window_sinks_and_chunk(backend):
    _, k, v = projections()
    sizes = [(3, 1, 4), (9, 2, 13)]

    def layer(x, size):
        window, count, chunk = size
        mask = Causal() & (Window(window) | FirstTokens(count)) & Chunked(chunk)
        return x + pj.attention(x, k, v, mask=mask, implementation=backend), None

    def total(x, k_and_v):
        nonlocal k, v
        k, v = k_and_v
        out = jax.lax.scan(layer, x, np.asarray(sizes, np.int32))[0]
        return jnp.sin(out).sum(), out

    def wanted(x):
        for window, count, chunk in sizes:
            mask = Causal() & (Window(window) | FirstTokens(count)) & Chunked(chunk)
            x = x + oracles.attention(x, k, v, allowed=allowed(mask))[0]
        return x

    q, *k_and_v = projections()
    gradient, out = jax.jit(jax.grad(total, has_aux=True))(q, k_and_v)
    k, v = k_and_v
    np.testing.assert_allclose(out, wanted(q), atol=1e-12)
    step = 1e-5 * np.random.default_rng(5).normal(size=q.shape)
    slope = (np.sin(wanted(q + step)) - np.sin(wanted(q - step))).sum() / 2
    np.testing.assert_allclose((np.asarray(gradient) * step).sum(), slope, rtol=1e-6)


@backends
def test_windows_under_vmap(backend):
    q, k, v = projections()
    run = jax.jit(jax.vmap(lambda n: pj.attention(q, k, v, mask=Causal() & Window(n), implementation=backend)))
    for got, n in zip(np.asarray(run(np.asarray([2, 7]))), (2, 7), strict=True):
        np.testing.assert_allclose(
            got, oracles.attention(q, k, v, allowed=allowed(Causal() & Window(n)))[0], atol=1e-12
        )


@pytest.mark.parametrize(
    ("bias", "backend"),
    [
        pytest.param(None, "dense", id="plain-dense"),
        pytest.param(pj.bias.ALiBi(), "blockwise", id="alibi-blockwise"),
        pytest.param(None, "blockwise", id="plain-blockwise", marks=pytest.mark.wide),
        pytest.param(pj.bias.ALiBi(), "dense", id="alibi-dense", marks=pytest.mark.wide),
    ],
)
def test_a_learned_soft_cap_and_its_gradient(bias, backend):
    q, k, v = projections()
    ids = np.asarray([[0] * 5 + [1] * 8, [-1] * 3 + [2] * 10], np.int32)
    mask = Causal() & masks.Segments(ids)
    positions = np.arange(LENGTH)
    array = None if bias is None else pj.alibi_bias(HEADS, positions, positions)

    def loss(softcap):
        out, lse = pj.attention(
            q, k, v, bias=bias, mask=mask, softcap=softcap, implementation=backend, return_residuals=True
        )
        return (out * jnp.cos(out)).sum() + jnp.where(jnp.isneginf(lse), 0, lse).sum()

    def numpy_loss(softcap):
        out, lse = oracles.attention(q, k, v, bias=array, allowed=allowed(mask), softcap=softcap)
        return (out * np.cos(out)).sum() + lse[np.isfinite(lse)].sum()

    found, gradient = jax.jit(jax.value_and_grad(loss))(jnp.float64(0.9))
    np.testing.assert_allclose(found, numpy_loss(0.9), rtol=1e-12)
    np.testing.assert_allclose(gradient, (numpy_loss(0.9 + 1e-5) - numpy_loss(0.9 - 1e-5)) / 2e-5, rtol=1e-7)


def test_a_learned_soft_cap_of_low_precision_adds_up_in_float32(monkeypatch):
    monkeypatch.setitem(BACKENDS, "blockwise", of_tiles(4, 4))
    length = 256
    q, k = (np.full((1, length, 1, SIZE), x, jnp.bfloat16) for x in (0.5, 0.25))

    def loss(softcap):
        return pj.attention(q, k, q, softcap=softcap, implementation="blockwise", return_residuals=True)[1].sum()

    logit = SIZE**0.5 * 0.125 / 0.5
    want = length * (np.tanh(logit) - logit * (1 - np.tanh(logit) ** 2))
    np.testing.assert_allclose(float(jax.jit(jax.grad(loss))(jnp.bfloat16(0.5))), want, rtol=2**-7)


@backends
def test_scalars_may_be_arrays_without_axes(backend):
    start = jnp.int32(4)
    attend = partial(
        pj.attention,
        mask=Causal() & Window(np.array(5)),
        scale=jnp.asarray(0.3),
        softcap=np.array(2.0),
        q_positions=pj.positions.Range(start, LENGTH),
        kv_positions=pj.positions.Range(start, LENGTH),
        implementation=backend,
    )
    want, _ = oracles.attention(*projections(), allowed=allowed(Causal() & Window(5)), scale=0.3, softcap=2.0)
    np.testing.assert_allclose(jax.jit(attend)(*projections()), want, atol=1e-12)
    if backend == "dense":
        np.testing.assert_allclose(attend(*projections()), want, atol=1e-12)


@pytest.mark.parametrize(
    ("softcap", "message"),
    [
        (jnp.float32(-3), "softcap must be positive, found -3.0"),
        (np.array(0.0), "softcap must be positive, found 0.0"),
        (jnp.float32(jnp.inf), "softcap must be finite, found inf"),
        (jnp.ones(4), r"softcap must be a positive number, found an array of .* and shape \(4,\)"),
        ("30", "softcap must be positive, found '30'"),
    ],
)
def test_bad_soft_caps_are_refused(softcap, message):
    with pytest.raises(ValueError, match=message):
        pj.attention(*projections(), softcap=softcap)


def test_where_a_size_must_be_known_the_error_names_it():
    q, k, v = (x.astype(np.float32) for x in projections())
    traced, cap = Causal() & Window(jnp.int32(3)), jnp.float32(2)
    with pytest.raises(ValueError, match="mask: Window size is an array, but caches and plans read"):
        pj.Scheme(mask=traced)
    with jax.enable_x64(False):
        for options, what in (({"mask": traced}, "Window size"), ({"softcap": cap}, "softcap")):
            with pytest.raises(ValueError, match=f"implementation='tpu': {what} is an array, and a kernel"):
                pj.attention(q, k, v, implementation="tpu", **options)
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    with pytest.raises(ValueError, match="for cuDNN Window size must be a Python int"):
        pj.attention(q, k, v, mask=traced, implementation="cudnn")
    sizes = Sizes(batch=1, length=64, heads=4, kv_heads=4, shards=4, window=traced.kept_keys)
    assert "Window(w) with a Python int" in strategy_refusal("neighbour", sizes)


def test_a_long_row_with_a_traced_window_needs_no_kernel():
    """``implementation=None`` beyond a tile: every kernel refuses, and blockwise runs."""
    q = np.ones((1, 600, 1, SIZE), np.float32)
    with jax.enable_x64(False):
        out = jax.eval_shape(lambda n: pj.attention(q, q, q, mask=Causal() & Window(n)), jnp.int32(3))
    assert out.shape == q.shape
