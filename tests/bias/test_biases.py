"""ALiBi, T5 and KERPLE: the numbers of the papers, and independent implementations. Formulas: ``test_distances``."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused

from posjax.bias import T5, ALiBi, Kerple, LogBias, PowerBias, alibi_bias, alibi_slopes, t5_bucket, t5_thresholds

Q = jnp.arange(6)
ROW, COLUMN = np.mgrid[:6, :6]
KEY = jax.random.key(0)


def values(spec, heads=4, params=None, at=Q):
    params = spec.init(KEY, heads) if params is None else params
    return spec.bind(params, num_heads=heads).values(at, at)


def slopes_of_the_paper(num_heads):
    """The recipe of the ALiBi paper's footnote: powers of two, then every second slope of twice as many."""
    if math.log2(num_heads).is_integer():
        return [2 ** (-8 * h / num_heads) for h in range(1, num_heads + 1)]
    c = 2 ** int(math.log2(num_heads))
    return slopes_of_the_paper(c) + slopes_of_the_paper(2 * c)[0::2][: num_heads - c]


def test_alibi_slopes_are_those_of_the_paper():
    for heads in range(1, 129):
        chex.assert_trees_all_close(alibi_slopes(heads), np.float32(slopes_of_the_paper(heads)), rtol=1e-7)
    np.testing.assert_array_equal(alibi_slopes(8), [2.0**-h for h in range(1, 9)])
    np.testing.assert_allclose(alibi_slopes(12)[8:], [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5], rtol=1e-7)


@pytest.mark.parity
@pytest.mark.parametrize("heads", [1, 6, 20])
def test_alibi_of_mpt_and_bloom_differs_by_a_constant_of_each_row(heads):
    """Both add a bias of the key's index alone. The softmax is the same as with the distance."""
    torch = pytest.importorskip("torch")
    mpt = pytest.importorskip("transformers.models.mpt.modeling_mpt")
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    ours = alibi_bias(heads, jnp.arange(40), jnp.arange(40))
    theirs = mpt.build_mpt_alibi_tensor(heads, 40), bloom.build_alibi_tensor(torch.ones(1, 40), heads, torch.float32)
    for each in theirs:
        rows = np.asarray(ours) - each.numpy().reshape(heads, 1, 40)
        np.testing.assert_allclose(rows, np.broadcast_to(rows[..., :1], rows.shape), atol=1e-5)


def test_alibi_keeps_its_precision_at_long_range():
    far = jnp.asarray([100_000, 100_001])
    bias = alibi_bias(8, far, far)
    np.testing.assert_array_equal(bias[:, 1, 1] - bias[:, 1, 0], alibi_slopes(8))
    np.testing.assert_array_equal(bias, alibi_bias(8, far + 1_000_003, far + 1_000_003))
    np.testing.assert_allclose(alibi_bias(2, Q, Q, symmetric=True)[1], -(2.0**-8) * abs(ROW - COLUMN))


def test_parameters_of_low_precision_meet_distances_in_float32():
    far = jnp.asarray([0, 70_001])
    low = [jnp.asarray([0.25, 0.5], jnp.bfloat16)] * 2
    for bound in (ALiBi(learned=True).bind({"slopes": low[0]}, num_heads=2), LogBias(*low), PowerBias(*low)):
        want = jax.tree.map(lambda x: x.astype(jnp.float32), bound).values(far, far)
        chex.assert_type(bound.values(far, far), jnp.float32)
        chex.assert_trees_all_close(bound.values(far, far), want)


def test_alibi_with_chosen_and_learned_slopes():
    slopes = lambda heads, **options: ALiBi(**options).bind(num_heads=heads).slopes  # noqa: E731
    np.testing.assert_array_equal(slopes(4, steepest=4.0), [4.0, 1.0, 0.25, 0.0625])
    np.testing.assert_array_equal(slopes(8, ladder=4), [*alibi_slopes(4), *alibi_slopes(4)])
    np.testing.assert_array_equal(slopes(4, steepest=4.0, ladder=2, factor=2.0), [2.0, 0.125, 2.0, 0.125])
    np.testing.assert_array_equal(slopes(6, ladder=6, steepest=0.5), alibi_slopes(6))
    np.testing.assert_array_equal(ALiBi(learned=True, steepest=1.0).init(None, 2)["slopes"], [1.0, 2.0**-4])
    chex.assert_trees_all_close(values(ALiBi(factor=8.0), at=8 * Q), values(ALiBi()))
    chex.assert_trees_all_close(values(ALiBi(learned=True, factor=2.0)), values(ALiBi()) / 2)


def test_alibi_that_distinguishes_left_from_right():
    m, r = np.asarray(alibi_slopes(4))[:, None, None], abs(ROW - COLUMN)
    offset = values(ALiBi(symmetric=True, direction="offset"))
    np.testing.assert_allclose(offset, m * (-r + 0.5 * (COLUMN < ROW)), rtol=1e-6)
    spec = ALiBi(symmetric=True, learned=True, direction="slopes")
    params = spec.init(KEY, 4)
    params["ahead"] = 3 * params["ahead"]
    np.testing.assert_allclose(values(spec, params=params), -m * np.where(COLUMN > ROW, 3 * r, r), rtol=1e-6)


CAUSAL_FIRST = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


