"""PaTH against products of matrices in float64, one query and key at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import posjax as pj
from posjax._shapes import grouped, ungrouped
from posjax.attention.call import Call
from posjax.attention.contextual import blockwise_contextual
from posjax.bias import PaTH
from posjax.masks import Causal, Segments
from posjax.positions import Range

B, N, HEADS, KV, D, WIDTH = 2, 11, 4, 2, 6, 5


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


Q, K, V, X = normal(0, B, N, HEADS, D), normal(1, B, N, KV, D), normal(2, B, N, KV, D), normal(3, B, N, WIDTH)
SPECS = {"low rank": PaTH(3), "full": PaTH(None)}


def made(spec):
    init = pj.Scheme(bias=spec).init(jax.random.key(0), HEADS, D, num_kv_heads=KV, model_dim=WIDTH)
    return jax.tree.map(lambda leaf: leaf + 0.3 * normal(leaf.size, *leaf.shape), init)


def transitions(spec, params, x):
    """``H_t`` of every token and key head, ``[batch, kv_heads, n, d, d]``."""
    p = {name: np.float64(leaf) for name, leaf in params["bias"].items()}
    w = p["w"] if spec.rank is None else np.einsum("mr,rhd->mhd", p["w"], p["up"])
    w = np.einsum("bnm,mhd->bhnd", x, w)
    w = w / np.linalg.norm(w, axis=-1, keepdims=True)
    beta = 2 / (1 + np.exp(-(np.einsum("bnm,mh->bhn", x, p["beta"]) + p["start"][:, None])))
    return np.eye(D) - beta[..., None, None] * w[..., :, None] * w[..., None, :]


def extra(spec, params, q=Q, k=K, x=X):
    """What the products add to ``q . k / sqrt(d)``, ``[batch, heads, n, n]``."""
    turns = transitions(spec, params, x)
    out = np.zeros((B, HEADS, N, N))
    for b, h, i in np.ndindex(B, HEADS, N):
        group = h // (HEADS // KV)
        product = np.eye(D)
        for j in range(i, -1, -1):
            out[b, h, i, j] = np.float64(q[b, i, h]) @ (product - np.eye(D)) @ k[b, j, group]
            product = product @ turns[b, group, j]
    return out / np.sqrt(D)


def attend(spec, params, q=Q, k=K, v=V, x=X, **options):
    scheme = pj.Scheme(bias=spec)
    gates = scheme.prepare(params, x)
    return scheme.attend(q, k, v, params=params, gates=(gates, gates), **options)


IDS = np.array([[0] * 4 + [1] * 7, [-1] * 2 + [2] * 9], np.int32)
ALLOWED = np.tri(N, dtype=bool) & (IDS[:, :, None] == IDS[:, None]) & (IDS[:, :, None] >= 0)


def tiled(spec, params, q, k, v, x):
    """Outputs ``[batch, n, heads, size]`` in tiles of 4."""
    bias = spec.bind(params["bias"], num_heads=HEADS, kv_states=spec.prepare(params["bias"], x))
    places = Range(0, N), Range(0, N)
    mask = Causal() & Segments(jnp.asarray(IDS))
    call = Call(grouped(q, KV), jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2), bias, mask, *places, scale=D**-0.5)
    return ungrouped(blockwise_contextual(call, block=4).out)


@pytest.mark.parametrize("name", SPECS)
def test_scores_are_those_of_products_of_matrices(name):
    spec = SPECS[name]
    params = made(spec)
    run = jax.jit(lambda x: (attend(spec, params, x=x, mask=Segments(IDS)), tiled(spec, params, Q, K, V, x)))
    want, _ = oracles.attention(Q, K, V, bias=extra(spec, params), allowed=ALLOWED[:, None])
    for found in run(X):
        np.testing.assert_allclose(found, want, atol=2e-5)


def test_gradients_are_those_of_the_products():
    """Along a random direction of all inputs, by central differences of the float64 oracle."""
    spec = SPECS["low rank"]
    inputs = made(spec), Q, K, V, X
    weights = normal(7, B, N, HEADS, D)

    def oracle(params, q, k, v, x):
        return oracles.attention(q, k, v, bias=extra(spec, params, q, k, x), allowed=ALLOWED[:, None])[0]

    grads = jax.jit(jax.grad(lambda inputs: (tiled(spec, *inputs) * weights).sum()))(inputs)
    directions = jax.tree.map(lambda leaf: normal(leaf.size + 1, *leaf.shape), inputs)
    slope = sum((np.float64(g) * d).sum() for g, d in zip(*map(jax.tree.leaves, (grads, directions)), strict=True))
    ahead, behind = (
        (oracle(*jax.tree.map(lambda p, d, s=step: np.float64(p) + s * d, inputs, directions)) * weights).sum()
        for step in (1e-6, -1e-6)
    )
    np.testing.assert_allclose(slope, (ahead - behind) / 2e-6, rtol=1e-3)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads))


def test_without_beta_it_has_no_positions():
    spec = SPECS["full"]
    params = made(spec)
    params["bias"] |= {"beta": np.zeros((WIDTH, KV)), "start": np.full(KV, -100.0)}
    want, _ = oracles.attention(Q, K, V, allowed=np.tri(N, dtype=bool))
    np.testing.assert_allclose(attend(spec, params), want, atol=1e-5)


def test_memory_of_the_gradient_is_linear():
    """Temporary memory of the compiled gradient at 1,024 and at 2,048 tokens, of one head and one row."""
    scheme = pj.Scheme(bias=PaTH(2))
    params = scheme.init(jax.random.key(0), 1, 8, model_dim=4)

    def temporary(length):
        def loss(params, q, x):
            gates = scheme.prepare(params, x)
            return scheme.attend(q, q, q, params=params, gates=(gates, gates), implementation="blockwise").sum()

        shapes = ((1, length, 1, 8), (1, length, 4))
        arrays = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(params, *arrays).compile().memory_analysis().temp_size_in_bytes

    assert temporary(2048) < 2 * temporary(1024)
