"""Kernels: each against its closed form in float64, the numbers of the articles, and the statistics of FAVOR+."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear.quadratic import quadratic
from refusals import refused

from posjax import apply_rotary, linear, rotary_table
from posjax.linear import Cosine, Elu, Exponential, Limit, Performer, Taylor, limit_features, taylor_features
from posjax.rotary import inverse_frequencies

B, T, H, K, D = 2, 9, 4, 2, 4
KEYS = jax.random.split(jax.random.key(0), 5)
RNG = np.random.default_rng(0)
Q, V = RNG.standard_normal((B, T, H, D), np.float32), RNG.standard_normal((B, T, K, D), np.float32)
KEY = 2 * RNG.standard_normal((B, T, K, D), np.float32)
PERFORMER = Performer(8, eps=0.0)
PROJECTION = PERFORMER.init(KEYS[3], num_heads=H, num_kv_heads=K, head_dim=D)
W = np.asarray(PROJECTION["projection"], np.float64)


def elu(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def favor(x):
    x = x / D**0.25
    return np.exp(x @ W.T - (x * x).sum(-1, keepdims=True) / 2) / math.sqrt(len(W))


# The weight of a pair of vectors [..., d], by a formula without features where there is one.
WEIGHTS = {
    Elu(): lambda q, k: (elu(q) * elu(k)).sum(-1),
    Exponential(): lambda q, k: (np.exp(q) * np.exp(k)).sum(-1) / np.exp(q).sum(-1),
    Taylor(): lambda q, k: 1 + (z := (q * k).sum(-1) / 2) + z**2 / 2,
    Taylor(order=4, scale=0.1): lambda q, k: sum((0.1 * (q * k).sum(-1)) ** n / math.factorial(n) for n in range(5)),
    Limit(): lambda q, k: (1 + (q * k).sum(-1) / 4) ** 2,
    Cosine(): lambda q, k: 1 + (q * k).sum(-1) / np.linalg.norm(q, axis=-1) / np.linalg.norm(k, axis=-1),
    PERFORMER: lambda q, k: (favor(q) * favor(k)).sum(-1),
}
kernels = pytest.mark.parametrize("kernel", WEIGHTS, ids=lambda kernel: type(kernel).__name__)


@jax.jit
def weights(phi, psi, log_scale):
    """phi . psi exp(c), up to the factors of queries."""
    scale = 1 if log_scale is None else jnp.exp(log_scale)[..., None]
    return jnp.einsum("bihm,bjhm->bhij", phi, jnp.repeat(psi * scale, H // K, axis=2))


@kernels
def test_weights_are_their_closed_form(kernel):
    params = PROJECTION if kernel.random else {}
    phi, (psi, log_scale) = jax.jit(lambda params: (kernel.query(params, Q), kernel.key(params, KEY)))(params)
    chex.assert_shape((phi, psi), [(B, T, H, kernel.size(D)), (B, T, K, kernel.size(D))])
    chex.assert_type([phi, psi], jnp.float32)
    q, k = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (Q, np.repeat(KEY, H // K, axis=2)))
    want = WEIGHTS[kernel](q[:, :, :, None], k[:, :, None])
    got = np.asarray(weights(phi, psi, log_scale), np.float64)
    np.testing.assert_allclose(got / got.sum(-1, keepdims=True), want / want.sum(-1, keepdims=True), atol=3e-6)
    assert (got >= 0).all()


@kernels
def test_kernels_take_low_precision_and_huge_inputs(kernel):
    params = PROJECTION if kernel.random else {}
    q = np.array([0.0, 1, -30, 60], jnp.bfloat16).reshape(1, 1, 1, D)

    def total(q):
        psi, log_scale = kernel.key(params, q)
        finite = kernel.query(params, q).sum() + psi.sum()
        return finite if log_scale is None else finite + log_scale.sum()

    run = jax.jit(jax.value_and_grad(total))
    chex.assert_tree_all_finite((run(q), run(np.zeros_like(q))))
    chex.assert_type(jax.eval_shape(kernel.query, params, q), jnp.float32)


def test_elu_stays_positive_and_has_slope_one_from_zero_to_any_large_input():
    """exp(100) is infinite in float32, and infinity times the zero of the other branch is NaN."""
    run = jax.value_and_grad(lambda x: Elu().query({}, x).sum())
    np.testing.assert_allclose(run(jnp.full((1, 1, 1, 1), -40.0))[0], math.exp(-40), rtol=1e-6)
    np.testing.assert_allclose(
        run(jnp.asarray([-2.0, 0.0, 0.5, 100.0, 1e30]))[1], [math.exp(-2), 1, 1, 1, 1], rtol=1e-6
    )


@pytest.mark.parametrize(
    ("order", "taylor", "limit"),
    [(1, 2.7, 2.7), (2, 4.145, 3.4225), (4, 5.3118, 4.1234), (8, 5.473555, 4.6715), (16, 5.473947, 5.0310)],
)
def test_numbers_of_article_5_at_an_inner_product_of_1_7(order, taylor, limit):
    with jax.enable_x64(True):
        found = jax.jit(lambda z: [f(z, order) for f in (taylor_features, limit_features)])
        pairs = zip(found(np.array([1.0])), found(np.array([1.7])), strict=True)
        products = [np.asarray(x) @ np.asarray(y) for x, y in pairs]
    np.testing.assert_allclose(products, (taylor, limit), rtol=0, atol=5e-5)
    if order >= 8:  # the article gives six decimals
        np.testing.assert_allclose(products[0], taylor, rtol=0, atol=5e-7)


@pytest.mark.parametrize(
    ("features", "kernel", "sizes"),
    [(taylor_features, Taylor, (1 + 3 + 9 + 27, 1 + 3 + 9 + 27 + 81)), (limit_features, Limit, (4**3, 4**4))],
)
def test_sizes_of_the_expansions_and_the_sign_of_odd_ones(features, kernel, sizes):
    x = np.array([1.0, -2.0, 0.5], np.float32)
    odd, even = (np.asarray(features(x, n)) for n in (3, 4))
    assert (odd.size, even.size, kernel(order=4).size(3)) == (*sizes, sizes[1])
    assert odd @ np.asarray(features(-x, 3)) < 0 < even @ np.asarray(features(-x, 4))


@pytest.mark.parametrize(("eps", "tolerance"), [(0.0, 1e-5), (1e-6, 1e-4)])
def test_performer_is_the_released_formula(eps, tolerance):
    """google-research's performer/fast_attention/jax, non-causal, in float64, with its one maximum over all keys.

    The effect of eps differs, because here it is relative to other maxima.
    """
    x, y = (np.asarray(a, np.float64) / D**0.25 for a in (Q / 2, np.repeat(KEY / 2, H // K, axis=2)))

    def released(x, axes):
        dash = x @ W.T
        return np.exp(dash - (x * x).sum(-1, keepdims=True) / 2 - dash.max(axes, keepdims=True)) + eps

    weight = np.einsum("bihm,bjhm->bhij", released(x, -1), released(y, (1, 3)))
    v = np.repeat(np.asarray(V, np.float64), H // K, axis=2)
    want = np.einsum("bhij,bjhv->bihv", weight / weight.sum(-1, keepdims=True), v)
    mapped = jax.jit(lambda q, k: linear.features(Performer(8, eps=eps), q, k, params=PROJECTION))(Q / 2, KEY / 2)
    np.testing.assert_allclose(over_all(mapped), want, atol=tolerance)


@jax.jit
def over_all(mapped):
    return quadratic(v=V, causal=False, **mapped)


def estimates(kernel, x, y, draws=3000):
    """phi . psi of one pair for many projections."""

    def one(key):
        params = {"projection": kernel.draw(key, x.size)}
        (a, log_a), (b, log_b) = (kernel.key(params, z.reshape(1, 1, 1, -1)) for z in (x, y))
        return (a * b).sum() * jnp.exp(log_a + log_b)[0, 0, 0]

    return np.asarray(jax.jit(jax.vmap(one))(jax.random.split(KEYS[4], draws)), np.float64)


@pytest.mark.parametrize("orthogonal", [True, False])
def test_performer_is_unbiased(orthogonal):
    x, y = np.float32([0.5, 0.3, 0.6, 0.2]), np.float32([0.4, 0.7, -0.1, 0.5])
    sample = estimates(Performer(8, orthogonal=orthogonal, eps=0.0, scale=1.0), x, y)
    error = sample.std() / math.sqrt(sample.size)
    assert error < 0.04
    assert abs(sample.mean() - math.exp(float(x @ y))) < 3 * error


def test_rows_of_a_projection():
    draws = jax.jit(jax.vmap(lambda key: Performer(10).draw(key, 4)))(jax.random.split(KEYS[4], 2000))
    chex.assert_shape(draws, (2000, 10, 4))
    chex.assert_type(draws, jnp.float32)
    draws = np.asarray(draws)
    gram = draws @ draws.swapaxes(1, 2)
    same_block = np.arange(10)[:, None] // 4 == np.arange(10) // 4
    assert np.abs(gram[:, same_block & ~np.eye(10, dtype=bool)]).max() < 1e-4
    assert np.abs(gram[:, ~same_block]).max() > 1
    np.testing.assert_allclose(np.diagonal(gram, axis1=1, axis2=2).mean(0), 4, rtol=0.1)
    # Each row alone is Gaussian: with the signs of a plain QR the mean of component l of row l is about -0.8.
    np.testing.assert_allclose(draws.mean(0), 0, atol=0.1)
    constant = Performer(10, norms="constant").draw(KEYS[4], 4)
    np.testing.assert_allclose(jnp.linalg.norm(constant, axis=-1), 2, rtol=1e-6)
    assert np.abs(draws[0] - draws[1]).max() > 0.1


def test_no_gradient_reaches_a_projection():
    gradient = jax.grad(lambda params: PERFORMER.query(params, Q).sum() + PERFORMER.key(params, KEY)[0].sum())
    chex.assert_trees_all_equal(jax.jit(gradient)(PROJECTION), jax.tree.map(jnp.zeros_like, PROJECTION))


def rotated(kernel, shift=0):
    def rotate(x):
        return apply_rotary(x, rotary_table(jnp.arange(T) + shift, inverse_frequencies(x.shape[-1], base=50.0)))

    params = PROJECTION if kernel.random else None
    return jax.jit(lambda q, k: linear.features(kernel, q, k, params=params, rotate_q=rotate, rotate_k=rotate))(Q, KEY)


def turned(x):
    """RoPE in float64, half pairing."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * 50.0 ** -(np.arange(half) / half)
    (c, s), a, b = (f(angle)[:, None] for f in (np.cos, np.sin)), x[..., :half], x[..., half:]
    return np.concatenate([a * c - b * s, a * s + b * c], -1)


