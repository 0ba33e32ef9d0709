"""Rules that read the current length: each equals its static rule at that length."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax import rotary
from posjax.coca import Coca
from posjax.positions import Range
from posjax.rotary import CLEX, DynamicLinear, DynamicNTK, DynamicYaRN, Linear, LongRoPE, NTKAware, Rotary, YaRN

L = 32
RULES = {
    "linear": (DynamicLinear(L), Linear),
    "yarn": (DynamicYaRN(L), lambda s: YaRN(s, L)),
    "yarn-rotations": (
        DynamicYaRN(L, beta_fast=8.0, ramp="rotations"),
        lambda s: YaRN(s, L, beta_fast=8.0, ramp="rotations"),
    ),
    "longrope": (
        LongRoPE((1.0,) * 8, tuple(1 + np.arange(8) / 2), L, factor=4.0, select="dynamic"),
        lambda s: LongRoPE((1.0,) * 8, tuple(1 + np.arange(8) / 2 * (s - 1) / 3), L, factor=s, select="long"),
    ),
}
rules = pytest.mark.parametrize(("rule", "static"), RULES.values(), ids=RULES)


@rules
@pytest.mark.parametrize("length", [1, 31, L])
def test_plain_up_to_the_training_length_even_when_traced(rule, static, length):
    for found, factor in (rule.at_length(length, head_dim=16), _traced(rule)(length)):
        chex.assert_trees_all_equal(found, rotary.inverse_frequencies(16))
        assert factor == 1.0
    chex.assert_trees_all_equal(rule.at_length(head_dim=16)[0], rotary.inverse_frequencies(16))


def _traced(rule):
    return jax.jit(lambda n: rule.at_length(n, head_dim=16))


@pytest.mark.parametrize("length", [1, L, 33, 100, 1_000_003])
def test_dynamic_ntk_grows_by_its_factor(length):
    """Base b s^(w / (w - 2)) with s = factor l / L - (factor - 1), as Hugging Face's "dynamic" has it."""
    s = 2.5 * max(length, L) / L - 1.5
    expected = 1 / (10_000 * s ** (16 / 14)) ** (np.arange(8) / 8)
    rule = DynamicNTK(L, factor=2.5)
    np.testing.assert_allclose(rule.at_length(length, head_dim=16)[0].value, expected, rtol=1e-6)
    np.testing.assert_allclose(_traced(rule)(length)[0].value, expected, rtol=2e-6)


@rules
def test_static_rule_at_the_current_scale(rule, static):
    traced = _traced(rule)
    for length in (33, 64, 100, 1_000_003):
        expected, expected_factor = static(length / L).at_length(head_dim=16)
        found, factor = rule.at_length(length, head_dim=16)
        np.testing.assert_allclose(found, expected, rtol=1e-7)
        np.testing.assert_allclose(factor, expected_factor, rtol=1e-12)
        far = np.array([2**31 - 1, -1_000_003])
        cos = [rotary.rotary_table(far, each).cos for each in (found, expected)]
        np.testing.assert_allclose(*cos, atol=2e-6)
        approximate, factor = traced(length)
        np.testing.assert_allclose(approximate, expected, rtol=1e-6)
        np.testing.assert_allclose(factor, expected_factor, rtol=1e-6)
    assert traced._cache_size() == 1


@rules
@pytest.mark.parametrize("traced", [False, True])
def test_lengths_of_rows_and_of_tokens(rule, static, traced):
    """Frequencies and temperature follow the length of each row, and of each token of packed documents."""
    lengths = np.array([[16, 32, 33, 48], [64, 100, 8, 127]])
    call = lambda n: rule.table(Range(5, 4), head_dim=16, length=n)  # noqa: E731
    call = jax.jit(call) if traced else call
    rows, tokens = call(lengths[:, 3]), call(lengths)
    chex.assert_shape([*rows, *tokens], (2, 4, 8))
    for b, t in np.ndindex(2, 4):
        for found, length in ((rows, lengths[b, 3]), (tokens, lengths[b, t])):
            expected = rule.table(Range(5 + t, 1), head_dim=16, length=int(length))
            chex.assert_trees_all_close(jax.tree.map(lambda x: x[b, t], found), _first(expected), atol=3e-6)  # noqa: B023


def _first(table):
    return jax.tree.map(lambda x: x[0], table)


def test_yarn_temperature_follows_the_length():
    found = [DynamicYaRN(4096).at_length(n * 4096, head_dim=64)[1] for n in (1, 2, 16, 40)]
    np.testing.assert_allclose(found, [1, 1.06931, 1.27726, 1.36889], atol=5.1e-6)
    factors = DynamicYaRN(4096).at_length(np.array([4096, 8192]), head_dim=64)[1]
    chex.assert_shape(factors, (2, 1, 1))


