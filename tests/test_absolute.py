"""Position embeddings against the papers' numbers, exact angles and transformers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_angles import POSITIONS, cos_sin

from posjax import absolute
from posjax.absolute import Hierarchical, Learned, Sinusoidal, hierarchical, learned, sinusoidal
from posjax.positions import Range

SIZE = 12
compiled = jax.jit(sinusoidal, static_argnames=("model_dim", "convention"))
conventions = pytest.mark.parametrize("convention", absolute.CONVENTIONS)


def arranged(cos, sin, convention):
    if convention == "interleaved":
        return np.stack([sin, cos], -1).reshape(*sin.shape[:-1], -1)
    return np.concatenate([sin, cos], -1)


def frequencies(convention):
    return 10_000.0 ** -(np.arange(SIZE // 2) / (SIZE // 2 - (convention == "tensor2tensor")))


@conventions
def test_sinusoidal_is_exact_at_every_position(convention):
    found = compiled(np.array(POSITIONS), model_dim=SIZE, convention=convention)
    chex.assert_type(found, jnp.float32)
    want = arranged(*cos_sin(POSITIONS, frequencies(convention)), convention)
    np.testing.assert_allclose(found, want, atol=2e-6)


def test_sinusoidal_gives_the_values_of_the_papers():
    """Position 1 of size 4: sin 1, cos 1, sin .01, cos .01; tensor2tensor ends at frequency 1/base."""
    one = np.array([1])
    found = {name: sinusoidal(one, 4, convention=name)[0] for name in absolute.CONVENTIONS}
    np.testing.assert_allclose(found["interleaved"], [0.84147098, 0.54030231, 0.00999983, 0.99995000], atol=1e-7)
    np.testing.assert_allclose(found["concatenated"], [0.84147098, 0.00999983, 0.54030231, 0.99995000], atol=1e-7)
    np.testing.assert_allclose(found["tensor2tensor"], [0.84147098, 1e-4, 0.54030231, 1.0], atol=1e-7)
    chex.assert_trees_all_equal(sinusoidal(one, 4)[0], found["interleaved"])


@conventions
def test_sinusoidal_at_real_positions(convention):
    positions = np.array([[0.0, 0.25, 3.5], [-1.75, 63.999, 1000.5]])
    angle = positions[..., None] * frequencies(convention)
    want = arranged(np.cos(angle), np.sin(angle), convention)
    for dtype in (np.float32, np.float64):
        found = compiled(positions.astype(dtype), SIZE, convention=convention)
        chex.assert_type(found, jnp.float32)
        np.testing.assert_allclose(found, want, atol=1e-6)


def test_sinusoidal_of_real_positions_has_a_slope():
    slope = jax.jit(jax.grad(lambda p: sinusoidal(p, SIZE, convention="concatenated")[0, 0]))(np.float32([0.3]))
    np.testing.assert_allclose(slope, np.cos([0.3]), rtol=1e-6)


look_up = jax.jit(learned)


def test_learned_looks_up_rows_and_gives_nan_beyond_them():
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.testing.assert_array_equal(learned(table, Range(1, 3)), table[1:])
    np.testing.assert_array_equal(look_up(table, np.array([[0, 3], [2, 2]])), table[[[0, 3], [2, 2]]])
    chex.assert_type(look_up(table.astype(jnp.bfloat16), Range(0, 2)), jnp.float32)
    found = look_up(table, np.array([3, 4, 1000, -1, -9]))
    assert np.isnan(found).all(axis=1).tolist() == [False, True, True, True, True]
    late = look_up(table, Range(jnp.int32(2), 4))
    assert np.isnan(late).all(axis=1).tolist() == [False, False, True, True]


def test_rows_before_position_0_are_not_read():
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    spec = Learned(2, unused=2)
    assert spec.init(jax.random.key(0), 3)["embedding"].shape == table.shape
    np.testing.assert_array_equal(spec.embed({"embedding": table}, Range(0, 2), 3), table[2:])
    assert np.isnan(spec.embed({"embedding": table}, np.array([-1, 2]), 3)).all()


def test_learned_gradient_reaches_the_rows_in_use():
    gradient = jax.jit(jax.grad(lambda table: learned(table, np.array([1, 1, 3])).sum()))(np.zeros((4, 2), np.float32))
    np.testing.assert_array_equal(gradient, [[0, 0], [2, 2], [0, 0], [1, 1]])


def hierarchical_oracle(table, position, alpha):
    """alpha u_a + (1 - alpha) u_c with position = a n + c and u = (p - alpha p_0) / (1 - alpha), in float64."""
    p = np.asarray(table, np.float64)
    u = (p - alpha * p[0]) / (1 - alpha)
    a, c = divmod(position, len(p))
    return alpha * u[a] + (1 - alpha) * u[c]


@pytest.mark.parametrize("alpha", [0.4, 0.7])
def test_hierarchical_is_its_formula_and_the_learned_rows_at_first(alpha):
    table = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)
    found = np.asarray(jax.jit(lambda t: hierarchical(t, Range(0, 36), alpha=alpha))(table))
    np.testing.assert_allclose(found, [hierarchical_oracle(table, p, alpha) for p in range(36)], atol=2e-6)
    np.testing.assert_array_equal(found[:6], table)


def test_hierarchical_ends_at_the_square():
    found = jax.jit(hierarchical)(np.ones((4, 3), np.float32), np.array([[0, 15, 16], [-1, 2**31 - 1, 7]]))
    assert np.isnan(found).any(-1).tolist() == [[False, False, True], [True, True, False]]


def test_hierarchical_trains_the_parameters_of_learned():
    """The gradient at position 9 of a table of 6: a = 1, c = 3, alpha = 0.4."""
    params = Learned(6).init(jax.random.key(1), 4)
    chex.assert_trees_all_equal(Hierarchical(6).init(jax.random.key(1), 4), params)
    found = Hierarchical(6).embed(params, Range(9, 1), 4)[0]
    np.testing.assert_allclose(found, hierarchical_oracle(params["embedding"], 9, 0.4), atol=1e-7)
    gradient = jax.jit(jax.grad(lambda p: Hierarchical(6).embed(p, Range(9, 1), 4).sum()))(params)
    np.testing.assert_allclose(gradient["embedding"][:, 0], [-2 / 3, 2 / 3, 0, 1, 0, 0], atol=1e-6)


def test_a_base_and_the_spread_of_a_table_are_those_of_the_spec():
    found = Sinusoidal("concatenated", base=500.0).embed({}, np.array([3]), 4)
    np.testing.assert_allclose(found[0, 1], np.sin(3 / 500**0.5), atol=1e-6)
    table = Learned(4000, stddev=0.5).init(jax.random.key(0), 16)["embedding"]
    np.testing.assert_allclose(np.std(table), 0.5, rtol=0.02)


@pytest.mark.parity
def test_sinusoidal_is_that_of_transformers():
    pytest.importorskip("transformers")
    import torch
    from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings
    from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions
    from transformers.models.whisper.modeling_whisper import sinusoids

    create_sinusoidal_embeddings(64, 32, interleaved := torch.zeros(64, 32))
    wanted = {"interleaved": interleaved, "concatenated": create_sinusoidal_positions(64, 32)}
    for convention, want in (wanted | {"tensor2tensor": sinusoids(64, 32)}).items():
        np.testing.assert_allclose(sinusoidal(Range(0, 64), 32, convention=convention), want.numpy(), atol=1e-5)
