"""Gradient accumulation over replicas: the gradients of one device, and one exchange between replicas a step."""

import collections

import jax
import numpy as np
import optax
import pytest
from documents import encode, pack

from train.config import parse
from train.loop.step import build_program
from train.model.build import placement
from train.model.mesh import make_mesh
from train.model.sharding import global_batch
from train.plan.compiling import abstract_batch
from train.plan.hlo import parse as read_program
from train.plan.network import COLLECTIVES, groups_of, kind_of

MODEL = {"num_layers": 2, "model_dim": 16, "num_heads": 2, "mlp_dim": 16}
TRAIN = {"length": 8, "batch_tokens": 128, "accumulate": 2, "warmup_steps": 0, "clip_norm": 1e9}
SLICES = {"replica": 2, "data": 1, "fsdp": 4}
SPLIT = {"replica": 2, "data": 1, "fsdp": 2, "context": 2}
CLEX = {"name": "clex", "original_length": 8, "max_factor": 4, "steps": 5}


def config_of(scheme="rope", model=None, **train):
    return parse({"model": MODEL | (model or {}), "scheme": scheme, "train": TRAIN | train})


def built(config):
    mesh = make_mesh(config.train.mesh, config.train.rows // config.train.accumulate)
    return build_program(config, mesh), mesh


@pytest.fixture(scope="module")
def batch():
    lines = (b"to be, or not to be" * 3, b"that is the question" * 2, b"whether 'tis nobler in the mind to suffer")
    return pack([encode(line) for line in lines], 8).batch(np.arange(16) % 15)


def gradient(config, batch):
    """The loss of a step, and the first moments after it, which are a tenth of the gradient."""
    program, mesh = built(config)
    random = np.random.default_rng(0)

    def draw(path, leaf):
        return random.normal(0, 0.2, leaf.shape).astype(leaf.dtype) + ("gain" in jax.tree_util.keystr(path))

    parameters = jax.tree_util.tree_map_with_path(draw, program.abstract.parameters)
    ordered = jax.tree.map(placement(config, mesh).layout.apply, batch)
    with jax.set_mesh(mesh):
        state, metrics = program.update(program.begin(parameters), global_batch(mesh, ordered, 16, slice(0, 16)))
    return float(metrics.loss), jax.tree.map(np.asarray, optax.tree_utils.tree_get(state.optimizer, "mu"))


@pytest.mark.parametrize(
    ("scheme", "model", "train"),
    [
        ({"name": "randomised", "max_length": 64}, {}, {"mesh": SLICES}),
        ("t5", {"remat": "full", "experts": {"count": 4, "per_token": 2}}, {"mesh": SPLIT, "loss_chunks": 2}),
        pytest.param(CLEX, {}, {"mesh": SPLIT}, marks=pytest.mark.wide),
        pytest.param(
            "equal-mean", {"implementation": "dense"}, {"mesh": SLICES, "z_loss": 0.1}, marks=pytest.mark.wide
        ),
        pytest.param("rope", {"causal": False}, {"mesh": {"replica": 8, "data": 1}}, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_replicas_that_add_up_their_own_parts_give_the_gradient_of_one_device(batch, scheme, model, train):
    alone = {name: value for name, value in train.items() if name not in ("mesh", "context")}
    loss, wanted = gradient(config_of(scheme, model, mesh={"data": 1}, **alone), batch)
    found_loss, found = gradient(config_of(scheme, model, **train), batch)
    np.testing.assert_allclose(found_loss, loss, rtol=1e-6)
    for (path, leaf), found_leaf in zip(
        jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(found), strict=True
    ):
        np.testing.assert_allclose(found_leaf, leaf, atol=1e-6 * np.abs(leaf).max(), rtol=0, err_msg=str(path))


def runs(module, computation, times=1):
    """Every instruction of a program, and how often it runs."""
    for line in module.computations[computation]:
        yield times, line
        trips = (module.trips(line) or 1) if line.opcode == "while" else 1
        for name in module.called(line):
            yield from runs(module, name, times * trips)


def exchanged(config):
    """Bytes that a step on virtual devices sums over `replica`, by how often the collective runs."""
    program, mesh = built(config)
    with jax.set_mesh(mesh):
        text = program.update.lower(program.abstract, abstract_batch(config, mesh)).compile().as_text()
    module, sizes = read_program(text), collections.Counter()
    per_replica = mesh.size // mesh.shape["replica"]
    for times, line in runs(module, module.entry):
        if kind_of(line) in COLLECTIVES and any(
            len({device // per_replica for device in group}) > 1 for group in groups_of(line, mesh.size)
        ):
            sizes[times] += sum(array.bytes for array in line.results)
    return sizes


def test_gradients_go_over_the_replicas_once_a_step():
    config = config_of(mesh=SLICES, accumulate=4, batch_tokens=256)
    parameters = built(config)[0].abstract.parameters
    held = sum(4 * np.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(parameters))
    found = exchanged(config)
    assert held <= found[1] <= 1.2 * held
    assert found.keys() == {1}, "nothing in a loop"
