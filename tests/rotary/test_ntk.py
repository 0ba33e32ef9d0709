"""Radix rules, HoPE and stretched rules: closed forms and the numbers that the articles print."""

import math

import numpy as np
import pytest

from posjax.positions import Range
from posjax.rotary import (
    CLEX,
    DynamicLinear,
    HoPE,
    Linear,
    LongRoPE,
    NTKAware,
    NTKFixed,
    NTKMixed,
    NTKOld,
    Plain,
    Proportional,
    RoPETie,
    Stretched,
    YaRN,
    from_hf,
    inverse_frequencies,
)

PLAIN = 10_000.0 ** (-np.arange(64) / 64)


def multipliers(rule):
    return rule.inverse_frequencies(128) / PLAIN


@pytest.mark.parametrize(
    ("rule", "first", "last"),
    [
        (NTKOld(8.0), 1, 0.12913),
        (NTKAware(8.0), 1, 1 / 8),
        (NTKFixed(8.0), 0.96803, 1 / 8),
        (NTKMixed(8.0), math.exp(-0.154555), 1 / 8),
        (NTKMixed(8.0, 0.75), math.exp(-0.091899), 1 / 8),
        (NTKMixed(12.0, 0.75), math.exp(-math.log(12) / 64**0.75), 1 / 12),
    ],
)
def test_end_points(rule, first, last):
    found = multipliers(rule)
    np.testing.assert_allclose(found[[0, -1]], [first, last], atol=5.1e-6)
    assert (np.diff(found) < 0).all()
    assert (multipliers(type(rule)(1.0)) == 1).all()


def test_mixed_is_the_rule_between_fixed_and_interpolation():
    np.testing.assert_allclose(multipliers(NTKMixed(8.0, 1.0)), multipliers(NTKFixed(8.0)), rtol=1e-13)
    np.testing.assert_allclose(multipliers(NTKMixed(8.0, 0.0)), multipliers(Linear(8.0)), rtol=1e-13)
    # each digit m = t + 1 is read in radix beta e^(a (m^b - (m-1)^b)), and the radices multiply up to k
    steps = np.arange(65) ** 0.625 * math.log(8) / 64**0.625
    np.testing.assert_allclose(multipliers(NTKMixed(8.0)), np.cumprod(np.exp(-np.diff(steps))), rtol=1e-12)


def test_old_is_a_plain_rule_of_another_base():
    rule = NTKOld(8.0, base=500.0, head_dim=16)
    np.testing.assert_allclose(rule.inverse_frequencies(), Plain(4000.0, head_dim=16).inverse_frequencies())
    assert from_hf(rule.to_hf()) == Plain(4000.0)


def test_hope_keeps_pairs_that_complete_a_turn_in_training():
    found = HoPE(4096).inverse_frequencies(128)
    assert (found > 0).sum() == 46
    np.testing.assert_array_equal(found[:46], Plain(head_dim=128).inverse_frequencies()[:46])
    assert (found[46:] == 0).all()
    # the 46th pair completes its turn, the 47th does not
    assert 2 * np.pi / PLAIN[45] <= 4096 < 2 * np.pi / PLAIN[46]
    assert HoPE(10**9).inverse_frequencies(128).all()
    np.testing.assert_array_equal(HoPE(6).inverse_frequencies(128), 0)


@pytest.mark.parametrize("factor", [0.0625, 1.0, 16.0])
def test_stretched_divides_positions(factor):
    rule = YaRN(4.0, 32, base=500.0, partial_rotary_factor=0.5)
    found = Stretched(rule, factor)
    np.testing.assert_array_equal(found.inverse_frequencies(16), rule.inverse_frequencies(16) / factor)
    assert (found.table_factor, found.rotary_dim(16)) == (rule.table_factor, 8)
    assert (found.base, found.head_dim, found.partial_rotary_factor) == (500.0, None, 0.5)
    positions = np.array([0, 16, 1_600_000, -320])
    stretched = found.table(positions, head_dim=16)
    divided = rule.table((positions / factor).astype(np.int32), head_dim=16)
    for a, b in zip(stretched, divided, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_stretched_carries_what_its_rule_declares():
    inner = YaRN(40.0, 32, mscale=1.0, mscale_all_dim=0.707, head_dim=16)
    assert Stretched(inner, 2.0).softmax_scale == inner.softmax_scale
    assert hash(Stretched(inner, 2)) == hash(Stretched(inner, 2.0))
    assert Stretched(inner, 2.0) != Stretched(inner, 3.0)
    assert Stretched(Stretched(inner, 2.0), 4.0).rotary_dim() == 16
    nope = Stretched(Proportional(0.0), 2.0)
    assert not nope.at_length(head_dim=16)[0].value.any()
    np.testing.assert_allclose(
        Stretched(Plain(), 4.0).at_length(head_dim=16)[0], np.asarray(inverse_frequencies(16)) / 4
    )
    assert Stretched(Plain(), 0.5).table(Range(0, 3), head_dim=16).cos.shape == (3, 8)


LISTS = ((1.0,) * 8, (2.0,) * 8)


class OwnFrequencies(Plain):
    """A rule with its own frequencies and the usual table."""

    def at_length(self, length=None, *, head_dim=None):
        return super().at_length(length, head_dim=head_dim)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: NTKOld(0.5), "factor must be a number of at least 1, found 0.5"),
        (lambda: NTKFixed(0.5), "factor must be a number of at least 1, found 0.5"),
        (lambda: NTKMixed(8.0, 1.5), r"exponent must be in \[0, 1\], found 1.5"),
        (lambda: NTKMixed(8.0, "0.6"), "exponent must be a number, found '0.6'"),
        (lambda: NTKFixed(8.0).to_hf(), "Hugging Face has no rope_type for NTKFixed"),
        (lambda: HoPE(0), "original_length must be a number of at least 1, found 0"),
        (lambda: HoPE(32).to_hf(), "no rope_type for HoPE"),
        (lambda: Stretched(10_000.0, 2.0), "rule must be a frequency rule, found 10000.0"),
        (lambda: Stretched(Plain(), 0.0), "factor must be positive, found 0.0"),
        (lambda: Stretched(Plain(), -2.0), "factor must be positive, found -2.0"),
        (lambda: Stretched(Plain(), float("inf")), "factor must be a number, found inf"),
        (lambda: Stretched(DynamicLinear(32), 2.0), "DynamicLinear reads the current length"),
        (lambda: Stretched(CLEX(32), 2.0), "CLEX reads the current length"),
        (lambda: Stretched(LongRoPE(*LISTS, 32, factor=2.0, select="long"), 2.0), "LongRoPE makes its own table"),
        (lambda: Stretched(RoPETie(), 2.0), "RoPETie makes its own table"),
        (lambda: Stretched(OwnFrequencies(), 2.0), "OwnFrequencies makes its own table"),
        (lambda: Stretched(Plain(), 2.0).to_hf(), "no rope_type for Stretched"),
        (lambda: Stretched(Plain(head_dim=8), 2.0).at_length(head_dim=16), "the rule was made for head_dim=8"),
    ],
)
def test_bad_rules_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
