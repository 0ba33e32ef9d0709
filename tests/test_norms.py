"""Norms of queries and keys against NumPy, closed forms and the models that have them."""

import math
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax import norms, scales
from posjax.positions import Range
from posjax.rotary import apply_rotary, inverse_frequencies, rotary_table

close = partial(np.testing.assert_allclose, rtol=1e-6)
ALL = [norms.KeyNorm(), norms.CosineNorm(), norms.QKNorm(gain=False), norms.QKNorm()]


def heads(seed=0, heads=3, size=8):
    return (3 * np.random.default_rng(seed).standard_normal((2, 5, heads, size))).astype(np.float32)


def unit(x):
    return np.float64(x) / np.linalg.norm(np.float64(x), axis=-1, keepdims=True)


def test_rms_norm_against_numpy():
    x, gain = heads(), np.linspace(0.5, 2, 8)
    wide = np.asarray(x, np.float64)
    for eps in (1e-6, 10.0):
        want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps)
        close(norms.rms_norm(x, eps=eps), want, rtol=1e-5)
        close(norms.rms_norm(x, gain.astype(np.float32), eps=eps), want * gain, rtol=1e-5)


def test_key_norm_with_the_usual_scale_gives_q_dot_unit_key():
    """Equation of the article, q . k / |k|, without 1 / sqrt(d)."""
    q, k = heads(0), heads(1)
    same, normed = norms.KeyNorm().apply({}, q, k)
    chex.assert_trees_all_equal(same, q)
    np.testing.assert_allclose(normed / math.sqrt(8), unit(k), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("scale", "factor"), [(None, 1), (scales.CosineScale(512), 4 * math.log(256)), (scales.CosineScale(), None)]
)
def test_cosine_attention_from_norm_and_scale(scale, factor):
    """Logits lambda cos(q, k); lambda is 1 without a scale, and 4 log n for the n keys that a query sees."""
    q, k = heads(0) * 2, heads(1)
    normed = norms.CosineNorm().apply({}, q, k)
    visible = np.arange(5) + 1
    found = 1.0 if scale is None else scale.factor({}, positions=None, visible=visible, num_heads=3)
    logits = np.einsum("bihd,bjhd->bhij", normed[0] * np.asarray(found)[..., None] / 8**0.5, normed[1])
    want = np.einsum("bihd,bjhd->bhij", unit(q), unit(k)) * (factor or 4 * np.log(visible)[:, None])
    np.testing.assert_allclose(logits, want, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("spec", ALL, ids=repr)
def test_norm_and_rotation_commute_as_declared(spec):
    params = {name: np.linspace(0.5, 2, 8, dtype=np.float32) for name in spec.init(jax.random.key(0), 8)}

    @jax.jit
    def both(q, k):
        rotate = partial(apply_rotary, table=rotary_table(Range(7, 5), inverse_frequencies(8)))
        return jax.tree.map(rotate, spec.apply(params, q, k)), spec.apply(params, rotate(q), rotate(k))

    before, after = both(heads(0), heads(1))
    moved = max(np.abs(a - b).max() for a, b in zip(before, after, strict=True))
    assert (moved < 1e-5) == spec.commutes_with_rotation == (spec != norms.QKNorm())


def test_learned_gains_start_at_one_and_get_gradients():
    spec, q, k = norms.QKNorm(), heads(0), heads(1, heads=1)
    params = spec.init(jax.random.key(0), 8)
    chex.assert_trees_all_equal(spec.apply(params, q, k), (norms.rms_norm(q), norms.rms_norm(k)))
    gradient = jax.jit(jax.grad(lambda params: sum(a.sum() for a in spec.apply(params, q, k))))(params)
    close(gradient["k"], np.asarray(norms.rms_norm(k)).sum((0, 1, 2)), rtol=1e-4)
    close(gradient["q"], np.asarray(norms.rms_norm(q)).sum((0, 1, 2)), rtol=1e-4)


def test_gains_of_a_unit_offset_are_counted_from_one():
    spec = norms.QKNorm(unit_offset=True)
    chex.assert_trees_all_equal(spec.init(jax.random.key(0), 8), {"q": jnp.zeros(8), "k": jnp.zeros(8)})
    q, k = spec.apply({"q": jnp.full(8, 0.5), "k": jnp.full(8, 2.0)}, heads(0), heads(1))
    close(q, 1.5 * np.asarray(norms.rms_norm(heads(0))))
    close(k, 3.0 * np.asarray(norms.rms_norm(heads(1))))


@pytest.mark.parametrize("spec", [norms.KeyNorm(), norms.QKNorm(), norms.CosineNorm()], ids=repr)
def test_norms_keep_dtypes_and_compute_in_float32(spec):
    q, k = (heads(seed).astype(jnp.bfloat16) for seed in (0, 1))
    params = spec.init(jax.random.key(0), 8)
    low, wide = (spec.apply(params, q.astype(t), k.astype(t)) for t in (jnp.bfloat16, jnp.float32))
    chex.assert_trees_all_equal(low, jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide))
    chex.assert_type(low, jnp.bfloat16)


def test_zero_keys_stay_zero_with_finite_gradients():
    value, gradient = jax.value_and_grad(lambda k: norms.key_norm(k).sum())(np.zeros((1, 1, 1, 8), np.float32))
    assert value == 0
    assert np.all(np.isfinite(gradient))


@pytest.mark.parity
def test_norms_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    llama4 = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    x = torch.tensor(heads())
    gained = qwen3.Qwen3RMSNorm(8, eps=1e-6)
    gained.weight.data = torch.linspace(0.5, 2, 8)
    close(norms.rms_norm(heads(), jnp.linspace(0.5, 2, 8)), gained(x).detach().numpy(), rtol=1e-5)
    close(norms.rms_norm(heads(), eps=1e-5), llama4.Llama4TextL2Norm(1e-5)(x).numpy(), rtol=1e-5)
