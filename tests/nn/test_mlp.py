"""The MLP of a block in NumPy; what its parameters start from; which sizes of a mixture a mesh can split."""

import math
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from posjax.attention.sharded import Placement
from posjax.nn import DecoderConfig, Experts
from posjax.nn.mlp import MLP, ExpertsMLP

SIZES = {"vocab_size": 5, "num_layers": 3, "num_heads": 4}


def made(module=MLP, *, model_dim=4, mlp_dim=6, **options):
    config = DecoderConfig(**SIZES, model_dim=model_dim, mlp_dim=mlp_dim, **options)
    return module(config, rngs=nnx.Rngs(0))


def test_weights_start_at_the_inverse_root_of_their_inputs():
    """The output also counts the 2 x 3 layers that are added up. 2,560 draws or more give the deviation to 2%."""
    found = made(ExpertsMLP, model_dim=64, mlp_dim=96, activation="swiglu", experts=Experts(count=40, per_token=2))
    for name, deviation in (("up", 1 / 8), ("gate", 1 / 8), ("router", 1 / 8), ("down", (96 * 2 * 3) ** -0.5)):
        weights = getattr(found, name)[...]
        np.testing.assert_allclose([weights.mean() / deviation, weights.std() / deviation], [0, 1], atol=0.05)
    assert np.abs(found.up[...] - found.gate[...]).max() > 0.1


@pytest.mark.parametrize("biases", [(), ("mlp",)])
@pytest.mark.parametrize("activation", ["swiglu", "silu"])
def test_parameters_of_gated_and_plain_mlps(activation, biases):
    found = nnx.to_pure_dict(nnx.state(made(activation=activation, biases=biases)))
    wanted = {"up": (4, 6), "down": (6, 4)} | ({"gate": (4, 6)} if activation == "swiglu" else {})
    if biases:
        wanted |= {f"{name}_bias": shape[1:] for name, shape in wanted.items()}
    chex.assert_trees_all_equal(jax.tree.map(jnp.shape, found), wanted)
    for name in wanted:
        assert np.any(found[name]) != name.endswith("bias")


@pytest.mark.parametrize("activation", ["swiglu", "silu"])
def test_an_mlp_is_two_products_around_its_activation(activation):
    module = made(activation=activation, biases=("mlp",))
    draw, x = np.random.default_rng(0), np.random.default_rng(1).normal(size=(2, 3, 4))
    p = {name: draw.normal(size=leaf.shape) for name, leaf in nnx.to_pure_dict(nnx.state(module)).items()}
    nnx.replace_by_pure_dict(state := nnx.state(module), jax.tree.map(jnp.float32, p))
    nnx.update(module, state)
    hidden = x @ p["up"] + p["up_bias"]
    gate = x @ p["gate"] + p["gate_bias"] if activation == "swiglu" else hidden
    hidden = gate / (1 + np.exp(-gate)) * (hidden if activation == "swiglu" else 1)
    np.testing.assert_allclose(module(jnp.float32(x)), hidden @ p["down"] + p["down_bias"], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("rows", "tokens", "hidden"),
    [(8, 9, 20), (7, 9, 20), (2, 9, 20), (8, 8, 20), (8, 3, 20), (8, 9, 18), (9, 9, 25), (7, 8, 21), (4, 3, 5)],
)
def test_a_mixture_is_split_if_every_size_can_be_split(rows, tokens, hidden):
    placement = Placement(batch=("a", "b"), context="c", heads="d")
    module = made(ExpertsMLP, mlp_dim=hidden, experts=Experts(count=2, per_token=1), placement=placement)
    mesh = SimpleNamespace(shape={"a": 2, "b": 2, "c": 3, "d": 5})
    remainders = [math.fmod(rows, 4), math.fmod(tokens, 3), math.fmod(hidden, 5)]
    assert module._fits(np.zeros((rows, tokens, 4)), mesh) == (max(remainders) == 0)