@pytest.mark.parametrize("shift", [0, 1_000_003])
@pytest.mark.parametrize("kernel", [Elu(), Cosine()], ids=["elementwise", "of the inner product"])
def test_rope_is_in_the_denominator_only_for_a_function_of_the_inner_product(kernel, shift):
    q, k, v = (np.asarray(x, np.float64) for x in (Q, np.repeat(KEY, H // K, 2), np.repeat(V, H // K, 2)))

    def products(q, k):
        return np.einsum("bihm,bjhm->bhij", q, k)

    if kernel == Elu():
        numerator, denominator = products(turned(elu(q)), turned(elu(k))), products(elu(q), elu(k))
        assert (numerator < 0).any()
    else:
        unit = (turned(x / np.linalg.norm(x, axis=-1, keepdims=True)) for x in (q, k))
        numerator = denominator = 1 + products(*unit)
    want = np.einsum("bhij,bjhv->bihv", numerator / denominator.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(over_all(rotated(kernel, shift)), want, atol=1e-5 if shift == 0 else 2e-5)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("order", lambda: taylor_features(Q, 0)),
        ("order", lambda: limit_features(Q, 1.5)),
        ("orthogonal", lambda: Performer(orthogonal=False, norms="constant")),
        ("projection", lambda: Performer(9).query(PROJECTION, Q)),
        ("rotate_k", lambda: linear.features(Elu(), Q, KEY, rotate_q=jnp.sin)),
    ],
)
def test_bad_input_is_named(name, call):
    refused(name, call)
