"""Scaling rules against the numbers of papers and released code, which the docstrings of the rules name."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax import rotary
from posjax.rotary import DynamicNTK, Linear, Llama3, LongRoPE, NTKAware, NTKByParts, Plain, Proportional, YaRN
from posjax.rotary.scalings import correction_range, yarn_magnitude

LISTS = (tuple(1 + 0.1 * np.arange(8)), tuple(1.0 + np.arange(8)))


def multipliers(rule, base=10_000.0):
    return rule.inverse_frequencies() / Plain(base, head_dim=rule.head_dim).inverse_frequencies()


def test_linear_divides_every_frequency():
    np.testing.assert_allclose(multipliers(Linear(4.0, head_dim=64)), 0.25, rtol=1e-15)


def test_linear_is_division_of_positions():
    scaled = rotary.rotary_table(np.array([0, 4, 4096, -400]), Linear(4.0).at_length(head_dim=16)[0])
    plain = rotary.rotary_table(np.array([0, 1, 1024, -100]), Plain().at_length(head_dim=16)[0])
    chex.assert_trees_all_close(scaled, plain, atol=1e-6)


@pytest.mark.parametrize(("factor", "base"), [(2, 20221.26), (4, 40889.94), (8, 82684.62), (16, 167198.74)])
def test_ntk_aware_base_and_end_points(factor, base):
    rule = NTKAware(factor, head_dim=128)
    np.testing.assert_allclose(rule.to_hf()["rope_theta"], base, atol=0.005)
    np.testing.assert_allclose(
        rule.inverse_frequencies(), Plain(rule.to_hf()["rope_theta"], head_dim=128).inverse_frequencies()
    )
    found = multipliers(rule)
    np.testing.assert_allclose(found, float(factor) ** (-2 * np.arange(64) / 126), rtol=1e-13)
    np.testing.assert_allclose(found[[0, -1]], [1, 1 / factor], rtol=1e-14)


def test_scaling_the_base_by_the_factor_itself_falls_short():
    """The older recipe b * k leaves the last frequency at k^(-(d-2)/d), not 1/k."""
    found = Plain(8e4, head_dim=128).inverse_frequencies() / Plain(head_dim=128).inverse_frequencies()
    np.testing.assert_allclose(found[-1], 0.12913, atol=5e-6)


@pytest.mark.parametrize("length", [1, 31, 32])
def test_dynamic_ntk_is_plain_up_to_the_training_length(length):
    found, factor = DynamicNTK(32, factor=2.0).at_length(length, head_dim=16)
    np.testing.assert_array_equal(found, rotary.inverse_frequencies(16))
    assert factor == 1.0
    traced = jax.jit(lambda n: DynamicNTK(32, factor=2.0).at_length(n, head_dim=16)[0])(np.uint32(length))
    np.testing.assert_array_equal(traced, rotary.inverse_frequencies(16))


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_dynamic_ntk_is_ntk_aware_at_the_current_factor(factor):
    for length in (33, 64, 1000):
        scale = factor * length / 32 - (factor - 1)
        found = DynamicNTK(32, factor=factor).at_length(length, head_dim=16)[0]
        chex.assert_trees_all_close(found, NTKAware(scale).at_length(head_dim=16)[0], rtol=1e-7)
        traced = jax.jit(lambda n: DynamicNTK(32, factor=factor).at_length(n, head_dim=16)[0])(length)
        np.testing.assert_allclose(traced, found, rtol=1e-6)
    unchanged = DynamicNTK(32, factor=factor).at_length(None, head_dim=16)[0]
    np.testing.assert_array_equal(unchanged, rotary.inverse_frequencies(16))


@pytest.mark.parametrize("rule", [DynamicNTK(32), LongRoPE(*LISTS, 32, factor=4.0)], ids=["dynamic", "longrope"])
@pytest.mark.parametrize("traced", [False, True])
def test_a_length_for_each_row_or_token(rule, traced):
    lengths = np.array([[16, 32, 33], [64, 100, 8]])
    call = lambda n: rule.at_length(n, head_dim=16)[0]  # noqa: E731
    call = jax.jit(call) if traced else call
    rows, tokens = call(lengths[0]), call(lengths)
    chex.assert_shape([rows.value, rows.high, tokens.value, tokens.low], [(3, 8), (3, 8), (2, 3, 8), (2, 3, 8)])
    for i, length in enumerate(lengths[0].tolist()):
        expected = rule.at_length(length, head_dim=16)[0]
        np.testing.assert_allclose(rows.value[i], expected, rtol=1e-6)
        np.testing.assert_allclose(tokens.value[0, i], expected, rtol=1e-6)


def test_a_traced_length_does_not_compile_again():
    compiled = jax.jit(lambda n: DynamicNTK(32).at_length(n, head_dim=16)[0])
    compiled(jnp.int32(40))
    compiled(jnp.int32(4000))
    assert compiled._cache_size() == 1


@pytest.mark.parametrize(
    ("width", "base", "length", "low", "high"),
    [
        (128, 1e4, 4096, 20.944, 45.027),
        (128, 1e4, 2048, 16.128, 40.210),
        (64, 150_000.0, 4096, 8.0927791, 17.3980245),
        (128, 1e6, 32_768, 23.596, 39.651),
    ],
)
def test_yarn_correction_range(width, base, length, low, high):
    found = correction_range(width, base, length, 32, 1, truncate=False)
    np.testing.assert_allclose(found, (low, high), rtol=3e-5)
    assert correction_range(width, base, length, 32, 1, truncate=True) == (np.floor(low), np.ceil(high))


def test_yarn_correction_range_ends_with_the_last_pair():
    """With base 10, one turn in 100,000 tokens would be at index 8 ln(1e5 / 2 pi) / (2 ln 10) = 16.8 of 0 to 7."""
    assert correction_range(8, 10.0, 1e5, 1e4, 1, truncate=False) == (pytest.approx(0.807, abs=1e-3), 7)
    assert correction_range(8, 10.0, 1e5, 1e4, 1, truncate=True) == (0, 7)


def test_yarn_correction_range_never_inverts():
    low, high = correction_range(8, 1e4, 6, 32, 31, truncate=True)
    assert (low, high) == (0, 0.001)
    values = multipliers(YaRN(4.0, 6, beta_fast=32, beta_slow=31, head_dim=8))
    np.testing.assert_allclose(values, [1, 0.25, 0.25, 0.25])


def test_yarn_ramps_of_the_code_and_of_the_paper():
    index, rotations = (multipliers(YaRN(16.0, 4096, head_dim=128, ramp=ramp)) for ramp in ("index", "rotations"))
    at = [21, 25, 30, 35, 40, 45]
    np.testing.assert_allclose(rotations[at], [0.9923, 0.5721, 0.2952, 0.1603, 0.0946, 0.0626], atol=5e-5)
    np.testing.assert_allclose(index[at], [0.9639, 0.8197, 0.6394, 0.4591, 0.2788, 0.0986], atol=5e-5)
    np.testing.assert_allclose(np.abs(index - rotations).max(), 0.344, atol=5e-4)
    for ramp in (index, rotations):
        assert (np.isclose(ramp, 1, rtol=1e-12).sum(), np.isclose(ramp, 1 / 16, rtol=1e-12).sum()) == (21, 18)


def test_yarn_of_gpt_oss():
    rule = YaRN(32.0, 4096, truncate=False, base=150_000.0, head_dim=64)
    expected = [0.90555, 0.80144, 0.69734, 0.59323, 0.48912, 0.38501, 0.28090, 0.17680, 0.07269]
    np.testing.assert_allclose(multipliers(rule, 150_000.0)[9:18], expected, atol=5e-6)
    np.testing.assert_allclose(rule.table_factor, 1.3465736, atol=5e-8)


@pytest.mark.parametrize(
    ("factor", "magnitude", "logits"),
    [
        (2, 1.06931, 1.1434),
        (4, 1.13863, 1.2965),
        (8, 1.20794, 1.4591),
        (16, 1.27726, 1.6314),
        (32, 1.34657, 1.8133),
        (40, 1.36889, 1.8739),
    ],
)
def test_yarn_temperature(factor, magnitude, logits):
    assert abs(YaRN(factor, 4096).table_factor - magnitude) < 5.1e-6
    assert abs(YaRN(factor, 4096).table_factor ** 2 - logits) < 5.1e-5


def test_yarn_temperature_to_more_digits():
    np.testing.assert_allclose(YaRN(4.0, 4096).table_factor, 1.1386294, atol=5e-8)
    assert yarn_magnitude(1.0) == yarn_magnitude(0.5) == 1.0


def test_yarn_without_extension_is_the_identity():
    for ramp in ("index", "rotations"):
        found, factor = YaRN(1.0, 4096, ramp=ramp).at_length(head_dim=128)
        np.testing.assert_array_equal(found, rotary.inverse_frequencies(128))
        assert factor == 1.0


def test_yarn_mscales_of_deepseek():
    v3 = YaRN(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    lite = YaRN(40.0, 4096, mscale=0.707, mscale_all_dim=0.707)
    assert (v3.table_factor, lite.table_factor) == (1.0, 1.0)
    np.testing.assert_allclose([v3.softmax_scale, lite.softmax_scale], [1.8738542, 1.5896262], atol=5e-8)
    uneven = YaRN(40.0, 4096, mscale=1.0, mscale_all_dim=0.707)
    np.testing.assert_allclose(uneven.table_factor, 1.3688879 / 1.2608038, rtol=1e-6)
    np.testing.assert_allclose(uneven.softmax_scale, 1.5896262, atol=5e-8)
    only_one = YaRN(40.0, 4096, mscale=0.5)
    np.testing.assert_allclose(only_one.table_factor, yarn_magnitude(40.0))
    assert only_one.softmax_scale == Plain().softmax_scale == 1.0
    explicit = YaRN(40.0, 4096, mscale=1.0, mscale_all_dim=0.707, attention_factor=0.9)
    assert explicit.table_factor == 0.9


def test_ntk_by_parts_is_yarn_without_its_temperature():
    parts, yarn = NTKByParts(16.0, 4096, head_dim=128), YaRN(16.0, 4096, head_dim=128)
    np.testing.assert_array_equal(parts.inverse_frequencies(), yarn.inverse_frequencies())
    assert parts.table_factor == 1.0


@pytest.mark.parametrize(("factor", "magnitude"), [(32, 1.19024), (64, 1.22474), (512, 1.32288), (1, 1.0)])
def test_longrope_magnitude(factor, magnitude):
    assert abs(LongRoPE(*LISTS, 4096, factor=factor).table_factor - magnitude) < 5.1e-6


def test_longrope_of_phi3_128k():
    np.testing.assert_allclose(LongRoPE(*LISTS, 4096, factor=32.0).table_factor, 1.1902381, atol=5e-8)
    assert LongRoPE(*LISTS, 4096, attention_factor=1.5).table_factor == 1.5


def test_longrope_switches_above_the_original_length():
    rule = LongRoPE(*LISTS, 4096, factor=32.0, head_dim=16)
    plain = Plain(head_dim=16).inverse_frequencies()
    short, long = (np.float32(plain / np.array(values)) for values in LISTS)
    traced = jax.jit(lambda n: rule.at_length(n)[0])
    for length, expected in ((None, short), (1, short), (4096, short), (4097, long)):
        np.testing.assert_array_equal(rule.at_length(length)[0], expected)
        if length is not None:
            chex.assert_trees_all_equal(traced(length), rule.at_length(length)[0])
            assert traced(length).is_exact
    fixed = {select: LongRoPE(*LISTS, 4096, factor=32.0, head_dim=16, select=select) for select in ("short", "long")}
    np.testing.assert_array_equal(fixed["short"].at_length(9999)[0], short)
    np.testing.assert_array_equal(fixed["long"].at_length(3)[0], long)
    assert (rule.reads_length, fixed["long"].reads_length) == (True, False)


def test_llama3_bands():
    found = multipliers(Llama3(base=5e5, head_dim=128), 5e5)
    assert ((found == 1).sum(), (found == 1 / 8).sum()) == (29, 29)
    np.testing.assert_allclose(found[29:35], [0.8282, 0.6437, 0.4935, 0.3711, 0.2714, 0.1902], atol=5e-5)
    small = multipliers(Llama3(32.0, base=5e5, head_dim=64), 5e5)
    assert ((small == 1).sum(), ((small < 1) & (small > 1 / 32)).sum(), (small == 1 / 32).sum()) == (15, 3, 14)


def test_every_rule_is_registered_hashable_and_declares_its_length():
    rules = {
        "default": Plain(),
        "proportional": Proportional(),
        "hope": rotary.HoPE(32),
        "linear": Linear(2.0),
        "ntk": NTKAware(2.0),
        "ntk-old": rotary.NTKOld(2.0),
        "ntk-fixed": rotary.NTKFixed(2.0),
        "ntk-mixed": rotary.NTKMixed(2.0),
        "ntk-by-parts": NTKByParts(2.0, 32),
        "dynamic-linear": rotary.DynamicLinear(32),
        "dynamic-ntk": DynamicNTK(32),
        "dynamic-yarn": rotary.DynamicYaRN(32),
        "yarn": YaRN(2.0, 32),
        "longrope": LongRoPE(list(LISTS[0]), list(LISTS[1]), 32, factor=2.0),
        "clex": rotary.CLEX(32),
        "llama3": Llama3(),
    }
    assert {name: type(rule) for name, rule in rules.items()} == rotary.SCALINGS
    assert len(set(rules.values())) == len(rules)
    reading = {name for name, rule in rules.items() if rule.reads_length}
    assert reading == {"dynamic-linear", "dynamic-ntk", "dynamic-yarn", "longrope", "clex"}
    for rule in rules.values():
        values, factor = rule.at_length(64, head_dim=16)
        chex.assert_shape(values.value, (8,))
        assert values.is_exact
        assert isinstance(factor, float)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Linear(0.5), "factor must be a number of at least 1, found 0.5"),
        (lambda: Linear("2"), "factor must be a number of at least 1, found '2'"),
        (lambda: NTKAware(float("nan")), "factor must be a number of at least 1, found nan"),
        (lambda: NTKAware(2.0, head_dim=2).at_length(), "NTK scaling needs a rotary width of at least 4, found 2"),
        (lambda: NTKAware(2.0).to_hf(), "set head_dim"),
        (lambda: DynamicNTK(0), "original_length must be a number of at least 1, found 0"),
        (lambda: YaRN(4.0, 4096, beta_fast=1, beta_slow=32), "beta_fast must be above beta_slow"),
        (lambda: YaRN(4.0, 4096, ramp="code"), "ramp: unknown value 'code'"),
        (lambda: YaRN(4.0, 4096, mscale=-1.0), "mscale must be a number of at least 0, found -1.0"),
        (lambda: YaRN(4.0, 4096, ramp="rotations").to_hf(), "Hugging Face has no ramp 'rotations'"),
        (lambda: LongRoPE(*LISTS, 32), "LongRoPE needs factor"),
        (lambda: LongRoPE(*LISTS, 32, factor=2.0, head_dim=32), "short_factor must have 16 numbers .* found 8"),
        (lambda: LongRoPE(*LISTS, 32, factor=2.0).at_length(head_dim=32), "short_factor must have 16 numbers"),
        (lambda: LongRoPE(LISTS[0], (1.0,), 32, factor=2.0, head_dim=16), "long_factor must have 8 numbers"),
        (lambda: LongRoPE((0.0,), (1.0,), 32, factor=2.0), "every short_factor must be positive, found 0.0"),
        (lambda: LongRoPE("ab", (1.0,), 32, factor=2.0), "short_factor must be a list of numbers, found 'ab'"),
        (lambda: LongRoPE(*LISTS, 32, factor=2.0, select="auto"), "select: unknown value 'auto'"),
        (lambda: LongRoPE(*LISTS, 32, factor=2.0, select="long").to_hf(), "always selects by length"),
        (lambda: Llama3(high_freq_factor=0.5), "high_freq_factor must be at least low_freq_factor"),
    ],
)
def test_bad_scalings_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
