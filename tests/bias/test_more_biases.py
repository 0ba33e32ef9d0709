"""Sandwich, FIRE, FoX, CoPE and scale-invariant attention: closed forms and the numbers of the papers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

import posjax as pj
from posjax.bias import FIRE, T5, ALiBi, CoPE, FoX, Kerple, Sandwich, ScaleInvariant, accumulate
from posjax.masks import Causal

Q = np.arange(7, dtype=np.int32)
ROW, COLUMN = np.mgrid[:7, :7]
R = ROW - COLUMN
KEY = jax.random.key(0)


def values(spec, heads=4, q=Q, k=Q, params=None):
    params = params or spec.init(KEY, heads)
    return jax.jit(lambda *x: spec.bind(x[0], num_heads=heads).values(*x[1:]))(params, q, k)


total = jax.jit(accumulate)


def sandwich_numerator(r, dbar, first, shift):
    t = np.arange(first, first + dbar // 2)
    return np.cos(np.abs(r)[..., None] * 10_000.0 ** (-2 * t / dbar)).sum(-1) - shift


@pytest.mark.parametrize(
    ("variant", "first", "shift", "factor"),
    [("from_one", 1, 16, None), ("from_zero", 0, 0, None), ("from_zero", 0, 0, 0.3)],
)
def test_sandwich_closed_form(variant, first, shift, factor):
    scale = factor or 1 / (8 * np.arange(1, 6)[:, None, None] / 5)
    want = np.broadcast_to(sandwich_numerator(R, 32, first, shift) * scale, (5, 7, 7))
    np.testing.assert_allclose(values(Sandwich(32, variant, factor=factor), 5), want, atol=1e-5)


def test_sandwich_numbers_at_the_default_size():
    """Known numerators, at any shift of the positions: head 1 of 8 divides by 1."""
    far = np.asarray([0, 1, 10, 100, 1000], np.int32)
    tiles = jax.jit(lambda q: Sandwich().bind(num_heads=8).values(q, q[:1]))
    for shift in (0, 1_000_003, 2**31 - 1001):
        tile = tiles(far + np.int32(shift))[0, :, 0]
        np.testing.assert_allclose(tile, [0, -1.447, -19.34, -33.32, -53.39], atol=6e-3)
        np.testing.assert_allclose(tile, sandwich_numerator(far, 128, 1, 64), atol=3e-5)


def fire(params, i, j):
    """The appendix of the paper in float64, one head and one pair at a time."""
    p = {name: np.asarray(x, np.float64) for name, x in params.items()}
    psi = lambda r: np.log(abs(p["c"] * r) + 1)  # noqa: E731
    x = psi(i - j) / (psi(max(i, abs(p["multiplier"] * 512))) + 1e-6)
    return np.maximum(x * p["w1"] + p["b1"], 0) @ p["w2"] + p["b2"]


def test_fire_closed_form_on_both_sides_of_its_threshold():
    params = FIRE().init(jax.random.key(1), 3)
    chex.assert_tree_shape_prefix({k: params[k] for k in ("w1", "b1", "w2")}, (32,))
    assert (float(params["c"]), float(params["multiplier"])) == (np.float32(0.1), 1.0)
    params |= {"c": jnp.float32(-0.3), "multiplier": jnp.float32(-0.5)}
    q, k = np.asarray([0, 5, 255, 257, 70_000]), np.asarray([0, 3, 256, 69_999])
    want = np.array([[fire(params, int(i), int(j)) for j in k] for i in q])
    np.testing.assert_allclose(values(FIRE(), 3, q, k, params), np.moveaxis(want, -1, 0), atol=2e-6)


def test_fire_learns_everything():
    params = FIRE().init(jax.random.key(1), 3)
    weights = np.random.default_rng(2).standard_normal((3, 7, 7)).astype(np.float32)
    slope = jax.jit(jax.grad(lambda p, q: (weights * FIRE().bind(p, num_heads=3).values(q, q)).sum()))
    near, beyond = slope(params, Q), slope(params, Q + 600)
    chex.assert_tree_all_finite(near)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(near))
    assert beyond["multiplier"] == 0  # beyond the threshold the position itself is the normaliser


def test_fox_bias_is_the_sum_of_the_log_gates_between():
    spec = FoX()
    params = spec.init(KEY, 2, 5)
    assert not params["b"].any()
    params["b"] = jnp.asarray([0.5, -1.0])
    x = np.random.default_rng(1).standard_normal((3, 7, 5)).astype(jnp.bfloat16)
    log_gates = jax.jit(spec.prepare)(params, x)
    chex.assert_type(log_gates, jnp.float32)
    z = np.asarray(x, np.float64) @ np.asarray(params["w"], np.float64) + np.array([0.5, -1.0])
    np.testing.assert_allclose(log_gates, -np.log1p(np.exp(-z)), rtol=1e-5)
    c = total(log_gates)
    tile, both = (s.bind(num_heads=2, q_gates=c, kv_gates=c).values(Q, Q) for s in (spec, FoX(symmetric=True)))
    for b, h, i, j in np.ndindex(3, 2, 7, 7):
        between = np.asarray(log_gates, np.float64)[b, min(i, j) + 1 : max(i, j) + 1, h].sum()
        np.testing.assert_allclose(both[b, h, i, j], between, atol=1e-5)
        np.testing.assert_allclose(tile[b, h, i, j], between if j <= i else -between, atol=1e-5)


def test_fox_in_chunks_with_padding_equals_the_whole():
    log_gates = -np.random.default_rng(0).uniform(size=(2, 7, 3)).astype(np.float32)
    whole = np.asarray(total(log_gates))
    np.testing.assert_allclose(whole, np.cumsum(np.moveaxis(log_gates, 2, 1), -1), atol=1e-6)
    first = np.asarray(total(log_gates[:, :4]))
    chex.assert_trees_all_close(total(log_gates[:, 4:], first[..., -1]), whole[..., 4:], atol=1e-6)
    padded = np.insert(log_gates, 2, -9.0, axis=1)
    valid = np.broadcast_to(np.arange(8) != 2, (2, 8))
    chex.assert_trees_all_close(np.delete(total(padded, valid=valid), 2, axis=2), whole, atol=1e-6)


def test_fox_constants_of_heads_begin_at_the_decay_times():
    spec = FoX(data_dependent=False, decay_times=(2.0, 512.0))
    params = spec.init(KEY, 5, 8)
    assert set(params) == {"b"}
    gates = spec.prepare(params, jnp.zeros((2, 3, 8)))
    np.testing.assert_allclose(-1 / gates[1, 2], [2, 8, 32, 128, 512], rtol=1e-4)
    assert set(FoX(decay_times=(1, 9)).init(KEY, 5, 8)) == {"w", "b"}


def test_scale_invariant_closed_form():
    scores = np.random.default_rng(0).standard_normal((2, 4, 7, 7)).astype(np.float32)
    log = np.log(abs(R) / 10 + 1)
    found = ScaleInvariant().bind(num_heads=4).apply(scores, Q, Q)
    np.testing.assert_allclose(found, scores * np.sqrt(1 + 2 * log) - 2 * log, rtol=2e-5, atol=1e-5)
    other = ScaleInvariant(tau=3.0, alpha=2.0, beta=2.5).bind(num_heads=4).apply(scores, Q, Q)
    square = 2 * (np.log(abs(R) / 3 + 1) - np.log(2) + 1.25)
    np.testing.assert_allclose(other, scores * np.sqrt(square) + 1.25 - square, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("alpha", [np.exp(0.5), 1.5])
def test_scale_invariant_weight_falls_as_one_over_distance(alpha):
    """E[exp(a z + m)] = alpha / (t / tau + 1) for z ~ N(0, 1), by Gauss-Hermite quadrature."""
    z, w = np.polynomial.hermite_e.hermegauss(60)
    t = np.asarray([0, 1, 10, 100, 10_000])
    scores = np.broadcast_to(np.float32(z)[:, None, None, None], (60, 1, 5, 1))
    logits = ScaleInvariant(alpha=alpha, beta=1.7).bind(num_heads=1).apply(scores, t, np.zeros(1, np.int32))
    mean = np.exp(np.asarray(logits, np.float64)[:, 0, :, 0]).T @ w / w.sum()
    np.testing.assert_allclose(mean, alpha / (t / 10 + 1), rtol=2e-4)


SPECS = {"fire": FIRE(), "scale": ScaleInvariant(), "kerple": Kerple("weighted-power"), "fox": FoX()}


@pytest.mark.parametrize("name", SPECS)
def test_attention_in_tiles_equals_dense_attention_with_gradients(name):
    rng, length = np.random.default_rng(0), 600
    q, k, v = rng.standard_normal((3, 1, length, 1, 4)).astype(np.float32)
    gates = -rng.uniform(size=(1, length, 1)).astype(np.float32)
    params = {} if name == "fox" else SPECS[name].init(KEY, 1)

    def loss(implementation, params, gates, q):
        c = accumulate(gates)
        given = {"q_gates": c, "kv_gates": c} if name == "fox" else {}
        bias = SPECS[name].bind(params, num_heads=1, **given)
        return jnp.sin(pj.attention(q, k, v, bias=bias, mask=Causal(), implementation=implementation)).sum()

    slopes = jax.jit(jax.value_and_grad(loss, (1, 2, 3)), static_argnums=0)
    want, got = (slopes(implementation, params, gates, q) for implementation in ("dense", "blockwise"))
    chex.assert_trees_all_close(got, want, atol=5e-5, rtol=1e-4)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves((want[1][0], want[1][2])))
    assert (np.abs(want[1][1]).max() > 0) == (name == "fox")


def test_every_spec_declares_its_properties():
    fits = (ALiBi(symmetric=True), T5(bidirectional=True), FoX(symmetric=True), FIRE(), Sandwich(), ScaleInvariant())
    assert all(spec.one_sided is None for spec in (*fits, Kerple()))
    wanted = {ALiBi(): "symmetric=True", FoX(): "symmetric=True", T5(): "bidirectional=True", CoPE(): ""}
    assert {spec: spec.one_sided for spec in wanted} == wanted
    assert [spec.reads_tokens for spec in (FoX(), CoPE(), T5())] == [True, False, False]
    assert [spec.contextual for spec in (FoX(), CoPE(), T5())] == [False, True, False]
    shared = {T5(): True, Kerple(): True, FIRE(): False, FIRE(shared_across_layers=True): True, FoX(): False}
    assert {spec: spec.shared_across_layers for spec in shared} == shared


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("c", lambda: FIRE().bind({}, num_heads=2)),
        ("w1", lambda: FIRE().bind(FIRE(16).init(KEY, 2), num_heads=2)),
        ("beta", lambda: ScaleInvariant(alpha=9.0)),
        ("w", lambda: FoX().prepare(FoX().init(KEY, 2, 5), np.zeros((1, 2, 3)))),
        ("q_gates", lambda: FoX().bind(num_heads=2, q_gates=np.zeros((1, 3, 2)), kv_gates=np.zeros((1, 2, 3)))),
        ("table", lambda: CoPE().bind(num_heads=2)),
    ],
)
def test_bad_input_is_named(name, call):
    refused(name, call)
