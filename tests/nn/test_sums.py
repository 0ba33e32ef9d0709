"""Gradients are sums over rows, tokens and heads: with bfloat16 numbers, the sums are still float32.

Rows that are equal give equal parts, bit for bit, so 1,024 of them must give 1,024 times the gradient of one. Summed in
bfloat16, equal parts stop counting at 256.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import NAMES, VOCAB, config, made, preset
from flax import nnx

import posjax as pj
from posjax import absolute, bias, linear, pope, rotary, scales, sinks
from posjax.nn.lookup import lookup

ROWS, LENGTH = 1024, 8
_TABLE = absolute.Learned(LENGTH)
_CLEX = rotary.Rotary(rotary.CLEX(original_length=8, max_factor=4, steps=5))
EVERY_KIND = pj.Layers(
    (
        (
            (
                pj.Scheme(embedding=_TABLE, features=rotary.MixedRotary(), scale=scales.SSMax(), bias=bias.T5(8, 12)),
                pj.Scheme(embedding=_TABLE, features=_CLEX, norm=scales.QKNorm(), bias=bias.FIRE(width=4)),
                pj.Scheme(embedding=_TABLE, features=pope.PoPE(), bias=bias.Kerple(), sinks=sinks.LearnedSinks()),
                pj.Scheme(
                    embedding=_TABLE, norm=scales.CosineNorm(), scale=scales.LearnedCosineScale(8), bias=bias.FoX()
                ),
                pj.Scheme(embedding=_TABLE, bias=bias.CoPE(6)),
            ),
            1,
        ),
    )
)
"""A layer for every kind of parameter: absolute, of features, biases, scales, sinks and norms."""


def by_rows(settings):
    """The gradients of the first of equal rows, and of all of them, in one program; every parameter is bfloat16."""
    graph, state = made(settings)
    tokens = np.tile(np.random.default_rng(0).integers(0, VOCAB, LENGTH, np.int32), (ROWS, 1))

    # Rows with positions of their own, so that what reads positions is computed and summed row by row.
    positions = jnp.tile(jnp.arange(LENGTH), (ROWS, 1))

    @jax.jit
    @jax.grad
    def gradients(state, weights):
        logits = nnx.merge(graph, state)(tokens, positions=positions)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), (tokens * 7 % VOCAB)[..., None], axis=-1)[..., 0]
        return -jnp.sum(chosen * weights[:, None])

    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state)
    return (gradients(narrow, weights) for weights in (np.eye(1, ROWS, dtype=np.float32)[0], np.ones(ROWS, np.float32)))


def assert_sums_count_every_row(scheme, implementation):
    sizes = {"model_dim": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "mlp_dim": 8}
    if not isinstance(scheme, pj.Layers):
        sizes |= {"num_layers": 1}
    one, every = by_rows(config(scheme, compute_dtype="bfloat16", implementation=implementation, **sizes))
    for (path, part), (_, whole) in zip(*map(jax.tree_util.tree_leaves_with_path, (one, every)), strict=True):
        wanted, found = np.asarray(part, np.float64) * ROWS, np.asarray(whole, np.float64)
        # Each is rounded to bfloat16, to 2^-9 of itself.
        error = np.linalg.norm(found - wanted)
        assert error <= 4e-3 * np.linalg.norm(wanted), (path, error / np.linalg.norm(wanted))


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_gradients_of_narrow_parameters_count_every_row(implementation):
    assert_sums_count_every_row(EVERY_KIND, implementation)


def test_gradients_through_linear_attention_count_every_row():
    assert_sums_count_every_row(pj.Scheme(features=rotary.Rotary(), linear=linear.Performer(8)), None)


@pytest.mark.wide
@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_narrow_parameters_count_every_row_in_every_preset(name, implementation):
    assert_sums_count_every_row(preset(name), implementation)


def test_the_gradient_of_a_lookup_counts_a_hundred_thousand_tokens():
    table = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.bfloat16)
    tokens = jnp.full((100, 1000), 2)

    chex.assert_trees_all_equal(lookup(table, tokens), table[tokens])
    gradient = jax.grad(lambda table: jnp.sum(lookup(table, tokens).astype(jnp.float32) * 0.01))(table)
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(gradient[2], np.float32), 1000, rtol=4e-3)
    np.testing.assert_array_equal(np.asarray(gradient, np.float32)[[0, 1, 3]], 0)
