import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_angles import POSITIONS, cos_sin

from posjax import rotary
from posjax._angles import as_real_positions
from posjax.positions import Range
from posjax.rotary import DynamicNTK, Linear, Llama3, LongRoPE, NTKAware, NTKByParts, Plain, Proportional, YaRN

RULES = [
    Plain(),
    Plain(5e5, partial_rotary_factor=0.5),
    Proportional(0.25),
    Linear(8.0),
    NTKAware(8.0),
    NTKByParts(16.0, 4096),
    DynamicNTK(4096),
    YaRN(32.0, 4096, base=150_000.0, truncate=False),
    LongRoPE((1.05,) * 8, (3.7,) * 8, 4096, factor=32.0),
    Llama3(base=5e5),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_tables_are_exact_at_every_position_through_jit(rule):
    frequencies, factor = rule.at_length(131_072, head_dim=16)
    table = jax.jit(rotary.rotary_table)(np.array(POSITIONS), frequencies)
    chex.assert_type(list(table), jnp.float32)
    chex.assert_shape(list(table), (len(POSITIONS), frequencies.value.size))
    plain = Plain(rule.base, partial_rotary_factor=getattr(rule, "partial_rotary_factor", 1.0))
    values = rule.inverse_frequencies(16) if not rule.reads_length else _by_hand(rule, plain)
    cos, sin = cos_sin(POSITIONS, values)
    np.testing.assert_allclose(table.cos, cos, atol=2e-6)
    np.testing.assert_allclose(table.sin, sin, atol=2e-6)
    scaled = rotary.rotary_table(np.array(POSITIONS), frequencies, attention_factor=factor)
    np.testing.assert_allclose(scaled.cos, factor * cos, atol=2e-6 * factor)


def _by_hand(rule, plain):
    values = plain.inverse_frequencies(16)
    return values / 3.7 if isinstance(rule, LongRoPE) else values * 32.0 ** (-np.arange(8) / 7)


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


def test_arrays_in_place_of_frequencies():
    values = 10_000.0 ** -(np.arange(8) / 8)
    positions = np.array([1_000_003])
    chex.assert_trees_all_equal(
        rotary.rotary_table(positions, values), rotary.rotary_table(positions, rotary.inverse_frequencies(16))
    )
    traced = jax.jit(rotary.rotary_table)(positions, jnp.float32(values))
    chex.assert_trees_all_close(traced, rotary.rotary_table(positions, values, precision="hf"), atol=1e-6)


def test_positions_of_every_form_agree():
    frequencies = rotary.inverse_frequencies(8)
    expected = rotary.rotary_table(np.arange(5, 9), frequencies)
    chex.assert_shape(expected.cos, (4, 4))
    rows = rotary.rotary_table(np.arange(5, 9)[None] + np.array([[0], [0]]), frequencies)
    chex.assert_shape(rows.cos, (2, 4, 4))
    chex.assert_trees_all_equal(rotary.rotary_table(Range(5, 4), frequencies), expected)
    chex.assert_trees_all_equal(jax.jit(rotary.rotary_table)(Range(jnp.int32(5), 4), frequencies), expected)
    chex.assert_trees_all_equal(jax.tree.map(lambda part: part[1], rows), expected)


def test_real_positions():
    """The whole part is exact, and the fraction is added. The "hf" mode is the float32 product."""
    positions = np.array([0.25, 70_000.5, -70_000.5], np.float32)
    table = jax.jit(rotary.rotary_table)(positions, rotary.inverse_frequencies(8))
    np.testing.assert_allclose(table.sin, np.sin(positions[:, None] * 10.0 ** -np.arange(4.0)), atol=2e-6)
    product = rotary.rotary_table(positions, rotary.inverse_frequencies(8), precision="hf")
    np.testing.assert_allclose(product.sin[0], table.sin[0], atol=1e-6)
    np.testing.assert_allclose(product.sin[1], table.sin[1], atol=2e-2)


def test_frequencies_for_each_row_or_token():
    rule = DynamicNTK(32)
    lengths = np.array([[40, 64], [100, 8]])
    rows = rotary.rotary_table(Range(3, 5), rule.at_length(lengths[:, 0], head_dim=8)[0])
    chex.assert_shape(rows.cos, (2, 5, 4))
    tokens = rotary.rotary_table(np.array([[3, 4], [3, 4]]), rule.at_length(lengths, head_dim=8)[0])
    chex.assert_shape(tokens.cos, (2, 2, 4))
    alone = rotary.rotary_table(Range(3, 5), rule.at_length(100, head_dim=8)[0])
    chex.assert_trees_all_close(jax.tree.map(lambda part: part[1], rows), alone, atol=1e-6)
    chex.assert_trees_all_close(tokens.sin[1, 0], alone.sin[0], atol=1e-6)


def test_gradients_reach_learned_frequencies():
    """d cos(p f) / d f = -p sin(p f)."""
    values = jnp.array([0.5, 0.25])
    gradient = jax.grad(lambda f: rotary.rotary_table(np.array([3]), f).cos.sum())(values)
    np.testing.assert_allclose(gradient, -3 * np.sin(3 * np.array([0.5, 0.25])), rtol=1e-6)


def test_tables_stay_float32_under_x64():
    with jax.enable_x64(True):
        for precision in ("exact", "hf"):
            table = rotary.rotary_table(
                np.array([7, 2**31 - 1]),
                rotary.inverse_frequencies(8),
                attention_factor=np.float64(1.5),
                precision=precision,
            )
            chex.assert_type(list(table), jnp.float32)


@pytest.mark.parametrize(
    ("positions", "frequencies", "message"),
    [
        (np.array([0.5], np.float16), rotary.inverse_frequencies(8), "must be integers or float32, found float16"),
        (np.zeros((2, 2, 2), int), rotary.inverse_frequencies(8), "positions must be"),
        (np.arange(3), np.float64(1.0), "must have 1 to 3 axes"),
        (np.zeros((2, 3), int), np.ones((4, 8)), r"shape \(4, 8\) do not fit positions of shape \(2, 3\)"),
        (np.zeros((2, 3), int), np.ones((2, 5, 8)), r"shape \(2, 5, 8\) do not fit"),
    ],
)
def test_bad_tables_are_refused(positions, frequencies, message):
    with pytest.raises(ValueError, match=message):
        rotary.rotary_table(positions, frequencies)


@pytest.mark.parametrize(("shape", "dtype"), [((3,), np.float32), ((2, 3), np.float32), ((2, 3), np.int32)])
def test_places_are_float32_or_int32_with_or_without_rows(shape, dtype):
    given = np.arange(np.prod(shape), dtype=dtype).reshape(shape)
    found = as_real_positions(given)
    chex.assert_type(found, dtype)
    np.testing.assert_array_equal(found, given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (np.zeros((1, 2, 3), np.float32), r"\[length\] or \[batch, length\], found shape \(1, 2, 3\)"),
        (np.zeros((), np.float32), r"found shape \(\)"),
        (np.zeros(3, jnp.bfloat16), "integers or float32, found bfloat16"),
    ],
)
def test_places_of_another_rank_or_too_few_bits_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        as_real_positions(given)
