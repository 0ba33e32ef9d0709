"""Gradients are summed over rows, tokens and heads in float32, also for bfloat16 parameters.

Equal rows give equal terms, bit for bit, so 512 rows must give 512 times the gradient of one. A sum of equal terms in
bfloat16 stops growing at 256 terms.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import GROUPS, NAMES, VOCAB, config, made, preset, scheme_of
from flax import nnx

import posjax as pj
from posjax import absolute, bias, linear, norms, rotary, scales, sinks
from posjax.nn import Decoder
from posjax.nn.lookup import lookup
from posjax.nn.parameters import from_heads, plus, to_heads

ROWS, LENGTH = 512, 8
SUMS = ("reduce_sum", "scatter-add", "cumsum")
_MANY = {
    "features": rotary.MixedRotary(),
    "norm": norms.QKNorm(),
    "scale": scales.SSMax(),
    "sinks": sinks.LearnedSinks(),
}
_TABLE = absolute.Learned(LENGTH)
SEVERAL = pj.Layers(
    (((pj.Scheme(embedding=_TABLE, bias=bias.T5(8, 12), **_MANY), pj.Scheme(embedding=_TABLE, bias=bias.CoPE(6))), 1),)
)
"""Parameters of every slot, in two layers."""


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Turns quick compilation off: at XLA's level 0 KERPLE's log1p has a NaN gradient, and many rows run slowly."""


def small(scheme, implementation=None):
    sizes = {"model_dim": 8, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "mlp_dim": 8}
    if not isinstance(scheme, pj.Layers):
        sizes |= {"num_layers": 1}
    return config(scheme, compute_dtype="bfloat16", implementation=implementation, **sizes)


def as_bfloat16(state):
    return jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), state)


def gradients_of(graph):
    """Gradients as a function of parameters and row weights. Positions are given per row, so every row adds a term."""
    tokens = np.tile(np.random.default_rng(0).integers(0, VOCAB, LENGTH, np.int32), (ROWS, 1))
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))

    def loss(state, weights):
        logits = nnx.merge(graph, state)(tokens, positions=positions)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), (tokens * 7 % VOCAB)[..., None], axis=-1)[..., 0]
        return -jnp.sum(chosen * weights[:, None])

    return jax.grad(loss)


def assert_sums_count_every_row(scheme, implementation=None):
    graph, state = made(small(scheme, implementation))
    first, all_rows = np.eye(1, ROWS, dtype=np.float32)[0], np.ones(ROWS, np.float32)
    gradients = jax.jit(gradients_of(graph))
    one, every = gradients(as_bfloat16(state), first), gradients(as_bfloat16(state), all_rows)
    for (path, part), (_, whole) in zip(*map(jax.tree_util.tree_leaves_with_path, (one, every)), strict=True):
        wanted, found = np.asarray(part, np.float64) * ROWS, np.asarray(whole, np.float64)
        # Both gradients are rounded to bfloat16, each by up to 2^-9 of its size.
        error = np.linalg.norm(found - wanted)
        assert error <= 4e-3 * np.linalg.norm(wanted), (path, error / np.linalg.norm(wanted))


def test_gradients_of_narrow_parameters_count_every_row():
    assert_sums_count_every_row(SEVERAL, "dense")


def test_gradients_through_linear_attention_count_every_row():
    assert_sums_count_every_row(pj.Scheme(features=rotary.Rotary(), linear=linear.Performer(8)))


@pytest.mark.wide
@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_narrow_parameters_count_every_row_in_every_preset(name, implementation):
    assert_sums_count_every_row(preset(name), implementation)


READ = ("rope", "learned", "linear")


@pytest.mark.parametrize(
    "name", [*READ, *(pytest.param(name, marks=pytest.mark.wide) for name in (*GROUPS, *NAMES) if name not in READ)]
)
def test_no_preset_sums_in_bfloat16(name):
    """Reads the program itself, because a CPU may sum in a wider dtype than the program says."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(small(scheme_of(name)), rngs=nnx.Rngs(0))))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), state)
    program = jax.make_jaxpr(gradients_of(graph))(shapes, np.ones(ROWS, np.float32))
    sums = [equation.outvars[0].aval for equation in equations(program.jaxpr) if equation.primitive.name in SUMS]
    assert sums
    assert all(found.dtype.itemsize >= 4 for found in sums), sums


def equations(program):
    """The equations of a program and of the programs inside it."""
    for equation in program.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_the_gradient_of_a_lookup_counts_a_hundred_thousand_tokens():
    tokens = np.full((100, 1000), 2)
    gradient = jax.jit(jax.grad(lambda table: jnp.sum(lookup(table, tokens).astype(jnp.float32) * 0.01)))
    found = gradient(jnp.zeros((4, 3), jnp.bfloat16))
    chex.assert_type(found, jnp.bfloat16)
    np.testing.assert_allclose(np.float32(found[2]), 1000, rtol=4e-3)
    np.testing.assert_array_equal(np.float32(found)[[0, 1, 3]], 0)


def test_a_bias_is_added_in_float32():
    """In bfloat16 1.002 is 1, and 257 is 256: only the exact sum, 257.002, is rounded to 258."""
    x, bias = jnp.full((2, 3, 2), 256, jnp.bfloat16), jnp.array([-256.0, 1.002])
    found, gradient = jax.vjp(lambda bias: plus(x, nnx.Param(bias)), bias)
    chex.assert_type(found, jnp.bfloat16)
    np.testing.assert_array_equal(np.unique(np.float32(found)), [0, 258])
    np.testing.assert_array_equal(gradient(jnp.ones_like(found))[0], [6.0, 6.0])


# Few tokens, or heads that do not fill the lanes of a TPU, take another path.
@pytest.mark.parametrize(("tokens", "size"), [((2, 3), 4), ((3, 7), 128), ((2, 3), 128)])
def test_projections_are_products_over_features(tokens, size):
    draw = np.random.default_rng(0)
    x, into, out = (draw.standard_normal(shape) for shape in ((*tokens, 12), (12, 3, size), (3, size, 12)))
    with jax.enable_x64(True):
        heads = jax.jit(to_heads)(x, into)
        back = jax.jit(from_heads)(heads, out)
    np.testing.assert_allclose(heads, np.tensordot(x, into, 1), rtol=0, atol=1e-13)
    np.testing.assert_allclose(back, np.tensordot(np.tensordot(x, into, 1), out, 2), rtol=0, atol=1e-12)
