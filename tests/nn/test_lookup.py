"""Lookup in a table on meshes: every device looks up its own tokens, and gradients are summed in float32."""

import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from posjax.attention.sharded import Placement
from posjax.nn.lookup import lookup

AXES = ("data", "fsdp", "context", "tensor")
BATCH = ("data", "fsdp")
ROWS, LENGTH, VOCABULARY, WIDTH = 8, 16, 64, 32
SHAPES = [(1, 8, 1, 1), (2, 2, 2, 1), (1, 2, 2, 2), (1, 1, 1, 8)]
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, LENGTH))
# bfloat16 represents these numbers exactly.
WEIGHTS = np.random.default_rng(1).integers(-16, 16, (ROWS, LENGTH, WIDTH)).astype(np.float32) / 8


def table_of(dtype, vocabulary: int = VOCABULARY):
    return np.random.default_rng(2).normal(size=(vocabulary, WIDTH)).astype(dtype)


def program(shape, dtype, vocabulary: int = VOCABULARY):
    """A program compiled for a mesh, and its arguments; it gives the rows, and the gradient of their weighted sum."""
    mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 4)
    placement = Placement(BATCH, "context", "tensor")
    split = "tensor" if vocabulary % shape[3] == 0 else None
    table = jax.device_put(table_of(dtype, vocabulary), NamedSharding(mesh, P(split, ("fsdp", "context"))))
    tokens = jax.device_put(TOKENS, NamedSharding(mesh, P(BATCH, "context")))

    def loss(table, tokens):
        found = lookup(table, tokens, placement)
        return (found.astype(jnp.float32) * WEIGHTS).sum(), found

    with jax.set_mesh(mesh):
        return jax.jit(jax.grad(loss, has_aux=True)).lower(table, tokens).compile(), (table, tokens)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("shape", "vocabulary"), [*((shape, VOCABULARY) for shape in SHAPES), ((1, 2, 2, 2), 63)])
def test_rows_and_sums_are_those_of_numpy(shape, vocabulary, dtype):
    compiled, arguments = program(shape, dtype, vocabulary)
    gradient, found = compiled(*arguments)
    table = table_of(dtype, vocabulary)
    tokens = np.minimum(TOKENS, vocabulary - 1)
    chex.assert_trees_all_equal(np.asarray(found), table[tokens])
    sums = np.zeros((vocabulary, WIDTH))
    inside = vocabulary > TOKENS  # JAX drops the gradient of tokens beyond the end
    np.add.at(sums, TOKENS[inside], WEIGHTS[inside])
    assert gradient.dtype == dtype
    chex.assert_trees_all_close(np.float64(gradient), sums, rtol=2e-6 if dtype == jnp.float32 else 4e-3, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_device_looks_up_the_tokens_of_others(shape):
    """For a table that is split along its width, the compiler alone would gather all tokens on every device."""
    text = program(shape, jnp.bfloat16)[0].as_text()
    own = TOKENS.size // np.prod(shape[:3])
    found = re.findall(r"= \w+\[([\d,]+)\]\S* gather\(", text)
    assert found
    for shape in found:
        assert np.prod([int(size) for size in shape.split(",")]) == own * WIDTH


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


@pytest.mark.parametrize("types", [(AxisType.Explicit,) * 4, (AxisType.Auto,) * 2 + (AxisType.Explicit,) * 2])
@pytest.mark.parametrize("lies", [(P(), P()), (P("tensor"), P(None, "context")), (P(None, "tensor"), P("context"))])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_and_sums_on_explicit_axes_are_those_of_one_device(types, lies, dtype):
    """For any sharding of the table and the tokens before the lookup."""
    mesh = jax.make_mesh((1, 2, 2, 2), AXES, axis_types=types)

    def looked_up(table, tokens, placement=None):
        rows, transpose = jax.vjp(lambda table: lookup(table, tokens, placement), table)
        return rows, transpose(rows)

    with jax.set_mesh(mesh):
        given = jax.device_put((table_of(dtype), TOKENS), tuple(NamedSharding(mesh, spec) for spec in lies))
        found = jax.jit(partial(looked_up, placement=Placement(BATCH, "context", "tensor")))(*given)
    chex.assert_trees_all_close(found, jax.jit(looked_up)(table_of(dtype), TOKENS), rtol=4e-3)


def test_rows_that_a_mesh_does_not_divide_are_left_to_the_compiler():
    mesh = jax.make_mesh((1, 8, 1, 1), AXES, axis_types=(AxisType.Auto,) * 4)
    table, tokens = table_of(np.float32), TOKENS[:3]
    with jax.set_mesh(mesh):
        found = jax.jit(lambda table: lookup(table, tokens, Placement(BATCH)))(table)
    chex.assert_trees_all_equal(np.asarray(found), table[tokens])
