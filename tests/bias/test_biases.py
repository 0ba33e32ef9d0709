"""Biases: closed forms, the numbers of the papers, and independent implementations."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.bias import T5, ALiBi, Kerple, LogBias, PowerBias, alibi_bias, alibi_slopes, t5_bucket, t5_thresholds

Q = jnp.arange(6)


def slopes_of_the_paper(num_heads):
    """The recipe of the ALiBi paper's footnote: powers of two, then every second slope of twice as many."""
    if math.log2(num_heads).is_integer():
        return [2 ** (-8 * h / num_heads) for h in range(1, num_heads + 1)]
    c = 2 ** int(math.log2(num_heads))
    return slopes_of_the_paper(c) + slopes_of_the_paper(2 * c)[0::2][: num_heads - c]


def test_alibi_slopes_of_1_to_128_heads():
    for heads in range(1, 129):
        chex.assert_trees_all_close(alibi_slopes(heads), np.float32(slopes_of_the_paper(heads)), rtol=1e-7)
    chex.assert_type(alibi_slopes(12), jnp.float32)


def test_alibi_slopes_printed_in_the_paper():
    np.testing.assert_array_equal(alibi_slopes(8), [2.0**-h for h in range(1, 9)])
    np.testing.assert_allclose(alibi_slopes(16), [2 ** (-h / 2) for h in range(1, 17)], rtol=1e-7)
    np.testing.assert_allclose(alibi_slopes(12)[8:], [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5], rtol=1e-7)


@pytest.mark.parity
def test_alibi_slopes_of_hugging_face_bloom():
    modeling = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    torch = pytest.importorskip("torch")
    for heads in range(1, 129):
        # At key position 1 BLOOM's tensor is the slope itself.
        tensor = modeling.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)
        np.testing.assert_allclose(alibi_slopes(heads), tensor[:, 0, 1].numpy(), rtol=1e-6)


@pytest.mark.parity
@pytest.mark.parametrize("heads", [1, 4, 6, 12, 20])
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


def test_alibi_bias_values():
    bias = alibi_bias(2, Q, Q)
    chex.assert_shape(bias, (2, 6, 6))
    chex.assert_type(bias, jnp.float32)
    i, j = np.mgrid[:6, :6]
    np.testing.assert_allclose(bias[0], -(2.0**-4) * (i - j))
    np.testing.assert_allclose(alibi_bias(2, Q, Q, symmetric=True)[1], -(2.0**-8) * abs(i - j))


def test_alibi_keeps_its_precision_at_long_range():
    far = jnp.asarray([100_000, 100_001])
    bias = alibi_bias(8, far, far)
    np.testing.assert_array_equal(bias[:, 1, 1] - bias[:, 1, 0], alibi_slopes(8))
    np.testing.assert_array_equal(bias, alibi_bias(8, far + 1_000_003, far + 1_000_003))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_parameters_of_low_precision_meet_distances_in_float32(dtype):
    far = jnp.asarray([0, 70_001])
    low = [jnp.asarray([0.25, 0.5], dtype)] * 2
    spec = ALiBi(learned=True)
    for bound in (spec.bind({"slopes": low[0]}, num_heads=2), LogBias(*low), PowerBias(*low)):
        want = jax.tree.map(lambda x: x.astype(jnp.float32), bound).values(far, far)
        got = bound.values(far, far)
        chex.assert_type(got, jnp.float32)
        chex.assert_trees_all_close(got, want)


def test_parameters_for_other_heads_are_named():
    with pytest.raises(ValueError, match=r"slopes must have shape \(4,\), found \(2,\)"):
        ALiBi(learned=True).bind({"slopes": jnp.ones(2)}, num_heads=4)
    with pytest.raises(ValueError, match=r"p must have shape \(4,\), found \(2,\)"):
        Kerple().bind({"a": jnp.ones(4), "p": jnp.ones(2)}, num_heads=4)


def test_alibi_is_a_vector_of_keys_under_a_causal_softmax():
    scores = jax.random.normal(jax.random.key(0), (4, 6, 6))
    causal = Q[None] <= Q[:, None]
    by_row = jax.nn.softmax(jnp.where(causal, scores + alibi_bias(4, Q, Q), -jnp.inf))
    by_key = jax.nn.softmax(jnp.where(causal, scores + (alibi_slopes(4)[:, None] * Q)[:, None], -jnp.inf))
    chex.assert_trees_all_close(by_row, by_key, atol=1e-6)


