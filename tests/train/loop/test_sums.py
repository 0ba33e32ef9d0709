"""A step in bfloat16 sums in float32: over the rows of a part, over parts, and over the tokens of a row.

Equal rows have equal gradients, so the mean gradient is that of one row, however many there are. A sum in bfloat16
would stop growing after 256 equal terms.
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
"""The tolerance after one rounding to bfloat16: sums in another order may round to a neighbour (gemma3: 1 in 64 do)."""
DRAWN = {name for name in NAMES if preset(name).training_positions is not None}
"""Schemes that draw training positions for each row, so that equal rows differ."""


def batch(labelled):
    """Equal rows, of which only the first `labelled` have labels."""
    tokens = np.tile(np.random.default_rng(0).integers(0, 4, LENGTH, np.int32), (ROWS, 1))
    labels = np.where(np.arange(ROWS)[:, None] < labelled, tokens * 7 % 5, -1).astype(np.int32)
    fields = {"positions": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)), "segment_ids": np.zeros_like(tokens)}
    return Batch(tokens=tokens, labels=labels, **fields)


def mean_gradients(scheme, train, model):
    """The first moments after a step (0.1 of its gradient), first with one labelled row, then with all labelled."""
    config = parse({"model": {**MODEL, **model}, "scheme": scheme, "train": {**TRAIN, "steps": 1, **train}})
    mesh = make_mesh(config.train.mesh, config.train.rows)
    program = build_program(config, mesh)
    random = np.random.default_rng(0)
    parameters = jax.tree.map(
        lambda leaf: random.normal(0, 0.3, leaf.shape).astype(leaf.dtype), program.abstract.parameters
    )
    with jax.set_mesh(mesh):
        for labelled in (1, ROWS):
            arrays = global_batch(mesh, batch(labelled), ROWS, slice(0, ROWS))
            state, metrics = program.update(program.begin(parameters), arrays)
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
