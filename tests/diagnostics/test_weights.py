"""Attention weights, their curves, reach and entropy, of whole schemes."""

import jax.numpy as jnp
import numpy as np
import pytest

import posjax as pj
from posjax import masks
from posjax.diagnostics import entropy, entropy_curve, mean_score, receptive_field, weight_curve, weights

SMALL = {"num_heads": 2, "head_dim": 8}


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize(
    "scheme", [pj.scheme("xpos"), pj.scheme("cope"), pj.scheme("dual-chunk", length=4), pj.scheme("pope")]
)
def test_schemes_of_every_kind_give_a_distribution_over_the_keys_they_see(scheme):
    found = weights(scheme, 6, query=3, **SMALL)
    np.testing.assert_allclose(found.sum(-1), [1, 1], rtol=1e-5)
    assert (found[:, 4:] == 0).all()
    assert (found[:, :4] > 0).all()


def test_far_pairs_gates_and_rotated_values():
    """ReRoPE is flat beyond its window; a gate of 1/2 halves every weight; rotated values leave weights unchanged."""
    far = weights(pj.scheme("rerope", window=3), 9, **SMALL)
    np.testing.assert_allclose(far[:, :6], far[:, :1].repeat(6, 1), rtol=1e-5)
    assert far[0, 8] > far[0, 7] > far[0, 6]
    gated = weights(pj.scheme("fox"), 6, **SMALL)
    np.testing.assert_allclose(gated[:, 1:] / gated[:, :-1], 2, rtol=1e-5)
    values = weights(pj.scheme("vo-rope"), 200, **SMALL)
    np.testing.assert_allclose(values, 1 / 200, rtol=1e-4)


def test_linear_attention():
    """Rotation is in the numerator only: theta_t rotates the part of the weight that pair t gives."""
    q = np.array([[0.3, -0.2, 0.5, 1.0]], np.float32)
    found = weights(pj.scheme("linear-exp"), 5, q=q, k=q, head_dim=4)
    a, b = np.exp(q[0].astype(np.float64) - q.max()), np.exp(q[0].astype(np.float64))
    a, b = a / a.sum(), b / b.sum()
    r = np.arange(4, -1, -1)[:, None] * np.array([1, 0.01])
    planes = (a[:2] + 1j * a[2:]) * (b[:2] - 1j * b[2:])
    np.testing.assert_allclose(found[0], (planes * np.exp(1j * r)).real.sum(-1) / (a @ b) / 5, rtol=1e-4)


def test_rotary_weights_against_float64():
    q, k = np.random.default_rng(0).normal(size=(2, 7, 2, 8))
    theta = 10_000.0 ** -(np.arange(4) / 4)
    planes = [x[..., :4] + 1j * x[..., 4:] for x in (q[-1], k)]
    turned = np.exp(1j * (6 - np.arange(7))[:, None, None] * theta)
    want = softmax(((planes[0] * np.conj(planes[1]) * turned).real.sum(-1) / 8**0.5).T)
    found = weights(pj.scheme("rope"), 7, q=jnp.float32(q[-1]), k=jnp.float32(k), head_dim=8)
    np.testing.assert_allclose(found, want, atol=1e-6)


def test_more_keys_than_one_block_and_a_window_and_sinks():
    scheme = pj.scheme("alibi", mask=masks.Window(200))
    want = softmax(np.where(np.arange(300) > 99, -(2.0**-4) * np.arange(299, -1, -1), -np.inf))
    np.testing.assert_allclose(weights(scheme, 300, **SMALL)[0], want, rtol=1e-4, atol=1e-9)
    half = weights(pj.scheme("nope"), 4, **SMALL, sinks=jnp.full(2, np.log(4.0) + 8**0.5))
    np.testing.assert_allclose(half, 1 / 8, rtol=1e-5)


def test_the_curve_of_alibi_is_its_bias_on_both_sides():
    distances = np.array([5, 0, -3, 3])
    found = weight_curve(pj.scheme("alibi", symmetric=True), distances, causal=False, **SMALL)
    wanted = -np.array([[2**-4], [2**-8]]) * np.abs(distances)
    np.testing.assert_allclose(found.logits - found.logits[:, 1:2], wanted, atol=1e-5)
    np.testing.assert_allclose(np.exp(found.logits), found.weights, rtol=1e-5)
    all_keys = softmax(-np.array([[2**-4], [2**-8]]) * np.abs(np.arange(-3, 6)))
    np.testing.assert_allclose(found.weights, all_keys[:, distances + 3], rtol=1e-5)
    assert (weight_curve(pj.scheme("alibi"), distances, **SMALL).weights[:, 2] == 0).all()


