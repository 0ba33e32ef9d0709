"""The rotation of features: the formula, its gradient, dtypes, and the permutations between layouts of pairs."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact_angles import cos_sin
from jax.sharding import PartitionSpec

from posjax import rotary
from posjax.positions import Range
from posjax.rotary import Plain, Proportional, apply_rotary, permute_projection, rotary_table

PAIRINGS = ("half", "interleaved")
FAR = np.array([257, 8191, 131_071, 1_000_003])


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def by_hand(x, positions, values, pairing):
    """One pair at a time, in float64: x ``[length, size]``."""
    out, (cos, sin) = np.array(x, np.float64), cos_sin(positions, values)
    for t in range(len(values)):
        i, j = (t, t + len(values)) if pairing == "half" else (2 * t, 2 * t + 1)
        a, b = np.float64(x[:, i]), np.float64(x[:, j])
        out[:, i], out[:, j] = a * cos[:, t] - b * sin[:, t], a * sin[:, t] + b * cos[:, t]
    return out


@pytest.mark.parametrize("share", [1.0, 0.75])
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_rotation_is_the_formula(pairing, share):
    rule = Plain(head_dim=16, partial_rotary_factor=share)
    x = normal(0, 1, 4, 3, 16)
    found = jax.jit(lambda x: apply_rotary(x, rotary_table(FAR, rule.at_length()[0]), pairing=pairing))(x)
    assert found.dtype == x.dtype
    for head in range(3):
        expected = by_hand(x[0, :, head], FAR, rule.inverse_frequencies(), pairing)
        np.testing.assert_allclose(found[0, :, head], expected, atol=5e-6)
    np.testing.assert_array_equal(found[..., rule.rotary_dim() :], x[..., rule.rotary_dim() :])


@pytest.mark.parametrize(
    ("rule", "pairing"), [(Plain(partial_rotary_factor=0.5), "half"), (Proportional(0.75), "interleaved")]
)
def test_scores_do_not_change_when_all_positions_shift(pairing, rule):
    q, k = normal(2, 1, 8, 2, 16), normal(3, 1, 8, 2, 16)

    @jax.jit
    def scores(start):
        table = rotary_table(Range(start, 8), rule.at_length(head_dim=16)[0])
        return jnp.einsum("btnd,bsnd->bnts", *(apply_rotary(x, table, pairing=pairing) for x in (q, k)))

    for shift in (-8, 1_000_003, 2**31 - 9, -(2**31)):
        np.testing.assert_allclose(scores(jnp.int32(shift)), scores(jnp.int32(0)), atol=2e-5)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_bfloat16_rounds_only_the_result(pairing):
    x = normal(4, 1, 4, 2, 64).astype(jnp.bfloat16)
    table = rotary_table(FAR, rotary.inverse_frequencies(64))
    low, high = jax.jit(lambda x: [apply_rotary(y, table, pairing=pairing) for y in (x, x.astype(jnp.float32))])(x)
    chex.assert_type(low, jnp.bfloat16)
    chex.assert_trees_all_equal(low, high.astype(jnp.bfloat16))


def test_float64_stays_float64():
    with jax.enable_x64(True):
        found = apply_rotary(np.ones((1, 4, 2, 16)), rotary_table(FAR, rotary.inverse_frequencies(16)))
        chex.assert_type(found, jnp.float64)


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
    ("rule", "rotary_dim"), [(Plain(partial_rotary_factor=0.5), 8), (Plain(), None), (Proportional(0.5), None)]
)
def test_permuted_weights_give_the_same_scores(rule, rotary_dim):
    """Grouped queries (4 heads on 2), biases and norm weights, full, partial and p-RoPE."""
    size, model = 16, 12
    table = rotary_table(np.arange(6) * 1000, rule.at_length(head_dim=size)[0])
    inputs = normal(6, 2, 6, model)
    weights = [
        {"w": normal(s, model, n, size), "b": normal(s + 2, n, size), "g": normal(s + 4, size)}
        for s, n in ((7, 4), (8, 2))
    ]

    @functools.partial(jax.jit, static_argnums=1)
    def scores(weights, pairing):
        features = []
        for part in weights:
            x = jnp.einsum("btm,mnd->btnd", inputs, part["w"]) + part["b"]
            x = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True)) * part["g"]
            features.append(apply_rotary(x, table, pairing=pairing))
        q, k = features
        return jnp.einsum("btngd,bsnd->bngts", q.reshape(2, 6, 2, 2, size), k)

    permuted = jax.tree.map(lambda x: permute_projection(x, "interleaved", "half", rotary_dim=rotary_dim), weights)
    np.testing.assert_allclose(scores(permuted, "half"), scores(weights, "interleaved"), atol=1e-4)
    assert np.abs(scores(weights, "half") - scores(weights, "interleaved")).max() > 0.1


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_gradient_is_the_inverse_rotation(pairing):
    x, w = normal(9, 1, 4, 2, 16), normal(10, 1, 4, 2, 16)
    forward, backward = (rotary_table(at, rotary.inverse_frequencies(16)) for at in (FAR, -FAR))
    gradient = jax.grad(lambda x: (apply_rotary(x, forward, pairing=pairing) * w).sum())(x)
    np.testing.assert_allclose(gradient, apply_rotary(w, backward, pairing=pairing), atol=1e-5)


def rotate(x, positions, frequencies):
    return apply_rotary(x, rotary_table(positions, frequencies))


def test_under_vmap_pmap_and_without_a_batch_axis():
    x, positions, frequencies = normal(11, 8, 4, 2, 16), np.arange(32).reshape(8, 4), rotary.inverse_frequencies(16)
    expected = jax.jit(rotate)(x, positions, frequencies)
    chex.assert_trees_all_close(jax.vmap(rotate, in_axes=(0, 0, None))(x, positions, frequencies), expected, atol=1e-6)
    chex.assert_trees_all_close(rotate(x[1], positions[1], frequencies), expected[1], atol=1e-6)
    found = jax.pmap(rotate, in_axes=(0, 0, None))(x, positions, frequencies)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("axis", ["length", "heads"])
def test_under_shard_map(axis):
    """Frequencies enter as a replicated argument; positions are sharded with the tokens, gradients included."""
    mesh = jax.make_mesh((8,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec(*("devices" if name == axis else None for name in ("batch", "length", "heads")))
    specs = (spec, PartitionSpec(*spec[:2]), PartitionSpec())
    x, w, frequencies = normal(12, 8, 8, 8, 16), normal(13, 8, 8, 8, 16), rotary.inverse_frequencies(16)
    positions = np.arange(64, dtype=np.int32).reshape(8, 8) * 1000
    sharded = jax.shard_map(rotate, mesh=mesh, in_specs=specs, out_specs=spec)
    values = [
        jax.jit(jax.value_and_grad(lambda x, f=f: (f(x, positions, frequencies) * w).sum()))(x)
        for f in (rotate, sharded)
    ]
    chex.assert_trees_all_close(*values, rtol=1e-5, atol=1e-5)
