"""What attention takes beside the tokens may be narrow; its gradient, a sum over the queries, is summed in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posjax as pj
from posjax import bias

QUERIES, KEYS, HEADS = 4096, 4, 2


def total(which, value, wide=False):
    """A number that every one of so many equal queries adds the same part to."""
    keys = jax.random.split(jax.random.key(0), 3)
    q = jnp.broadcast_to(jax.random.normal(keys[0], (1, 1, HEADS, 8)), (1, QUERIES, HEADS, 8))
    k, v = (jax.random.normal(key, (1, KEYS, HEADS, 8)) for key in keys[1:])
    q, k, v = ((x.astype(jnp.bfloat16)).astype(jnp.float32 if wide else jnp.bfloat16) for x in (q, k, v))
    where = {"q_positions": jnp.full(QUERIES, KEYS, jnp.int32), "kv_positions": jnp.arange(KEYS)}
    bound = {"bias": lambda table: bias.T5(4, 3).bind({"table": table}, num_heads=HEADS)}.get(which, lambda x: x)
    out = pj.attention(q, k, v, **where, **{which: bound(value)}, implementation="dense")
    return jnp.sum(out.astype(jnp.float32))


@pytest.mark.parametrize(
    ("which", "shape"), [("bias", (4, HEADS)), ("scale", (HEADS,)), ("scale", ()), ("sinks", (HEADS,))]
)
def test_the_gradient_of_a_narrow_argument_counts_every_query(which, shape):
    value = jnp.asarray(np.random.default_rng(0).uniform(0.2, 0.4, shape), jnp.bfloat16)
    found = jax.grad(lambda value: total(which, value))(value)
    wanted = jax.grad(lambda value: total(which, value, wide=True))(value.astype(jnp.float32))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted, rtol=0.02, atol=0.02 * np.abs(wanted).max())
