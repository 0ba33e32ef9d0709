import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax import rotary
from posjax.rotary import Plain, Proportional


def test_frequencies_is_the_formula_in_float32():
    found = rotary.inverse_frequencies(8, 500.0)
    chex.assert_shape(found.value, (4,))
    chex.assert_type([found.value, found.high, found.low], [np.float32, np.uint32, np.uint32])
    np.testing.assert_allclose(found, [1, 500**-0.25, 500**-0.5, 500**-0.75], rtol=1e-7)
    np.testing.assert_allclose(rotary.inverse_frequencies(128), 10_000.0 ** -(np.arange(64) / 64), rtol=1e-7)


def test_frequencies_are_the_digits_of_a_number_in_base_beta():
    """Digit m of n in base beta = b^(2/d) turns with phase n / beta^(m-1)."""
    beta = 10_000.0 ** (2 / 128)
    np.testing.assert_allclose(Plain(head_dim=128).inverse_frequencies(), 1 / beta ** np.arange(64), rtol=1e-12)


@pytest.mark.parametrize(
    ("head_dim", "share", "width"), [(80, 0.25, 20), (64, 0.5, 32), (128, 0.75, 96), (100, 0.29, 28)]
)
def test_partial_rotary_counts_exponents_over_the_rotary_width(head_dim, share, width):
    rule = Plain(head_dim=head_dim, partial_rotary_factor=share)
    assert rule.rotary_dim() == width
    np.testing.assert_allclose(rule.at_length()[0], 10_000.0 ** -(np.arange(0, width, 2) / width), rtol=1e-7)
    np.testing.assert_array_equal(
        rotary.inverse_frequencies(head_dim, partial_rotary_factor=share), rule.at_length()[0]
    )


def test_a_share_that_is_a_quotient_gives_its_number_of_channels():
    """Every even width w of every even head d up to 512 from the share w / d, also as others read what to_hf writes."""
    pairs = [(size, width) for size in range(2, 513, 2) for width in range(2, size + 1, 2)]
    rounded = [(size, width) for size, width in pairs if int(size * (width / size)) < width]
    assert len(rounded) == 1087
    assert [
        pair
        for pair in pairs
        if Plain(head_dim=pair[0], partial_rotary_factor=pair[1] / pair[0]).rotary_dim() != pair[1]
    ] == []
    for size, width in rounded:
        rule = rotary.from_hf({"model_type": "gptj", "n_embd": size, "n_head": 1, "rotary_dim": width})
        assert rule.rotary_dim() == width
        written = rule.to_hf()
        assert int(size * written["partial_rotary_factor"]) == width
        again = rotary.from_hf({"head_dim": size, "rope_parameters": written})
        assert again.rotary_dim() == width
        np.testing.assert_array_equal(again.at_length()[0], rule.at_length()[0])


@pytest.mark.parametrize(("share", "turning"), [(0.25, 64), (0.75, 192), (0.3, 76), (1.0, 256), (0.0, 0)])
def test_proportional_counts_exponents_over_the_full_head(share, turning):
    """Gemma 4's global layers: head 512, factor 0.25, so 64 of 256 pairs turn."""
    values = Proportional(share, head_dim=512, base=1e6).inverse_frequencies()
    chex.assert_shape(values, (256,))
    np.testing.assert_allclose(values[:turning], 1e6 ** -(np.arange(turning) / 256), rtol=1e-12)
    assert (values[turning:] == 0).all()


def test_proportional_ends_are_rope_and_nope():
    np.testing.assert_array_equal(Proportional(1.0, head_dim=16).at_length()[0], rotary.inverse_frequencies(16))
    table = rotary.rotary_table(np.array([5, 1_000_003]), Proportional(0.0, head_dim=16).at_length()[0])
    x = jax.random.normal(jax.random.key(0), (1, 2, 3, 16))
    chex.assert_trees_all_equal(rotary.apply_rotary(x, table), x)
    halved = Proportional(0.5, head_dim=16, factor=2.0).inverse_frequencies()
    np.testing.assert_allclose(halved, Proportional(0.5, head_dim=16).inverse_frequencies() / 2)


def test_rules_take_the_head_size_from_either_place():
    np.testing.assert_array_equal(Plain().at_length(head_dim=8)[0], Plain(head_dim=8).at_length()[0])
    np.testing.assert_array_equal(Plain(head_dim=8).at_length(head_dim=8)[0], Plain(head_dim=8).at_length()[0])
    with pytest.raises(ValueError, match="Plain needs a head_dim: set its field or pass head_dim="):
        Plain().at_length()
    with pytest.raises(ValueError, match="head_dim=16 but the rule was made for head_dim=8"):
        Plain(head_dim=8).at_length(head_dim=16)


def test_rules_are_static_arguments_of_jit():
    compiled = jax.jit(lambda rule: jnp.asarray(rule.at_length(head_dim=8)[0]), static_argnums=0)
    np.testing.assert_array_equal(compiled(Plain(500.0)), rotary.inverse_frequencies(8, 500.0))
    compiled(Plain(500))
    assert compiled._cache_size() == 1
    assert Plain() != Proportional(1.0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: rotary.inverse_frequencies(7), "head_dim must be a positive even number, found 7"),
        (lambda: rotary.inverse_frequencies(0), "head_dim must be a positive even number, found 0"),
        (
            lambda: rotary.inverse_frequencies(28, partial_rotary_factor=0.25),
            r"rotary width int\(28 \* 0.25\) .* found 7",
        ),
        (lambda: Plain(base=1.0), "base must be greater than 1, found 1.0"),
        (lambda: Plain(base="1e4"), "base must be a number, found '1e4'"),
        (lambda: Plain(base=None), "base must be a number, found None"),
        (lambda: Plain(base=True), "base must be a number, found True"),
        (lambda: Plain(partial_rotary_factor=0.0), r"partial_rotary_factor must be in \(0, 1\], found 0.0"),
        (lambda: Plain(partial_rotary_factor=1.5), r"partial_rotary_factor must be in \(0, 1\], found 1.5"),
        (lambda: Proportional(-0.1), r"partial_rotary_factor must be in \[0, 1\], found -0.1"),
        (lambda: Proportional(0.5, factor=0.5), "factor must be a number of at least 1, found 0.5"),
        (lambda: Proportional(0.5, head_dim=7), "head_dim must be a positive even number, found 7"),
    ],
)
def test_bad_rules_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
