"""Scaling rules against the numbers of papers and released code, which the docstrings of the rules name."""

import chex
import jax
import numpy as np
import pytest

from posjax import rotary
from posjax.rotary import DynamicNTK, Linear, Llama3, LongRoPE, NTKByParts, Plain, YaRN

LISTS = (tuple(1 + 0.1 * np.arange(8)), tuple(1.0 + np.arange(8)))


def multipliers(rule):
    return rule.inverse_frequencies() / Plain(rule.base, head_dim=rule.head_dim).inverse_frequencies()


def test_linear_divides_positions():
    np.testing.assert_allclose(multipliers(Linear(4.0, head_dim=64)), 0.25, rtol=1e-15)
    scaled = rotary.rotary_table(np.array([0, 4, 4096, -400]), Linear(4.0).at_length(head_dim=16)[0])
    plain = rotary.rotary_table(np.array([0, 1, 1024, -100]), Plain().at_length(head_dim=16)[0])
    chex.assert_trees_all_close(scaled, plain, atol=1e-6)


@pytest.mark.parametrize("rule", [DynamicNTK(32), LongRoPE(*LISTS, 32, factor=4.0)], ids=["dynamic", "longrope"])
@pytest.mark.parametrize("traced", [False, True])
def test_each_row_or_token_may_have_its_length(rule, traced):
    lengths = np.array([[16, 32, 33], [64, 100, 8]])
    call = lambda n: rule.at_length(n, head_dim=16)[0]  # noqa: E731
    call = jax.jit(call) if traced else call
    rows, tokens = call(lengths[0]), call(lengths)
    chex.assert_shape([rows.value, rows.high, tokens.value, tokens.low], [(3, 8), (3, 8), (2, 3, 8), (2, 3, 8)])
    for i, length in enumerate(lengths[0].tolist()):
        expected = rule.at_length(length, head_dim=16)[0]
        np.testing.assert_allclose(rows.value[i], expected, rtol=1e-6)
        np.testing.assert_allclose(tokens.value[0, i], expected, rtol=1e-6)


def test_the_ramp_of_yarn_ends_with_the_last_pair_and_never_inverts():
    """With base 10, one turn in 100,000 tokens would be at index 8 ln(1e5 / 2 pi) / (2 ln 10) = 16.8 of 0 to 7."""
    found = multipliers(YaRN(4.0, 10**5, beta_fast=1e4, beta_slow=1, base=10.0, head_dim=8))
    np.testing.assert_allclose(found, 1 - 0.75 * np.arange(4) / 7, rtol=1e-12)
    found = multipliers(YaRN(4.0, 10**5, beta_fast=1e4, beta_slow=1, base=10.0, head_dim=8, truncate=False))
    np.testing.assert_allclose(found, 1 - 0.75 * np.clip((np.arange(4) - 0.807) / (7 - 0.807), 0, 1), rtol=1e-3)
    values = multipliers(YaRN(4.0, 6, beta_fast=32, beta_slow=31, head_dim=8))
    np.testing.assert_allclose(values, [1, 0.25, 0.25, 0.25])


def test_yarn_ramps_of_the_code_and_of_the_paper():
    index, rotations = (multipliers(YaRN(16.0, 4096, head_dim=128, ramp=ramp)) for ramp in ("index", "rotations"))
    at = [21, 25, 30, 35, 40, 45]
    np.testing.assert_allclose(rotations[at], [0.9923, 0.5721, 0.2952, 0.1603, 0.0946, 0.0626], atol=5e-5)
    np.testing.assert_allclose(index[at], [0.9639, 0.8197, 0.6394, 0.4591, 0.2788, 0.0986], atol=5e-5)
    for ramp in (index, rotations):
        assert (np.isclose(ramp, 1, rtol=1e-12).sum(), np.isclose(ramp, 1 / 16, rtol=1e-12).sum()) == (21, 18)


def test_yarn_of_gpt_oss():
    rule = YaRN(32.0, 4096, truncate=False, base=150_000.0, head_dim=64)
    expected = [0.90555, 0.80144, 0.69734, 0.59323, 0.48912, 0.38501, 0.28090, 0.17680, 0.07269]
    np.testing.assert_allclose(multipliers(rule)[9:18], expected, atol=5e-6)
    np.testing.assert_allclose(rule.table_factor, 1.3465736, atol=5e-8)


