"""Trials: what is tried, what is chosen, and on which text."""

import math
import sys

import jax
import pytest
from flags import QUICK
from refusals import refused

from train.compare.compare import compare
from train.compare.sweep import Choice, sweep, trial_config, tuned
from train.compare.training import DIVERGED
from train.config import parse
from train.evaluate.saved import evaluate, evaluation_documents
from train.model.build import Setup
from train.report.numbers import training_length_loss
from train.runtime.rows import read_rows

SWEEP = {"learning_rate": [1e-3, 2e-3, 4e-3], "position_factor": [1, 10], "extensions": 2}


def config(scheme="rope", sweep=None, **values):
    return parse({"scheme": scheme, "compare": {"sweep": sweep or SWEEP}, **values})


def searched(loss, scheme="rope", **changes):
    """The choice of a sweep over trainings whose loss is a formula, and the choices that were tried."""
    asked = []

    def run(configs):
        for each in configs:
            factors = set(each.train.learning_rate_factors.values()) or {1.0}
            choice = Choice(each.train.learning_rate, factors.pop())
            asked.append(choice)
            found = loss(*choice)
            measured = {"length": 32, "train_length": 32, "error": None, "window_nll": found}
            yield [measured if math.isfinite(found) else {"error": DIVERGED}]

    base = config(scheme, {**SWEEP, **changes})
    choice, trials = sweep(base, base.compare.sweep, run)
    assert list(trials) == asked
    assert len(set(asked)) == len(asked)
    return choice, asked


def bowl(best_rate, best_factor=1.0):
    return lambda rate, factor: abs(math.log(rate / best_rate)) + abs(math.log(factor / best_factor))


def test_an_optimum_at_the_end_of_the_grid_extends_it():
    """At (4e-3, 10) first; then at (8e-3, 10) and (4e-3, 100), of which the latter is better; then (8e-3, 100)."""
    choice, asked = searched(bowl(8e-3, 100.0), {"name": "t5"})
    assert choice == pytest.approx((8e-3, 100.0))
    assert set(asked) >= {Choice(rate, factor) for rate in (1e-3, 2e-3, 4e-3) for factor in (1, 10)}


@pytest.mark.parametrize(
    ("best", "tried", "chosen"),
    [
        (8e-3, [1e-3, 2e-3, 4e-3, 8e-3, 16e-3], 8e-3),
        (2e-3, [1e-3, 2e-3, 4e-3], 2e-3),
        (1e-4, [1e-3, 2e-3, 4e-3, 5e-4, 2.5e-4], 2.5e-4),
    ],
)
def test_a_scheme_that_learns_nothing_tries_rates_alone(best, tried, chosen):
    """The ratio of the last two is kept beyond the end; an optimum inside extends nothing."""
    choice, asked = searched(bowl(best), "alibi")
    assert choice == pytest.approx((chosen, 1.0))
    assert [rate for rate, _ in asked] == pytest.approx(tried)


def test_a_trial_that_diverges_is_never_chosen():
    choice, _ = searched(lambda rate, factor: math.inf if rate > 1e-3 else 3.0, extensions=0)
    assert choice.learning_rate == 1e-3
    refused("compare.sweep.learning_rate", lambda: searched(lambda rate, factor: math.inf))


def test_a_trial_is_judged_at_the_training_length():
    """Not at a shorter length that is measured too, and not by a task."""
    losses = {4: 1.0, 8: 2.0, 16: 3.0}
    rows = [{"length": n, "train_length": 8, "window_nll": loss, "error": None} for n, loss in losses.items()]
    task = {"length": 8, "train_length": 8, "task": "copy", "error": None}
    assert training_length_loss([task, *rows]) == 2
    assert training_length_loss([rows[0], rows[2]]) == 3


def test_the_config_of_a_trial():
    base = config({"name": "t5"}, train={"learning_rate_factors": {"shared/*": 2.0}})
    trial = trial_config(base, Choice(4e-3, 10), ("shared/*",))
    assert (trial.train.learning_rate, trial.train.learning_rate_factors) == (4e-3, {"shared/*": 20.0})
    assert (trial.seed, trial.compare.sweep.learning_rate) == (1000, (4e-3,))
    assert tuned(base, Choice(3e-3, 1), ("shared/*",)).train == base.train


