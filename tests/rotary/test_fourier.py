"""FoPE against sums in float64, and against numbers of the authors' code."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.positions import Range
from posjax.rotary import FoPE

D, HEADS, KV, N = 16, 4, 2, 9
SIZES = {"num_heads": HEADS, "num_kv_heads": KV, "head_dim": D}
SPECS = {"all planes": FoPE(64, base=500.0, gain=0.5), "two planes": FoPE(64, base=500.0, planes=2, learned=True)}
X = np.random.default_rng(0).normal(size=(2, N, HEADS, D)).astype(np.float32)


def turned(x, params, length, base, at):
    """One head ``[n, d]`` by the definition, plane by plane: the first planes have series, all others 1 and 1."""
    theta = [base ** (-2 * t / D) for t in range(D // 2) if base ** (-2 * t / D) >= 2 * np.pi / length]
    cosines, sines = (np.float64(params[name]) for name in ("cosines", "sines"))
    out = np.zeros(x.shape)
    for n, position in enumerate(at):
        for c in range(D // 2):
            given = c < cosines.shape[1]
            cos = sum(cosines[t, c] * np.cos(position * w) for t, w in enumerate(theta)) if given else 1
            sin = sum(sines[t, c] * np.sin(position * w) for t, w in enumerate(theta)) if given else 1
            a, b = x[n, c], x[n, c + D // 2]
            out[n, c], out[n, c + D // 2] = a * cos - b * sin, a * sin + b * cos
    return out


@pytest.mark.parametrize("name", SPECS)
def test_planes_turn_by_their_series_and_query_heads_share_those_of_their_key_head(name):
    spec = SPECS[name]
    params = spec.init(jax.random.key(1), **SIZES)
    found = jax.jit(lambda x: spec.query(params, x, Range(5, N), head_dim=D))(X)
    for head in range(HEADS):
        own = {name: array[head // (HEADS // KV)] for name, array in params.items()}
        wanted = turned(X[1, :, head], own, 64, 500.0, range(5, 5 + N))
        np.testing.assert_allclose(found[1, :, head], wanted, atol=1e-5)


def test_coefficients_start_at_rope_with_the_spread_of_the_authors_code():
    """Four heads of 64 made for 4,096 tokens, 16 planes: torch's xavier_normal_ of [4, 23, 16] at 0.3, and its eye."""
    spec = FoPE(4096, planes=16)
    params = spec.init(jax.random.key(0), num_heads=8, num_kv_heads=4, head_dim=64)
    eye = np.zeros((23, 16))
    eye[2 * np.arange(12), np.arange(12)] = 1
    for array in params.values():
        assert array.shape == (4, 23, 16)
        noise = np.asarray(array) - eye
        np.testing.assert_allclose(noise.std(), 0.3 * np.sqrt(2 / (23 * 16 + 4 * 16)), rtol=0.05)
        assert abs(noise.mean()) < 2e-3
    still = FoPE(2**20, gain=0.0, base=500.0).init(jax.random.key(0), **SIZES)
    np.testing.assert_array_equal(still["cosines"], np.tile(np.eye(D // 2), (KV, 1, 1)))


def test_only_coefficients_that_are_learned_have_gradients():
    spec = SPECS["two planes"]
    params = spec.init(jax.random.key(1), **SIZES)

    def loss(params, spec):
        return jnp.square(spec.query(params, X, Range(5, N), head_dim=D)).sum()

    learned, kept = (jax.grad(loss)(params, s) for s in (spec, dataclasses.replace(spec, learned=False)))
    assert all(np.abs(g).min() > 0 for g in learned.values())
    assert not any(g.any() for g in kept.values())
