"""Attention on a mesh: every device attends to its own rows, and nothing is gathered."""

import dataclasses
import importlib
import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import posjax as pj
from posjax import nn
from posjax.attention.sharded import Placement

ROWS, LENGTH = 8, 24


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture(scope="module")
def config():
    scheme = pj.scheme("t5", num_buckets=8, max_distance=12, scale={"name": "ssmax"})
    return nn.DecoderConfig(
        vocab_size=32, num_layers=2, model_dim=16, num_heads=2, scheme=scheme, implementation="blockwise"
    )


@pytest.fixture(scope="module")
def decoder(config):
    """The graph of the decoder, and random parameters in NumPy."""
    graph, shapes = nnx.split(nnx.eval_shape(lambda: nn.Decoder(config, rngs=nnx.Rngs(0))))
    draw = np.random.default_rng(1)
    return graph, jax.tree.map(lambda leaf: np.float32(draw.normal(0, 0.3, leaf.shape)), shapes)


@pytest.fixture(scope="module")
def batch():
    draw = np.random.default_rng(0)
    return draw.integers(0, 32, (ROWS, LENGTH), np.int32), np.sort(draw.integers(0, 4, (ROWS, LENGTH), np.int32))


def loss(graph, state, tokens, ids):
    logits = nnx.merge(graph, state)(tokens, segment_ids=ids)
    return jnp.square(logits).mean()


def on_axis(config, axis):
    config = dataclasses.replace(config, placement=Placement(batch=(axis,)))
    return nnx.graphdef(nnx.eval_shape(lambda: nn.Decoder(config, rngs=nnx.Rngs(0))))


def compiled(graph, state, batch, mesh):
    with jax.set_mesh(mesh):
        placed = jax.device_put(batch, NamedSharding(mesh, P("data")))
        state = jax.device_put(state, NamedSharding(mesh, P()))
        step = jax.jit(jax.value_and_grad(lambda state, *batch: loss(graph, state, *batch)))
        return step.lower(state, *placed).compile(), (state, *placed)


def test_loss_and_gradients_are_those_of_one_device_and_nothing_is_gathered(config, decoder, batch, mesh):
    graph, state = decoder
    want = jax.jit(jax.value_and_grad(lambda state, *batch: loss(graph, state, *batch)))(state, *batch)
    program, arguments = compiled(on_axis(config, "data"), state, batch, mesh)
    chex.assert_trees_all_close(jax.device_get(program(*arguments)), jax.device_get(want), rtol=2e-4, atol=1e-6)
    assert re.search(r"all-reduce", program.as_text()), "gradients are summed over the devices"
    assert not re.search(r"all-gather|all-to-all", program.as_text())


def test_without_the_axis_the_compiler_gathers(decoder, batch, mesh, monkeypatch):
    """Why the axis is needed: in the same program the compiler alone gathers. Rows are too long to share tiles."""
    monkeypatch.setattr(importlib.import_module("posjax.attention.blockwise"), "TILE_ELEMENTS", 1)
    graph, state = decoder
    program, _ = compiled(graph, state, batch, mesh)
    assert re.search(r"all-gather|all-to-all|collective-permute", program.as_text())


def test_without_a_mesh_it_is_a_plain_call(config, decoder, batch):
    graph, state = decoder
    run = jax.jit(loss, static_argnums=0)
    chex.assert_trees_all_close(run(on_axis(config, "data"), state, *batch), run(graph, state, *batch), atol=1e-6)


def test_a_batch_that_does_not_fit_the_mesh_is_refused(config, decoder, batch, mesh):
    _, state = decoder
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"no axis \['dta'\]; it has \['data', 'model'\]"):
        jax.eval_shape(partial(loss, on_axis(config, "dta")), state, *batch)
    with pytest.raises(ValueError, match="6 rows cannot be split evenly over 4 devices"):
        Placement(batch=("data",)).check(mesh.shape, batch=6, length=LENGTH, heads=2, kv_heads=2)
