"""Parameters and their products: heads that are narrow or fill TPU lanes, few and many tokens, biases, placement."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from posjax.attention.sharded import Placement
from posjax.nn.parameters import (
    _merges_heads,
    bias_parameter,
    from_heads,
    on_any_mesh,
    parameter,
    placed,
    plain,
    plus,
    scheme_parameters,
    to_heads,
)

EMBED, HEADS = 12, 3


def values(*shape: int):
    return np.random.default_rng(sum(shape)).standard_normal(shape)


@pytest.mark.parametrize("size", [4, 128])
@pytest.mark.parametrize("tokens", [(2, 3), (3, 7), (40,)], ids=str)
def test_projections_are_products_over_features(tokens, size):
    x, into, out = values(*tokens, EMBED), values(EMBED, HEADS, size), values(HEADS, size, EMBED)
    with jax.enable_x64(True):
        heads = jax.jit(to_heads)(x, into)
        back = jax.jit(from_heads)(heads, out)
    np.testing.assert_allclose(heads, np.tensordot(x, into, 1), rtol=0, atol=1e-13)
    np.testing.assert_allclose(back, np.tensordot(np.tensordot(x, into, 1), out, 2), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("tokens", "size", "one"), [(EMBED - 1, 128, False), (EMBED, 128, True), (EMBED, 64, False)])
def test_many_tokens_and_heads_that_fill_lanes_use_one_matrix_product(tokens, size, one):
    """With few tokens, copying the weight to another layout takes longer than the product."""
    x, into, out = values(tokens, EMBED), values(EMBED, HEADS, size), values(HEADS, size, EMBED)
    for project, arguments in ((to_heads, (x, into)), (from_heads, (values(tokens, HEADS, size), out))):
        assert ("optimization_barrier" in jax.jit(project).lower(*arguments).as_text()) == one


@pytest.mark.parametrize(
    ("tokens", "size", "embed", "merges"),
    [
        ((3, 4), 128, 12, True),
        ((3, 4), 256, 12, True),
        ((3, 4), 128, 13, False),
        ((3, 4), 129, 12, False),
        ((3, 4), 64, 12, False),
        (("a symbol", 4), 128, 4, False),
        (("a symbol", "another"), 128, 4, False),
    ],
)
def test_heads_are_merged_for_many_tokens_of_known_number_and_heads_that_fill_lanes(tokens, size, embed, merges):
    assert _merges_heads(tokens, size, embed) == merges


def test_parameters_are_normal_and_biases_are_zero():
    found = parameter(jax.random.key(0), (100, 300), ("embed", "mlp"), 0.25)
    np.testing.assert_allclose([found[...].mean(), found[...].std()], [0, 0.25], atol=0.01)
    bias = bias_parameter((7,), ("mlp",))
    np.testing.assert_array_equal(bias[...], np.zeros(7, np.float32))
    assert (found.get_metadata("logical_axes"), bias.get_metadata("logical_axes")) == (("embed", "mlp"), ("mlp",))


def test_a_bias_is_added_in_float32():
    """In bfloat16 1.002 is 1, and 257 is 256: only the exact sum, 257.002, is rounded to 258."""
    x, bias = jnp.full((2, 3, 2), 256, jnp.bfloat16), nnx.Param(jnp.array([-256.0, 1.002], jnp.float32))
    np.testing.assert_array_equal(np.unique(np.float32(plus(x, bias))), [0, 258])
    assert plus(x, bias).dtype == jnp.bfloat16
    assert plus(x, None) is x
    slope = jax.grad(lambda b: plus(x, nnx.Param(b)).astype(jnp.float32).sum())(jnp.zeros(2))
    np.testing.assert_array_equal(slope, [6.0, 6.0])


def test_parameters_of_a_scheme_come_back():
    given = {"bias": {"slopes": jnp.arange(3.0)}, "scale": {"s": jnp.ones((2, 2)), "b": jnp.zeros(())}}
    tree = scheme_parameters(given)
    chex.assert_trees_all_equal(plain(tree), given)
    assert tree["scale"]["s"].get_metadata("logical_axes") == (None, None)


@pytest.mark.parametrize(
    ("placement", "spec"), [(Placement(batch=("x",)), ("x",)), (Placement(context="y"), (None, "y"))]
)
def test_tokens_are_placed_on_the_mesh_in_use(placement, spec):
    x = jnp.ones((2, 4, 3))
    assert placed(x, placement) is x
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        with jax.set_mesh(mesh := jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)):
            found = jax.jit(partial(placed, placement=placement))(x)
        assert found.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(*spec)), 3)


class Factor(nnx.Module):
    def __init__(self):
        self.factor = nnx.Param(jnp.full(3, 2.0))


def test_a_module_runs_on_automatic_axes_of_an_explicit_mesh():
    kinds, module = [], Factor()

    def product(module, x):
        kinds.append(jax.sharding.get_abstract_mesh().axis_types)
        return x * module.factor[...]

    with jax.set_mesh(jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))):
        x = jax.device_put(np.ones((4, 3), np.float32), PartitionSpec("x"))
        found = jax.jit(lambda x: on_any_mesh(product, module, x))(x)
        assert jax.typeof(found).sharding.spec == PartitionSpec("x", None)
    assert kinds == [(jax.sharding.AxisType.Auto,)]
    np.testing.assert_array_equal(found, np.full((4, 3), 2.0))


def test_without_a_mesh_a_module_is_called_as_it_is():
    module, x = Factor(), jnp.ones(3)
    found = on_any_mesh(lambda *arguments: arguments, module, x, "more")
    assert all(one is other for one, other in zip(found, (module, x, "more"), strict=True))
