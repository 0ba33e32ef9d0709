"""RoPE++ against complex numbers in float64."""

import jax
import numpy as np
import oracles
import pytest
from flax import nnx

import posjax as pj

B, N, HEADS, KV, D = 2, 9, 4, 2, 8


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


Q, K, V = normal(0, B, N, HEADS, D), normal(1, B, N, KV, D), normal(2, B, N, KV, D)


def complex_scores(q, k):
    """``sum_t q_t conj(k_t) exp(i (m - n) theta_t)`` of all pairs, ``[batch, heads, m, n]``, planes (t, t + d/2)."""
    q, k = (x[..., : D // 2] + 1j * np.float64(x[..., D // 2 :]) for x in (q, np.repeat(k, HEADS // KV, axis=2)))
    turns = np.exp(1j * np.arange(N)[:, None] * 10_000.0 ** (-np.arange(D // 2) / (D // 2)))
    return np.einsum("bmht,bnht->bhmn", q * turns[None, :, None], np.conj(k * turns[None, :, None]))


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_heads_attend_by_the_real_and_by_the_imaginary_part(implementation):
    """Keys are shared as in RoPE; a scale and sinks have a number for each of the heads of attention."""
    scheme = pj.scheme("rope-pp", sinks={"name": "learned"})
    params = {"sinks": {"sinks": normal(3, 2 * HEADS)}}
    shapes = jax.tree.map(np.shape, scheme.init(jax.random.key(0), HEADS, D))
    assert shapes == jax.tree.map(np.shape, params)
    found = jax.jit(lambda q: scheme.attend(q, K, V, params=params, implementation=implementation))(Q)
    scores = complex_scores(Q, K)
    logits = np.stack([scores.real, scores.imag], axis=2).reshape(B, 2 * HEADS, N, N) / np.sqrt(D)
    empty = np.zeros((B, N, 2 * HEADS, 1)), np.zeros((B, N, KV, 1))
    sinks = params["sinks"]["sinks"]
    want, _ = oracles.attention(*empty, V, bias=logits, allowed=np.tri(N, dtype=bool), sinks=sinks)
    assert found.shape == (B, N, 2 * HEADS, D)
    np.testing.assert_allclose(found, want, atol=1e-5)


def test_a_decoder_with_half_of_the_heads_has_the_output_matrix_of_rope_and_half_of_its_cache():
    sizes = {"vocab_size": 8, "num_layers": 1, "model_dim": 32, "head_dim": 8}
    rope = pj.nn.DecoderConfig(**sizes, num_heads=4, num_kv_heads=2, scheme=pj.scheme("rope"))
    half = pj.nn.DecoderConfig(**sizes, num_heads=2, num_kv_heads=1, scheme=pj.scheme("rope-pp"))
    layers = [config.of_layer(0) for config in (rope, half)]
    made = [jax.eval_shape(lambda layer=layer: pj.nn.Attention(layer, rngs=nnx.Rngs(0))) for layer in layers]
    assert made[0].o.shape == made[1].o.shape == (4, 8, 32)
    caches = [jax.eval_shape(lambda c=c: pj.nn.Decoder(c, rngs=nnx.Rngs(0)).init_cache(1, 4)) for c in (rope, half)]
    held = [sum(leaf.size for leaf in jax.tree.leaves(cache) if leaf.dtype == np.float32) for cache in caches]
    assert held[0] == 2 * held[1]
