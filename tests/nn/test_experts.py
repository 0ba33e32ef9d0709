"""A mixture of experts against a float64 loop over tokens, on meshes and in decoding; and its FLOPs."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import posjax as pj
from posjax.attention.sharded import Placement
from posjax.nn import Decoder, DecoderConfig, Experts, Router
from posjax.nn.experts import ExpertsMLP
from train.model.flops import product_parameters

CONFIG = DecoderConfig(
    vocab_size=40,
    num_layers=2,
    model_dim=16,
    num_heads=4,
    mlp_dim=24,
    activation="swiglu-clamped",
    experts=Experts(count=4, per_token=2, router=Router(bias=True)),
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


def gradients_of(graph):
    """``run(parameters, tokens)`` -> the loss and the logits, and the gradients."""

    def loss(state, tokens):
        logits = nnx.merge(graph, state)(tokens)
        return jnp.square(logits).mean(), logits

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.fixture(scope="module")
def parameters():
    return random_parameters(Decoder)


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


def hidden(gate, up):
    """The clamped SwiGLU of gpt-oss; without a gate ReLU."""
    if gate is None:
        return np.maximum(up, 0)
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return (up + 1) * gate / (1 + np.exp(-1.702 * gate))


def by_token(p, x):
    """For each token, its two likeliest experts, weighted by the softmax over the two."""
    out = np.zeros_like(x)
    for place in np.ndindex(x.shape[:2]):
        logits = x[place] @ p["router"] + p.get("router_bias", 0)
        chosen = np.argsort(-logits)[:2]
        shares = np.exp(logits[chosen] - logits[chosen].max())
        for e, share in zip(chosen, shares / shares.sum(), strict=True):
            parts = {n: x[place] @ p[n][e] + p.get(f"{n}_bias", np.zeros(4))[e] for n in ("gate", "up") if n in p}
            units = hidden(parts.get("gate"), parts["up"])
            out[place] += share * (units @ p["down"][e] + p.get("down_bias", np.zeros(4))[e])
    return out


@pytest.mark.parametrize(
    ("scale", "changes", "crowded"),
    [(1.0, {}, True), (20.0, {}, False), (1.0, {"activation": "relu", "biases": (), "experts": Experts(4, 2)}, False)],
    ids=["all want the same", "clamped", "without gates and biases"],
)
def test_every_token_takes_its_experts(scale, changes, crowded):
    config = dataclasses.replace(CONFIG, **changes)
    graph, state = shapes(ExpertsMLP, config)[0], random_parameters(ExpertsMLP, config)
    x = scale * np.random.default_rng(1).normal(size=(3, 5, 16))
    if crowded:
        state["router_bias"][...] = np.float32([0, 0, 100, 0])
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(state))
    found = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, np.float32(x))
    chex.assert_type(found, jnp.float32)
    wanted = by_token(p, x)
    np.testing.assert_allclose(found, wanted, atol=2e-6 * np.abs(wanted).max())


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


def test_meshes_give_the_numbers_of_one_device(parameters, one_device):
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    placement = Placement(batch=("data", "fsdp"), heads="tensor")
    config = dataclasses.replace(CONFIG, placement=placement, remat="full")
    with jax.set_mesh(mesh):
        found = jax.device_get(gradients_of(shapes(Decoder, config)[0])(parameters, TOKENS))
    assert_close_for_their_size(found, one_device)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(found[1]))


@pytest.mark.wide
def test_norms_apart_and_learned_scales_are_the_same_on_a_mesh():
    experts = Experts(4, 2, Router(learned_scale=True), shared_dim=20, norms=True)
    config = dataclasses.replace(CONFIG, experts=experts, biases=())
    mesh = jax.make_mesh((2, 2, 2), ("data", "expert", "tensor"), axis_types=(AxisType.Auto,) * 3)
    placement = Placement(batch=("data", "expert"), heads="tensor", experts="expert")
    placed = dataclasses.replace(config, placement=placement)
    graph, parameters = shapes(Decoder, config)[0], random_parameters(Decoder, config)
    wanted = jax.device_get(gradients_of(graph)(parameters, TOKENS))
    with jax.set_mesh(mesh):
        found = jax.device_get(gradients_of(shapes(Decoder, placed)[0])(parameters, TOKENS))
    assert_close_for_their_size(found, wanted)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(found[1]))


@pytest.mark.parametrize(
    ("rows", "tokens", "mlp_dim", "split"),
    [(2, 5, 24, True), (3, 4, 24, False), (4, 4, 25, False)],
    ids=["fits", "an odd number of rows", "an odd number of hidden units"],
)
def test_a_mixture_is_split_where_the_mesh_divides_its_sizes(rows, tokens, mlp_dim, split):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    one = dataclasses.replace(CONFIG, mlp_dim=mlp_dim)
    placed = dataclasses.replace(one, placement=Placement(batch=("data",), heads="tensor"))
    state, x = random_parameters(ExpertsMLP, one), np.random.default_rng(0).normal(size=(rows, tokens, 16))
    graphs = [shapes(ExpertsMLP, config)[0] for config in (placed, one)]
    run, alone = (jax.jit(lambda state, x, graph=graph: nnx.merge(graph, state)(x)) for graph in graphs)
    with jax.set_mesh(mesh):
        found = run(state, np.float32(x))
        assert ("shard_map" in str(jax.make_jaxpr(run)(state, x))) == split
    np.testing.assert_allclose(found, alone(state, np.float32(x)), atol=1e-4)


@pytest.mark.parametrize("entered", ["replica", "data"])
def test_inside_a_shard_map_the_numbers_stay(entered, parameters, one_device):
    """If it is over an axis of the placement, rows are local already and nothing more is sharded."""
    mesh = jax.make_mesh((2, 2), ("replica", "data"), axis_types=(AxisType.Auto,) * 2)
    graph, _ = shapes(Decoder, dataclasses.replace(CONFIG, placement=Placement(batch=("data",))))

    def logits(state, tokens):
        return nnx.merge(graph, state)(tokens)

    specs = {"in_specs": (jax.P(), jax.P(entered)), "out_specs": jax.P(entered), "axis_names": {entered}}
    with jax.set_mesh(mesh):
        found = jax.jit(jax.shard_map(logits, check_vma=False, **specs))(parameters, TOKENS)
    np.testing.assert_allclose(found, one_device[0][1], atol=1e-5)


def test_flops_are_those_of_the_experts_that_a_token_takes():
    assert product_parameters(CONFIG) == 16 * (2 * (4 * 16 + 2 * 3 * 24 + 4) + 40)
