"""ALiBi as features: sums of products in float64 against the closed form, attention against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from refusals import refused

from posjax.attention import attention
from posjax.attention.bias_features import FEATURES, with_alibi
from posjax.attention.call import Call
from posjax.attention.dense import dense
from posjax.bias import ALiBi, LinearBias
from posjax.masks import Causal, Window
from posjax.positions import Range

HEADS, KV_HEADS, TOKENS, SIZE = 6, 2, 70, 16


def call(bias, q, k, v, mask=None, start=0) -> Call:
    """A call of scaled queries, ``[batch, heads, tokens, size]``, and keys and values of fewer heads."""
    batch, heads, tokens, size = q.shape
    places = Range(start, tokens), Range(start, tokens)
    return Call(q.reshape(batch, k.shape[1], heads // k.shape[1], tokens, size), k, v, bias, mask, *places)


def draw(dtype, tokens=TOKENS) -> list:
    """Queries, keys and values, times 1/4 so that logits and biases are of one size."""
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.standard_normal((2, heads, tokens, SIZE)) / 4, dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def distances(tokens: int) -> np.ndarray:
    """``j - i`` of every pair."""
    return np.arange(tokens)[None] - np.arange(tokens)[:, None]


@pytest.mark.parametrize(
    ("spec", "heads", "tokens"),
    [
        (ALiBi(steepest=4.0), 12, 2**17),
        (ALiBi(factor=3.0), 20, 2**17),
        (ALiBi(steepest=0.3), 7, 2**17 - 1),
        (ALiBi(), 3, 5),
    ],
)
def test_the_bias_is_exact_but_for_a_constant_of_each_query(spec, heads, tokens):
    """Its differences between keys have no error; the constant is small enough for the maximum of a row."""
    bias = spec.bind(num_heads=heads)
    q = k = jnp.zeros((1, heads, tokens, 8), jnp.bfloat16)
    found = jax.jit(with_alibi)(call(bias, q, k, k))
    i, j = np.random.default_rng(1).integers(0, tokens, (2, 500))
    i[0], j[:3] = tokens - 1, (0, tokens // 2, tokens - 1)
    rows, columns, own = (
        np.asarray(x, np.float64)[0] for x in (found.q[:, :, 0, i], found.k[:, :, j], found.k[:, :, i])
    )
    constant = (rows * own).sum(-1)
    slopes = np.asarray(bias.slopes, np.float64)[:, None]
    np.testing.assert_array_equal((rows * columns).sum(-1) - constant, slopes * (j - i))
    assert (np.abs(constant) <= slopes * tokens * 2.0**-18).all()


@pytest.mark.parametrize("mask", [Causal(), Causal() & Window(20)], ids=["causal", "window"])
def test_attention_with_features_is_attention_with_the_bias(mask):
    """Grouped heads, and positions that do not start at 0."""
    q, k, v = draw(jnp.bfloat16)
    bias = ALiBi(steepest=2.0).bind(num_heads=HEADS)
    found = with_alibi(call(bias, q, k, v, start=10**6))
    assert {x.dtype for x in (found.q, found.k, found.v)} == {jnp.dtype(jnp.bfloat16)}
    allowed = (distances(TOKENS) <= 0) & (distances(TOKENS) > (-TOKENS if mask == Causal() else -20))

    def attended(q, k, bias):
        values = (np.swapaxes(np.asarray(x, np.float64), 1, 2) for x in (q, k, v))
        return oracles.attention(*values, bias=bias, allowed=allowed, scale=1.0)[0]

    slopes = np.asarray(bias.slopes, np.float64)[:, None, None]
    of_features = attended(found.q.reshape(2, HEADS, TOKENS, -1), found.k, None)
    np.testing.assert_allclose(of_features, attended(q, k, slopes * distances(TOKENS)), atol=1e-12)


def test_gradients_are_those_of_the_bias_and_slopes_have_none():
    """In float64, so that only an error of the formula remains."""
    with jax.enable_x64(True):
        values = draw(jnp.float64)

        def gradients(change):
            def loss(q, k, v, slopes):
                x = call(LinearBias(slopes), q, k, v, Causal())
                return jnp.sin(4 * dense(change(x)).out).sum()

            return jax.grad(loss, argnums=(0, 1, 2, 3))(*values, ALiBi().slopes(HEADS))

        *found, of_slopes = gradients(with_alibi)
        *wanted, _ = gradients(lambda x: x)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-12)
        assert np.abs(want).max() > 0.01
    np.testing.assert_array_equal(of_slopes, 0)


# The whole path of ``implementation="cudnn"``, with what jax.nn computes without cuDNN in its place.


@pytest.fixture
def without_cudnn(monkeypatch):
    plain = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda *x, implementation, **options: plain(*x, implementation="xla", **options),
    )


@pytest.mark.usefixtures("without_cudnn")
def test_cudnn_gets_scaled_queries_and_whole_values_come_back():
    q, k, v = (4 * jnp.swapaxes(x, 1, 2) for x in draw(jnp.bfloat16))
    spec, window = ALiBi(steepest=1.0), 20
    found = jax.jit(lambda *x: attention(*x, bias=spec, mask=Causal() & Window(window), implementation="cudnn"))(
        q, k, v
    )
    behind = -distances(TOKENS)
    bias = -np.asarray(spec.slopes(HEADS), np.float64)[:, None, None] * behind
    wanted, _ = oracles.attention(q, k, v, bias=bias, allowed=(behind >= 0) & (behind < window))
    assert found.shape == wanted.shape
    # bfloat16 has 8 bits; the scaled queries, the weights and the results are rounded to it.
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, atol=0.02)


LEARNED = ALiBi(learned=True).init(jax.random.key(0), HEADS)["slopes"]


def asked(bias, dtype=jnp.bfloat16, tokens=TOKENS, size=SIZE, **options):
    """Traces a call of cuDNN whose parameters are traced too."""
    shapes = ((1, tokens, heads, size) for heads in (HEADS, KV_HEADS, KV_HEADS))
    values = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]

    def run(q, k, v, slopes):
        bound = bias(slopes) if callable(bias) else bias
        return attention(q, k, v, bias=bound, implementation="cudnn", **{"mask": Causal()} | options)

    return jax.eval_shape(run, *values, LEARNED)


class Steeper(LinearBias):
    """A bias whose values may be others than those of its parent."""


jax.tree_util.register_dataclass(Steeper, data_fields=["slopes", "ahead"], meta_fields=["symmetric", "offset"])


@pytest.mark.usefixtures("without_cudnn")
@pytest.mark.parametrize(
    ("reason", "bias", "options"),
    [
        ("fixed", LinearBias, {}),
        ("symmetric", ALiBi(symmetric=True), {}),
        ("Steeper", Steeper(np.float32([1] * HEADS)), {}),
        ("float16", ALiBi(), {"dtype": jnp.float16}),
        ("131072", ALiBi(steepest=0.1), {"tokens": 2**17 + 1}),
        ("float32", ALiBi(steepest=0.51), {"tokens": 2**16}),
        ("120", ALiBi(), {"size": 128}),
        ("ranges", ALiBi(), {"q_positions": Range(1, TOKENS)}),
        ("cap", ALiBi(), {"softcap": 9.0}),
    ],
)
def test_what_is_refused(reason, bias, options):
    refused(reason, lambda: asked(bias, **options))


@pytest.mark.usefixtures("without_cudnn")
@pytest.mark.parametrize(
    ("bias", "options"),
    [
        (LinearBias(LEARNED), {}),
        (ALiBi(steepest=0.25), {"tokens": 2**17}),
        (ALiBi(), {"size": 128 - FEATURES}),
        (ALiBi(), {"q_positions": Range(7, TOKENS), "kv_positions": Range(7, TOKENS)}),
    ],
)
def test_what_is_not_refused(bias, options):
    assert asked(bias, **options).dtype == jnp.bfloat16
