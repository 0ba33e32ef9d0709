"""Rotary tables: exact at every int32 position, the mode of PyTorch code, and every form of positions."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_angles import POSITIONS, cos_sin

from posjax import rotary
from posjax.positions import Range
from posjax.rotary import DynamicNTK, Linear, Llama3, LongRoPE, Plain, Proportional, YaRN

PLAIN = 10_000.0 ** (-np.arange(8) / 8)
RULES = {
    "plain": (Plain(5e5, partial_rotary_factor=0.5), 5e5 ** (-np.arange(4) / 4)),
    "proportional": (Proportional(0.25), PLAIN * (np.arange(8) < 2)),
    "linear": (Linear(8.0), PLAIN / 8),
    "dynamic": (DynamicNTK(4096), PLAIN * 32.0 ** -(np.arange(8) / 7)),
    "yarn": (YaRN(32.0, 4096), YaRN(32.0, 4096).inverse_frequencies(16)),
    "longrope": (LongRoPE((1.05,) * 8, (3.7,) * 8, 4096, factor=32.0), PLAIN / 3.7),
    "llama3": (Llama3(base=5e5), Llama3(base=5e5).inverse_frequencies(16)),
}


@pytest.mark.parametrize("name", RULES)
def test_tables_are_exact_at_every_position_through_jit(name):
    rule, values = RULES[name]
    frequencies, factor = rule.at_length(131_072, head_dim=16)
    table = jax.jit(rotary.rotary_table)(np.array(POSITIONS), frequencies, attention_factor=factor)
    chex.assert_type(list(table), jnp.float32)
    cos, sin = cos_sin(POSITIONS, values)
    np.testing.assert_allclose(table.cos, factor * cos, atol=2e-6 * factor)
    np.testing.assert_allclose(table.sin, factor * sin, atol=2e-6 * factor)


def test_float32_tables_are_wrong_far_away():
    """The error of the float32 product is over 1e-2 at one million, and as large as the values at 2^31."""
    positions, values = np.array([1_000_003, 2**31 - 1]), 10_000.0 ** -(np.arange(64) / 64)
    table = rotary.rotary_table(positions, rotary.inverse_frequencies(128), precision="hf")
    error = np.abs(table.cos - cos_sin(positions, values)[0]).max(axis=1)
    assert error[0] > 1e-2
    assert error[1] > 0.5


def test_hf_precision_is_bit_for_bit_the_float32_product():
    frequencies = rotary.inverse_frequencies(16)
    positions = np.array([3, 131_071, 1_000_003], np.int32)
    table = rotary.rotary_table(positions, frequencies, precision="hf")
    angle = jnp.asarray(positions.astype(np.float32)[:, None] * np.asarray(frequencies))
    chex.assert_trees_all_equal(table, rotary.RotaryTable(jnp.cos(angle), jnp.sin(angle)))
    traced = jax.jit(rotary.rotary_table)(positions, jnp.float32(PLAIN))
    chex.assert_trees_all_close(traced, table, atol=1e-6)


def test_positions_of_every_form_agree():
    frequencies = rotary.inverse_frequencies(8)
    expected = rotary.rotary_table(np.arange(5, 9), frequencies)
    chex.assert_trees_all_equal(rotary.rotary_table(np.arange(5, 9), 10.0 ** -np.arange(4.0)), expected)
    chex.assert_trees_all_equal(rotary.rotary_table(Range(5, 4), frequencies), expected)
    chex.assert_trees_all_equal(jax.jit(rotary.rotary_table)(Range(jnp.int32(5), 4), frequencies), expected)
    rows = rotary.rotary_table(np.stack([np.arange(4), np.arange(5, 9)]), frequencies)
    chex.assert_trees_all_equal(jax.tree.map(lambda part: part[1], rows), expected)


def test_real_positions():
    """The whole part is exact, and the fraction is added. The "hf" mode is the float32 product."""
    positions = np.array([0.25, 70_000.5, -70_000.5], np.float32)
    table = jax.jit(rotary.rotary_table)(positions, rotary.inverse_frequencies(8))
    np.testing.assert_allclose(table.sin, np.sin(positions[:, None] * 10.0 ** -np.arange(4.0)), atol=2e-6)
    product = rotary.rotary_table(positions, rotary.inverse_frequencies(8), precision="hf")
    np.testing.assert_allclose(product.sin[0], table.sin[0], atol=1e-6)
    np.testing.assert_allclose(product.sin[1], table.sin[1], atol=2e-2)


def test_each_row_and_each_token_may_have_its_frequencies():
    rule, lengths = DynamicNTK(32), np.array([[40, 64], [100, 8]])
    rows = rotary.rotary_table(Range(3, 5), rule.at_length(lengths[:, 0], head_dim=8)[0])
    tokens = rotary.rotary_table(np.array([[3, 4], [3, 4]]), rule.at_length(lengths, head_dim=8)[0])
    chex.assert_shape([rows.cos, tokens.cos], [(2, 5, 4), (2, 2, 4)])
    alone = rotary.rotary_table(Range(3, 5), rule.at_length(100, head_dim=8)[0])
    chex.assert_trees_all_close(jax.tree.map(lambda part: part[1], rows), alone, atol=1e-6)
    chex.assert_trees_all_close(tokens.sin[1, 0], alone.sin[0], atol=1e-6)


def test_gradients_reach_learned_frequencies():
    """d cos(p f) / d f = -p sin(p f)."""
    values = jnp.array([0.5, 0.25])
    gradient = jax.grad(lambda f: rotary.rotary_table(np.array([3]), f).cos.sum())(values)
    np.testing.assert_allclose(gradient, -3 * np.sin(3 * np.array([0.5, 0.25])), rtol=1e-6)


@pytest.mark.parametrize("precision", ["exact", "hf"])
def test_tables_stay_float32_under_x64(precision):
    with jax.enable_x64(True):
        options = {"attention_factor": np.float64(1.5), "precision": precision}
        table = rotary.rotary_table(np.array([7, 2**31 - 1]), rotary.inverse_frequencies(8), **options)
        chex.assert_type(list(table), jnp.float32)
