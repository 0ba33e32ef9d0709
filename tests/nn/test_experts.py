"""A mixture of experts against a float64 loop over tokens, on meshes and in decoding; and its FLOPs."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posjax as pj
from posjax.attention.sharded import Placement
from posjax.nn import Decoder, DecoderConfig, Experts
from posjax.nn.mlp import ExpertsMLP
from train.model.flops import product_parameters

CONFIG = DecoderConfig(
    vocab_size=40,
    num_layers=2,
    model_dim=16,
    num_heads=4,
    mlp_dim=24,
    activation="swiglu-clamped",
    experts=Experts(count=4, per_token=2),
    biases=("mlp", "qkv"),
    scheme=pj.scheme("rope"),
)
TOKENS = np.random.default_rng(0).integers(0, 40, (4, 8), np.int32)


def shapes(module, config=CONFIG):
    """The graph and the shapes of the parameters."""
    return nnx.split(nnx.eval_shape(lambda: module(config, rngs=nnx.Rngs(0))))


def random_parameters(module, config=CONFIG):
    """Random parameters: biases are not zero, gains are around one, and the router prefers some experts."""
    draw = np.random.default_rng(1)

    def random(path, leaf):
        return np.float32(("gain" in jax.tree_util.keystr(path)) + draw.normal(0, 0.4, leaf.shape))

    return jax.tree.map_with_path(random, shapes(module, config)[1])


@pytest.fixture(scope="module")
def parameters():
    return random_parameters(Decoder)


def gradients_of(graph):
    """``run(parameters, tokens)`` -> the loss and the logits, and the gradients."""

    def loss(state, tokens):
        logits = nnx.merge(graph, state)(tokens)
        return jnp.square(logits).mean(), logits

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.fixture(scope="module")
def one_device(parameters):
    """The loss, the logits and the gradients on one device."""
    return jax.device_get(gradients_of(shapes(Decoder)[0])(parameters, TOKENS))


def assert_close_for_their_size(found, wanted):
    """Each array differs by at most 1e-5 of its largest entry: small entries are sums in which large terms cancel."""
    chex.assert_trees_all_equal_shapes_and_dtypes(found, wanted)
    largest = jax.tree.map(lambda leaf: np.abs(leaf).max(), wanted)
    found, wanted = (jax.tree.map(np.divide, tree, largest) for tree in (found, wanted))
    chex.assert_trees_all_close(found, wanted, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def mlp():
    """``run(parameters, x)`` and its parameters."""
    graph, _ = shapes(ExpertsMLP)
    return jax.jit(lambda state, x: nnx.merge(graph, state)(x)), random_parameters(ExpertsMLP)


@pytest.mark.parametrize(
    ("activation", "biases", "names"),
    [
        ("gelu", (), {"router", "up", "down"}),
        ("gelu", ("mlp",), {"router", "up", "down", "router_bias", "up_bias", "down_bias"}),
        ("swiglu", (), {"router", "up", "gate", "down"}),
    ],
)
def test_experts_have_the_parameters_of_their_config(activation, biases, names):
    _, parameters = shapes(ExpertsMLP, dataclasses.replace(CONFIG, activation=activation, biases=biases))
    assert set(parameters) == names


def clamped(gate, up):
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return (up + 1) * gate / (1 + np.exp(-1.702 * gate))


def by_token(p, x):
    """For each token, its two likeliest experts, weighted by the softmax over the two."""
    out = np.zeros_like(x)
    for place in np.ndindex(x.shape[:2]):
        logits = x[place] @ p["router"] + p["router_bias"]
        chosen = np.argsort(-logits)[:2]
        shares = np.exp(logits[chosen] - logits[chosen].max())
        for e, share in zip(chosen, shares / shares.sum(), strict=True):
            hidden = clamped(*(x[place] @ p[n][e] + p[f"{n}_bias"][e] for n in ("gate", "up")))
            out[place] += share * (hidden @ p["down"][e] + p["down_bias"][e])
    return out


@pytest.mark.parametrize("scale", [1.0, 20.0], ids=["plain", "clamped"])
def test_every_token_takes_its_experts(scale, mlp):
    run, state = mlp
    x = scale * np.random.default_rng(1).normal(size=(3, 5, 16))
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(state))
    found, wanted = run(state, np.float32(x)), by_token(p, x)
    chex.assert_type(found, jnp.float32)
    np.testing.assert_allclose(found, wanted, atol=2e-6 * np.abs(wanted).max())


def test_all_tokens_may_want_the_same_expert():
    mlp = ExpertsMLP(dataclasses.replace(CONFIG, experts=Experts(4, 1)), rngs=nnx.Rngs(1))
    mlp.router_bias[...] = np.float32([0, 0, 100, 0])
    x = np.random.default_rng(0).normal(size=(3, 5, 16)).astype(np.float32)
    gate, up = (x @ np.asarray(matrix[...])[2] for matrix in (mlp.gate, mlp.up))
    wanted = clamped(gate, up) @ np.asarray(mlp.down[...])[2]
    np.testing.assert_allclose(mlp(x), wanted, atol=1e-5)


def test_decoding_is_the_forward_pass(parameters, one_device):
    graph, _ = shapes(Decoder)

    @jax.jit
    def decode(state):
        model = nnx.merge(graph, state)
        parts = TOKENS.reshape(4, 2, 4).swapaxes(0, 1)
        cache = model.init_cache(4, 8, chunk=4)
        return jax.lax.scan(lambda cache, part: model.decode(part, cache, length=8)[::-1], cache, parts)[1]

    found = np.asarray(decode(parameters)).swapaxes(0, 1).reshape(4, 8, 40)
    chex.assert_trees_all_close(found, one_device[0][1], atol=1e-5)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_meshes_give_the_numbers_of_one_device(parameters, one_device, remat):
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    config = dataclasses.replace(CONFIG, placement=Placement(batch=("data", "fsdp"), heads="tensor"), remat=remat)
    with jax.set_mesh(mesh):
        found = jax.device_get(gradients_of(shapes(Decoder, config)[0])(parameters, TOKENS))
    assert_close_for_their_size(found, one_device)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(found[1]))


def test_an_odd_number_of_tokens_is_sharded_by_rows():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    config = dataclasses.replace(CONFIG, placement=Placement(batch=("data",), heads="tensor"))
    graph, state = shapes(ExpertsMLP, config)
    with jax.set_mesh(mesh):
        program = jax.make_jaxpr(lambda s, x: nnx.merge(graph, s)(x))(state, np.zeros((2, 5, CONFIG.model_dim), "f4"))
    assert "shard_map" in str(program)


@pytest.mark.parametrize(("entered", "shared"), [("replica", True), ("data", False)])
def test_inside_a_shard_map_over_another_axis_the_placement_still_shards(entered, shared):
    """If the outer shard_map is over an axis of the placement, rows are local already and nothing more is sharded."""
    mesh = jax.make_mesh((2, 2), ("replica", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    config = dataclasses.replace(CONFIG, placement=Placement(batch=("data",)))
    graph, state = shapes(Decoder, config)

    def hidden(state, tokens):
        return nnx.merge(graph, state).hidden(tokens)

    rows = jax.P(entered)
    inside = jax.shard_map(hidden, in_specs=(jax.P(), rows), out_specs=rows, axis_names={entered}, check_vma=False)
    with jax.set_mesh(mesh):
        program = str(jax.make_jaxpr(inside)(state, TOKENS))
    assert ("sharding_constraint" in program) == shared
    assert program.count("shard_map[") == (4 if shared else 1), "of the test, the lookup, attention and experts"


def test_explicit_axes(parameters, one_device):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    graph, _ = shapes(Decoder)
    tokens = jax.device_put(TOKENS, jax.NamedSharding(mesh, jax.P("data")))
    state = jax.device_put(parameters, jax.NamedSharding(mesh, jax.P()))
    with jax.set_mesh(mesh):
        found = jax.jit(lambda s, t: nnx.merge(graph, s)(t))(state, tokens)
    np.testing.assert_allclose(found, one_device[0][1], atol=1e-5)


def test_flops_are_those_of_the_experts_that_a_token_takes():
    assert product_parameters(CONFIG) == 16 * (2 * (4 * 16 + 2 * 3 * 24 + 4) + 40)


@pytest.mark.parametrize(
    ("experts", "message"),
    [((0, 1), r"experts\.count must be positive"), ((2, 3), r"experts\.per_token must be at most experts\.count")],
)
def test_invalid_numbers_are_refused(experts, message):
    with pytest.raises(ValueError, match=message):
        Experts(*experts)
