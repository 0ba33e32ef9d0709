"""Several trainings in one program, with stand-ins for the program and the data."""

from contextlib import nullcontext
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.config import parse
from train.loop import together as module
from train.loop.step import StepMetrics
from train.loop.together import _in_turn, _lines, _mean, _rates, _save, _train, _Trained


def configs(rates=(1e-3, 2e-3, 3e-3), **train):
    train = {"length": 8, "batch_tokens": 32, "steps": 10, "warmup_steps": 0, "log_every": 4} | train
    return [parse({"seed": seed, "train": {**train, "learning_rate": rate}}) for seed, rate in enumerate(rates)]


def metrics(losses):
    return StepMetrics(jnp.asarray(losses), jnp.asarray(losses) * 2, *(jnp.zeros(len(losses)),) * 3)


def test_a_line_for_each_training_counts_its_tokens():
    found = _lines(3, metrics([1.5, np.nan, 9.0]), 2, 32)
    assert found == [
        {"step": 3, "loss": 1.5, "gradient_norm": 3.0, "tokens": 96},
        {"step": 3, "loss": None, "gradient_norm": None, "tokens": 96},
    ]


@pytest.mark.parametrize(("losses", "mean"), [([1.0, None, 2.5], 1.75), ([4.0], 4.0), ([None], None)])
def test_the_loss_that_is_shown_is_the_mean_of_the_finite_ones(losses, mean):
    assert _mean([{"loss": loss} for loss in losses]) == mean


@pytest.fixture
def trained(monkeypatch):
    """A function that trains: the loss of training n after step s is ``10 + n - s``, and its state ``100 n + s``."""
    shown = []

    def streams(rows, size, seed):
        class Stream:
            read = 0

            def __next__(self):
                self.read += 1
                return seed

            def get_state(self):
                return seed, self.read

        return Stream()

    def update(state, read):
        assert read == [0, 1, 2]
        step = int(state[0]) + 1
        return state + 1, metrics([10.0 + n - step for n in range(3)])

    program = SimpleNamespace(initialize=lambda: 100.0 * jnp.arange(3), update=update)
    monkeypatch.setattr(module, "stacked_program", lambda configs: program)
    monkeypatch.setattr(module, "batches", streams)
    report = lambda step, values, tokens: shown.append((step, values["loss"]))  # noqa: E731
    monkeypatch.setattr(module, "show_progress", lambda label, steps: nullcontext(report))

    def train(**changes):
        shown.clear()
        found = _train(configs(**changes), None, None)
        return [(float(each.state), each.position, [line["step"] for line in each.lines]) for each in found], shown

    return train


def test_trainings_without_a_loss_to_stop_at_end_after_all_steps(trained):
    found, shown = trained()
    assert found == [(100.0 * n + 10, (n, 10), [4, 8, 10]) for n in range(3)]
    assert shown == [(4, 7.0), (8, 3.0), (10, 1.0)]


def test_each_training_is_taken_at_its_first_logged_loss_below_the_one_to_stop_at(trained):
    """Losses are 6, 7, 8 after step 4, and 2, 3, 4 after step 8."""
    found, shown = trained(stop_loss=7.0)
    assert found == [(4.0, (0, 4), [4]), (108.0, (1, 8), [4, 8]), (208.0, (2, 8), [4, 8])]
    assert [step for step, _ in shown] == [4, 8]


@pytest.mark.parametrize(("in_row", "finished"), [(0, True), (2, True), (3, False), (4, False)])
def test_a_training_that_skipped_too_many_updates_is_not_saved(monkeypatch, in_row, finished):
    class Saved(Exception):
        pass

    def create(config, directory):
        raise Saved

    monkeypatch.setattr(module, "create_run", create)
    (config,) = configs(rates=(1e-3,), stop_after_skips=3)
    state = SimpleNamespace(guard=SimpleNamespace(in_row=jnp.asarray(in_row)))
    trained = _Trained(state, None, [{"step": 4, "loss": 2.0}, {"step": 8, "loss": 1.0}])
    with pytest.raises(Saved) if finished else nullcontext():
        result = _save(config, "digest", trained)
        assert (result.finished, result.steps, result.final_loss) == (False, 8, 1.0)


def test_rates_are_those_of_a_training_over_those_of_the_first():
    first, second = configs(rates=(1e-3, 3e-3), learning_rate_factors={"a": 0.5})
    axes = {"a": ("embed", "mlp"), "b": ("embed", "mlp")}
    found = [_rates(SimpleNamespace(config=first, axes=axes), each) for each in (first, second)]
    for rates, wanted in zip(found, ({"a": 0.5, "b": 1.0}, {"a": 1.5, "b": 3.0}), strict=True):
        assert rates == pytest.approx(wanted)


def test_trainings_in_turn_are_those_of_vmap():
    numbers = jnp.arange(3.0), jnp.ones((3, 2))
    function = lambda a, b: (a * 2, (a + b).sum())  # noqa: E731
    for found, wanted in zip(_in_turn(function)(*numbers), jax.vmap(function)(*numbers), strict=True):
        np.testing.assert_array_equal(found, wanted)
