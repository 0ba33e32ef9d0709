"""Radix rules, HoPE and stretched rules: closed forms and the numbers that the articles print."""

import math

import numpy as np
import pytest

from posjax.rotary import (
    HoPE,
    Linear,
    NTKAware,
    NTKFixed,
    NTKMixed,
    NTKOld,
    Plain,
    Proportional,
    Stretched,
    YaRN,
    from_hf,
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
    ],
)
def test_end_points(rule, first, last):
    found = multipliers(rule)
    np.testing.assert_allclose(found[[0, -1]], [first, last], atol=5.1e-6)
    assert (np.diff(found) < 0).all()
    assert (multipliers(type(rule)(1.0)) == 1).all()


def test_every_pair_of_the_radix_rules_in_closed_form():
    """Digit m = t + 1 of the mixed rule is read in radix beta e^(a (m^b - (m-1)^b)); the radices multiply up to k."""
    steps = np.arange(65) ** 0.625 * math.log(8) / 64**0.625
    np.testing.assert_allclose(multipliers(NTKMixed(8.0)), np.cumprod(np.exp(-np.diff(steps))), rtol=1e-12)
    np.testing.assert_allclose(multipliers(NTKFixed(8.0)), 8.0 ** (-np.arange(1, 65) / 64), rtol=1e-12)
    np.testing.assert_allclose(multipliers(NTKMixed(8.0, 0.0)), multipliers(Linear(8.0)), rtol=1e-13)
    np.testing.assert_allclose(multipliers(NTKAware(8.0)), 8.0 ** (-2 * np.arange(64) / 126), rtol=1e-13)


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


@pytest.mark.parametrize("factor", [0.0625, 16.0])
def test_stretched_divides_positions_and_carries_what_its_rule_declares(factor):
    rule = YaRN(4.0, 32, base=500.0, partial_rotary_factor=0.5, mscale=1.0, mscale_all_dim=0.707)
    found = Stretched(rule, factor)
    assert (found.table_factor, found.softmax_scale) == (rule.table_factor, rule.softmax_scale)
    assert (found.rotary_dim(16), found.base, found.head_dim, found.partial_rotary_factor) == (8, 500.0, None, 0.5)
    stretched = found.table(np.array([0, 16, 1_600_000, -320]), head_dim=16)
    divided = rule.table((np.array([0, 16, 1_600_000, -320]) / factor).astype(np.int32), head_dim=16)
    np.testing.assert_allclose(np.stack(stretched), np.stack(divided), atol=2e-6)


def test_stretched_rules_are_values():
    assert hash(Stretched(Plain(), 2)) == hash(Stretched(Plain(), 2.0))
    assert Stretched(Plain(), 2.0) != Stretched(Plain(), 3.0)
    assert not Stretched(Proportional(0.0), 2.0).at_length(head_dim=16)[0].value.any()
