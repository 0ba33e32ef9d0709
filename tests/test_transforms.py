"""Whole schemes, masks and biases under jit, grad, vmap, shard_map over 8 devices, and pmap."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import posjax as pj

ROWS, LENGTH, HEADS, SIZE = 8, 12, 2, 8
WINDOW = {"name": "window", "size": 5}
SCHEMES = {
    "rope": pj.scheme("rope", scale={"name": "ssmax"}, norm={"name": "qk-norm"}, mask=WINDOW),
    "alibi": pj.scheme("alibi", learned=True),
    "t5": pj.scheme("t5", num_buckets=8, max_distance=10),
    "kerple": pj.scheme("kerple-log", scale={"name": "log-n", "length": 8}),
    "coca": pj.scheme("coca-slack"),
}
schemes = pytest.mark.parametrize("name", SCHEMES)


def inputs(scheme):
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = (scheme.query_size(SIZE), scheme.key_size(SIZE), SIZE)
    projected = [jax.random.normal(k, (ROWS, LENGTH, HEADS, s)) for k, s in zip(keys, sizes, strict=False)]
    params = scheme.init(keys[3], HEADS, SIZE) | scheme.init_shared(keys[3], HEADS, SIZE)
    return params, *projected


def loss(scheme, params, q, k, v):
    return jnp.square(scheme.attend(q, k, v, params=params)).sum()


@schemes
def test_gradients_are_the_same_under_every_transformation(name):
    scheme = SCHEMES[name]
    params, *rows = inputs(scheme)
    gradient = jax.grad(partial(loss, scheme), argnums=(0, 1, 2, 3))
    want = jax.jit(gradient)(params, *rows)
    one_by_one = [x[:, None] for x in rows]
    mesh = Mesh(np.array(jax.devices()), ("data",))

    def mapped(found):
        d_params, *d_rows = found
        return jax.tree.map(lambda x: x.sum(0), d_params), *(x[:, 0] for x in d_rows)

    by_vmap = mapped(jax.jit(jax.vmap(gradient, in_axes=(None, 0, 0, 0)))(params, *one_by_one))
    by_pmap = mapped(jax.pmap(gradient, in_axes=(None, 0, 0, 0))(params, *one_by_one))
    sharded = jax.shard_map(
        lambda *a: jax.lax.psum(loss(scheme, *a), "data"), mesh=mesh, in_specs=(P(), *(P("data"),) * 3), out_specs=P()
    )
    by_shard_map = jax.jit(jax.grad(sharded, argnums=(0, 1, 2, 3)))(params, *rows)
    for found in (by_vmap, by_pmap, by_shard_map):
        chex.assert_trees_all_equal_shapes_and_dtypes(found, want)
        chex.assert_trees_all_close(jax.device_get(found), jax.device_get(want), atol=2e-5, rtol=2e-4)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(want))


@schemes
def test_tokens_that_are_all_alike_give_outputs_that_are_all_alike(name):
    """Position told in the logits alone gives v back."""
    scheme = SCHEMES[name]
    params, q, k, v = inputs(scheme)
    q, k, v = (jnp.broadcast_to(x[:, :1], x.shape) for x in (q, k, v))
    chex.assert_trees_all_close(scheme.attend(q, k, v, params=params), v, atol=1e-5)


def test_masks_and_biases_alone_under_vmap_and_pmap():
    at = jnp.arange(8 * LENGTH).reshape(8, LENGTH)
    mask = pj.masks.Causal() & (pj.masks.Window(4) | pj.masks.Sinks(2)) & pj.masks.Chunked(16)
    table = pj.bias.T5(8, 10).init(jax.random.key(0), HEADS)
    bias = pj.bias.T5(8, 10).bind(table, num_heads=HEADS)
    for function in (mask.allowed, bias.values):
        want = jnp.stack([function(row, row) for row in at])
        chex.assert_trees_all_equal(jax.vmap(function)(at, at), want)
        chex.assert_trees_all_equal(jax.device_get(jax.pmap(function)(at, at)), jax.device_get(want))
