"""Plain and proportional frequencies: the formula, the rotated share of a head, and the ways to give its size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax import rotary
from posjax.rotary import Plain, Proportional


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


def test_proportional_ends_are_rope_and_nope():
    np.testing.assert_array_equal(Proportional(1.0, head_dim=16).at_length()[0], rotary.inverse_frequencies(16))
    table = rotary.rotary_table(np.array([5, 1_000_003]), Proportional(0.0, head_dim=16).at_length()[0])
    x = jax.random.normal(jax.random.key(0), (1, 2, 3, 16))
    np.testing.assert_array_equal(rotary.apply_rotary(x, table), x)


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
    assert len(set(rules.values())) == len(rules) == 16
    reading = {name for name, rule in rules.items() if rule.reads_length}
    assert reading == {"dynamic-linear", "dynamic-ntk", "dynamic-yarn", "longrope", "clex"}
    for rule in rules.values():
        values, factor = rule.at_length(64, head_dim=16)
        assert values.value.shape == (8,)
        assert values.is_exact
        assert isinstance(factor, float)