def test_alibi_learned_slopes():
    spec = ALiBi(learned=True)
    params = spec.init(jax.random.key(0), 4)
    chex.assert_trees_all_close(params, {"slopes": alibi_slopes(4)})
    bound = spec.bind({"slopes": 2 * params["slopes"]}, num_heads=4)
    chex.assert_trees_all_close(bound.values(Q, Q), 2 * alibi_bias(4, Q, Q))
    with pytest.raises(ValueError, match="params must hold 'slopes'"):
        spec.bind(num_heads=4)


def test_alibi_with_chosen_slopes():
    slopes = lambda heads, **options: ALiBi(**options).bind(num_heads=heads).slopes  # noqa: E731
    np.testing.assert_array_equal(slopes(4, steepest=4.0), [4.0, 1.0, 0.25, 0.0625])
    np.testing.assert_array_equal(slopes(8, ladder=4), [*alibi_slopes(4), *alibi_slopes(4)])
    np.testing.assert_array_equal(slopes(4, steepest=4.0, ladder=2, factor=2.0), [2.0, 0.125, 2.0, 0.125])
    np.testing.assert_array_equal(slopes(6, ladder=6, steepest=0.5), alibi_slopes(6))
    np.testing.assert_array_equal(ALiBi(learned=True, steepest=1.0).init(None, 2)["slopes"], [1.0, 2.0**-4])


def test_alibi_with_chosen_slopes_refuses():
    with pytest.raises(ValueError, match=r"ladder must divide the number of heads \(4\), found 3"):
        ALiBi(ladder=3).bind(num_heads=4)
    with pytest.raises(ValueError, match="steepest"):
        ALiBi(steepest=0.0)
    with pytest.raises(ValueError, match=r"symmetric must be .* found float32 array of shape \(4,\)"):
        ALiBi(alibi_slopes(4))
    with pytest.raises(ValueError, match="ladder"):
        ALiBi(ladder=0)


@pytest.mark.parametrize("heads", [0, -3, 8.0, True])
def test_alibi_refuses_invalid_numbers_of_heads(heads):
    with pytest.raises(ValueError, match="num_heads must be positive"):
        alibi_slopes(heads)


CAUSAL_FIRST = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


def test_t5_causal_buckets_begin_where_the_table_says():
    buckets = np.asarray(t5_bucket(jnp.arange(2000)))
    assert [int(np.argmax(buckets == b)) for b in range(32)] == CAUSAL_FIRST
    assert buckets.max() == 31
    np.testing.assert_array_equal(t5_bucket(jnp.arange(-50, 0)), 0)


def test_t5_bidirectional_buckets_begin_where_the_table_says():
    past = np.asarray(t5_bucket(jnp.arange(2000), bidirectional=True))
    assert [int(np.argmax(past == b)) for b in range(16)] == [*range(8), 8, 12, 16, 23, 32, 46, 64, 91]
    ahead = t5_bucket(-jnp.asarray([1, 7, 8, 91, 5000]), bidirectional=True)
    np.testing.assert_array_equal(ahead, [17, 23, 24, 31, 31])


def test_t5_thresholds_are_exact_where_a_logarithm_would_round():
    """e = 4, K = 4, max = 64: bucket 4 + t begins exactly at 4 * 2^t, where floor(log) may go either way."""
    assert t5_thresholds(8, 64) == (8, 16, 32)


@pytest.mark.parity
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (32, 256), (64, 128), (16, 128), (320, 800), (32, 512)])
def test_t5_buckets_of_hugging_face(bidirectional, buckets, longest):
    torch = pytest.importorskip("torch")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    r = np.arange(-600, 601)
    want = t5.T5Attention._relative_position_bucket(torch.tensor(-r), bidirectional, buckets, longest)
    np.testing.assert_array_equal(t5_bucket(jnp.asarray(r), buckets, longest, bidirectional=bidirectional), want)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("buckets", "longest"), [(4, 8), (8, 40), (32, 128)])
