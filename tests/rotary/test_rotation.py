"""Rotary tables, exact at every int32 position, and the rotation of features: the formula and its gradient."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_angles import POSITIONS, cos_sin
from rotations import turn

from posjax import rotary
from posjax.positions import Range
from posjax.rotary import apply_rotary, permute_projection

PLAIN = 10_000.0 ** (-np.arange(8) / 8)
RULES = {
    "plain": (rotary.Plain(5e5, partial_rotary_factor=0.5), 5e5 ** (-np.arange(4) / 4)),
    "proportional": (rotary.Proportional(0.25), PLAIN * (np.arange(8) < 2)),
    "linear": (rotary.Linear(8.0), PLAIN / 8),
    "dynamic": (rotary.DynamicNTK(4096), PLAIN * 32.0 ** -(np.arange(8) / 7)),
    "yarn": (rotary.YaRN(32.0, 4096), rotary.YaRN(32.0, 4096).inverse_frequencies(16)),
    "longrope": (rotary.LongRoPE((1.05,) * 8, (3.7,) * 8, 4096, factor=32.0), PLAIN / 3.7),
    "llama3": (rotary.Llama3(base=5e5), rotary.Llama3(base=5e5).inverse_frequencies(16)),
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


# --- rotation ---------------------------------------------------------------------------------------------------------

PAIRINGS = ("half", "interleaved")
FAR = np.array([257, 8191, 131_071, 1_000_003])


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("share", [1.0, 0.75])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_rotation_is_the_formula(pairing, share):
    rule = rotary.Plain(head_dim=16, partial_rotary_factor=share)
    x = normal(0, 1, 4, 3, 16)
    found = jax.jit(lambda x: apply_rotary(x, rotary.rotary_table(FAR, rule.at_length()[0]), pairing=pairing))(x)
    assert found.dtype == x.dtype
    width = rule.rotary_dim()
    expected = turn(x[..., :width], FAR[:, None, None] * rule.inverse_frequencies(), pairing)
    np.testing.assert_allclose(found[..., :width], expected, atol=5e-6)
    np.testing.assert_array_equal(found[..., width:], x[..., width:])


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_bfloat16_rounds_only_the_result_and_float64_stays(pairing):
    x = normal(4, 1, 4, 2, 64).astype(jnp.bfloat16)
    table = rotary.rotary_table(FAR, rotary.inverse_frequencies(64))
    low, high = jax.jit(lambda x: [apply_rotary(y, table, pairing=pairing) for y in (x, x.astype(jnp.float32))])(x)
    chex.assert_type(low, jnp.bfloat16)
    chex.assert_trees_all_equal(low, high.astype(jnp.bfloat16))
    with jax.enable_x64(True):
        chex.assert_type(apply_rotary(np.ones((1, 4, 2, 64)), table, pairing=pairing), jnp.float64)


def test_permutations_by_hand():
    order = permute_projection(np.arange(8), "interleaved", "half")
    assert order.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert permute_projection(np.arange(8), "half", "interleaved").tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert permute_projection(np.arange(8), "half", "half").tolist() == [*range(8)]
    partial = permute_projection(np.arange(8), "interleaved", "half", rotary_dim=4)
    assert partial.tolist() == [0, 2, 1, 3, 4, 5, 6, 7]
    rows = permute_projection(np.arange(8).reshape(2, 4, 1), "interleaved", "half", axis=1)
    assert rows.ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize(
    ("rule", "rotary_dim"), [(rotary.Plain(partial_rotary_factor=0.5), 8), (rotary.Proportional(0.5), None)]
)
def test_permuted_weights_give_permuted_features(rule, rotary_dim):
    table = rotary.rotary_table(FAR, rule.at_length(head_dim=16)[0])
    inputs, weights = normal(6, 2, 4, 12), normal(7, 12, 3, 16)
    permuted = functools.partial(permute_projection, source="interleaved", target="half", rotary_dim=rotary_dim)
    found = apply_rotary(jnp.einsum("btm,mnd->btnd", inputs, permuted(weights)), table)
    expected = apply_rotary(jnp.einsum("btm,mnd->btnd", inputs, weights), table, pairing="interleaved")
    np.testing.assert_allclose(found, permuted(expected), atol=1e-5)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_gradient_is_the_inverse_rotation(pairing):
    x, w = normal(9, 1, 4, 2, 16), normal(10, 1, 4, 2, 16)
    forward, backward = (rotary.rotary_table(at, rotary.inverse_frequencies(16)) for at in (FAR, -FAR))
    gradient = jax.grad(lambda x: (apply_rotary(x, forward, pairing=pairing) * w).sum())(x)
    np.testing.assert_allclose(gradient, apply_rotary(w, backward, pairing=pairing), atol=1e-5)


def rotate(x, positions, frequencies):
    return apply_rotary(x, rotary.rotary_table(positions, frequencies))


def test_under_vmap_pmap_and_without_a_batch_axis():
    x, positions, frequencies = normal(11, 8, 4, 2, 16), np.arange(32).reshape(8, 4), rotary.inverse_frequencies(16)
    expected = jax.jit(rotate)(x, positions, frequencies)
    chex.assert_trees_all_close(jax.vmap(rotate, in_axes=(0, 0, None))(x, positions, frequencies), expected, atol=1e-6)
    chex.assert_trees_all_close(rotate(x[1], positions[1], frequencies), expected[1], atol=1e-6)
    found = jax.pmap(rotate, in_axes=(0, 0, None))(x, positions, frequencies)
    np.testing.assert_allclose(found, expected, atol=1e-6)
