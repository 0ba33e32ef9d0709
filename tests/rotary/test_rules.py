"""Rules of fixed frequencies against closed forms, and the numbers of papers and released code."""

import math
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax import rotary
from posjax.rotary import LongRoPE, from_hf
from posjax.rotary.ntk import NTKAware, NTKFixed, NTKMixed, NTKOld
from posjax.rotary.rules import Plain, Proportional
from posjax.rotary.scalings import HoPE, Linear, Llama3, NTKByParts, Resonance, Stretched, YaRN

# --- plain and proportional frequencies -------------------------------------------------------------------------------


def test_frequencies_are_the_formula_in_float32():
    found = rotary.inverse_frequencies(8, 500.0)
    assert found.value.dtype == np.float32
    np.testing.assert_allclose(found, [1, 500**-0.25, 500**-0.5, 500**-0.75], rtol=1e-7)
    np.testing.assert_allclose(Plain(head_dim=128).inverse_frequencies(), 1e4 ** -(np.arange(64) / 64), rtol=1e-12)


@pytest.mark.parametrize(("head_dim", "share", "width"), [(80, 0.25, 20), (128, 0.75, 96), (100, 0.29, 28)])
def test_partial_rotary_counts_exponents_over_the_rotary_width(head_dim, share, width):
    rule = Plain(head_dim=head_dim, partial_rotary_factor=share)
    assert rule.rotary_dim() == width
    np.testing.assert_allclose(rule.at_length()[0], 10_000.0 ** -(np.arange(0, width, 2) / width), rtol=1e-7)
    np.testing.assert_array_equal(
        rotary.inverse_frequencies(head_dim, partial_rotary_factor=share), rule.at_length()[0]
    )


@pytest.mark.parametrize(("share", "turning"), [(0.25, 64), (0.3, 76), (1.0, 256), (0.0, 0)])
def test_proportional_counts_exponents_over_the_full_head(share, turning):
    """Gemma 4's global layers: head 512, factor 0.25, so 64 of 256 pairs turn."""
    values = Proportional(share, head_dim=512, base=1e6, factor=2.0).inverse_frequencies()
    np.testing.assert_allclose(values[:turning], 1e6 ** -(np.arange(turning) / 256) / 2, rtol=1e-12)
    assert values.shape == (256,)
    assert (values[turning:] == 0).all()


def test_rules_take_the_head_size_from_either_place_and_are_static_arguments():
    compiled = jax.jit(lambda rule: jnp.asarray(rule.at_length(head_dim=8)[0]), static_argnums=0)
    np.testing.assert_array_equal(compiled(Plain(500.0)), Plain(500.0, head_dim=8).at_length()[0])
    compiled(Plain(500))
    assert compiled._cache_size() == 1
    assert Plain() != Proportional(1.0)


