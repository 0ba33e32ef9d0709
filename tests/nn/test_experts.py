"""A mixture of experts against every token's experts one by one in float64, on meshes, decoded, in FLOPs."""

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
from posjax.nn.experts import ExpertsMLP
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
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 40, (4, 8)), jnp.int32)


def perturbed(module):
    """The module with biases that are not zero and a router that prefers some experts."""
    state = nnx.state(module)
    nnx.update(module, jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), state))
    return module


@pytest.fixture(scope="module")
def decoder():
    return perturbed(Decoder(CONFIG, rngs=nnx.Rngs(0)))


def clamped(gate, up):
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return (up + 1) * gate / (1 + np.exp(-1.702 * gate))


def by_token(p, x):
    """Every token by itself: its two likeliest experts, weighted by the softmax over the two."""
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
def test_every_token_takes_its_experts(scale):
    mlp = perturbed(ExpertsMLP(CONFIG, rngs=nnx.Rngs(1)))
    x = scale * np.random.default_rng(1).normal(size=(3, 5, 16))
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(nnx.state(mlp)))
    found, wanted = mlp(jnp.float32(x)), by_token(p, x)
    chex.assert_type(found, jnp.float32)
    np.testing.assert_allclose(found, wanted, atol=2e-6 * np.abs(wanted).max())


def test_all_tokens_may_want_the_same_expert():
    mlp = ExpertsMLP(dataclasses.replace(CONFIG, experts=Experts(4, 1)), rngs=nnx.Rngs(1))
    mlp.router_bias[...] = jnp.array([0.0, 0.0, 100.0, 0.0])
    x = jax.random.normal(jax.random.key(0), (3, 5, 16))
    gate, up = (x @ matrix[...][2] for matrix in (mlp.gate, mlp.up))
    wanted = clamped(np.asarray(gate), np.asarray(up)) @ mlp.down[...][2]
    np.testing.assert_allclose(mlp(x), wanted, atol=1e-5)


def test_decoding_is_the_forward_pass(decoder):
    cache = decoder.init_cache(4, 8, chunk=5)
    first, cache = decoder.decode(TOKENS[:, :5], cache, length=8)
    rest, _ = decoder.decode(TOKENS[:, 5:], cache, length=8)
    chex.assert_trees_all_close(jnp.concatenate([first, rest], axis=1), decoder(TOKENS), atol=1e-5)


def loss(graph, state, tokens):
    return jnp.square(nnx.merge(graph, state)(tokens)).mean()


@pytest.mark.parametrize("remat", ["none", "full"])
def test_meshes_give_the_numbers_of_one_device(decoder, remat):
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    config = dataclasses.replace(CONFIG, placement=Placement(batch=("data", "fsdp"), heads="tensor"), remat=remat)
    graph, state = nnx.split(decoder)
    split = nnx.graphdef(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    wanted = jax.value_and_grad(loss, argnums=1)(graph, state, TOKENS)
    with jax.set_mesh(mesh):
        found = jax.jit(jax.value_and_grad(loss, argnums=1), static_argnums=0)(split, state, TOKENS)
    chex.assert_trees_all_close(found, wanted, rtol=1e-4, atol=1e-6)
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(found[1]))


def test_explicit_axes(decoder):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    tokens = jax.device_put(TOKENS, jax.NamedSharding(mesh, jax.P("data")))
    graph, state = nnx.split(decoder)
    state = jax.tree.map(lambda x: jax.device_put(x, jax.NamedSharding(mesh, jax.P())), state)
    with jax.set_mesh(mesh):
        found = jax.jit(lambda s, t: nnx.merge(graph, s)(t))(state, tokens)
    np.testing.assert_allclose(found, decoder(TOKENS), atol=1e-5)


def test_flops_are_those_of_the_experts_that_a_token_takes():
    assert product_parameters(CONFIG) == 16 * (2 * (4 * 16 + 2 * 3 * 24 + 4) + 40)


@pytest.mark.parametrize(
    ("experts", "message"),
    [((0, 1), r"experts\.count must be positive"), ((2, 3), r"experts\.per_token must be at most experts\.count")],
)
def test_numbers_that_cannot_be(experts, message):
    with pytest.raises(ValueError, match=message):
        Experts(*experts)
