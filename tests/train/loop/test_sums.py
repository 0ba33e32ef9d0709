"""A step in bfloat16 sums in float32: over the rows of a part, over parts, and over the tokens of a row.

Equal rows give equal parts, so their mean gradient is that of one of them, whatever their number. Summed in bfloat16,
equal parts stop counting at 256.
"""

import jax
import numpy as np
import optax
import pytest
from decoders import NAMES, OPTIONS, preset

from train.config import parse
from train.data.packing import Batch
from train.loop.step import build_program
from train.model.mesh import make_mesh
from train.model.sharding import global_batch

ROWS, LENGTH = 512, 8
MODEL = {"model_dim": 8, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "mlp_dim": 8, "compute_dtype": "bfloat16"}
TRAIN = {"length": LENGTH, "batch_tokens": ROWS * LENGTH, "warmup_steps": 0, "clip_norm": 1e9, "mesh": {"data": 1}}
T5 = {"name": "t5", "num_buckets": 4, "max_distance": 6, "norm": {"name": "qk-norm"}, "scale": {"name": "ssmax"}}
IN_PARTS = {"accumulate": 4, "loss_chunks": 4}
ROUNDED = 2**-8
"""What rounding to bfloat16 once may change: sums in another order may round to neighbours (gemma3: one in 64 numbers).
"""
DRAWN = {name for name in NAMES if preset(name).training_positions is not None}
"""Those whose rows stand at positions of their own in training, so that equal ones differ."""


def batch(labelled):
    """Equal rows, of which so many are predicted."""
    tokens = np.tile(np.random.default_rng(0).integers(0, 4, LENGTH, np.int32), (ROWS, 1))
    labels = np.where(np.arange(ROWS)[:, None] < labelled, tokens * 7 % 5, -1).astype(np.int32)
    fields = {"positions": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)), "segment_ids": np.zeros_like(tokens)}
    return Batch(tokens=tokens, labels=labels, **fields)


def mean_gradients(scheme, train, model):
    """The first moments that a step leaves, 0.1 of its gradient: of the first row alone, and of all."""
    config = parse({"model": {**MODEL, **model}, "scheme": scheme, "train": {**TRAIN, "steps": 1, **train}})
    mesh = make_mesh(config.train.mesh, config.train.rows)
    program = build_program(config, mesh)
    random = np.random.default_rng(0)
    parameters = jax.tree.map(
        lambda leaf: random.normal(0, 0.3, leaf.shape).astype(leaf.dtype), program.abstract.parameters
    )
    with jax.set_mesh(mesh):
        for labelled in (1, ROWS):
            given = global_batch(mesh, batch(labelled), ROWS, slice(0, ROWS))
            state, metrics = program.update(program.begin(parameters), given)
            assert int(metrics.skipped) == 0
            yield optax.tree_utils.tree_get(state.optimizer, "mu")


def assert_the_mean_is_that_of_a_row(scheme, train, model, tolerance=1e-3):
    one, every = mean_gradients(scheme, train, model)
    for (path, wanted), found in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(every), strict=True):
        error = np.linalg.norm(np.asarray(found, np.float64) - np.asarray(wanted))
        assert error <= tolerance * np.linalg.norm(wanted), (path, error / np.linalg.norm(wanted))


REMAT = {"remat": "full", "implementation": "blockwise"}


@pytest.mark.parametrize(
    ("train", "model", "layers"),
    [({}, {}, 2), (IN_PARTS, REMAT, 1), pytest.param(IN_PARTS, REMAT, 2, marks=pytest.mark.wide)],
    ids=["whole", "parts", "parts of two layers"],
)
def test_a_step_counts_every_row(train, model, layers):
    assert_the_mean_is_that_of_a_row(T5, train, {"num_layers": layers, **model})


@pytest.mark.wide
@pytest.mark.parametrize("name", sorted(set(NAMES) - DRAWN))
def test_a_step_counts_every_row_in_every_preset(name):
    options = OPTIONS.get(name, {})
    layers = options.get("num_layers", 1)
    assert_the_mean_is_that_of_a_row({"name": name, **options}, {"accumulate": 2}, {"num_layers": layers}, ROUNDED)