def test_longrope_magnitude_follows_the_length_unless_given():
    lists = ((1.0,) * 8, (2.0,) * 8)
    rule = LongRoPE(*lists, 4096, factor=512.0, select="dynamic")
    found = [rule.at_length(n * 4096, head_dim=16)[1] for n in (1, 32, 64, 512)]
    np.testing.assert_allclose(found, [1, 1.19024, 1.22474, 1.32288], atol=5.1e-6)
    full = rule.at_length(512 * 4096, head_dim=16)[0]
    np.testing.assert_allclose(full, np.asarray(rotary.inverse_frequencies(16)) / 2, rtol=1e-7)
    fixed = LongRoPE(*lists, 4096, factor=512.0, attention_factor=1.5, select="dynamic")
    assert [fixed.at_length(n, head_dim=16)[1] for n in (1, 99_999)] == [1.5, 1.5]


def test_steps_of_qwen():
    """alpha = 1, 3, 7, 15 up to L, 2L, 4L, 8L, in integers: the boundaries themselves belong to the lower step."""
    rule = DynamicNTK(2048, schedule="qwen")
    traced = _traced(rule)
    cases = {1: 1, 2048: 1, 2049: 3, 4096: 3, 4097: 7, 8192: 7, 8193: 15, 16384: 15, 16385: 31, 2048 * 1024: 2047}
    for length, alpha in cases.items():
        expected = NTKAware(alpha).at_length(head_dim=16)[0]
        np.testing.assert_allclose(rule.at_length(length, head_dim=16)[0], expected, rtol=1e-7)
        np.testing.assert_allclose(traced(length)[0], expected, rtol=2e-6)
        assert length <= 2048 or alpha == 2 ** int(np.ceil(np.log2(length / 2048) + 1)) - 1
    rows = rule.at_length(np.array([4096, 4097]), head_dim=16)[0]
    np.testing.assert_allclose(rows.value[1], NTKAware(7.0).at_length(head_dim=16)[0], rtol=1e-7)
    assert rule.at_length(2**31 - 1, head_dim=16)[0].value[-1] > 0


@pytest.mark.parametrize("rule", [DynamicYaRN(4), CLEX(4, max_factor=4, steps=2)], ids=["yarn", "clex"])
def test_features_take_a_length_for_each_row(rule):
    """RoPE and CoCA: exchanging the rows and their lengths exchanges the results."""
    q = jax.random.normal(jax.random.key(0), (2, 6, 2, 16))
    for slot, k in ((Rotary(rule), q), (Coca("slack", rule), q[..., :8])):
        params = slot.init(jax.random.key(1), num_heads=2, num_kv_heads=2, head_dim=16)
        at = {"q_positions": Range(0, 6), "kv_positions": Range(0, 6), "head_dim": 16, "params": params}
        call = jax.jit(lambda q, k, lengths, slot=slot, at=at: slot(q, k, **at, length=lengths))
        both, exchanged = call(q, k, jnp.array([12, 4])), call(q[::-1], k[::-1], jnp.array([4, 12]))
        chex.assert_trees_all_close(both, jax.tree.map(lambda x: x[::-1], exchanged), atol=1e-6)
        assert np.abs(both[0] - call(q, k, jnp.array([4, 4]))[0])[0].max() > 0.1
        chex.assert_shape(both, (2, 6, 2, 16))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DynamicLinear(0), "original_length must be a number of at least 1, found 0"),
        (lambda: DynamicYaRN(32, beta_fast=1.0, beta_slow=32.0), "beta_fast must be above beta_slow"),
        (lambda: DynamicYaRN(32, ramp="code"), "ramp: unknown value 'code'"),
        (lambda: DynamicNTK(32, schedule="qwen-1"), "schedule: unknown value 'qwen-1'; did you mean 'qwen'"),
        (lambda: DynamicNTK(32, factor=2.0, schedule="qwen"), "factor must be 1 for the schedule 'qwen'"),
        (lambda: DynamicNTK(32, schedule="qwen").to_hf(), "Hugging Face has no schedule 'qwen'"),
        (lambda: DynamicYaRN(32).to_hf(), "no rope_type for DynamicYaRN"),
        (lambda: DynamicYaRN(32).table(Range(0, 4), head_dim=16), "DynamicYaRN reads the current length: pass length="),
    ],
)
def test_bad_rules_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
