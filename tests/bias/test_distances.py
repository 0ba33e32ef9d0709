"""Biases by distance against their formulas in float64, up to the ends of int32, where ``i - j`` does not fit."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from refusals import refused

import posjax as pj
from posjax.bias import FIRE, T5, ALiBi, Kerple, Sandwich, ScaleInvariant, t5_bucket
from posjax.bias.base import distance
from posjax.masks import Causal
from posjax.positions import Range

LOW, HIGH = -(2**31), 2**31 - 1
Q = np.array([HIGH, HIGH - 7, 1_000_010, 3, 0, -1, LOW + 9, LOW])
K = np.array([LOW, LOW + 1, -65_537, -1, 0, 2, 1_000_003, HIGH])
R = Q[:, None] - K[None]
HEADS = 3


def params(spec):
    return spec.init(jax.random.key(0), HEADS) or None


def found(spec):
    bound = spec.bind(params(spec), num_heads=HEADS)
    return np.asarray(jax.jit(bound.values)(jnp.asarray(Q, jnp.int32), jnp.asarray(K, jnp.int32)), np.float64)


def per_head(spec, name):
    return np.asarray(params(spec)[name], np.float64)[:, None, None]


SLOPES = np.asarray(pj.alibi_slopes(HEADS), np.float64)[:, None, None]


def kerple(kind):
    spec = Kerple(kind)
    a, p = np.maximum(per_head(spec, "a"), 0.01), np.maximum(per_head(spec, "p"), 0.01)
    return -p * np.log1p(a * abs(R)) if kind == "log" else -a * np.abs(R).astype(float) ** p


def fire():
    w = {name: np.asarray(value, np.float64) for name, value in params(FIRE()).items()}
    longest = np.maximum(Q, 512.0)[:, None]
    x = np.log1p(abs(w["c"] * R)) / (np.log1p(abs(w["c"] * longest)) + 1e-6)
    hidden = np.maximum(x[..., None] * w["w1"] + w["b1"], 0)
    return np.moveaxis(hidden @ w["w2"] + w["b2"], -1, 0)


def scale_invariant():
    return np.broadcast_to(-2 * np.log1p(abs(R) / 10.0), (HEADS, *R.shape))


def bucket(r, bidirectional):
    """The bucket by its formula in exact integers: half of a side's buckets are exact, the others logarithmic."""
    side = 16 if bidirectional else 32
    n = abs(r) if bidirectional else max(r, 0)
    half = side // 2
    steps = sum(n**half >= 128**t * half ** (half - t) for t in range(1, half)) if n >= half else 0
    return min(n, half) + steps + (side if bidirectional and r < 0 else 0)


def t5(bidirectional):
    table = np.asarray(params(T5(bidirectional=bidirectional))["table"], np.float64)
    return np.moveaxis(table[np.vectorize(lambda r: bucket(int(r), bidirectional))(R)], -1, 0)


CASES = {
    "alibi": (ALiBi(), lambda: -SLOPES * R),
    "symmetric alibi": (ALiBi(symmetric=True), lambda: -SLOPES * abs(R)),
    "alibi with an offset": (ALiBi(symmetric=True, direction="offset"), lambda: -SLOPES * (abs(R) - 0.5 * (R > 0))),
    "alibi with two slopes": (ALiBi(symmetric=True, learned=True, direction="slopes"), lambda: -SLOPES * abs(R)),
    "kerple log": (Kerple("log"), lambda: kerple("log")),
    "kerple power": (Kerple("power"), lambda: kerple("power")),
    "fire": (FIRE(), fire),
    "scale-invariant": (ScaleInvariant(), scale_invariant),
    "t5": (T5(), lambda: t5(False)),
    "two-sided t5": (T5(bidirectional=True), lambda: t5(True)),
}


@pytest.mark.parametrize("name", CASES)
def test_biases_at_the_ends_of_int32(name):
    spec, want = CASES[name]
    np.testing.assert_allclose(*np.broadcast_arrays(found(spec), want()), rtol=3e-6, atol=3e-6)


def test_distances_are_rounded_once_and_ordinary_ones_equal_int32_subtraction():
    rng = np.random.default_rng(0)
    for reach in (2**10, 2**24, 2**30):
        i, j = rng.integers(-reach, reach, (2, 257)).astype(np.int32)
        r = distance(jnp.asarray(i), jnp.asarray(j), jnp.float32)[0]
        chex.assert_type(r, jnp.float32)
        np.testing.assert_array_equal(r, (jnp.asarray(i)[:, None] - jnp.asarray(j)[None]).astype(jnp.float32))
    ends = [jnp.asarray(positions, jnp.int32) for positions in (Q, K)]
    np.testing.assert_array_equal(distance(*ends, jnp.float32)[0], R.astype(np.float32))


def test_a_bucket_of_the_smallest_int32():
    assert t5_bucket(jnp.int32(LOW), bidirectional=True) == t5_bucket(jnp.int32(-1000), bidirectional=True)


@pytest.mark.parametrize(("implementation", "symmetric"), [("dense", False), ("blockwise", True)])
def test_attention_over_all_of_int32(symmetric, implementation):
    """A key at a distance of 2^32 - 1 is not treated as the next one."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, HEADS, 4))
    given = {"q_positions": jnp.asarray(Q, jnp.int32), "kv_positions": jnp.asarray(K, jnp.int32)}
    mask = None if symmetric else Causal()
    out = pj.attention(q, k, v, bias=ALiBi(symmetric=symmetric), mask=mask, implementation=implementation, **given)
    logits = -SLOPES * (abs(R) if symmetric else R)
    want, _ = oracles.attention(q, k, v, bias=logits, allowed=(R >= 0) | symmetric)
    np.testing.assert_allclose(out, want, atol=2e-5)


def test_kernels_that_count_distances_in_int32_refuse_longer_ones():
    q = jnp.zeros((1, 128, 1, 8))
    far = {"q_positions": Range(HIGH - 127, 128), "kv_positions": Range(LOW, 128)}
    refused(
        "q_positions",
        lambda: pj.attention(q, q, q, bias=Sandwich(), mask=Causal(), implementation="tpu", **far),
    )