def test_t5_buckets_begin_where_the_table_says():
    buckets = np.asarray(t5_bucket(jnp.arange(-50, 2000)))
    assert [int(np.argmax(buckets == b)) - 50 for b in range(1, 32)] == CAUSAL_FIRST[1:]
    assert (buckets[:50].max(), buckets.max()) == (0, 31)
    past = np.asarray(t5_bucket(jnp.arange(2000), bidirectional=True))
    assert [int(np.argmax(past == b)) for b in range(16)] == [*range(8), 8, 12, 16, 23, 32, 46, 64, 91]
    ahead = t5_bucket(-jnp.asarray([1, 7, 8, 91, 5000]), bidirectional=True)
    np.testing.assert_array_equal(ahead, [17, 23, 24, 31, 31])


def test_t5_thresholds_are_exact_where_a_logarithm_would_round():
    """e = 4, K = 4, max = 64: bucket 4 + t begins exactly at 4 * 2^t, where floor(log) may go either way."""
    assert t5_thresholds(8, 64) == (8, 16, 32)


@pytest.mark.parity
@pytest.mark.parametrize(
    ("buckets", "longest", "bidirectional"), [(32, 128, True), (64, 128, False), (320, 800, True), (32, 512, False)]
)
def test_t5_buckets_of_hugging_face(bidirectional, buckets, longest):
    torch = pytest.importorskip("torch")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    r = np.arange(-600, 601)
    want = t5.T5Attention._relative_position_bucket(torch.tensor(-r), bidirectional, buckets, longest)
    np.testing.assert_array_equal(t5_bucket(jnp.asarray(r), buckets, longest, bidirectional=bidirectional), want)


@pytest.mark.parametrize(("bidirectional", "buckets", "longest"), [(False, 16, 128), (True, 8, 40), (True, 4, 8)])
def test_t5_is_constant_from_its_last_bucket_on(bidirectional, buckets, longest):
    spec = T5(buckets, longest, bidirectional=bidirectional)
    bucket = np.asarray(t5_bucket(jnp.arange(300), buckets, longest, bidirectional=bidirectional))
    assert spec.bind(spec.init(KEY, 2), num_heads=2).constant_from == np.flatnonzero(np.diff(bucket))[-1] + 1


def test_t5_looks_up_its_table():
    spec = T5(num_buckets=8, max_distance=20)
    params = spec.init(KEY, 3)
    chex.assert_shape(params["table"], (8, 3))
    found = values(spec, 3, params)
    for i, j in np.ndindex(6, 6):
        np.testing.assert_array_equal(found[:, i, j], params["table"][int(t5_bucket(jnp.asarray(i - j), 8, 20))])
    np.testing.assert_array_equal(values(spec, 3, params, Q[None, None])[0], found)


def test_kerple_clamps_its_parameters():
    tiny = LogBias(jnp.asarray([-1.0]), jnp.asarray([0.0])).values(Q, Q)
    np.testing.assert_allclose(tiny[0, 5, 0], -0.01 * np.log(1.05), rtol=1e-6)
    steep = PowerBias(jnp.asarray([1.0]), jnp.asarray([9.0])).values(Q, Q)
    np.testing.assert_allclose(steep[0, 5, 0], -25.0, rtol=1e-6)


def test_kerple_starts_in_the_paper_s_ranges_with_finite_gradients_at_distance_zero():
    params = Kerple().init(KEY, 1000)
    assert 0 <= params["a"].min() < 0.05
    assert 0.95 < params["a"].max() <= 1
    assert 1.9 < params["p"].max() <= 2
    for spec in (Kerple("log"), Kerple("power")):
        chex.assert_tree_all_finite(jax.grad(lambda p, s=spec: values(s, params=p).sum())(spec.init(KEY, 4)))


def test_weighted_kerple_is_a_factor_and_an_offset():
    spec = Kerple("weighted-power")
    params = spec.init(KEY, 2)
    scores = np.random.default_rng(1).standard_normal((3, 2, 6, 6)).astype(np.float32)
    apply = jax.jit(lambda p: spec.bind(p, num_heads=2).apply(scores, Q, Q))
    a, p, weight_a, weight_p = (
        np.asarray(params[name], np.float64)[:, None, None] for name in ("a", "p", "weight_a", "weight_p")
    )
    r = abs(ROW - COLUMN).astype(float)
    want = scores * np.exp(-weight_a * r**weight_p) - a * r**p
    np.testing.assert_allclose(apply(params), want, rtol=1e-4, atol=1e-5)
    slopes = jax.jit(jax.grad(lambda p: jnp.sin(apply(p)).sum()))(params)
    chex.assert_tree_all_finite(slopes)
    assert all(np.abs(g).min() > 0 for g in jax.tree.leaves(slopes))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("num_heads", lambda: alibi_slopes(0)),
        ("slopes", lambda: ALiBi(learned=True).bind({"slopes": jnp.ones(2)}, num_heads=4)),
        ("slopes", lambda: ALiBi(learned=True).bind(num_heads=4)),
        ("ladder", lambda: ALiBi(ladder=3).bind(num_heads=4)),
        ("steepest", lambda: ALiBi(steepest=0.0)),
        ("symmetric", lambda: ALiBi(alibi_slopes(4))),
        ("symmetric", lambda: ALiBi(direction="offset")),
        ("learned", lambda: ALiBi(symmetric=True, direction="slopes")),
        ("table", lambda: T5().bind(num_heads=4)),
        ("p", lambda: Kerple().bind({"a": jnp.ones(4), "p": jnp.ones(2)}, num_heads=4)),
    ],
)
def test_bad_input_is_named(name, call):
    refused(name, call)
