"""Bias, scale and sinks in bfloat16: their gradients, sums over queries and rows, are summed in float32."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posjax as pj
from posjax import bias

QUERIES, KEYS, HEADS = 4096, 4, 2
ROWS = 512


def total(which, value, wide=False):
    """A sum over equal queries, which all contribute the same."""
    draw = np.random.default_rng(0)
    q = np.broadcast_to(draw.normal(size=(1, 1, HEADS, 8)), (1, QUERIES, HEADS, 8))
    k, v = draw.normal(size=(2, 1, KEYS, HEADS, 8))
    q, k, v = (x.astype(jnp.bfloat16).astype(np.float32 if wide else jnp.bfloat16) for x in (q, k, v))
    where = {"q_positions": np.full(QUERIES, KEYS, np.int32), "kv_positions": np.arange(KEYS)}
    bound = {"bias": lambda table: bias.T5(4, 3).bind({"table": table}, num_heads=HEADS)}.get(which, lambda x: x)
    out = pj.attention(q, k, v, **where, **{which: bound(value)}, implementation="dense")
    return jnp.sum(out.astype(jnp.float32))


@pytest.mark.parametrize(
    ("which", "shape"), [("bias", (4, HEADS)), ("scale", (HEADS,)), ("scale", ()), ("sinks", (HEADS,))]
)
def test_the_gradient_of_a_narrow_argument_counts_every_query(which, shape):
    value = np.asarray(np.random.default_rng(0).uniform(0.2, 0.4, shape)).astype(jnp.bfloat16)
    found = jax.jit(jax.grad(partial(total, which)))(value)
    wanted = np.asarray(jax.jit(jax.grad(partial(total, which, wide=True)))(value.astype(np.float32)))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted, rtol=0.02, atol=0.02 * np.abs(wanted).max())


@pytest.mark.parametrize("spec", [bias.T5(4, 3), bias.FIRE(width=4)], ids=["t5", "fire"])
def test_rows_taken_one_after_the_other_are_all_counted(spec):
    """Rows with their own positions are summed in a loop. All are equal; a sum in bfloat16 would stop after 256."""
    draw = np.random.default_rng(0)
    q, k, v = (np.tile(draw.normal(size=(1, KEYS, HEADS, 8)).astype(np.float32), (ROWS, 1, 1, 1)) for _ in range(3))
    positions = np.tile(np.arange(KEYS), (ROWS, 1))

    @jax.jit
    @jax.grad
    def gradient(params, weights):
        where = {"q_positions": positions, "kv_positions": positions, "implementation": "blockwise"}
        out = pj.attention(q, k, v, bias=spec.bind(params, num_heads=HEADS), **where)
        return jnp.sum(out * weights[:, None, None, None])

    start = jax.device_get(jax.jit(spec.init, static_argnums=1)(jax.random.key(0), HEADS))
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), start)
    one, every = gradient(params, np.arange(ROWS) < 1), gradient(params, np.ones(ROWS, bool))
    wanted = jax.tree.map(lambda part: np.asarray(part, np.float32) * ROWS, one)
    # FIRE's b2 adds the same to all logits of a query, so its gradient is zero and what is found is rounding error.
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(wanted))
    found = jax.tree.map(np.float32, every)
    chex.assert_trees_all_close(found, wanted, rtol=0.01, atol=1e-3 * largest)