@pytest.fixture
def values(tmp_path):
    for number in range(12):
        words = " ".join(["brown", "fox", "lazy", "dog", "sleeps"][(number + n * n) % 5] for n in range(60))
        (tmp_path / f"{number}.txt").write_text(f"{number} {words}")
    drawn = {"name": "randomised", "max_length": 40, "test": "random", "train": {"learning_rate": 3e-3}}
    return {
        "name": "swept",
        "output": str(tmp_path / "runs"),
        "monitor": {"tensorboard": False},
        "data": {"source": "files", "paths": [f"{tmp_path}/*.txt"], "held_out": 0.4},
        "model": {"num_layers": 1, "model_dim": 16, "num_heads": 2},
        "train": {"length": 8, "batch_tokens": 64, "steps": 6, "warmup_steps": 1, "log_every": 3},
        "evaluate": {"lengths": [8, 16], "tokens": 64, "batch_tokens": 64},
        "compare": {
            "seeds": [0, 1],
            "together": 4,
            "schemes": [{"name": "t5", "num_buckets": 4, "max_distance": 6}, drawn],
            "sweep": {"learning_rate": [1e-3, 1e-2], "position_factor": [1, 10], "extensions": 0},
        },
    }


def test_nothing_is_reported_on_the_text_of_the_trials(values):
    swept = parse(values)
    documents = evaluation_documents(Setup(swept)), evaluation_documents(Setup(swept), trials=True)
    texts = [{document.tobytes() for document in part} for part in documents]
    assert texts[0]
    assert texts[1]
    assert not texts[0] & texts[1]
    everything = evaluation_documents(Setup(parse({**values, "compare": {}})))
    assert texts[0] | texts[1] == {document.tobytes() for document in everything}
    values["data"]["held_out"] = 1e-9
    refused("compare.sweep", lambda: compare(parse(values)))


@pytest.mark.slow
@pytest.mark.usefixtures("unpainted")
def test_a_comparison_with_a_sweep_from_text_to_page(values, monkeypatch):
    """The trials are one program, and so are both seeds of a scheme; an entry with its own rate is not swept."""
    jax.devices()  # this process's own devices are settled before the flags of its children are set
    monkeypatch.setenv("XLA_FLAGS", " ".join(QUICK))
    directory = compare(parse(values))
    trials = read_rows(directory / "trials.jsonl")
    tried = {(row["label"], row["learning_rate"], row["position_factor"]) for row in trials}
    assert tried == {("t5", rate, factor) for rate in (1e-3, 1e-2) for factor in (1, 10)}
    at_length = [row for row in trials if row["length"] == 8]
    (best,) = [row for row in at_length if row["chosen"]]
    assert best["window_nll"] == min(row["window_nll"] for row in at_length)
    rows = read_rows(directory / "results.jsonl")
    wanted = [(label, seed, length) for label in ("t5", "randomised") for seed in (0, 1) for length in (8, 16)]
    assert [(row["label"], row["seed"], row["length"]) for row in rows] == wanted
    assert f"learning_rate: {best['learning_rate']}" in (directory / "t5-seed0" / "config.yaml").read_text()
    for label in ("t5", "randomised"):  # whose seeds draw other positions when they are measured
        again = {row["length"]: row["window_nll"] for row in evaluate(directory / f"{label}-seed1")}
        measured = {row["length"]: row["window_nll"] for row in rows if (row["label"], row["seed"]) == (label, 1)}
        assert again == pytest.approx(measured)
    assert "Learning rates, chosen by the loss" in (directory / "index.html").read_text()

    times = {path: path.stat().st_mtime_ns for path in directory.glob("*/*.json*")}
    values["compare"]["sweep"]["learning_rate"] = [1e-3, 3e-3, 1e-2]
    values["compare"]["together"] = 2
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ValueError, match=r"2 of 4 trainings failed: t5-seed0: trial t5-rate0\.003-factor1: no mess"):
        compare(parse(values))
    assert {path: path.stat().st_mtime_ns for path in times} == times