def test_temperature_of_yarn():
    found = [YaRN(factor, 4096).table_factor for factor in (1, 2, 4, 8, 16, 32, 40)]
    np.testing.assert_allclose(found, [1, 1.06931, 1.13863, 1.20794, 1.27726, 1.34657, 1.36889], atol=5.1e-6)
    np.testing.assert_allclose(np.square(found[1:]), [1.1434, 1.2965, 1.4591, 1.6314, 1.8133, 1.8739], atol=5.1e-5)


@pytest.mark.parametrize("ramp", ["index", "rotations"])
def test_yarn_without_extension_is_the_identity(ramp):
    found, factor = YaRN(1.0, 4096, ramp=ramp).at_length(head_dim=128)
    np.testing.assert_array_equal(found, rotary.inverse_frequencies(128))
    assert factor == 1.0


def test_mscales_of_deepseek():
    v3 = YaRN(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    lite = YaRN(40.0, 4096, mscale=0.707, mscale_all_dim=0.707)
    assert (v3.table_factor, lite.table_factor) == (1.0, 1.0)
    np.testing.assert_allclose([v3.softmax_scale, lite.softmax_scale], [1.8738542, 1.5896262], atol=5e-8)
    uneven = YaRN(40.0, 4096, mscale=1.0, mscale_all_dim=0.707)
    np.testing.assert_allclose(uneven.table_factor, 1.3688879 / 1.2608038, rtol=1e-6)
    only_one = YaRN(40.0, 4096, mscale=0.5)
    np.testing.assert_allclose(only_one.table_factor, 1.3688879, rtol=1e-7)
    assert only_one.softmax_scale == Plain().softmax_scale == 1.0
    assert YaRN(40.0, 4096, mscale=1.0, mscale_all_dim=0.707, attention_factor=0.9).table_factor == 0.9


def test_ntk_by_parts_is_yarn_without_its_temperature():
    parts, yarn = NTKByParts(16.0, 4096, head_dim=128), YaRN(16.0, 4096, head_dim=128)
    np.testing.assert_array_equal(parts.inverse_frequencies(), yarn.inverse_frequencies())
    assert parts.table_factor == 1.0


def test_magnitude_of_longrope():
    """Phi-3 with 128k tokens has 1.1902381."""
    found = [LongRoPE(*LISTS, 4096, factor=factor).table_factor for factor in (1, 32, 64, 512)]
    np.testing.assert_allclose(found, [1, 1.1902381, 1.22474, 1.32288], atol=5.1e-6)
    np.testing.assert_allclose(found[1], 1.1902381, atol=5e-8)
    assert LongRoPE(*LISTS, 4096, attention_factor=1.5).table_factor == 1.5


def test_longrope_switches_above_the_original_length():
    rule = LongRoPE(*LISTS, 4096, factor=32.0, head_dim=16)
    plain = Plain(head_dim=16).inverse_frequencies()
    short, long = (np.float32(plain / np.array(values)) for values in LISTS)
    traced = jax.jit(lambda n: rule.at_length(n)[0])
    for length, expected in ((1, short), (4096, short), (4097, long)):
        np.testing.assert_array_equal(rule.at_length(length)[0], expected)
        chex.assert_trees_all_equal(traced(length), rule.at_length(length)[0])
        assert traced(length).is_exact
    np.testing.assert_array_equal(rule.at_length()[0], short)
    fixed = {select: LongRoPE(*LISTS, 4096, factor=32.0, head_dim=16, select=select) for select in ("short", "long")}
    np.testing.assert_array_equal(fixed["short"].at_length(9999)[0], short)
    np.testing.assert_array_equal(fixed["long"].at_length(3)[0], long)
    assert (rule.reads_length, fixed["long"].reads_length) == (True, False)


def test_bands_of_llama3():
    found = multipliers(Llama3(base=5e5, head_dim=128))
    assert ((found == 1).sum(), (found == 1 / 8).sum()) == (29, 29)
    np.testing.assert_allclose(found[29:35], [0.8282, 0.6437, 0.4935, 0.3711, 0.2714, 0.1902], atol=5e-5)
    small = multipliers(Llama3(32.0, base=5e5, head_dim=64))
    assert ((small == 1).sum(), ((small < 1) & (small > 1 / 32)).sum(), (small == 1 / 32).sum()) == (15, 3, 14)