def test_every_rule_is_registered_hashable_and_declares_whether_it_reads_the_length():
    needed = {"factor": 2.0, "original_length": 32, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rules = {}
    for name, kind in rotary.SCALINGS.items():
        given = {key: value for key, value in needed.items() if key in kind.__dataclass_fields__}
        rules[name] = kind(**given)
    assert len(set(rules.values())) == len(rules) == 17
    reading = {name for name, rule in rules.items() if rule.reads_length}
    assert reading == {"dynamic-linear", "dynamic-ntk", "dynamic-yarn", "longrope", "clex"}


# --- radix rules, HoPE and stretched rules ----------------------------------------------------------------------------

PLAIN = 10_000.0 ** (-np.arange(64) / 64)


def of_128(rule):
    return rule.inverse_frequencies(128) / PLAIN


def test_every_pair_of_the_radix_rules_in_closed_form():
    """Digit m = t + 1 of the mixed rule is read in radix beta e^(a (m^b - (m-1)^b)); the radices multiply up to k."""
    steps = np.arange(65) ** 0.625 * math.log(8) / 64**0.625
    np.testing.assert_allclose(of_128(NTKMixed(8.0)), np.cumprod(np.exp(-np.diff(steps))), rtol=1e-12)
    np.testing.assert_allclose(of_128(NTKFixed(8.0)), 8.0 ** (-np.arange(1, 65) / 64), rtol=1e-12)
    slower = of_128(NTKMixed(8.0, 0.75))
    np.testing.assert_allclose(slower[[0, -1]], [math.exp(-0.091899), 1 / 8], atol=5.1e-6)
    np.testing.assert_allclose(of_128(NTKMixed(8.0, 0.0)), of_128(Linear(8.0)), rtol=1e-13)
    np.testing.assert_allclose(of_128(NTKAware(8.0)), 8.0 ** (-2 * np.arange(64) / 126), rtol=1e-13)


def test_old_is_a_plain_rule_of_another_base():
    rule = NTKOld(8.0, base=500.0, head_dim=16)
    np.testing.assert_allclose(rule.inverse_frequencies(), Plain(4000.0, head_dim=16).inverse_frequencies())
    assert from_hf(rule.to_hf()) == Plain(4000.0)


@pytest.mark.parametrize(("factor", "base"), [(2, 20221.26), (16, 167198.74)])
def test_ntk_aware_is_written_as_its_base(factor, base):
    np.testing.assert_allclose(NTKAware(factor, head_dim=128).to_hf()["rope_theta"], base, atol=0.005)


def test_hope_keeps_pairs_that_complete_a_turn_in_training():
    found = HoPE(4096).inverse_frequencies(128)
    np.testing.assert_array_equal(found[:46], Plain(head_dim=128).inverse_frequencies()[:46])
    assert (found[46:] == 0).all()
    assert 2 * np.pi / PLAIN[45] <= 4096 < 2 * np.pi / PLAIN[46]
    assert HoPE(10**9).inverse_frequencies(128).all()
    np.testing.assert_array_equal(HoPE(6).inverse_frequencies(128), 0)


def test_wavelengths_of_resonance_are_those_of_its_released_code():
    """Computed by torch.round(2 pi / inv_freq) as in sheryc/resonance_rope, plain and under YaRN (8 times 4,096)."""
    plain, yarn = (2 * np.pi / rule.inverse_frequencies(128) for rule in (Resonance(), Resonance(YaRN(8.0, 4096))))
    np.testing.assert_allclose(plain[::9], [6, 23, 84, 306, 1117, 4080, 14900, 54410], rtol=1e-14)
    np.testing.assert_allclose(yarn[[20, 21, 30, 40, 45, 63]], [112, 134, 710, 6078, 25718, 435281], rtol=1e-14)
    assert Resonance(YaRN(8.0, 4096)).table_factor == YaRN(8.0, 4096).table_factor
    with_zeros = Resonance(HoPE(4096)).inverse_frequencies(128)
    np.testing.assert_array_equal(with_zeros == 0, HoPE(4096).inverse_frequencies(128) == 0)


def test_angles_of_resonance_come_back_after_each_wavelength():
    positions = np.array([0, 5, 1_000_003])
    at = partial(Resonance(base=500.0).table, head_dim=16)
    for pair, wavelength in enumerate([6, 14, 30, 65, 140, 306, 664, 1445]):
        start, end = (np.stack(at(positions + shift))[..., pair] for shift in (0, 700 * wavelength))
        np.testing.assert_allclose(start, end, atol=1e-6)


@pytest.mark.parametrize("factor", [0.0625, 16.0])
def test_stretched_divides_positions_and_carries_what_its_rule_declares(factor):
    rule = YaRN(4.0, 32, base=500.0, partial_rotary_factor=0.5, mscale=1.0, mscale_all_dim=0.707)
    found = Stretched(rule, factor)
    assert (found.table_factor, found.softmax_scale) == (rule.table_factor, rule.softmax_scale)
    assert (found.rotary_dim(16), found.base, found.head_dim, found.partial_rotary_factor) == (8, 500.0, None, 0.5)
    stretched = found.table(np.array([0, 16, 1_600_000, -320]), head_dim=16)
    divided = rule.table((np.array([0, 16, 1_600_000, -320]) / factor).astype(np.int32), head_dim=16)
    np.testing.assert_allclose(np.stack(stretched), np.stack(divided), atol=2e-6)


# --- linear scaling, YaRN, LongRoPE and Llama 3 -----------------------------------------------------------------------

LISTS = (tuple(1 + 0.1 * np.arange(8)), tuple(1.0 + np.arange(8)))


def multipliers(rule):
    return rule.inverse_frequencies() / Plain(rule.base, head_dim=rule.head_dim).inverse_frequencies()


def test_linear_divides_positions():
    np.testing.assert_allclose(multipliers(Linear(4.0, head_dim=64)), 0.25, rtol=1e-15)
    scaled = rotary.rotary_table(np.array([0, 4, 4096, -400]), Linear(4.0).at_length(head_dim=16)[0])
    plain = rotary.rotary_table(np.array([0, 1, 1024, -100]), Plain().at_length(head_dim=16)[0])
    chex.assert_trees_all_close(scaled, plain, atol=1e-6)


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