def test_t5_is_constant_from_its_last_bucket_on(bidirectional, buckets, longest):
    buckets //= 1 if bidirectional else 2
    bias = T5(buckets, longest, bidirectional=bidirectional).bind({"table": jnp.zeros((buckets, 2))}, num_heads=2)
    found = np.asarray(t5_bucket(jnp.arange(300), buckets, longest, bidirectional=bidirectional))
    assert bias.constant_from == np.flatnonzero(np.diff(found))[-1] + 1


def test_t5_bias_looks_up_its_table():
    spec = T5(num_buckets=8, max_distance=20)
    params = spec.init(jax.random.key(0), 3)
    chex.assert_shape(params["table"], (8, 3))
    values = spec.bind(params, num_heads=3).values(Q, Q)
    chex.assert_shape(values, (3, 6, 6))
    for i, j in np.ndindex(6, 6):
        bucket = int(t5_bucket(jnp.asarray(i - j), 8, 20))
        np.testing.assert_array_equal(values[:, i, j], params["table"][bucket])
    batched = spec.bind(params, num_heads=3).values(Q[None, None], Q[None, None])
    np.testing.assert_array_equal(batched[0], values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_buckets": 1}, "num_buckets must be at least 2"),
        ({"num_buckets": 7, "bidirectional": True}, "num_buckets must be even"),
        ({"num_buckets": 32, "max_distance": 16}, "max_distance must exceed the 16 exact buckets"),
    ],
)
def test_t5_refuses_invalid_buckets(options, message):
    with pytest.raises(ValueError, match=message):
        T5(**options)


def test_kerple_closed_forms():
    i, j = np.mgrid[:6, :6]
    r = abs(i - j).astype(np.float64)
    a, p = np.array([0.3, 1.5]), np.array([0.7, 1.2])
    log = LogBias(jnp.float32(a), jnp.float32(p)).values(Q, Q)
    power = PowerBias(jnp.float32(a), jnp.float32(p)).values(Q, Q)
    for h in range(2):
        np.testing.assert_allclose(log[h], -p[h] * np.log(1 + a[h] * r), rtol=1e-6)
        np.testing.assert_allclose(power[h], -a[h] * r ** p[h], rtol=1e-6)


def test_kerple_power_with_exponent_one_is_alibi():
    slopes = jnp.asarray([0.5, 0.25])
    causal = np.tril(np.ones((6, 6)))
    power = PowerBias(slopes, jnp.ones(2)).values(Q, Q)
    alibi = -slopes[:, None, None] * (Q[:, None] - Q[None, :])
    chex.assert_trees_all_close(power * causal, alibi * causal)


def test_kerple_clamps_its_parameters():
    tiny = LogBias(jnp.asarray([-1.0]), jnp.asarray([0.0])).values(Q, Q)
    np.testing.assert_allclose(tiny[0, 5, 0], -0.01 * np.log(1.05), rtol=1e-6)
    steep = PowerBias(jnp.asarray([1.0]), jnp.asarray([9.0])).values(Q, Q)
    np.testing.assert_allclose(steep[0, 5, 0], -25.0, rtol=1e-6)


@pytest.mark.parametrize("kind", ["log", "power"])
def test_kerple_gradients_are_finite_at_distance_zero(kind):
    spec = Kerple(kind)
    params = spec.init(jax.random.key(1), 4)
    chex.assert_tree_shape_prefix(params, (4,))
    grads = jax.grad(lambda p: spec.bind(p, num_heads=4).values(Q, Q).sum())(params)
    chex.assert_tree_all_finite(grads)


def test_kerple_starts_in_the_paper_s_ranges():
    params = Kerple().init(jax.random.key(2), 1000)
    assert 0 <= params["a"].min() < 0.05
    assert 0.95 < params["a"].max() <= 1
    assert 1.9 < params["p"].max() <= 2


def test_unknown_kind_suggests_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'power'"):
        Kerple("powr")


@pytest.mark.parametrize("spec", [T5(), Kerple()])
def test_missing_parameters_are_named(spec):
    with pytest.raises(ValueError, match="params must hold"):
        spec.bind(num_heads=4)
