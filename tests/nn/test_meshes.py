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
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import posjax as pj
from posjax import masks, nn
from posjax.attention.sharded import Placement
from posjax.layout import Layout

SPLITS = {
    "data": {},
    "fsdp": {"heads": "data", "mlp": "data"},
    "tensor": {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"},
    "both": {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "embed": "data"},
}
"""The mesh axis of each logical axis of the parameters; rows are always split over "data"."""
MIXED = "t5 in a window, fox, linear-elu, gated-delta"
"""A decoder of four layers, each of another kind of scheme."""
# Each kind of scheme once.
CASES = [
    (MIXED, "explicit", "tensor"),
]
MORE = [
    ("rope", "mixed", "tensor"),
    ("rope", "explicit", "fsdp"),
    ("coca-slack", "auto", "both"),
    ("t5", "explicit", "both"),
    ("fox", "explicit", "tensor"),
    ("linear-elu", "explicit", "tensor"),
    ("learned", "explicit", "tensor"),
    ("gemma3", "explicit", "both"),
    ("gated-delta", "auto", "both"),
    ("gated-delta", "mixed", "tensor"),
]


@cache
def rows():
    """Four packed rows: tokens, positions, segment ids, in NumPy."""
    a, b, c = decoders.documents()
    return jax.device_get(decoders.layout([a, b], [c], [b, a], [c]))


def settings(name):
    """The config of a preset, of two presets with a layer each, or of ``MIXED``."""
    if name != MIXED:
        schemes = tuple(map(decoders.preset, name.split(", ")))
        return decoders.config(schemes[0] if len(schemes) == 1 else pj.Layers(((schemes, 1),)))
    t5, *others = map(decoders.preset, ("t5", "fox", "linear-elu", "gated-delta"))
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
def program(name, placement=Placement()):  # noqa: B008
    """``run(parameters, tokens, positions, segments)`` -> gradients and logits; logits may have any sharding."""
    graph = decoders.made(settings(name))[0]
    if placement != Placement():
        config = dataclasses.replace(settings(name), placement=placement)
        graph = nnx.graphdef(nnx.eval_shape(lambda: nn.Decoder(config, rngs=nnx.Rngs(0))))

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
        over_vocabulary = "tensor" if "vocab" in SPLITS[split] else None
        assert found[1].sharding.spec == P("data", None, over_vocabulary)
    meshes.same(found, on_one_device(name), tolerance=5e-5)


PLACEMENTS = {
    "ring, zigzag": ((2, 2, 2), Placement(("data",), "context", "tensor", "ring", Layout("zigzag", 2))),
    "neighbour or ring": ((2, 4, 1), Placement(("data",), "context", None, ("neighbour", "ring"), Layout("zigzag", 4))),
    "ulysses": ((2, 4, 1), Placement(("data",), "context", None, "ulysses")),
    "auto": ((2, 2, 2), Placement(("data",), "context", "tensor", "auto", Layout("zigzag", 2))),
    "heads": ((2, 1, 4), Placement(("data",), None, "tensor")),
}
PAIRS = [("rope", "ring, zigzag")]
MORE_PAIRS = [("rope", "ulysses"), ("t5, fox", "ring, zigzag"), ("hwfa", "neighbour or ring")]
MORE_PAIRS += [("gated-delta", "heads")]
MORE_PAIRS += [(name, "auto") for name in ("coca-slack", "rerope", "learned-sinks", "ssmax", "window", "cope")]


@pytest.mark.parametrize(
    ("name", "placement"), PAIRS + [pytest.param(*pair, marks=pytest.mark.wide) for pair in MORE_PAIRS]
)
def test_a_step_with_split_rows_over_any_placement(name, placement):
    """Tokens are in the order of the layout. The tests of `posjax.attention.sharded` have the full grid."""
    sizes, placement = PLACEMENTS[placement]
    mesh = jax.make_mesh(sizes, ("data", "context", "tensor"), axis_types=(AxisType.Auto,) * 3)
    tokens, _, segments = map(placement.layout.apply, rows())
    state = jax.device_get(decoders.made(settings(name))[1])
    with jax.set_mesh(mesh):
        gradients, logits = jax.device_get(program(name, placement)(state, tokens, None, segments))
    order = np.asarray(placement.layout.apply(np.arange(decoders.LENGTH)))
    meshes.same((gradients, logits[:, np.argsort(order)]), on_one_device(name), tolerance=5e-5)


def test_a_placement_on_explicit_axes():
    """The placement decides how activations are sharded, not the sharding of the tokens."""
    mesh, split = meshes.mesh("explicit"), Placement(batch=("data",), context="tensor")
    with jax.set_mesh(mesh):
        batch = [meshes.put(mesh, array, P()) for array in rows()]
        found = program("rope", split)(placed("rope", "explicit", "fsdp"), *batch)
    meshes.same(found, on_one_device("rope"), tolerance=5e-5)


def decode(graph, state, tokens):
    """Logits of a prompt in two parts, and of three tokens one by one; a cache in a loop keeps its sharding."""
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
        (MIXED, "explicit", "tensor"),
        pytest.param("rope", "auto", "tensor", marks=pytest.mark.wide),
        pytest.param("window", "explicit", "data", marks=pytest.mark.wide),
        pytest.param("coca-strict", "explicit", "both", marks=pytest.mark.wide),
        pytest.param("sinusoidal", "mixed", "data", marks=pytest.mark.wide),
        pytest.param("gated-delta", "auto", "tensor", marks=pytest.mark.wide),
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


def test_a_token_is_decoded_by_the_kernel_of_every_device():
    """Traced for a mesh of TPUs, where attention warns if the compiler would have to split its kernel."""
    chip = AbstractDevice("TPU v5e", None, "tpu")
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,), abstract_device=chip)
    sizes = {"vocab_size": 8, "num_layers": 1, "model_dim": 8, "num_heads": 1}
    config = nn.DecoderConfig(**sizes, scheme=pj.scheme("alibi"), placement=Placement(batch=("data",)))
    slots = 2**19  # with fewer, attention is dense

    def on_mesh(tree, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    with jax.sharding.use_abstract_mesh(mesh):
        graph, state = nnx.split(nnx.eval_shape(lambda: nn.Decoder(config, rngs=nnx.Rngs(0))))
        cache = jax.eval_shape(lambda: nn.Decoder(config, rngs=nnx.Rngs(0)).init_cache(8, slots))

        def step(state, cache, tokens):
            return nnx.merge(graph, state).decode(tokens, cache, length=slots)[0]

        tokens = on_mesh(jax.ShapeDtypeStruct((8, 1), jnp.int32), P("data"))
        jax.jit(step).trace(on_mesh(state, P()), on_mesh(cache, P()), tokens)


def test_attention_alone():
    config, mesh = settings("rope"), meshes.mesh("explicit")
    module = nnx.eval_shape(lambda: nn.Attention(config.of_layer(0), rngs=nnx.Rngs(0)))
    graph, shapes = nnx.split(module)
    draw = np.random.default_rng(0)
    state = jax.tree.map(lambda leaf: draw.normal(0, 0.2, leaf.shape).astype(np.float32), shapes)
    x = draw.normal(size=(4, 8, 32)).astype(np.float32)
    run = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    replicated = jax.tree.map(lambda leaf: meshes.put(mesh, leaf, P()), state)
    meshes.same(run(replicated, meshes.put(mesh, x, P("data", None, None))), run(state, x))
