"""Decoders on meshes give the loss and gradients of one device, for any mesh, layout and scheme."""

import dataclasses
import re
from functools import cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

import posjax as pj
from posjax import nn
from posjax.attention.sharded import Placement
from posjax.layout import Layout

ROWS, LENGTH, LAYERS = 2, 32, 2

CASES = {
    "rope": {},
    "t5": {"num_buckets": 8, "max_distance": 12},
    "fox": {},
    "coca-slack": {},
    "rerope": {"window": 6},
    "learned-sinks": {},
    "ssmax": {},
    "window": {"size": 6},
    "cope": {},
    "hwfa": {"num_layers": LAYERS, "length": LENGTH, "window": 3},
}
MESHES = {
    "ring, zigzag": ((1, 4, 2), Placement(("data",), "context", "tensor", "ring", Layout("zigzag", 4))),
    "ring": ((2, 4, 1), Placement(("data",), "context", None, "ring")),
    "gathered, zigzag": ((2, 2, 2), Placement(("data",), "context", "tensor", "all-gather", Layout("zigzag", 2))),
    "ulysses": ((2, 4, 1), Placement(("data",), "context", None, "ulysses")),
    "neighbour or ring": ((1, 8, 1), Placement(("data",), "context", None, ("neighbour", "ring"), Layout("zigzag", 8))),
    "auto": ((2, 2, 2), Placement(("data",), "context", "tensor", "auto", Layout("zigzag", 2))),
}
# Every mesh with one scheme, or with two in two layers. The tests of `posjax.attention.sharded` have the full grid.
PAIRS = [
    ("rope", "gathered, zigzag"),
    ("rope", "ulysses"),
    ("rope", "ring"),
    ("t5, fox", "ring, zigzag"),
    ("coca-slack, cope", "auto"),
    ("hwfa", "neighbour or ring"),
]
WIDE = [*((name, "auto") for name in CASES), ("rope", "ring, zigzag"), ("t5", "ring, zigzag"), ("fox", "ring")]


def scheme_of(name: str) -> pj.Scheme | pj.Layers:
    """The scheme of a case, or of two cases with a layer each."""
    if ", " in name:
        return pj.Layers(((tuple(map(scheme_of, name.split(", "))), 1),))
    return pj.scheme("rope", scale={"name": "ssmax"}) if name == "ssmax" else pj.scheme(name, **CASES[name])


@cache
def config(name: str) -> nn.DecoderConfig:
    scheme = scheme_of(name)
    return nn.DecoderConfig(vocab_size=16, num_layers=LAYERS, model_dim=32, num_heads=4, mlp_dim=16, scheme=scheme)


def split(name: str, placement: Placement) -> tuple:
    """Graph and shapes of the parameters."""
    placed = dataclasses.replace(config(name), placement=placement)
    return nnx.split(nnx.eval_shape(lambda: nn.Decoder(placed, rngs=nnx.Rngs(0))))


@cache
def parameters(name: str):
    """Random NumPy arrays, so they are on no mesh; gains are around one."""
    draw = np.random.default_rng(1)

    def random(path, leaf):
        return np.float32(("gain" in jax.tree_util.keystr(path)) + 0.2 * draw.normal(size=leaf.shape))

    return jax.tree.map_with_path(random, split(name, Placement())[1])


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    ids = np.sort(rng.integers(0, 3, (ROWS, LENGTH)), axis=-1)
    ids[1, -3:] = -1
    return rng.integers(0, 16, (ROWS, LENGTH), np.int32), ids.astype(np.int32)


def loss_of(name: str, placement: Placement, tokens, ids):
    """The loss as a function of parameters. Every token has its own weight, so swapped tokens change the loss."""
    graph, layout = split(name, placement)[0], placement.layout
    weights = np.linspace(1, 2, LENGTH, dtype=np.float32)

    def loss(state):
        hidden = nnx.merge(graph, state).hidden(layout.apply(tokens), segment_ids=layout.apply(ids))
        shares = layout.apply(weights)[None] * (layout.apply(ids) >= 0)
        return (jnp.square(hidden[..., ::3] - 0.5).mean(-1) * shares).sum()

    return loss


def gradients(name: str, *arguments):
    """The loss and its gradients."""
    return jax.device_get(jax.jit(jax.value_and_grad(loss_of(name, *arguments)))(parameters(name)))


@pytest.fixture(scope="module")
def on_one_device(batch):
    """Loss and gradients of a scheme on one device."""
    return cache(lambda name: gradients(name, Placement(), *batch))


def device_mesh(*sizes: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, ("data", "context", "tensor"), axis_types=(AxisType.Auto,) * 3)


@pytest.mark.parametrize(
    ("name", "mesh"), PAIRS + [pytest.param(*pair, marks=pytest.mark.wide) for pair in WIDE if pair not in PAIRS]
)
def test_a_mesh_changes_nothing(name, mesh, batch, on_one_device):
    sizes, placement = MESHES[mesh]
    with jax.set_mesh(device_mesh(*sizes)):
        found = gradients(name, placement, *batch)
    expected = on_one_device(name)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    chex.assert_trees_all_close(found[1], expected[1], rtol=1e-4, atol=1e-5)


def collectives(name: str, placement: Placement, tokens) -> set[tuple[str, int]]:
    """The collectives over eight shards: the kind, and how many tokens of keys a device has after it."""
    graph, shapes = split(name, placement)
    with jax.set_mesh(device_mesh(1, 8, 1)):
        program = jax.jit(lambda state: nnx.merge(graph, state).hidden(tokens)).lower(shapes).compile()
    found = re.findall(r"= \w+\[([\d,]+)\]\S* (collective-permute|all-gather|all-to-all)\(", program.as_text())
    return {(kind, int(shape.split(",")[2])) for shape, kind in found}


@pytest.mark.parametrize(
    ("strategy", "sent"),
    [
        (("neighbour", "ring"), {("collective-permute", 2), ("collective-permute", 4)}),
        (("neighbour", "ulysses", "all-gather"), {("collective-permute", 2), ("all-gather", LENGTH)}),
        (("ring", "neighbour"), {("collective-permute", 4)}),
        # Four heads are too few for Ulysses; with so few keys, gathering them is chosen.
        ("auto", {("collective-permute", 2), ("all-gather", LENGTH)}),
    ],
)
def test_every_layer_takes_the_first_strategy_that_splits_it(strategy, sent, batch):
    """Over 8 shards of 4 tokens, a window of 3 needs 2 tokens of the neighbour; a ring moves all 4."""
    assert collectives("hwfa", Placement(context="context", strategy=strategy), batch[0]) == sent


def test_without_a_mesh_a_layout_is_an_order_of_tokens(batch, on_one_device):
    """The row is in the order of four shards, all on one device."""
    placement = Placement(layout=Layout("zigzag", 4))
    found = jax.jit(loss_of("t5, fox", placement, *batch))(parameters("t5, fox"))
    np.testing.assert_allclose(found, on_one_device("t5, fox")[0], rtol=1e-5)
