"""Lookup in a table on meshes: every device looks up its own tokens, and gradients are summed in float32."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import put

from posjax.attention.sharded import Placement
from posjax.nn.lookup import lookup

AXES = ("data", "fsdp", "context", "tensor")
BATCH = ("data", "fsdp")
ROWS, LENGTH, VOCABULARY, WIDTH = 8, 16, 64, 32
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, LENGTH))
# bfloat16 represents these numbers exactly.
WEIGHTS = np.random.default_rng(1).integers(-16, 16, (ROWS, LENGTH, WIDTH)).astype(np.float32) / 8


def table_of(dtype, vocabulary: int = VOCABULARY):
    return np.random.default_rng(2).normal(size=(vocabulary, WIDTH)).astype(dtype)


AUTO, EXPLICIT = (AxisType.Auto,) * 4, (AxisType.Explicit,) * 4
SPREAD = P("tensor", ("fsdp", "context")), P(BATCH, "context")
"""How the table and the tokens lie on the mesh."""


def program(shape, dtype, lies=SPREAD, types=AUTO, vocabulary=VOCABULARY):
    """A program compiled for a mesh, and its arguments; it gives the rows, and the gradient of their weighted sum."""
    mesh = jax.make_mesh(shape, AXES, axis_types=types)
    table, tokens = (put(mesh, *pair) for pair in zip((table_of(dtype, vocabulary), TOKENS), lies, strict=True))

    def loss(table, tokens):
        found = lookup(table, tokens, Placement(BATCH, "context", "tensor"))
        return (found.astype(jnp.float32) * WEIGHTS).sum(), found

    with jax.set_mesh(mesh):
        return jax.jit(jax.grad(loss, has_aux=True)).lower(table, tokens).compile(), (table, tokens)


@pytest.mark.parametrize(
    ("shape", "dtype", "lies", "types", "vocabulary"),
    [
        ((1, 8, 1, 1), jnp.bfloat16, SPREAD, AUTO, 64),
        ((2, 2, 2, 1), jnp.float32, SPREAD, AUTO, 64),
        ((1, 1, 1, 8), jnp.float32, SPREAD, AUTO, 64),
        ((1, 2, 2, 2), jnp.float32, SPREAD, AUTO, 63),
        ((1, 2, 2, 2), jnp.float32, (P(), P()), EXPLICIT, 64),
        ((1, 2, 2, 2), jnp.bfloat16, (P("tensor"), P(None, "context")), EXPLICIT, 64),
        ((1, 2, 2, 2), jnp.float32, (P(None, "tensor"), P("context")), AUTO[:2] + EXPLICIT[2:], 64),
    ],
)
def test_rows_and_sums_are_those_of_numpy(shape, dtype, lies, types, vocabulary):
    """For any sharding of the table and the tokens before the lookup."""
    compiled, arguments = program(shape, dtype, lies, types, vocabulary)
    gradient, found = compiled(*arguments)
    table = table_of(dtype, vocabulary)
    chex.assert_trees_all_equal(np.asarray(found), table[np.minimum(TOKENS, vocabulary - 1)])
    sums = np.zeros((vocabulary, WIDTH))
    inside = vocabulary > TOKENS  # JAX drops the gradient of tokens beyond the end
    np.add.at(sums, TOKENS[inside], WEIGHTS[inside])
    assert gradient.dtype == dtype
    chex.assert_trees_all_close(np.float64(gradient), sums, rtol=2e-6 if dtype == jnp.float32 else 4e-3, atol=1e-5)


def test_no_device_looks_up_the_tokens_of_others():
    """For a table that is split along its width, the compiler alone would gather all tokens on every device."""
    text = program((1, 2, 2, 2), jnp.bfloat16)[0].as_text()
    found = re.findall(r"= \w+\[([\d,]+)\]\S* gather\(", text)
    assert found
    for shape in found:
        assert np.prod([int(size) for size in shape.split(",")]) == TOKENS.size // 4 * WIDTH


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_ids_outside_the_table_are_read_as_on_one_device(dtype):
    """Negative ids count from the end. Ids outside read the nearest row, but do not count in its gradient."""
    table = jnp.asarray(table_of(dtype))
    outside = [-1, -VOCABULARY, VOCABULARY, 1000, -VOCABULARY - 1, -VOCABULARY - 40, -1000, 3]
    tokens = jnp.tile(jnp.array([outside]), (ROWS, LENGTH // 8))
    mesh = jax.make_mesh((1, 2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 4)

    def looked_up(placement=None):
        rows, transpose = jax.vjp(lambda table: lookup(table, tokens, placement), table)
        return rows, transpose(WEIGHTS.astype(dtype))

    with jax.set_mesh(mesh):
        found = jax.jit(lambda: looked_up(Placement(BATCH, "context", "tensor")))()
    chex.assert_trees_all_equal(found, jax.jit(looked_up)())
    nearest = [-1, 0, -1, -1, 0, 0, 0, 3] * (LENGTH // 8)
    chex.assert_trees_all_equal(np.asarray(found[0]), np.stack([np.asarray(table)[nearest]] * ROWS))


def test_rows_that_a_mesh_does_not_divide_are_left_to_the_compiler():
    mesh = jax.make_mesh((1, 8, 1, 1), AXES, axis_types=(AxisType.Auto,) * 4)
    table, tokens = table_of(np.float32), TOKENS[:3]
    with jax.set_mesh(mesh):
        found = jax.jit(lambda table: lookup(table, tokens, Placement(BATCH)))(table)
    chex.assert_trees_all_equal(np.asarray(found), table[tokens])
