"""The canonical operands: layouts of heads, and the steps that all backends share, against NumPy."""

import dataclasses
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from posjax.attention import operands as ops
from posjax.bias import array_bias
from posjax.masks import Beyond, Causal
from posjax.positions import Range

BATCH, KV_HEADS, GROUP, QUERIES, KEYS, SIZE = 2, 2, 3, 4, 5, 6


def normal(seed: int, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


Q, K, V = normal(1, BATCH, KV_HEADS, GROUP, QUERIES, SIZE), *(normal(n, BATCH, KV_HEADS, KEYS, SIZE) for n in (2, 3))
WEIGHTS = normal(4, BATCH, KV_HEADS, GROUP, QUERIES, KEYS)


def test_functions_of_the_slots_meet_the_bias_and_every_mask():
    far = ops.RemappedPair(Q + 1, K + 1, Beyond(3))
    x = ops.Operands(Q, K, V, None, Causal(), Range(0, QUERIES), Range(0, KEYS), (far,))
    assert x.masks == (Causal(), Beyond(3))
    for found, given in zip(x.pairs, ((Q, K), (far.q, far.k)), strict=True):
        chex.assert_trees_all_equal(found, given)
    found = x.with_slots(lambda slot: ~slot)
    assert (found.bias, found.masks) == (None, (~Causal(), ~Beyond(3)))
    assert dataclasses.replace(x, bias="bias", mask=None, remap=()).with_slots(len).bias == 4


def test_the_products_of_all_heads():
    chex.assert_trees_all_close(
        (ops.scores(Q, K), ops.mix(WEIGHTS, V, jnp.float32), ops.mix_transposed(Q, WEIGHTS, jnp.float32)),
        (
            np.einsum("bkgqd,bksd->bkgqs", Q, K),
            np.einsum("bkgqs,bksd->bkgqd", WEIGHTS, V),
            np.einsum("bkgqd,bkgqs->bkds", Q, WEIGHTS),
        ),
        rtol=1e-5,
        atol=1e-5,
    )
    flat = ops.flat_heads(Q)
    for head in range(KV_HEADS * GROUP):
        np.testing.assert_array_equal(flat[:, head], Q[:, head // GROUP, head % GROUP])


def test_products_of_narrow_arrays_are_summed_in_float32():
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in (Q, K, V, WEIGHTS)]
    q, k, v, weights = narrow
    found = ops.scores(q, k), ops.mix(weights, v, jnp.float32)
    chex.assert_type(found, jnp.float32)
    assert ops.statistics_dtype(q) == jnp.float32


@pytest.mark.parametrize("size", [128, 256, 8, 129])
@pytest.mark.parametrize("heads", [(2, 3), (6,), (1, 1)])
def test_heads_that_fill_lanes_lie_side_by_side(size, heads):
    x = np.arange(2 * np.prod(heads) * 5 * size).reshape(2, *heads, 5, size)
    found = ops.merge_heads(jnp.asarray(x))
    flat = x.reshape(2, -1, 5, size)
    if size % 128:
        np.testing.assert_array_equal(found, flat)
    else:
        np.testing.assert_array_equal(found, np.concatenate(list(flat.swapaxes(0, 1)), -1)[:, None])
    np.testing.assert_array_equal(ops.split_heads(found, heads), x)


def test_arrays_vary_over_the_mesh_axes_of_all_and_numbers_stay():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "a")
    seen = {}

    def body(sharded, whole):
        seen.update(zip(("sharded", "whole", "number"), ops.vary_alike((sharded, whole, 2.5)), strict=True))
        seen["zeros"] = ops.like_zeros((3,), jnp.int32, sharded)
        return sharded

    specs = {"in_specs": (P("a"), P()), "out_specs": P("a")}
    jax.make_jaxpr(jax.shard_map(body, mesh=mesh, **specs))(jnp.zeros(2), jnp.zeros(3))
    assert seen.pop("number") == 2.5
    assert [ops.varying(x) for x in seen.values()] == [{"a"}] * 3


def test_constants_have_their_fill_and_zero_cotangents_their_dtype():
    chex.assert_trees_all_equal(ops.like_zeros((2,), jnp.int32, Q), jnp.zeros(2, jnp.int32))
    chex.assert_trees_all_equal(ops.like_zeros((2,), jnp.int32, Q, 7), jnp.full(2, 7, jnp.int32))
    chex.assert_trees_all_equal(ops.no_gradient(jnp.ones(2, jnp.bfloat16)), jnp.zeros(2, jnp.bfloat16))
    found = ops.no_gradient(jnp.ones((2, 3), jnp.int32))
    assert (found.shape, found.dtype) == ((2, 3), jax.dtypes.float0)


def test_values_with_symbolic_zeros_are_taken_apart():
    tree = {"a": SimpleNamespace(value=1, perturbed=True), "b": (SimpleNamespace(value=2, perturbed=False), None)}
    assert ops.taken_apart(tree) == ({"a": 1, "b": (2, None)}, [True, False])


def test_a_bias_is_added_head_by_head():
    bias = normal(9, BATCH, KV_HEADS * GROUP, QUERIES, KEYS)
    found = ops.with_bias(array_bias(bias), WEIGHTS, jnp.arange(QUERIES), jnp.arange(KEYS))
    np.testing.assert_allclose(found, WEIGHTS + bias.reshape(WEIGHTS.shape), rtol=1e-6)
    assert ops.with_bias(None, WEIGHTS, None, None) is WEIGHTS


def test_logits_stay_below_the_soft_cap():
    np.testing.assert_allclose(ops.capped(2.0, 3 * WEIGHTS), 2 * np.tanh(3 * WEIGHTS / 2), rtol=1e-4, atol=1e-6)
    assert ops.capped(None, WEIGHTS) is WEIGHTS


def test_a_soft_cap_is_a_number_or_has_the_dtype_of_the_logits():
    narrow = jnp.zeros(1, jnp.bfloat16)
    assert ops.checked_softcap(None, narrow) is None
    assert ops.checked_softcap(3, narrow) == 3
    chex.assert_type(ops.checked_softcap(jnp.asarray(3, jnp.bfloat16), narrow), jnp.float32)
    with pytest.raises(ValueError, match="softcap must be positive, found 0"):
        ops.checked_softcap(0.0, narrow)


@pytest.mark.parametrize("rows", [False, True])
def test_the_factors_of_a_decay_multiply_to_the_decay(rows):
    rates = np.array([0.0, 0.1, 0.3], np.float32)
    i, j = np.array([7, 3, 8]), np.array([2, 4, 1])
    of_q, of_k = ops.decay_factors(rates, *(jnp.asarray(x[None, None] if rows else x) for x in (i, j)))
    chex.assert_shape((of_q, of_k), [(1, 1, 1, 3, 3), (1, 1, 3, 3)] if rows else (3, 3))
    of_q, of_k = of_q.reshape(3, 3), of_k.reshape(3, 3)
    decay = np.exp(-rates * (i[:, None] - j)[..., None])
    np.testing.assert_allclose(of_q[:, None] * of_k, decay, rtol=1e-5)
    np.testing.assert_array_equal(of_k[1], 1, "factors are relative to the last key")


def test_the_factor_of_a_query_far_behind_all_keys_is_finite():
    of_q, _ = ops.decay_factors(np.ones(1, np.float32), jnp.asarray([0, 961]), jnp.asarray([1000]))
    np.testing.assert_allclose(of_q[:, 0], np.exp([40.0, 39.0]), rtol=1e-5)


def test_decayed_features_keep_their_dtype():
    x, factor = jnp.asarray(Q, jnp.bfloat16), normal(10, QUERIES, SIZE)
    found = ops.decayed(x, factor)
    chex.assert_type(found, jnp.bfloat16)
    np.testing.assert_array_equal(found, (np.asarray(x, np.float32) * factor).astype(jnp.bfloat16))


def test_the_heads_of_a_mask_are_grouped_like_those_of_the_queries():
    tile = WEIGHTS.reshape(BATCH, -1, QUERIES, KEYS) > 0
    np.testing.assert_array_equal(ops.group_mask(tile, KV_HEADS, GROUP), WEIGHTS > 0)
    np.testing.assert_array_equal(ops.group_mask(tile[:, :1], KV_HEADS, GROUP), tile[:, :1, None])
    assert ops.group_mask(tile[0, 0], KV_HEADS, GROUP).shape == (QUERIES, KEYS)
    with pytest.raises(ValueError, match=r"^mask: it has one pattern for each of 3 heads, but q has 6$"):
        ops.group_mask(tile[:, :3], KV_HEADS, GROUP)
