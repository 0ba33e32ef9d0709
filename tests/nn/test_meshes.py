"""Decoders on meshes with Explicit and Auto axes give the logits and gradients of one device."""

import dataclasses
from functools import cache

import chex
import decoders
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import posjax as pj
from posjax import masks, nn
from posjax.attention.sharded import Placement

SPLITS = {
    "data": {},
    "fsdp": {"heads": "data", "mlp": "data"},
    "tensor": {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"},
    "both": {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "embed": "data"},
}
"""The mesh axis of each logical axis of the parameters; rows are always split over "data"."""
MIXED = "t5 in a window, fox, linear-elu"
"""A decoder of three layers, each of another kind of scheme."""
# Explicit axes with every split, Auto axes with the hardest split; each kind of scheme once.
CASES = [
    ("rope", "explicit", "fsdp"),
    ("rope", "mixed", "tensor"),
    (MIXED, "explicit", "both"),
    ("coca-slack", "auto", "both"),
]
MORE = [
    (MIXED, "explicit", "tensor"),
    ("t5", "explicit", "both"),
    ("fox", "explicit", "tensor"),
    ("linear-elu", "explicit", "tensor"),
    ("rope", "auto", "both"),
    ("coca-slack", "auto", "tensor"),
    ("rope", "explicit", "tensor"),
    ("learned", "explicit", "tensor"),
    ("mixed", "explicit", "tensor"),
    ("gemma3", "explicit", "both"),
]


@cache
def rows():
    """Four packed rows: tokens, positions, segment ids, in NumPy."""
    a, b, c = decoders.documents()
    return jax.device_get(decoders.layout([a, b], [c], [b, a], [c]))


def settings(name):
    """The config of a preset, or of ``MIXED``: three layers with a preset each."""
    if name != MIXED:
        return decoders.config(decoders.preset(name))
    t5, *others = map(decoders.preset, ("t5", "fox", "linear-elu"))
    layers = (dataclasses.replace(t5, mask=masks.Window(5)), *others)
    return decoders.config(pj.Layers(((layers, 1),)), scan_layers=False)


def placed(name, kind, split):
    """The parameters of a decoder on a mesh."""
    graph, state = decoders.made(settings(name))
    names = jax.tree.leaves(nn.logical_axes(nnx.merge(graph, state)), is_leaf=lambda node: isinstance(node, tuple))
    leaves, structure = jax.tree.flatten(state)
    specs = [P(*(SPLITS[split].get(axis) for axis in own)) for own in names]
    return structure.unflatten([meshes.put(meshes.mesh(kind), *pair) for pair in zip(leaves, specs, strict=True)])


@cache
def program(name):
    """``run(parameters, tokens, positions, segments)`` -> gradients and logits; logits may have any sharding."""
    graph, _ = decoders.made(settings(name))

    def loss(state, tokens, positions, segments):
        logits = nnx.merge(graph, state)(tokens, positions=positions, segment_ids=segments, length=decoders.LENGTH)
        label = jax.nn.one_hot(tokens * 7 % decoders.VOCAB, decoders.VOCAB)
        losses = jax.nn.logsumexp(logits, axis=-1) - (logits * label).sum(-1)
        return jnp.where(segments >= 0, losses, 0.0).sum(), logits

    return jax.jit(jax.grad(loss, has_aux=True))


@cache
def on_one_device(name):
    return jax.device_get(program(name)(decoders.made(settings(name))[1], *rows()))


@cache
def logits_on_one_device(name):
    """Logits on one device, by the same program. Each row is one document."""
    tokens = rows()[0]
    positions = np.broadcast_to(np.arange(decoders.LENGTH, dtype=np.int32), tokens.shape)
    return np.asarray(program(name)(decoders.made(settings(name))[1], tokens, positions, np.zeros_like(tokens))[1])


@pytest.mark.parametrize(
    ("name", "kind", "split"), CASES + [pytest.param(*case, marks=pytest.mark.wide) for case in MORE]
)
def test_a_step_over_any_mesh(name, kind, split):
    mesh = meshes.mesh(kind)
    batch = [meshes.put(mesh, array, P("data", None)) for array in rows()]
    with jax.set_mesh(mesh):
        found = program(name)(placed(name, kind, split), *batch)
    if kind == "explicit":
        assert found[1].sharding.spec[0] == "data"
    meshes.same(found, on_one_device(name), tolerance=5e-5)


@pytest.mark.parametrize("spec", [P("data"), P()])
def test_a_placement_on_explicit_axes(spec):
    """The placement decides how activations are sharded, for any sharding of the tokens."""
    split = Placement(batch=("data",), context="tensor")
    config = dataclasses.replace(settings("rope"), placement=split)
    placed_graph = nnx.graphdef(nnx.eval_shape(lambda: nn.Decoder(config, rngs=nnx.Rngs(0))))
    mesh = meshes.mesh("explicit")
    with jax.set_mesh(mesh):
        run = jax.jit(lambda state, tokens: nnx.merge(placed_graph, state)(tokens))
        found = run(placed("rope", "explicit", "data"), meshes.put(mesh, rows()[0], spec))
    meshes.same(found, logits_on_one_device("rope"), tolerance=5e-5)


def decode(graph, state, tokens):
    """Logits of a prompt in two parts, and of three tokens one by one."""
    model = nnx.merge(graph, state)

    def step(cache, part):
        logits, cache = model.decode(part, cache, length=decoders.LENGTH)
        return cache, logits

    prompt = jnp.stack([tokens[:, :5], tokens[:, 5:10]])
    cache, first = jax.lax.scan(step, model.init_cache(len(tokens), decoders.LENGTH, chunk=5), prompt)
    _, rest = jax.lax.scan(step, cache, tokens[:, 10:13].T[..., None])
    return first, rest[:, :, 0]


@pytest.mark.parametrize(
    ("name", "kind", "split"),
    [
        ("rope", "auto", "tensor"),
        (MIXED, "explicit", "tensor"),
        pytest.param("window", "explicit", "data", marks=pytest.mark.wide),
        pytest.param("fox", "explicit", "tensor", marks=pytest.mark.wide),
        pytest.param("linear-elu", "explicit", "tensor", marks=pytest.mark.wide),
        pytest.param("rope", "explicit", "tensor", marks=pytest.mark.wide),
        pytest.param("coca-strict", "explicit", "both", marks=pytest.mark.wide),
        pytest.param("sinusoidal", "mixed", "data", marks=pytest.mark.wide),
    ],
)
def test_decoding_over_any_mesh(name, kind, split):
    mesh, (graph, _) = meshes.mesh(kind), decoders.made(settings(name))
    run = jax.jit(lambda state, tokens: decode(graph, state, tokens))
    with jax.set_mesh(mesh):
        first, rest = run(placed(name, kind, split), meshes.put(mesh, rows()[0], P("data", None)))
    chex.assert_shape([first, rest], [(2, 4, 5, decoders.VOCAB), (3, 4, decoders.VOCAB)])
    found = np.concatenate([*np.asarray(first), np.asarray(rest).swapaxes(0, 1)], axis=1)
    meshes.same(found, logits_on_one_device(name)[:, :13], tolerance=5e-5)


def test_a_cache_keeps_its_sharding():
    """Otherwise decoding could not be the body of a loop."""
    mesh, (graph, _) = meshes.mesh("explicit"), decoders.made(settings("rope"))
    tokens = meshes.put(mesh, np.zeros((4, 1), np.int32), P("data", None))
    with jax.set_mesh(mesh):

        @jax.jit
        def run(state, tokens):
            model = nnx.merge(graph, state)

            def step(cache, _):
                logits, cache = model.decode(tokens, cache, length=8)
                return cache, logits

            return jax.lax.scan(step, model.init_cache(4, 8), length=3)[1]

        chex.assert_shape(run(placed("rope", "explicit", "tensor"), tokens), (3, 4, 1, decoders.VOCAB))


def test_queries_of_a_new_token_are_sharded_by_rows_and_heads():
    mesh, (graph, _) = meshes.mesh("explicit"), decoders.made(settings("rope"))
    with jax.set_mesh(mesh):
        layers = nnx.merge(graph, placed("rope", "explicit", "tensor")).stacks[0][0].attention
        graph, state = nnx.split(layers)
        attention = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[0], state))
        found = attention._partition(meshes.put(mesh, np.zeros((4, 1, 32), np.float32), P("data")))
    assert found == P("data", None, "tensor")


@pytest.mark.parametrize("module", [nn.Attention, nn.Block])
def test_a_module_alone(module):
    config, mesh = settings("rope"), meshes.mesh("explicit")
    graph, shapes = nnx.split(nnx.eval_shape(lambda: module(config, config.layers.schemes[0], rngs=nnx.Rngs(0))))
    draw = np.random.default_rng(0)
    state = jax.tree.map(lambda leaf: draw.normal(0, 0.2, leaf.shape).astype(np.float32), shapes)
    x = draw.normal(size=(4, 8, 32)).astype(np.float32)
    run = jax.jit(lambda state, x: nnx.merge(graph, state)(x, *_context(module, x)))
    replicated = jax.tree.map(lambda leaf: meshes.put(mesh, leaf, P()), state)
    meshes.same(run(replicated, meshes.put(mesh, x, P("data", None, None))), run(state, x))


def _context(module, x):
    if module is nn.Attention:
        return ()
    visible = np.arange(1, x.shape[1] + 1)
    return (nn.modules.LayerInputs(positions=None, mask=None, visible=visible, length=x.shape[1], shared={}),)
