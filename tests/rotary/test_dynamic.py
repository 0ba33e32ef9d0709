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
GROWTH = np.arange(8) / 2
RULES = {
    "linear": (DynamicLinear(L), Linear),
    "yarn": (
        DynamicYaRN(L, beta_fast=8.0, ramp="rotations"),
        lambda s: YaRN(s, L, beta_fast=8.0, ramp="rotations"),
    ),
    "longrope": (
        LongRoPE((1.0,) * 8, tuple(1 + GROWTH), L, factor=4.0, select="dynamic"),
        lambda s: LongRoPE((1.0,) * 8, tuple(1 + GROWTH * (s - 1) / 3), L, factor=s, select="long"),
    ),
    "longrope-given": (
        LongRoPE((1.0,) * 8, tuple(1 + GROWTH), L, factor=4.0, attention_factor=1.0, select="dynamic"),
        lambda s: LongRoPE((1.0,) * 8, tuple(1 + GROWTH * (s - 1) / 3), L, attention_factor=1.0, select="long"),
    ),
    "ntk": (DynamicNTK(L), NTKAware),
    "by-length": (
        LongRoPE((1.0,) * 8, tuple(1 + GROWTH), L, factor=4.0, attention_factor=1.0),
        lambda s: LongRoPE((1.0,) * 8, tuple(1 + GROWTH), L, attention_factor=1.0, select="long"),
    ),
}
rules = pytest.mark.parametrize(("rule", "static"), RULES.values(), ids=RULES)


def traced(rule):
    return jax.jit(lambda n: rule.at_length(n, head_dim=16))


@rules
def test_plain_up_to_the_training_length_and_then_the_static_rule_at_the_current_scale(rule, static):
    program = traced(rule)
    for length in (1, 31, L):
        for found, factor in (rule.at_length(length, head_dim=16), program(length)):
            chex.assert_trees_all_equal(found, rotary.inverse_frequencies(16))
            assert factor == 1.0
    chex.assert_trees_all_equal(rule.at_length(head_dim=16)[0], rotary.inverse_frequencies(16))
    for length in (33, 100, 1_000_003):
        expected, expected_factor = static(length / L).at_length(head_dim=16)
        found, factor = rule.at_length(length, head_dim=16)
        np.testing.assert_allclose(found, expected, rtol=1e-7)
        np.testing.assert_allclose(factor, expected_factor, rtol=1e-12)
        approximate, factor = program(length)
        np.testing.assert_allclose(approximate, expected, rtol=1e-6)
        np.testing.assert_allclose(factor, expected_factor, rtol=1e-6)
    assert program._cache_size() == 1


@pytest.mark.parametrize("length", [1, L, 33, 100, 1_000_003])
def test_dynamic_ntk_grows_by_its_factor(length):
    """Base b s^(w / (w - 2)) with s = factor l / L - (factor - 1), as Hugging Face's "dynamic" has it."""
    s = 2.5 * max(length, L) / L - 1.5
    expected = 1 / (10_000 * s ** (16 / 14)) ** (np.arange(8) / 8)
    rule = DynamicNTK(L, factor=2.5)
    np.testing.assert_allclose(rule.at_length(length, head_dim=16)[0].value, expected, rtol=1e-6)
    np.testing.assert_allclose(traced(rule)(length)[0].value, expected, rtol=2e-6)


@pytest.mark.parametrize("name", ["yarn", "longrope", "by-length"])
def test_each_row_and_each_token_may_have_its_length(name):
    """Frequencies and temperature follow the length of each row, and of each token of packed documents."""
    rule = RULES[name][0]
    lengths = np.array([[16, 33, 48], [64, 8, 127]])
    call = jax.jit(lambda n: rule.table(Range(5, 3), head_dim=16, length=n))
    known = jax.jit(lambda at, length: rule.table(at[None], head_dim=16, length=length), static_argnums=1)
    rows, tokens = call(lengths[:, 2]), call(lengths)
    chex.assert_shape([*rows, *tokens], (2, 3, 8))
    for b, t in np.ndindex(2, 3):
        for found, length in ((rows, lengths[b, 2]), (tokens, lengths[b, t])):
            cos, sin = known(5 + t, int(length))
            chex.assert_trees_all_close((found.cos[b, t], found.sin[b, t]), (cos[0], sin[0]), atol=3e-6)


def test_steps_of_qwen():
    """alpha = 1, 3, 7, 15 up to L, 2L, 4L, 8L, in integers: the boundaries themselves belong to the lower step."""
    rule = DynamicNTK(2048, schedule="qwen")
    program = traced(rule)
    for length, alpha in {1: 1, 2048: 1, 2049: 3, 4096: 3, 4097: 7, 16384: 15, 16385: 31, 2048 * 1024: 2047}.items():
        expected = 10_000.0 ** (-np.arange(8) / 8) * float(alpha) ** (-np.arange(8) / 7)
        np.testing.assert_allclose(rule.at_length(length, head_dim=16)[0], expected, rtol=1e-7)
        np.testing.assert_allclose(program(length)[0], expected, rtol=2e-6)
    rows = rule.at_length(np.array([4096, 4097]), head_dim=16)[0]
    np.testing.assert_allclose(rows.value[1], NTKAware(7.0).at_length(head_dim=16)[0], rtol=1e-7)
    assert rule.at_length(2**31 - 1, head_dim=16)[0].value[-1] > 0


def test_features_take_a_length_for_each_row():
    """RoPE and CoCA: exchanging the rows and their lengths exchanges the results."""
    rule = CLEX(4, max_factor=4, steps=2)
    q = jax.random.normal(jax.random.key(0), (2, 6, 2, 16))
    for slot, k in ((Rotary(rule), q), (Coca("slack", rule), q[..., :8])):
        params = slot.init(jax.random.key(1), num_heads=2, num_kv_heads=2, head_dim=16)
        at = {"q_positions": Range(0, 6), "kv_positions": Range(0, 6), "head_dim": 16, "params": params}
        call = jax.jit(lambda q, k, lengths, slot=slot, at=at: slot(q, k, **at, length=lengths))
        both, exchanged = call(q, k, jnp.array([12, 4])), call(q[::-1], k[::-1], jnp.array([4, 12]))
        chex.assert_trees_all_close(both, jax.tree.map(lambda x: x[::-1], exchanged), atol=1e-6)
        assert np.abs(both[0] - call(q, k, jnp.array([4, 4]))[0])[0].max() > 0.1
