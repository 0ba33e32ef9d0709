"""Whole schemes, and masks and biases alone, under jit, grad, vmap, shard_map over 8 devices, and pmap."""

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
    "t5": pj.scheme("t5", num_buckets=8, max_distance=10),
    "kerple": pj.scheme("kerple-log", scale={"name": "log-n", "length": 8}),
    "coca": pj.scheme("coca-slack"),
}


def inputs(scheme):
    rng = np.random.default_rng(0)
    sizes = (scheme.query_size(SIZE), scheme.key_size(SIZE), SIZE)
    projected = [rng.standard_normal((ROWS, LENGTH, HEADS, s)).astype(np.float32) for s in sizes]
    params = jax.jit(lambda key: scheme.init(key, HEADS, SIZE) | scheme.init_shared(key, HEADS, SIZE))
    return jax.device_get(params(jax.random.key(0))), *projected


def loss(scheme, params, q, k, v):
    return jnp.square(scheme.attend(q, k, v, params=params)).sum()


@pytest.mark.parametrize("name", SCHEMES)
def test_gradients_are_the_same_under_every_transformation(name):
    scheme = SCHEMES[name]
    params, *rows = inputs(scheme)
    one_by_one = [x[:, None] for x in rows]
    gradient = jax.grad(partial(loss, scheme), argnums=(0, 1, 2, 3))
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharded = jax.shard_map(
        lambda *a: jax.lax.psum(loss(scheme, *a), "data"), mesh=mesh, in_specs=(P(), *(P("data"),) * 3), out_specs=P()
    )

    def summed(found):
        d_params, *d_rows = found
        return jax.tree.map(lambda x: x.sum(0), d_params), *(x[:, 0] for x in d_rows)

    @jax.jit
    def in_one_program(params, *rows):
        by_vmap = jax.vmap(gradient, in_axes=(None, 0, 0, 0))(params, *(x[:, None] for x in rows))
        return gradient(params, *rows), summed(by_vmap), jax.grad(sharded, argnums=(0, 1, 2, 3))(params, *rows)

    want, *found = jax.device_get(in_one_program(params, *rows))
    by_pmap = jax.pmap(gradient, in_axes=(None, 0, 0, 0))(params, *one_by_one) if name == "rope" else None
    for got in (*found, *([] if by_pmap is None else [summed(jax.device_get(by_pmap))])):
        chex.assert_trees_all_close(got, want, atol=2e-5, rtol=2e-4)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(want))


ALIBI = {"bias": pj.bias.ALiBi(), "mask": pj.masks.Causal()}
TABLE = pj.rotary_table(pj.positions.Range(0, LENGTH), pj.rotary.inverse_frequencies(SIZE))
CALLS = {
    "coca": lambda q, k, v: pj.coca_attention(q, k[..., : SIZE // 2], v, table=TABLE, mask=pj.masks.Causal()),
    "alibi": lambda q, k, v: pj.attention(q, k, v, **ALIBI),
    "rotary": lambda q, k, v: pj.attention(pj.apply_rotary(q, TABLE), pj.apply_rotary(k, TABLE), v),
}


@pytest.mark.parametrize("name", CALLS)
def test_functions_give_the_same_under_pmap(name):
    rows = inputs(pj.Scheme())[1:]
    found = jax.pmap(CALLS[name])(*(x[:, None] for x in rows))
    chex.assert_trees_all_close(jax.device_get(found)[:, 0], jax.jit(CALLS[name])(*rows), atol=1e-5)
