"""The pieces of an update, with numbers in place of the model."""

from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from posjax.layout import Layout
from train.config import parse
from train.data.packing import Batch
from train.loop import step as module
from train.loop.loss import Losses
from train.loop.step import _divides_by_replica, _guard, _in_parts, _of_piece, redraw, update, without
from train.model.mesh import make_mesh
from train.model.state import Guard, TrainState


def config_of(scheme="rope", **train):
    sizes = {"length": 8, "batch_tokens": 64, "steps": 20, "warmup_steps": 2, "learning_rate": 0.01}
    return parse({"scheme": scheme, "train": {**sizes, **train}})


@pytest.mark.parametrize(
    ("before", "loss", "norm", "after"),
    [
        ((0, 0, 0), 1.0, 4.0, (4, 0, 0)),
        ((2, 5, 1), 1.0, 3.0, (0.95 * 2 + 0.05 * 3, 5, 0)),
        ((2, 5, 1), 1.0, 3.1, (2, 6, 2)),
        ((2, 5, 0), np.nan, 2.0, (2, 6, 1)),
        ((2, 5, 0), 1.0, np.inf, (2, 6, 1)),
        ((2, 5, 2), 1.0, 2.0, (2, 6, 3)),
    ],
)
def test_a_guard_counts_skips_and_averages_the_norms_of_the_others(before, loss, norm, after):
    """Norms above 1.5 times the mean are left out, and everything after two skips in a row."""
    config = config_of(stop_after_skips=2, spike_factor=1.5)
    guard = Guard(*(jnp.asarray(value) for value in before))
    sound, found = _guard(SimpleNamespace(config=config), guard, jnp.asarray(loss), jnp.asarray(norm))
    assert bool(sound) == (after[2] == 0)
    np.testing.assert_allclose(found, after, rtol=1e-6)


def test_without_a_spike_factor_every_finite_norm_is_taken():
    guard = Guard(jnp.asarray(2.0), jnp.asarray(5), jnp.asarray(1))
    sound, found = _guard(SimpleNamespace(config=config_of()), guard, jnp.asarray(1.0), jnp.asarray(1e9))
    assert bool(sound)
    np.testing.assert_allclose(found, (0.95 * 2 + 0.05 * 1e9, 5, 0), rtol=1e-6)


@pytest.mark.parametrize(("nll", "count", "loss"), [(6.0, 4, 1.5), (6.0, 1, 6.0), (0.0, 0, 0.0)])
def test_metrics_are_the_mean_loss_and_the_norm_of_its_gradient(monkeypatch, nll, count, loss):
    """Of ten batches before, three were skipped, so the rate is that of the eighth update."""
    losses = Losses(jnp.asarray(nll), jnp.asarray(0.0), jnp.asarray(count))
    gradients = {"a": jnp.asarray([3.0]), "b": jnp.asarray([4.0])}
    monkeypatch.setattr(module, "_gradients", lambda parts, key, parameters, batch: (losses, gradients))
    config = config_of(warmup_steps=16)
    parts = SimpleNamespace(config=config, optimizer=optax.sgd(0.1))
    parameters = {"a": jnp.asarray([1.0]), "b": jnp.asarray([2.0])}
    guard = Guard(jnp.asarray(0.0), jnp.asarray(3), jnp.asarray(0))
    state = TrainState(jnp.asarray(10), parameters, parts.optimizer.init(parameters), guard)
    state, metrics = update(parts, 0, state, None)
    np.testing.assert_allclose([*metrics], [loss, 5.0, 0.01 * 8 / 16, 3, 0], rtol=1e-6)
    assert int(state.step) == 11
    chex.assert_trees_all_close(state.parameters, {"a": np.array([0.7]), "b": np.array([1.6])}, rtol=1e-6)


def test_the_objective_is_the_loss_and_a_share_of_the_z_loss(monkeypatch):
    def losses(parts, parameters, rows, drawn):
        return Losses(2 * parameters, 3 * parameters**2, jnp.asarray(4.0))

    monkeypatch.setattr(module, "_losses", losses)
    piece = SimpleNamespace(rows=None, drawn={})
    found, gradient = _of_piece(SimpleNamespace(config=config_of(z_loss=0.1)), jnp.asarray(5.0), 8, piece)
    np.testing.assert_allclose(found, [10, 75, 4])
    np.testing.assert_allclose(gradient, (2 + 0.1 * 30) / 8, rtol=1e-6)


@pytest.mark.parametrize(("labels", "predicted"), [([[0, -1], [3, -1]], 2), ([[-1, 2], [-1, -1]], 1), ([[-1, -1]], 1)])
def test_gradients_are_divided_by_the_predicted_tokens(monkeypatch, labels, predicted):
    monkeypatch.setattr(module, "_of_piece", lambda parts, parameters, predicted, piece: int(predicted))
    labels = jnp.asarray(labels)
    own = Batch(labels, labels, labels, labels)
    parts = SimpleNamespace(config=config_of(), layout=Layout())
    assert module._gradients(parts, jax.random.key(0), None, own) == predicted


@pytest.mark.parametrize(("every", "due"), [(2, [2, 4]), (3, [3]), (0, [])])
def test_features_are_redrawn_at_multiples_of_the_steps_between(every, due):
    """In every layer; nothing else changes."""
    config = config_of({"name": "performer", "num_features": 6}, redraw_every=every)
    blank = np.zeros((2, 6, 4))
    drawn = []
    for step in range(5):
        before = {"linear": {"projection": blank, "other": blank}, "projection": blank}
        found = redraw(config, jax.random.key(0), jnp.asarray(step), before)
        drawn.append(np.asarray(found["linear"]["projection"]))
        chex.assert_trees_all_equal((found["linear"]["other"], found["projection"]), (blank, blank))
    assert [step for step, each in enumerate(drawn) if each[0].any() and each[1].any()] == due
    assert [step for step, each in enumerate(drawn) if each.any()] == due


def test_other_schemes_have_no_features_to_redraw():
    old = {"linear": {"projection": jnp.zeros((2, 6, 4))}}
    assert redraw(config_of(redraw_every=2), jax.random.key(0), jnp.asarray(2), old) is old


@pytest.mark.parametrize(("replica", "tensor", "divides"), [(1, 1, False), (2, 1, True), (2, 2, False), (1, 2, False)])
def test_replicas_sum_their_own_parts_unless_tensors_are_split(replica, tensor, divides):
    assert _divides_by_replica(SimpleNamespace(shape={"replica": replica, "tensor": tensor})) == divides


def test_the_parts_of_a_batch_are_interleaved():
    config = config_of(accumulate=4, mesh={"data": 2})
    mesh, rows = make_mesh(config.train.mesh, 2), np.arange(8 * 3).reshape(8, 3)
    with jax.set_mesh(mesh):
        found = _in_parts(SimpleNamespace(config=config, mesh=mesh), Batch(*(jnp.asarray(rows),) * 4))
    for values in found:
        np.testing.assert_array_equal(values, [rows[part::4] for part in range(4)])


def test_a_mesh_without_an_axis_keeps_the_sizes_of_the_others():
    found = without(SimpleNamespace(shape={"replica": 2, "data": 3, "tensor": 4}), "data")
    assert dict(found.shape) == {"replica": 2, "tensor": 4}
