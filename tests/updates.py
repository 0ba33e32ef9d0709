"""Programs of tiny trainings, and their updates, for tests."""

import jax
import numpy as np

from train.config import parse
from train.loop.step import build_program
from train.model.build import Setup
from train.model.mesh import make_mesh
from train.model.sharding import global_batch

MODEL = {"num_layers": 2, "model_dim": 16, "num_heads": 2, "mlp_dim": 16}
TRAIN = {"length": 8, "batch_tokens": 64, "steps": 20, "warmup_steps": 2, "learning_rate": 0.01, "mesh": {"data": 1}}


def config_of(scheme="rope", model=None, **train):
    return parse({"scheme": scheme, "model": MODEL | (model or {}), "train": TRAIN | train})


def build(*given, **train):
    """The program of a config, and its mesh."""
    config = config_of(*given, **train)
    mesh = make_mesh(config.train.mesh, config.train.rows // config.train.accumulate)
    return build_program(Setup(config, mesh)), mesh


def placed(mesh, batch):
    """The whole batch, sharded over the mesh."""
    return global_batch(mesh, batch, len(batch.tokens), slice(0, len(batch.tokens)))


def begin(program, parameters):
    """The first state of a program, with given parameters: compiling their initialization takes as long as an update.

    The parameters are copied, because an update reuses the memory of its arguments.
    """
    shapes = program.abstract.parameters
    return program.begin(jax.tree.map(lambda x, leaf: jax.device_put(x.copy(), leaf.sharding), parameters, shapes))


def random_parameters(program):
    """Normal numbers, and gains around 1, for tests that do not need the program's own initialization."""
    random = np.random.default_rng(0)

    def draw(path, leaf):
        numbers = random.normal(0, 0.2, leaf.shape) + ("gain" in jax.tree_util.keystr(path))
        return numbers.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, program.abstract.parameters)


def run(program, mesh, batch, state, steps=3):
    """The last state and all losses."""
    losses = []
    with jax.set_mesh(mesh):
        for _ in range(steps):
            before = jax.tree.leaves(state.parameters)
            state, metrics = program.update(program.given, state, placed(mesh, batch))
            assert all(leaf.is_deleted() for leaf in before), "the update takes the buffers it is given"
            losses.append(float(metrics.loss))
    return state, losses
