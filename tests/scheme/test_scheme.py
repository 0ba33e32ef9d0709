"""Attention of whole schemes against NumPy: parameters, the current length, linear attention, gradients."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import posjax as pj
from posjax import bias, coca, masks, norms, rotary, scales
from posjax.positions import Range
from posjax.scheme import Scheme

ROPE = pj.scheme("rope")
BATCH, TOKENS, HEADS, KV, SIZE = 2, 11, 4, 2, 8


def draw(shape, seed):
    return np.random.default_rng(seed).normal(size=shape)


def projections(key_size=SIZE):
    """Queries, keys and values in float64."""
    return [draw((BATCH, TOKENS, *size), seed) for seed, size in enumerate(((HEADS, SIZE), (KV, key_size), (KV, SIZE)))]


Q, K, V = (jnp.asarray(x, jnp.float32) for x in projections())


def test_parameters_of_a_layer_and_of_all_layers():
    scheme = pj.scheme("t5", num_buckets=8, norm=norms.QKNorm(), scale=scales.SSMax())
    key = jax.random.key(0)
    own, shared = scheme.init(key, 4, 16), scheme.init_shared(key, 4, 16)
    assert jax.tree.map(jnp.shape, own) == {"norm": {"q": (16,), "k": (16,)}, "scale": {"s": (4,)}}
    assert jax.tree.map(jnp.shape, shared) == {"bias": {"table": (8, 4)}}
    assert ROPE.init(key, 4, 16) == ROPE.init_shared(key, 4, 16) == {}
    assert pj.scheme("alibi", learned=True).init(key, 4, 16)["bias"]["slopes"].shape == (4,)


YARN_OF_EIGHT = np.r_[1, 100.0 ** (-np.arange(1, 4) / 4) / 4]
"""The frequencies of YaRN with factor 4, base 100 and a head of 8: the ramp keeps pair 0 alone."""


@pytest.mark.parametrize("temperature", [{}, {"mscale": 0.7, "mscale_all_dim": 1.0}], ids=["yarn", "deepseek"])
def test_coca_yarn_log_n_and_a_window_are_one_scheme(temperature):
    """Logits ``sum_j t_j |q_j|^2 cos((m - n) theta_j)``, times both factors, with the bias of ALiBi."""
    rule = rotary.YaRN(4.0, 8, base=100.0, **temperature)
    scheme = Scheme(
        features=coca.Coca("strict", rule), scale=scales.LogN(5, minimum=1), bias=bias.ALiBi(), mask=masks.Window(4)
    )
    q, t, v = projections(key_size=SIZE // 2)
    found = jax.jit(scheme.attend)(*(jnp.asarray(x, jnp.float32) for x in (q, t, v)))

    n = np.arange(TOKENS)
    distance = n[:, None] - n
    squared = q[..., :4] ** 2 + q[..., 4:] ** 2
    turn = np.cos(distance[..., None] * YARN_OF_EIGHT)
    logits = np.einsum("bmhj,bnhj,mnj->bhmn", squared, np.repeat(np.maximum(t, 0), HEADS // KV, axis=2), turn)
    extra = 0.1 * np.log(4) + 1
    temper = (0.07 * np.log(4) + 1) ** 2 if temperature else extra**2
    logits *= temper * (np.log(np.minimum(n + 1, 4)) / np.log(5))[:, None] / np.sqrt(SIZE)
    slopes = 2.0 ** -np.array([2, 4, 6, 8])
    # The oracle takes logits as a bias on features that are zero.
    wanted, _ = oracles.attention(
        0 * q,
        0 * q,
        np.repeat(v, 2, 2),
        bias=logits - slopes[:, None, None] * distance,
        allowed=(distance >= 0) & (distance < 4),
    )
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_rope_with_learned_norm_and_scale_is_their_formula():
    rule = rotary.YaRN(4.0, 8, base=100.0, mscale=1.0, mscale_all_dim=1.0)
    scheme = Scheme(norm=norms.QKNorm(), features=rotary.Rotary(rule), scale=scales.SSMax(bias=True))
    q, k, v = projections()
    gains, s, b = {"q": draw(SIZE, 5), "k": draw(SIZE, 6)}, draw(HEADS, 7), draw(HEADS, 8)
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), {"norm": gains, "scale": {"s": s, "b": b}})
    found = jax.jit(lambda *qkv: scheme.attend(*qkv, params=params, causal=False))(Q, K, V)

    def mapped(x, gain):
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gain
        turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * np.arange(TOKENS)[:, None, None] * YARN_OF_EIGHT)
        return np.concatenate([turned.real, turned.imag], -1)

    factor = (s * np.log(TOKENS) + b)[:, None] * (0.1 * np.log(4) + 1) ** 2
    wanted, _ = oracles.attention(mapped(q, gains["q"]) * factor, mapped(k, gains["k"]), v)
    np.testing.assert_allclose(found, wanted, atol=2e-5)


@pytest.mark.parametrize("window", [None, 3])
def test_a_norm_after_the_rotation_norms_what_attention_reads(window):
    """With ReRoPE, whose far pairs have the queries at the window and the keys at 0, those as well."""
    scheme = pj.scheme("rope", norm=norms.QKNorm(after_features=True))
    scheme = scheme if window is None else scheme.extend(remap={"name": "rerope", "window": window})
    q, k, v = projections()
    gains = {"q": draw(SIZE, 5), "k": draw(SIZE, 6)}
    params = {"norm": jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), gains)}

    def mapped(x, gain, at):
        turn = np.exp(1j * np.reshape(at, (-1, 1, 1)) * 10_000.0 ** (-np.arange(4) / 4))
        turned = (x[..., :4] + 1j * x[..., 4:]) * turn
        x = np.concatenate([turned.real, turned.imag], -1)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gain

    n = np.arange(TOKENS)
    distance = n[:, None] - n
    far = () if window is None else ((mapped(q, gains["q"], window), mapped(k, gains["k"], 0), (distance >= window)),)
    wanted, _ = oracles.attention(
        mapped(q, gains["q"], n),
        mapped(k, gains["k"], n),
        v,
        allowed=distance >= 0,
        remap=[(*both, where[None, None]) for *both, where in far],
    )
    found = jax.jit(lambda *qkv: scheme.attend(*qkv, params=params))(Q, K, V)
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_the_causal_default_counts_keys_by_position_and_a_given_count_wins():
    scheme = pj.scheme("nope", scale=scales.LogN(4, minimum=1))
    n = np.arange(TOKENS)
    factor = (np.log(n + 1) / np.log(4))[:, None, None]
    wanted, _ = oracles.attention(np.asarray(Q) * factor, K, V, allowed=n[:, None] >= n)
    attend = jax.jit(scheme.attend)
    np.testing.assert_allclose(attend(Q, K, V), wanted, atol=2e-6)
    far = Range(1_000_003, TOKENS)
    np.testing.assert_allclose(attend(Q, K, V, q_positions=far, kv_positions=far), wanted, atol=2e-6)
    last = attend(Q[:, -1:], K, V, q_positions=Range(TOKENS - 1, 1))
    np.testing.assert_allclose(last, wanted[:, -1:], atol=2e-6)
    wanted, _ = oracles.attention(np.asarray(Q) * np.log(9) / np.log(4), K, V, allowed=n[:, None] >= n)
    np.testing.assert_allclose(attend(Q, K, V, visible=jnp.full(TOKENS, 9)), wanted, atol=2e-6)


def test_the_length_decides_the_rule_and_is_the_number_of_keys_if_left_out():
    scheme = ROPE.extend(frequencies=rotary.DynamicNTK(4))
    attend = jax.jit(lambda scheme, length=None: scheme.attend(Q, K, V, length=length), static_argnums=0)
    np.testing.assert_allclose(attend(scheme, 4), attend(ROPE), atol=1e-6)
    ntk = attend(ROPE.extend(frequencies=rotary.NTKAware(TOKENS / 4)))
    np.testing.assert_allclose(attend(scheme, TOKENS), ntk, atol=1e-5)
    np.testing.assert_allclose(attend(scheme), ntk, atol=1e-5)


def test_linear_attention_rotates_queries_by_their_positions_whatever_the_implementation():
    attend = jax.jit(pj.scheme("linear-elu").attend, static_argnames="implementation")
    near, far = Range(0, TOKENS), Range(100, TOKENS)
    unshifted = attend(Q, K, V, implementation="blockwise")
    assert np.abs(attend(Q, K, V, q_positions=far, kv_positions=near) - unshifted).max() > 0.01
    np.testing.assert_allclose(attend(Q, K, V, q_positions=far, kv_positions=far), unshifted, atol=1e-5)


@pytest.mark.parametrize(("name", "options"), [("performer", {"causal": False}), ("rope", {})])
def test_gradients_under_two_vmaps_are_those_of_single_calls(name, options):
    """Several query heads share a key head, so the products have as many axes as they can have."""
    scheme = pj.scheme(name)
    params = scheme.init(jax.random.key(0), 4, 8, num_kv_heads=2)
    sizes = (4, scheme.query_size(8)), (2, scheme.key_size(8)), (2, 8)
    qkv = [draw((2, 3, 2, 5, *size), n).astype(np.float32) for n, size in enumerate(sizes)]
    gradient = jax.grad(lambda *qkv: jnp.sin(scheme.attend(*qkv, params=params, **options)).sum(), (0, 1, 2))
    got, one = jax.jit(jax.vmap(jax.vmap(gradient)))(*qkv), jax.jit(gradient)
    for at in np.ndindex(2, 3):
        chex.assert_trees_all_close([x[at] for x in got], list(one(*(x[at] for x in qkv))), atol=1e-5)