@pytest.mark.parametrize(("draws", "heads", "tolerance"), [(0, 1, 1e-4), (120, 4, 0.15)])
def test_the_curve_of_rope_is_the_mean_score(draws, heads, tolerance):
    """For ones, and on average for random keys like the query, the logit is sqrt(d) times mean_score, plus a number."""
    distances = np.array([0, 1, 5, 20])
    found = weight_curve(pj.scheme("rope"), distances, draws=draws, num_heads=heads, head_dim=32).logits.mean(0)
    want = 32**0.5 * mean_score(pj.rotary.Plain(), distances, head_dim=32)
    np.testing.assert_allclose(found - found[0], want - want[0], atol=tolerance)


@pytest.mark.parametrize(("distances", "keys"), [((0, 1, 3), 4), ((0, -1, -3), 4), ((2, -1), 4), ((-1, -2), 3)])
def test_the_context_is_just_long_enough_for_the_distances(distances, keys):
    found = weight_curve(pj.scheme("nope"), np.array(distances), causal=False, **SMALL)
    np.testing.assert_allclose(found.weights, 1 / keys, rtol=1e-6)


def test_the_reach_of_alibi_and_of_windows_in_closed_form():
    want = np.ceil(np.log(100) * 2.0 ** np.arange(1, 9))
    assert receptive_field(pj.scheme("alibi"), 4096, head_dim=2).tolist() == want.tolist()
    window = pj.scheme("rope", mask=masks.Window(16))
    assert receptive_field(window, 64, share=0.5, num_heads=1).tolist() == [8]
    # 23 window layers of HWFA reach 346 tokens (article 9: (w - 1)(L - 1) + 1).
    assert receptive_field(window, 64, share=1, layers=23, num_heads=1).tolist() == [346]


def test_uniform_attention_has_the_entropy_log_n():
    q, k = np.zeros((2, 9, 2, 8), np.float32), np.ones((2, 9, 1, 8), np.float32)
    found = entropy(pj.scheme("rope"), q, k)
    np.testing.assert_allclose(found, np.tile(np.log(np.arange(1, 10))[:, None], (2, 1, 2)), atol=1e-6)
    np.testing.assert_allclose(entropy(pj.scheme("rope"), q, k, causal=False), np.log(9), atol=1e-6)


def test_the_current_length_is_that_of_the_keys():
    """Dynamic NTK at 4 times the training length is NTK-aware scaling by 4."""
    dynamic = pj.scheme("rope", frequencies={"name": "dynamic-ntk", "original_length": 8})
    fixed = pj.scheme("rope", frequencies={"name": "ntk", "factor": 4.0})
    np.testing.assert_allclose(weights(dynamic, 32, **SMALL), weights(fixed, 32, **SMALL), atol=1e-6)
    q, k = np.random.default_rng(0).normal(size=(2, 1, 32, 1, 8)).astype(np.float32)
    found = entropy(dynamic, q, k)
    np.testing.assert_allclose(found, entropy(fixed, q, k), atol=1e-4)
    assert np.abs(found - entropy(dynamic, q, k, length=8)).max() > 1e-3


def test_entropy_against_float64_over_several_blocks():
    q, k = np.random.default_rng(1).normal(size=(2, 1, 300, 1, 8)).astype(np.float32)
    found = entropy(pj.scheme("nope"), q[:, [0, 150, 299]], k, q_positions=np.array([0, 150, 299]))
    for column, at in enumerate((0, 150, 299)):
        p = softmax(k[0, : at + 1, 0].astype(np.float64) @ q[0, at, 0] / 8**0.5)
        assert found[0, column, 0] == pytest.approx(-(p * np.log(p)).sum(), abs=1e-5)


def test_entropy_grows_with_the_context_and_log_n_holds_it_back():
    """For normal logits it is log n - 1/2. The scale log n / log L makes it larger below L and smaller above L."""
    lengths = np.array([64, 256, 1024])
    plain = entropy_curve(pj.scheme("nope"), lengths, draws=4, num_heads=4, head_dim=64).mean(0)
    np.testing.assert_allclose(plain, np.log(lengths) - 0.5, atol=0.06)
    log_n = pj.scheme("nope", scale={"name": "log-n", "length": 256})
    scaled = entropy_curve(log_n, lengths, draws=4, num_heads=4).mean(0)
    assert scaled[0] > plain[0]
    assert scaled[1] == pytest.approx(plain[1], abs=0.06)
    assert scaled[2] < plain[2]
    none = entropy_curve(pj.scheme("nope"), np.array([1, 9]), draws=2, gain=0.0, num_heads=3, head_dim=8)
    np.testing.assert_allclose(none, [[0, np.log(9)]] * 3, atol=1e-6)
