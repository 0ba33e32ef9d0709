"""The last queries of a row, with their positions, give the last outputs of the whole row."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from refusals import refused

import posjax as pj
from posjax.masks import Causal, Segments, Window
from posjax.positions import Range

ROWS, KEYS, HEADS, SIZE = 2, 12, 2, 8
SHOWN = np.random.default_rng(0).random((ROWS, 1, 12, KEYS)) < 0.7
IDS = np.repeat([[0, 1], [2, -1]], 6, axis=1).astype(np.int32)


def qkv(queries):
    """The last queries of a row, and all its keys and values."""
    q, k, v = np.random.default_rng(1).normal(size=(3, ROWS, KEYS, HEADS, SIZE)).astype(np.float32)
    return q[:, KEYS - queries :], k, v


def assert_last(attend):
    @jax.jit
    def run(q, k, v):
        return attend(q, k, v), [attend(q[:, -n:], k, v, q_positions=Range(KEYS - n, n)) for n in (1, 5)]

    whole, last = jax.device_get(run(*qkv(KEYS)))
    for found in last:
        np.testing.assert_allclose(found, whole[:, -found.shape[1] :], atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"mask": ~Window(3)},
        {"mask": Window(20) & SHOWN[..., :1, :]},
        {"bias": pj.bias.ALiBi(symmetric=True)},
        {"decay": np.full(SIZE, 0.01), "mask": Causal()},
    ],
    ids=["mask", "mask and array", "bias", "decay"],
)
def test_of_attention(options):
    assert_last(partial(pj.attention, **options))


SCHEMES = {
    "rotary features": pj.scheme("rope"),
    "bias": pj.Scheme(bias=pj.bias.T5(8, 12, bidirectional=True)),
    "remap": pj.Scheme(features=pj.rotary.Rotary(), remap=pj.remap.ReRoPE(4)),
    "decay": pj.Scheme(features=pj.rotary.XPos()),
    "log-n": pj.Scheme(scale=pj.scales.LogN(4)),
    "CoPE": pj.Scheme(bias=pj.bias.CoPE(4)),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_of_schemes(name):
    scheme = SCHEMES[name]
    params = scheme.init(jax.random.key(1), HEADS, SIZE) | scheme.init_shared(jax.random.key(2), HEADS, SIZE)
    attend = partial(scheme.attend, params=params)
    assert_last(attend)
    refused("q_positions", lambda: attend(*qkv(5)))


def test_without_positions_where_nothing_reads_them():
    """If positions are given, they change nothing."""
    q, k, v = qkv(5)
    bias = SHOWN[..., :5, :].astype(np.float32)
    for mask in (None, SHOWN[..., :5, :], ~(SHOWN[..., :5, :] & Segments(IDS[:, -5:], IDS))):
        attend = jax.jit(partial(pj.attention, bias=bias, mask=mask, softcap=2.0, sinks=np.ones(HEADS, np.float32)))
        moved = attend(q, k, v, q_positions=Range(7, 5), kv_positions=np.arange(KEYS)[::-1])
        np.testing.assert_array_equal(attend(q, k, v), moved)
    scheme = pj.Scheme(norm=pj.norms.QKNorm())
    params = scheme.init(jax.random.key(0), HEADS, SIZE)
    assert scheme.attend(q, k, v, params=params, causal=False, mask=SHOWN[..., :5, :]).shape == q.shape


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_positions_are_a_range_or_one_row_or_a_row_for_each_sequence(implementation):
    q, k, v = qkv(KEYS)
    attend = partial(pj.attention, q, k, v, bias=pj.bias.ALiBi(), mask=Causal(), implementation=implementation)
    attend = jax.jit(attend)
    want = attend(q_positions=Range(3, KEYS), kv_positions=Range(3, KEYS))
    np.testing.assert_allclose(attend(), want, atol=1e-6)
    for shape in ((KEYS,), (1, KEYS), (ROWS, KEYS)):
        places = np.broadcast_to(np.arange(3, 3 + KEYS), shape)
        np.testing.assert_allclose(attend(q_positions=places, kv_positions=jnp.asarray(places)), want, atol=1e-6)


def test_rates_of_decay_have_no_gradient_and_traced_ones_below_zero_count_as_zero():
    def loss(rates):
        return jnp.sin(pj.attention(*qkv(KEYS), decay=rates, mask=Causal())).sum()

    found, gradient = jax.jit(jax.value_and_grad(loss))(jnp.asarray([-3.0] * 4 + [0.1] * 4))
    np.testing.assert_array_equal(gradient, 0)
    np.testing.assert_allclose(found, jax.jit(partial(loss, np.array([0.0] * 4 + [0.1] * 4)))(), rtol=1e-5)


def test_a_decay_over_many_positions_is_exact_up_to_an_exponent_of_40_and_finite_beyond():
    """Two tokens of one position, and one far ahead."""
    q, k, v = (x[:1, -3:] for x in qkv(KEYS))

    @jax.jit
    def run(q, reach):
        places = dict.fromkeys(("q_positions", "kv_positions"), jnp.stack([0, 0, reach]))
        return pj.attention(q, k, v, decay=np.ones(SIZE), mask=Causal(), implementation="dense", **places)

    want, _ = oracles.attention(q[:, :2], k[:, :2], v[:, :2])
    np.testing.assert_allclose(run(q, 39)[:, :2], want, rtol=1e-5)
    out, gradient = jax.jit(jax.value_and_grad(lambda q: run(q, 2000).sum()))(q)
    assert np.isfinite(out)
    assert np.isfinite(gradient).all()
