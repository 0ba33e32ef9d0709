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


def heads(seed=0, heads=3, size=8, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return (3 * rng.standard_normal((2, 5, heads, size))).astype(dtype)


def test_rms_norm_against_numpy():
    x, gain = heads(), jnp.linspace(0.5, 2, 8)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    close(norms.rms_norm(x), expected, rtol=1e-5)
    close(norms.rms_norm(x, gain), expected * np.asarray(gain), rtol=1e-5)
    close(norms.rms_norm(x, eps=10.0), wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 10), rtol=1e-5)


def test_key_norm_with_the_usual_scale_gives_q_dot_unit_key():
    """Equation of the article, q . k / |k|, without 1 / sqrt(d)."""
    q, k = heads(0), heads(1)
    _, normed = norms.KeyNorm().apply({}, q, k)
    logits = np.einsum("bmhd,bnhd->bhmn", q, normed) / math.sqrt(8)
    unit = np.float64(k) / np.linalg.norm(np.float64(k), axis=-1, keepdims=True)
    np.testing.assert_allclose(logits, np.einsum("bmhd,bnhd->bhmn", np.float64(q), unit), rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_equal(normed, norms.qk_norm(q, k)[1], norms.key_norm(k))


def test_cosine_attention_of_the_article():
    """CosA, lambda cos(q, k) with lambda = 4 ln(512 / 2) = 22.18, is QK-norm under the scale lambda / d."""
    temperature = 4 * math.log(512 / 2)
    assert temperature == pytest.approx(22.18, abs=5e-3)
    q, k = norms.QKNorm(gain=False).apply({}, heads(0), heads(1))
    logits = temperature / 8 * np.einsum("bmhd,bnhd->bhmn", q, k)
    units = (np.float64(a) / np.linalg.norm(np.float64(a), axis=-1, keepdims=True) for a in (heads(0), heads(1)))
    np.testing.assert_allclose(logits, temperature * np.einsum("bmhd,bnhd->bhmn", *units), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("spec", "commutes"), [(norms.KeyNorm(), True), (norms.QKNorm(gain=False), True), (norms.QKNorm(), False)]
)
def test_norm_and_rotation_commute_as_declared(spec, commutes):
    params = {name: np.linspace(0.5, 2, 8, dtype=np.float32) for name in spec.init(jax.random.key(0), 8)}

    @jax.jit
    def both(q, k):
        rotate = partial(apply_rotary, table=rotary_table(Range(7, 5), inverse_frequencies(8)))
        return jax.tree.map(rotate, spec.apply(params, q, k)), spec.apply(params, rotate(q), rotate(k))

    before, after = jax.device_get(both(heads(0), heads(1)))
    moved = max(np.abs(a - b).max() for a, b in zip(before, after, strict=True))
    assert spec.commutes_with_rotation == commutes
    assert (moved < 1e-5) == commutes


def test_learned_gains_start_at_one_and_get_gradients():
    spec = norms.QKNorm()
    params = spec.init(jax.random.key(0), 8)
    chex.assert_trees_all_equal(params, {"q": jnp.ones(8), "k": jnp.ones(8)})
    q, k = heads(0), heads(1, heads=1)
    chex.assert_trees_all_equal(spec.apply(params, q, k), norms.qk_norm(q, k))
    gradient = jax.jit(jax.grad(lambda params: sum(a.sum() for a in spec.apply(params, q, k))))(params)
    close(gradient["k"], np.asarray(norms.rms_norm(k)).sum((0, 1, 2)), rtol=1e-4)
    close(gradient["q"], np.asarray(norms.rms_norm(q)).sum((0, 1, 2)), rtol=1e-4)


def test_gains_of_a_unit_offset_are_counted_from_one():
    spec = norms.QKNorm(unit_offset=True)
    chex.assert_trees_all_equal(spec.init(jax.random.key(0), 8), {"q": jnp.zeros(8), "k": jnp.zeros(8)})
    q, k = spec.apply({"q": jnp.full(8, 0.5), "k": jnp.full(8, 2.0)}, heads(0), heads(1))
    close(q, 1.5 * np.asarray(norms.rms_norm(heads(0))))
    close(k, 3.0 * np.asarray(norms.rms_norm(heads(1))))


@pytest.mark.parametrize("spec", [norms.KeyNorm(), norms.QKNorm(), norms.QKNorm(gain=False)])
def test_norms_keep_dtype_and_compute_in_float32(spec):
    q, k = heads(0, dtype=jnp.bfloat16), heads(1, heads=1, dtype=jnp.bfloat16)
    params = spec.init(jax.random.key(0), 8)
    low = spec.apply(params, q, k)
    chex.assert_type(list(low), jnp.bfloat16)
    chex.assert_equal_shape([low[0], q])
    chex.assert_equal_shape([low[1], k])
    wide = jax.device_get(spec.apply(params, q.astype(np.float32), k.astype(np.float32)))
    chex.assert_trees_all_equal(jax.device_get(low), jax.tree.map(lambda a: a.astype(jnp.bfloat16), wide))


def test_zero_keys_stay_zero_with_finite_gradients():
    zero = np.zeros((1, 1, 1, 8), np.float32)
    value, gradient = jax.jit(jax.value_and_grad(lambda k: norms.key_norm(k).sum()))(zero)
    assert value == 0
    assert np.all(np.isfinite(gradient))


@pytest.mark.parity
def test_norms_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    llama4_model = pytest.importorskip("transformers.models.llama4.modeling_llama4")
    x = torch.tensor(np.asarray(heads()))
    gained = qwen3.Qwen3RMSNorm(8, eps=1e-6)
    gained.weight.data = torch.linspace(0.5, 2, 8)
    close(norms.rms_norm(heads(), jnp.linspace(0.5, 2, 8)), gained(x).detach().numpy(), rtol=1e-5)
    close(norms.rms_norm(heads(), eps=1e-5), llama4_model.Llama4TextL2Norm(1e-5)(x).numpy(), rtol=1e-5)


@pytest.mark.parametrize("scale", [None, scales.CosineScale(512), scales.CosineScale()])
def test_cosine_attention_from_norm_and_scale(scale):
    """Logits lambda cos(q, k), with lambda 1 without a scale, one pair at a time; a rotation commutes with the norm."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(1, 6, 4, 8)) * 7, rng.normal(size=(1, 6, 2, 8)) * 0.3

    @jax.jit
    def run(q, k):
        table = rotary_table(Range(0, 6), inverse_frequencies(8))
        normed = norms.CosineNorm().apply({}, q, k)
        late = norms.CosineNorm().apply({}, *(apply_rotary(x, table) for x in (q, k)))
        visible = jnp.arange(6) + 1
        factor = 1.0 if scale is None else scale.factor({}, positions=None, visible=visible, num_heads=4)
        return normed, late, tuple(apply_rotary(x, table) for x in normed), jnp.asarray(factor)

    normed, late, rotated, factor = jax.device_get(run(q.astype(np.float32), k.astype(np.float32)))
    chex.assert_trees_all_close(late, rotated, atol=1e-5)
    found = np.einsum("bihd,bjhd->hij", normed[0] * factor[..., None] / 8**0.5, normed[1].repeat(2, 2))
    for h, i, j in np.ndindex(found.shape):
        a, b = q[0, i, h], k[0, j, h // 2]
        cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        n = 256 if scale == scales.CosineScale(512) else i + 1
        want = cosine if scale is None else 4 * math.log(n) * cosine
        assert float(found[h, i, j]) == pytest.approx(want, rel=2e-5, abs=1e-5)


def test_cosine_norm_keeps_dtypes_and_learns_nothing():
    x = jnp.ones((1, 2, 3, 4), jnp.bfloat16)
    chex.assert_type(norms.CosineNorm().apply({}, x, x), jnp.bfloat16)
    assert norms.CosineNorm().init(jax.random.key(0), 8) == {}


def test_gains_that_do_not_fit_are_refused():
    q, key = heads(), jax.random.key(0)
    for params in ({}, norms.QKNorm().init(key, 4)):
        with pytest.raises(ValueError, match=r"QKNorm\(\.\.\.\)\.init makes them"):
            norms.QKNorm().apply(params, q, q)
