"""CoCA attention end to end against the three-way product in float64."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from posjax import coca, masks
from posjax.attention.coca import coca_attention
from posjax.positions import Range
from posjax.rotary import inverse_frequencies, rotary_table

BATCH, LENGTH, HEADS, SIZE = 2, 12, 4, 16
THETA = 10_000.0 ** (-np.arange(0, SIZE, 2) / SIZE)


def inputs(kv_heads=2, *, tied=False, length=LENGTH):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((BATCH, length, HEADS, SIZE // 2 if tied else SIZE))
    t = rng.standard_normal((BATCH, length, kv_heads, SIZE // 2))
    v = rng.standard_normal((BATCH, length, kv_heads, 6))
    return tuple(a.astype(np.float32) for a in (q, t, v))


def oracle(q, t, v, variant, pairing="half"):
    """Causal softmax over the naive scores, float64; the three-way product is written out."""
    q, t, v = (np.asarray(a, np.float64) for a in (q, t, v))
    t, v = (np.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (np.maximum(t, 0), v))
    x, y = (q[..., 0::2], q[..., 1::2]) if pairing == "interleaved" else np.split(q, 2, -1)
    turn = np.exp(1j * np.arange(q.shape[1])[:, None, None] * THETA)
    if variant == "strict":
        score = np.einsum("bmhj,bmhj,bnhj->bhmn", (x + 1j * y) * turn, x - 1j * y, t * turn.conj()).real
    else:
        rotated, key = (x + 1j * y) * turn, (1 + 1j) * t * turn
        score = np.einsum("bmhj,bmhj,bnhj->bhmn", x, rotated.real, key.real)
        score += np.einsum("bmhj,bmhj,bnhj->bhmn", y, rotated.imag, key.imag)
    score = np.where(np.tri(q.shape[1], dtype=bool), score / np.sqrt(SIZE), -np.inf)
    weights = np.exp(score - score.max(-1, keepdims=True))
    return np.einsum("bhmn,bnhd->bmhd", weights / weights.sum(-1, keepdims=True), v)


def table(length=LENGTH, start=0):
    return rotary_table(Range(start, length), inverse_frequencies(SIZE))


eager = partial(coca_attention, mask=masks.Causal())
causal = jax.jit(eager, static_argnames=("variant", "pairing", "implementation"))

# Every pair of values of any two columns.
COVERING = [
    ("strict", "half", 4, "dense"),
    ("strict", "half", 1, "blockwise"),
    ("strict", "interleaved", 2, "blockwise"),
    ("slack", "half", 2, "dense"),
    ("slack", "interleaved", 4, "blockwise"),
    ("slack", "interleaved", 1, "dense"),
]


@pytest.mark.parametrize(("variant", "pairing", "kv_heads", "implementation"), COVERING)
def test_against_the_naive_product(variant, pairing, kv_heads, implementation):
    q, t, v = inputs(kv_heads)
    out = causal(q, t, v, table=table(), variant=variant, pairing=pairing, implementation=implementation)
    chex.assert_shape(out, (BATCH, LENGTH, HEADS, 6))
    chex.assert_type(out, jnp.float32)
    np.testing.assert_allclose(out, oracle(q, t, v, variant, pairing), atol=1e-5)


def test_tied_is_strict_on_doubled_queries():
    q, t, v = inputs(tied=True)
    doubled = np.concatenate([q, q], -1)
    tied = causal(q, t, v, table=table(), variant="tied")
    np.testing.assert_allclose(tied, oracle(doubled, t, v, "strict"), atol=1e-5)
    np.testing.assert_allclose(tied, causal(doubled, t, v, table=table(), variant="slack"), atol=1e-5)


@pytest.mark.parametrize("variant", ["tied", "slack"])
def test_decoding_from_cached_half_width_keys(variant):
    """Token by token with a cache of unrotated relu(t), rotated on read, equals the full forward."""
    q, t, v = inputs(tied=variant == "tied")
    full = np.asarray(causal(q, t, v, table=table(), variant=variant))
    cache = np.zeros_like(t)

    @jax.jit
    def step(cache, q, t, i):
        cache = jax.lax.dynamic_update_slice_in_dim(cache, coca.half_width(t), i, axis=1)
        here = Range(i, 1)
        out = causal(
            q,
            cache,
            v,
            table=rotary_table(here, inverse_frequencies(SIZE)),
            kv_table=table(),
            variant=variant,
            q_positions=here,
        )
        return cache, out

    for i in range(LENGTH):
        cache, out = step(cache, q[:, i : i + 1], t[:, i : i + 1], np.int32(i))
        chex.assert_trees_all_close(np.asarray(out)[:, 0], full[:, i], atol=2e-6)
    assert np.all(np.asarray(cache) >= 0)


def test_gradients_against_central_differences_of_the_oracle():
    inputs_ = inputs()
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((BATCH, LENGTH, HEADS, 6))
    directions = [rng.standard_normal(a.shape) for a in inputs_]

    def loss(q, t, v):
        return jnp.sum(causal(q, t, v, table=table(), variant="strict") * weight.astype(np.float32))

    step = 1e-6
    ends = [
        (
            weight
            * oracle(*(np.asarray(a, np.float64) + e * d for a, d in zip(inputs_, directions, strict=True)), "strict")
        ).sum()
        for e in (step, -step)
    ]
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*inputs_)
    slope = sum(np.vdot(np.asarray(g, np.float64), d) for g, d in zip(gradients, directions, strict=True))
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-4)


def test_shard_map_over_batch_and_heads():
    q, t, v = inputs(kv_heads=4)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "heads"))
    spec = PartitionSpec("data", None, "heads")
    f = partial(eager, table=table(), variant="slack")
    sharded = jax.shard_map(f, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec)
    values = [jax.jit(jax.value_and_grad(lambda *a, g=g: jnp.sum(g(*a) ** 2), argnums=(0, 1, 2))) for g in (sharded, f)]
    chex.assert_trees_all_close(*(value(q, t, v) for value in values), atol=1e-4, rtol=1e-5)


def test_bfloat16_against_float32():
    q, t, v = (a.astype(jnp.bfloat16) for a in inputs())
    low = causal(q, t, v, table=table(start=1_000_003), variant="slack")
    chex.assert_type(low, jnp.bfloat16)
    wide = causal(*(a.astype(np.float32) for a in (q, t, v)), table=table(start=1_000_003), variant="slack")
    chex.assert_trees_all_close(np.asarray(low, np.float32), np.asarray(wide), atol=0.05)
