"""A decoder on a mesh: every device attends to its own rows, and nothing is gathered."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from refusals import refused

import posjax as pj
from posjax import nn
from posjax.attention.sharded import Placement

ROWS, LENGTH = 8, 16


def decoder(axis=None):
    """The graph of a decoder whose batch is split over a mesh axis, and the shapes of its parameters."""
    scheme = pj.scheme("t5", num_buckets=8, max_distance=12, scale={"name": "ssmax"})
    options = {"placement": Placement(batch=(axis,))} if axis else {}
    config = nn.DecoderConfig(vocab_size=32, num_layers=1, model_dim=16, num_heads=2, scheme=scheme, **options)
    config = dataclasses.replace(config, implementation="blockwise")
    return nnx.split(nnx.eval_shape(lambda: nn.Decoder(config, rngs=nnx.Rngs(0))))


def loss(graph, state, tokens, ids):
    logits = nnx.merge(graph, state)(tokens, segment_ids=ids)
    return jnp.square(logits).mean()


def test_loss_and_gradients_are_those_of_one_device_and_nothing_is_gathered():
    draw = np.random.default_rng(0)
    batch = draw.integers(0, 32, (ROWS, LENGTH), np.int32), np.sort(draw.integers(0, 4, (ROWS, LENGTH), np.int32))
    graph, shapes = decoder()
    state = jax.tree.map(lambda leaf: np.float32(draw.normal(0, 0.3, leaf.shape)), shapes)
    want = jax.jit(jax.value_and_grad(lambda state, *batch: loss(graph, state, *batch)))(state, *batch)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        placed = jax.device_put(batch, NamedSharding(mesh, P("data")))
        state = jax.device_put(state, NamedSharding(mesh, P()))
        step = jax.jit(jax.value_and_grad(lambda state, *batch: loss(decoder("data")[0], state, *batch)))
        program = step.lower(state, *placed).compile()
        chex.assert_trees_all_close(jax.device_get(program(state, *placed)), jax.device_get(want), rtol=2e-4, atol=1e-6)
        refused("placement", lambda: jax.eval_shape(lambda *x: loss(decoder("dta")[0], *x), state, *placed))
    assert re.search(r"all-reduce", program.as_text()), "gradients are summed over the devices"
    assert not re.search(r"all-gather|all-to-all", program.as_text())
