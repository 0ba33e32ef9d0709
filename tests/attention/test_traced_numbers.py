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
from posjax.attention.platform import BACKENDS
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


@pytest.mark.parametrize("backend", ["blockwise", pytest.param("dense", marks=pytest.mark.wide)])
def test_steps_of_a_scan_may_differ_in_window_sinks_and_chunk(backend):
    """Outputs against NumPy, gradients against calls with numbers."""
    values, sizes = projections(), [(3, 1, 4), (9, 2, 13)]

    def mask(window, count, chunk):
        return Causal() & (Window(window) | FirstTokens(count)) & Chunked(chunk)

    def step(q, k, v, size):
        return pj.attention(q, k, v, mask=mask(*size), implementation=backend)

    @jax.jit
    def run(*values):
        def scanned(*values):
            return jax.lax.scan(lambda _, size: (None, step(*values, size)), None, np.asarray(sizes, np.int32))[1]

        found, transpose = jax.vjp(scanned, *values)
        want, dense = jax.vjp(lambda *values: jnp.stack([step(*values, size) for size in sizes]), *values)
        return found, transpose(jnp.sin(found)), dense(jnp.sin(want))

    found, gradients, wanted = run(*values)
    for out, size in zip(found, sizes, strict=True):
        np.testing.assert_allclose(out, oracles.attention(*values, allowed=allowed(mask(*size)))[0], atol=1e-12)
    for one, other in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


@backends
def test_a_learned_soft_cap_of_low_precision_adds_up_in_float32(backend, monkeypatch):
    monkeypatch.setitem(BACKENDS, "blockwise", of_tiles(4, 4))
    length = 256
    q, k = (np.full((1, length, 1, SIZE), x, jnp.bfloat16) for x in (0.5, 0.25))

    def loss(softcap):
        return pj.attention(q, k, q, softcap=softcap, implementation=backend, return_residuals=True)[1].sum()

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
