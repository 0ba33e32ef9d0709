"""CoCA attention end to end against the three-way product in float64."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax import coca, masks
from posjax.attention import coca_attention
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
def test_the_last_queries_read_half_width_keys_from_a_cache(variant):
    """The cache holds unrotated relu(t), which are rotated on read."""
    q, t, v = inputs(tied=variant == "tied")
    full = causal(q, t, v, table=table(), variant=variant)
    here = {"table": table(3, LENGTH - 3), "kv_table": table(), "q_positions": Range(LENGTH - 3, 3)}
    last = causal(q[:, -3:], coca.half_width(t), v, variant=variant, **here)
    chex.assert_trees_all_close(last, full[:, -3:], atol=2e-6)
