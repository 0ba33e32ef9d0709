"""Sandwich, FIRE, FoX, scale-invariant attention, and the further forms of ALiBi and KERPLE."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.tiles import in_tiles

import posjax as pj
from posjax._axes import narrowed, sizes_of
from posjax.attention.dense import dense
from posjax.attention.operands import Operands
from posjax.attention.padding import lengthened
from posjax.bias import (
    FIRE,
    T5,
    ALiBi,
    CoPE,
    FoX,
    Kerple,
    Sandwich,
    ScaleInvariant,
    accumulate,
    alibi_slopes,
)
from posjax.masks import Causal
from posjax.positions import Range

Q = np.arange(7, dtype=np.int32)
ROW, COLUMN = np.mgrid[:7, :7]
R = ROW - COLUMN


def values(spec, heads=4, q=Q, k=Q, params=None):
    params = params or spec.init(jax.random.key(0), heads)
    return jax.jit(lambda *x: spec.bind(x[0], num_heads=heads).values(*x[1:]))(params, q, k)


total = jax.jit(accumulate)


@pytest.mark.parametrize(("spec", "heads"), [(Sandwich(), 4), (FIRE(), 4), (ScaleInvariant(), 1)])
def test_one_form_for_shared_and_for_batched_positions(spec, heads):
    tile = values(spec, q=Q[:3])
    chex.assert_shape(tile, (heads, 3, 7))
    chex.assert_type(tile, jnp.float32)
    both = np.stack([Q, Q + 5])[:, None]
    batched = values(spec, q=both[..., :3], k=both)
    chex.assert_shape(batched, (2, heads, 3, 7))
    chex.assert_trees_all_close(batched[0], tile, atol=1e-6)
    if spec.shift_invariant:
        chex.assert_trees_all_close(batched[1], tile, atol=5e-5)


def sandwich_numerator(r, dbar, first, shift):
    t = np.arange(first, first + dbar // 2)
    return np.cos(np.abs(r)[..., None] * 10_000.0 ** (-2 * t / dbar)).sum(-1) - shift


@pytest.mark.parametrize(("variant", "first", "shift"), [("from_one", 1, 16), ("from_zero", 0, 0)])
def test_sandwich_closed_form(variant, first, shift):
    want = sandwich_numerator(R, 32, first, shift) / (8 * np.arange(1, 6)[:, None, None] / 5)
    np.testing.assert_allclose(values(Sandwich(32, variant), 5), want, atol=1e-5)


def test_sandwich_numbers_at_the_default_size():
    """Known numerators, at any shift of the positions: head 1 of 8 divides by 1."""
    far = np.asarray([0, 1, 10, 100, 1000], np.int32)
    tiles = jax.jit(lambda q: Sandwich().bind(num_heads=8).values(q, q[:1]))
    for shift in (0, 1_000_003, 2**31 - 1001):
        tile = tiles(far + np.int32(shift))
        np.testing.assert_allclose(tile[0, :, 0], [0, -1.447, -19.34, -33.32, -53.39], atol=6e-3)
        want = sandwich_numerator(np.asarray(far), 128, 1, 64)
        np.testing.assert_allclose(tile[0, :, 0], want, atol=3e-5)
    np.testing.assert_allclose(values(Sandwich(), 4, Q, Q), np.swapaxes(values(Sandwich(), 4), 1, 2), atol=3e-5)


@pytest.mark.parametrize(("variant", "first", "shift"), [("from_one", 1, 16), ("from_zero", 0, 0)])
def test_sandwich_with_one_factor_for_all_heads(variant, first, shift):
    want = 0.3 * np.broadcast_to(sandwich_numerator(R, 32, first, shift), (5, *R.shape))
    np.testing.assert_allclose(values(Sandwich(32, variant, factor=0.3), 5), want, atol=1e-5)


def test_sandwich_of_one_factor_is_the_mean_logit_that_strict_coca_starts_from():
    """The mean over many standard normal queries and keys, by distance. Its standard error is below 0.005."""
    rng, size, pairs, at = np.random.default_rng(0), 32, 100_000, np.array([40])
    q = rng.standard_normal((1, 1, pairs, size)).astype(np.float32)
    t = rng.standard_normal((1, 1, pairs, size // 2)).astype(np.float32)
    far = at - np.array([0, 1, 3, 10, 32])

    @jax.jit
    def features(q, t):
        here, there = (pj.rotary_table(where, pj.rotary.inverse_frequencies(size)) for where in (at, far))
        return pj.coca.features(q, jnp.repeat(t, 5, axis=1), here, kv_table=there, variant="strict")

    phi, psi = (np.asarray(x, np.float64) for x in features(q, t))
    mean = np.einsum("bmhd,bnhd->n", phi, psi) / pairs / size**0.5
    bias = values(Sandwich(size, "from_zero", factor=(2 / (np.pi * size)) ** 0.5), 1, at, far)[0, 0]
    np.testing.assert_allclose(mean, bias, atol=0.015)
    assert bias[0] - bias[-1] > 0.8


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
    got = values(FIRE(), 3, q, k, params)
    np.testing.assert_allclose(got, np.moveaxis(want, -1, 0), atol=2e-6)


def test_fire_depends_on_the_query_s_position_and_learns_everything():
    params = FIRE().init(jax.random.key(1), 3)
    far = Q + 600
    assert not FIRE().shift_invariant
    assert np.abs(values(FIRE(), 3, far, far, params) - values(FIRE(), 3, Q, Q, params))[:, 6, 0].max() > 1e-4
    weights = np.random.default_rng(2).standard_normal((3, 7, 7)).astype(np.float32)
    slope = jax.jit(jax.grad(lambda p, q: (weights * FIRE().bind(p, num_heads=3).values(q, q)).sum()))
    near, beyond = slope(params, Q), slope(params, far)
    chex.assert_tree_all_finite(near)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(near))
    assert beyond["multiplier"] == 0  # beyond the threshold the position itself is the normaliser


def test_fox_bias_is_the_sum_of_the_log_gates_between():
    spec = FoX()
    params = spec.init(jax.random.key(0), 2, 5)
    chex.assert_shape((params["w"], params["b"]), ((5, 2), (2,)))
    assert not params["b"].any()
    params["b"] = jnp.asarray([0.5, -1.0])
    x = np.random.default_rng(1).standard_normal((3, 7, 5)).astype(jnp.bfloat16)
    log_gates = jax.jit(spec.prepare)(params, x)
    chex.assert_shape(log_gates, (3, 7, 2))
    chex.assert_type(log_gates, jnp.float32)
    z = np.asarray(x, np.float64) @ np.asarray(params["w"], np.float64) + np.array([0.5, -1.0])
    np.testing.assert_allclose(log_gates, -np.log1p(np.exp(-z)), rtol=1e-5)
    c = total(log_gates)
    specs = spec, FoX(symmetric=True)
    run = jax.jit(lambda c: [s.bind(num_heads=2, q_gates=c, kv_gates=c).values(Q, Q) for s in specs])
    tile, both = jax.device_get(run(c))
    chex.assert_shape(tile, (3, 2, 7, 7))
    for b, h, i, j in np.ndindex(3, 2, 7, 7):
        between = np.asarray(log_gates, np.float64)[b, min(i, j) + 1 : max(i, j) + 1, h].sum()
        np.testing.assert_allclose(both[b, h, i, j], between, atol=1e-5)
        np.testing.assert_allclose(tile[b, h, i, j], between if j <= i else -between, atol=1e-5)


@pytest.mark.parametrize("symmetric", [False, True])
def test_fox_with_constant_gates_is_alibi(symmetric):
    slopes = alibi_slopes(4)
    c = total(np.broadcast_to(-np.asarray(slopes), (1, 7, 4)))
    tile = FoX(symmetric=symmetric).bind(num_heads=4, q_gates=c, kv_gates=c).values(Q, Q)
    chex.assert_trees_all_close(tile[0], values(ALiBi(symmetric=symmetric)), atol=1e-6)


def test_fox_in_chunks_with_padding_equals_the_whole():
    log_gates = -np.random.default_rng(0).uniform(size=(2, 7, 3)).astype(np.float32)
    whole = np.asarray(total(log_gates))
    chex.assert_shape(whole, (2, 3, 7))
    first = np.asarray(total(log_gates[:, :4]))
    chex.assert_trees_all_close(total(log_gates[:, 4:], first[..., -1]), whole[..., 4:], atol=1e-6)
    padded = np.insert(log_gates, 2, -9.0, axis=1)
    valid = np.broadcast_to(np.arange(8) != 2, (2, 8))
    chex.assert_trees_all_close(np.delete(total(padded, valid=valid), 2, axis=2), whole, atol=1e-6)


def test_fox_bias_by_blocks():
    c = total(-np.random.default_rng(0).uniform(size=(2, 7, 3)).astype(np.float32))
    bound = FoX().bind(num_heads=3, q_gates=c, kv_gates=c)
    whole = bound.values(Q, Q)
    assert sizes_of(bound, "batch") == {2}
    longer = lengthened(bound, queries=(7, 8), keys=(7, 10))
    part = narrowed(longer, batch=(1, 1), queries=(2, 3), keys=(4, 3))
    chex.assert_trees_all_close(part.values(Q[2:5], Q[4:7])[0], whole[1, :, 2:5, 4:7])
    bound.check(2, 7, 7)
    with pytest.raises(ValueError, match=r"kv_gates must have shape \(2, heads, 8\), found \(2, 3, 7\)"):
        bound.check(2, 7, 8)


def test_fox_constants_of_heads_begin_at_the_decay_times():
    spec = FoX(data_dependent=False, decay_times=(2.0, 512.0))
    params = spec.init(jax.random.key(0), 5, 8)
    assert set(params) == {"b"}
    gates = spec.prepare(params, jnp.zeros((2, 3, 8)))
    chex.assert_shape(gates, (2, 3, 5))
    np.testing.assert_allclose(-1 / gates[1, 2], [2, 8, 32, 128, 512], rtol=1e-4)
    assert set(FoX(decay_times=(1, 9)).init(jax.random.key(0), 5, 8)) == {"w", "b"}


def test_fox_gradients_reach_the_gates():
    spec = FoX()
    x = np.random.default_rng(1).standard_normal((1, 7, 5)).astype(np.float32)

    def loss(params, x):
        c = total(spec.prepare(params, x))
        return jnp.tril(jnp.sin(spec.bind(num_heads=2, q_gates=c, kv_gates=c).values(Q, Q))).sum()

    params = jax.device_get(spec.init(jax.random.key(0), 2, 5))
    loss = jax.jit(loss)
    grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)
    chex.assert_tree_all_finite(grads)
    step = np.zeros_like(params["w"])
    step[1, 1] = 1e-2
    slope = (loss({**params, "w": params["w"] + step}, x) - loss({**params, "w": params["w"] - step}, x)) / 2e-2
    np.testing.assert_allclose(grads[0]["w"][1, 1], slope, rtol=2e-3)


def test_scale_invariant_closed_form():
    scores = np.random.default_rng(0).standard_normal((2, 4, 7, 7)).astype(np.float32)
    bound = ScaleInvariant().bind(num_heads=4)
    log = np.log(abs(R) / 10 + 1)
    want = np.asarray(scores) * np.sqrt(1 + 2 * log) - 2 * log
    applied, added = jax.jit(lambda x: (bound.apply(x, Q, Q), bound.values(Q, Q)))(scores)
    np.testing.assert_allclose(applied, want, rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(added, -2 * log[None], rtol=1e-5, atol=1e-6)
    other = ScaleInvariant(tau=3.0, alpha=2.0, beta=2.5).bind(num_heads=4).apply(scores, Q, Q)
    square = 2 * (np.log(abs(R) / 3 + 1) - np.log(2) + 1.25)
    np.testing.assert_allclose(other, np.asarray(scores) * np.sqrt(square) + 1.25 - square, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("alpha", [np.exp(0.5), 1.5])
def test_scale_invariant_weight_falls_as_one_over_distance(alpha):
    """E[exp(a z + m)] = alpha / (t / tau + 1) for z ~ N(0, 1), by Gauss-Hermite quadrature."""
    z, w = np.polynomial.hermite_e.hermegauss(60)
    t = np.asarray([0, 1, 10, 100, 10_000])
    scores = np.broadcast_to(np.float32(z)[:, None, None, None], (60, 1, 5, 1))
    bound = ScaleInvariant(alpha=alpha, beta=1.7).bind(num_heads=1)
    logits = jax.jit(bound.apply)(scores, t, np.zeros(1, np.int32))
    mean = np.exp(np.asarray(logits, np.float64)[:, 0, :, 0]).T @ w / w.sum()
    np.testing.assert_allclose(mean, alpha / (np.asarray(t) / 10 + 1), rtol=2e-4)


def test_weighted_kerple_is_a_factor_and_an_offset():
    spec = Kerple("weighted-power")
    params = spec.init(jax.random.key(0), 2)
    assert set(params) == {"a", "p", "weight_a", "weight_p"}
    scores = np.random.default_rng(1).standard_normal((3, 2, 7, 7)).astype(np.float32)
    got = np.asarray(jax.jit(lambda p: spec.bind(p, num_heads=2).apply(scores, Q, Q))(params))
    r = abs(R).astype(float)
    for h in range(2):
        a, p, weight_a, weight_p = (float(params[name][h]) for name in ("a", "p", "weight_a", "weight_p"))
        want = np.asarray(scores[:, h]) * np.exp(-weight_a * r**weight_p) - a * r**p
        np.testing.assert_allclose(got[:, h], want, rtol=1e-4, atol=1e-5)
    grads = jax.jit(jax.grad(lambda p: jnp.sin(spec.bind(p, num_heads=2).apply(scores, Q, Q)).sum()))(params)
    chex.assert_tree_all_finite(grads)
    assert all(np.abs(g).min() > 0 for g in jax.tree.leaves(grads))


def test_alibi_that_distinguishes_left_from_right():
    m = np.asarray(alibi_slopes(4))[:, None, None]
    offset = values(ALiBi(symmetric=True, direction="offset"))
    np.testing.assert_allclose(offset, m * (-abs(R) + 0.5 * (COLUMN < ROW)), rtol=1e-6)
    spec = ALiBi(symmetric=True, learned=True, direction="slopes")
    params = spec.init(jax.random.key(0), 4)
    chex.assert_trees_all_close(values(spec, params=params), values(ALiBi(symmetric=True)))
    params["ahead"] = 3 * params["ahead"]
    np.testing.assert_allclose(values(spec, params=params), -m * np.where(COLUMN > ROW, 3 * abs(R), abs(R)), rtol=1e-6)


def test_interpolated_alibi_is_alibi_of_positions_divided():
    at = 8 * Q
    chex.assert_trees_all_close(values(ALiBi(factor=8.0), q=at, k=at), values(ALiBi()))
    learned = ALiBi(learned=True, factor=2.0)
    chex.assert_trees_all_close(values(learned), values(ALiBi()) / 2)


def test_every_spec_declares_its_properties():
    fits = (ALiBi(symmetric=True), T5(bidirectional=True), FoX(symmetric=True), FIRE(), Sandwich(), ScaleInvariant())
    assert all(spec.one_sided is None for spec in (*fits, Kerple()))
    assert [spec.one_sided for spec in (ALiBi(), FoX(), T5(), CoPE())] == ["symmetric=True"] * 2 + [
        "bidirectional=True",
        "",
    ]
    assert [spec.reads_tokens for spec in (FoX(), CoPE(), T5())] == [True, False, False]
    assert [spec.contextual for spec in (FoX(), CoPE(), T5())] == [False, True, False]
    assert [spec.shared_across_layers for spec in (T5(), Kerple(), FIRE(), FIRE(shared_across_layers=True), FoX())] == [
        True,
        True,
        False,
        True,
        False,
    ]
    for spec in (*fits, CoPE()):
        assert hash(spec) == hash(dataclasses.replace(spec))


@pytest.mark.parametrize("spec", [ALiBi(), FIRE(), Sandwich(), ScaleInvariant(), Kerple("weighted-power")])
def test_identical_tokens_get_identical_outputs(spec):
    """Rows of a softmax sum to 1: a bias of the logits alone cannot distinguish identical tokens by position."""

    @jax.jit
    def run(params):
        scores = spec.bind(params, num_heads=4).apply(jnp.full((1, 4, 7, 7), 0.7), Q, Q)
        return jax.nn.softmax(jnp.where(Q[None] <= Q[:, None], scores, -jnp.inf)) @ jnp.full((7, 2), 1.5)

    out = run(spec.init(jax.random.key(0), 4))
    np.testing.assert_allclose(out, np.full((1, 4, 7, 2), 1.5), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ALiBi(factor=0.5), "factor must be at least 1, found 0.5"),
        (lambda: ALiBi(symmetric=True, direction="ofset"), "did you mean 'offset'"),
        (lambda: ALiBi(direction="offset"), "use symmetric=True with it"),
        (lambda: ALiBi(symmetric=True, direction="slopes"), "use learned=True with it"),
        (lambda: Sandwich(dbar=7), "dbar must be a positive even number, found 7"),
        (lambda: Sandwich(variant="nemo"), "Sandwich variant: unknown value 'nemo'"),
        (lambda: FIRE(width=0), "FIRE width must be positive and whole, found 0"),
        (lambda: FIRE(threshold=-1), "FIRE threshold must be positive"),
        (lambda: FIRE().bind({}, num_heads=2), "params must hold 'c', 'multiplier', 'w1'"),
        (lambda: FIRE().bind(FIRE(16).init(jax.random.key(0), 2), num_heads=2), r"w1 must have shape \(32,\)"),
        (lambda: ScaleInvariant(tau=0), "tau must be positive, found 0"),
        (lambda: ScaleInvariant(alpha=9.0), "beta must be at least alpha log alpha = 19.78"),
        (lambda: FoX(data_dependent=False), "decay_times must be given"),
        (lambda: FoX(decay_times=(9, 2)), r"decay_times must be \(shortest, longest\)"),
        (lambda: FoX().prepare({}, np.zeros((1, 2, 3))), "params must hold 'w', 'b'"),
        (
            lambda: FoX().prepare(FoX().init(jax.random.key(0), 2, 5), np.zeros((1, 2, 3))),
            r"w must have shape \(3, 2\)",
        ),
        (lambda: FoX().bind(num_heads=2, q_gates=np.zeros((1, 3, 2)), kv_gates=np.zeros((1, 2, 3))), "with 2 heads"),
        (lambda: CoPE(1), "max_position must be at least 2"),
        (lambda: CoPE().bind(num_heads=2), "params must hold 'table'"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def bound_in(kind, params, log_gates):
    """A bound bias of this kind from its learned arrays."""
    specs = {"fire": FIRE(), "scale": ScaleInvariant(), "kerple": Kerple("weighted-power")}
    if kind in specs:
        return specs[kind].bind(params, num_heads=4)
    c = total(log_gates)
    return FoX().bind(num_heads=4, q_gates=c, kv_gates=c)


@pytest.mark.parametrize("kind", ["fire", "scale", "kerple", "fox"])
def test_attention_tile_by_tile_equals_the_whole_with_gradients(kind):
    keys = jax.random.split(jax.random.key(0), 4)
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 13, 4, 8)).astype(np.float32)
    log_gates = -rng.uniform(size=(2, 13, 4)).astype(np.float32)
    params = {"fire": FIRE().init(keys[2], 4), "kerple": Kerple("weighted-power").init(keys[3], 4)}

    heads = (np.moveaxis(q, 2, 1)[:, :, None], np.moveaxis(k, 2, 1), np.moveaxis(v, 2, 1))

    def loss(backend, x):
        operands = Operands(heads[0] * x[2], *heads[1:], bound_in(kind, *x[:2]), Causal(), Range(0, 13), Range(0, 13))
        out, lse = backend(operands)[:2]
        return jnp.sin(out).sum() + jnp.cos(lse).sum()

    backends = dense, lambda x: in_tiles(x, 4, 6)
    slopes = jax.jit(lambda x: [jax.value_and_grad(partial(loss, backend))(x) for backend in backends])
    want, got = slopes((params.get(kind), log_gates, np.ones((), np.float32)))
    chex.assert_trees_all_close(got, want, atol=5e-5, rtol=1e-4)
    learned = {"scale": (), "fox": want[1][1]}.get(kind, want[1][0])
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves((learned, want[1][2])))
