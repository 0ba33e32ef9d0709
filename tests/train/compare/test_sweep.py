"""Trials: what is tried, what is chosen, and on which text."""

import math

import pytest

from train.compare.compare import compare
from train.compare.sweep import Choice, Trial, neighbours, sweep, trial_config, tuned
from train.compare.training import DIVERGED
from train.config import parse
from train.evaluate.saved import evaluate, evaluation_documents, read_rows
from train.model.build import learned_positions

SWEEP = {"learning_rate": [1e-3, 2e-3, 4e-3], "position_factor": [1, 10], "extensions": 2}


def config(scheme="rope", sweep=None, **values):
    return parse({"scheme": scheme, "compare": {"sweep": sweep or SWEEP}, **values})


def swept(settings):
    return parse({"compare": {"sweep": settings}}).compare.sweep


def runner(loss):
    """A stub of the trainings, whose loss is a formula, and the list of the choices that it was given."""
    asked = []

    def run(configs):
        for each in configs:
            factors = set(each.train.learning_rate_factors.values()) or {1.0}
            choice = Choice(each.train.learning_rate, factors.pop())
            asked.append(choice)
            found = loss(*choice)
            measured = {"length": 32, "train_length": 32, "error": None, "window_nll": found}
            yield [measured if math.isfinite(found) else {"error": DIVERGED}]

    return run, asked


def bowl(rate, factor):
    """A loss with its minimum at a rate of 0.008 and a factor of 100."""
    return abs(math.log(rate / 8e-3)) + abs(math.log(factor / 100.0))


def test_an_optimum_at_the_end_of_the_grid_extends_it():
    run, asked = runner(bowl)
    choice, trials = sweep(config({"name": "t5"}), swept(SWEEP), run)
    # (8e-3, 10) and (4e-3, 100) first, of which the latter is better; then (8e-3, 100).
    assert choice == pytest.approx((8e-3, 100.0))
    assert len(trials) == len(asked) == len(set(asked))
    assert set(asked) >= {Choice(rate, factor) for rate in (1e-3, 2e-3, 4e-3) for factor in (1, 10)}


def test_no_factor_is_tried_for_a_scheme_that_learns_nothing():
    run, asked = runner(bowl)
    choice, _ = sweep(config("alibi"), swept(SWEEP), run)
    assert choice == pytest.approx((8e-3, 1.0))
    assert [rate for rate, _ in asked] == pytest.approx([1e-3, 2e-3, 4e-3, 8e-3, 16e-3])


def test_an_optimum_inside_the_grid_extends_nothing():
    run, asked = runner(lambda rate, factor: abs(math.log(rate / 2e-3)))
    assert sweep(config("rope"), swept(SWEEP), run)[0].learning_rate == 2e-3
    assert len(asked) == 3


def test_a_trial_that_diverges_is_never_chosen():
    run, _ = runner(lambda rate, factor: math.inf if rate > 1e-3 else 3.0)
    assert sweep(config("rope"), swept({**SWEEP, "extensions": 0}), run)[0].learning_rate == 1e-3
    run, _ = runner(lambda rate, factor: math.inf)
    with pytest.raises(ValueError, match="rope: all trials diverged; try lower"):
        sweep(config("rope"), swept(SWEEP), run)


def test_neighbours_of_a_choice_keep_the_ratio_of_the_last_two_values():
    tried = [Choice(rate, factor) for rate in (1.0, 4.0) for factor in (2.0, 8.0, 16.0)]
    assert neighbours(Choice(4.0, 8.0), tried) == [Choice(16.0, 8.0)]
    assert neighbours(Choice(1.0, 16.0), tried) == [Choice(0.25, 16.0), Choice(1.0, 32.0)]
    assert neighbours(Choice(16.0, 8.0), [*tried, Choice(16.0, 8.0)]) == [
        Choice(64.0, 8.0), Choice(16.0, 2.0), Choice(16.0, 16.0),
    ]  # fmt: skip
    assert neighbours(Choice(4.0, 8.0), [Choice(4.0, 8.0)]) == []


@pytest.mark.parametrize(
    ("scheme", "names"),
    [
        ("rope", ()),
        ("alibi", ()),
        ("t5", ("shared/*",)),
        ({"name": "fire", "threshold": 4}, ("*/learned/bias/*",)),
        ("ssmax", ("*/learned/scale/*",)),
        ("pope", ("*/learned/features/*",)),
        ({"name": "learned", "max_length": 32}, ("embedding/*",)),
        ("performer", ()),
    ],
)
def test_what_a_scheme_learns_of_positions(scheme, names):
    assert learned_positions(config(scheme)) == names


def test_the_config_of_a_trial():
    base = config({"name": "t5"}, train={"learning_rate_factors": {"shared/*": 2.0}})
    trial = trial_config(base, Choice(4e-3, 10), ("shared/*",))
    assert trial.train.learning_rate == 4e-3
    assert trial.train.learning_rate_factors == {"shared/*": 20.0}
    assert trial.seed == 1000
    assert trial.compare.sweep.learning_rate == (4e-3,)
    assert tuned(base, Choice(3e-3, 1), ("shared/*",)).train == base.train


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({"learning_rate": [2e-3, 1e-3]}, r"compare\.sweep\.learning_rate: expected rising values above 0"),
        ({"position_factor": [0, 1]}, r"compare\.sweep\.position_factor: expected rising values above 0"),
        ({"position_factor": []}, r"position_factor is empty; \[1\] would work"),
        ({"extensions": -1}, r"extensions must not be negative"),
    ],
)
def test_sweeps_that_make_no_sense_are_refused(sweep, message):
    with pytest.raises(ValueError, match=message):
        config("rope", sweep)


@pytest.fixture
def values(tmp_path):
    for number in range(12):
        words = " ".join(["brown", "fox", "lazy", "dog", "sleeps"][(number + n * n) % 5] for n in range(60))
        (tmp_path / f"{number}.txt").write_text(f"{number} {words}")
    return {
        "name": "swept", "output": str(tmp_path / "runs"), "monitor": {"tensorboard": False},
        "data": {"source": "files", "paths": [f"{tmp_path}/*.txt"], "held_out": 0.4},
        "model": {"num_layers": 1, "model_dim": 16, "num_heads": 2},
        "train": {"length": 8, "batch_tokens": 64, "steps": 6, "warmup_steps": 1, "log_every": 3},
        "evaluate": {"lengths": [8, 16], "tokens": 64, "batch_tokens": 64},
        "compare": {
            "seeds": [0, 1], "together": 4, "schemes": [{"name": "t5", "num_buckets": 4, "max_distance": 6}],
            "sweep": {"learning_rate": [1e-3, 1e-2], "position_factor": [1, 10], "extensions": 0},
        },
    }  # fmt: skip


def test_nothing_is_reported_on_the_text_of_the_trials(values):
    swept = parse(values)
    documents = evaluation_documents(swept), evaluation_documents(swept, trials=True)
    texts = [{document.tobytes() for document in part} for part in documents]
    assert texts[0]
    assert texts[1]
    assert not texts[0] & texts[1]
    everything = evaluation_documents(parse({**values, "compare": {}}))
    assert texts[0] | texts[1] == {document.tobytes() for document in everything}


def test_a_single_held_out_document_is_not_enough(values):
    values["data"]["held_out"] = 1e-9
    with pytest.raises(ValueError, match=r"compare\.sweep: the held-out text is a single document"):
        compare(parse(values))


@pytest.mark.slow
def test_a_comparison_with_a_sweep_from_text_to_page(values, monkeypatch):
    directory = compare(parse(values))
    trials = read_rows(directory / "trials.jsonl")
    assert {(row["learning_rate"], row["position_factor"]) for row in trials} == {
        (1e-3, 1), (1e-3, 10), (1e-2, 1), (1e-2, 10),
    }  # fmt: skip
    at_length = [row for row in trials if row["length"] == 8]
    (best,) = [row for row in at_length if row["chosen"]]
    assert best["window_nll"] == min(row["window_nll"] for row in at_length)
    rows = read_rows(directory / "results.jsonl")
    assert [(row["seed"], row["length"]) for row in rows] == [(seed, length) for seed in (0, 1) for length in (8, 16)]
    run = parse({**values, "output": str(directory), "name": "t5-seed0"}).directory
    assert f"learning_rate: {best['learning_rate']}" in (run / "config.yaml").read_text()
    for seed in (0, 1):  # the comparison measured both in one program; here each is measured by itself
        again = {row["length"]: row["window_nll"] for row in evaluate(directory / f"t5-seed{seed}")}
        assert again == pytest.approx({row["length"]: row["window_nll"] for row in rows if row["seed"] == seed})
    page = (directory / "index.html").read_text()
    assert "Every trial" in page
    assert "factor for positions" in page
    times = {path: path.stat().st_mtime_ns for path in directory.glob("*/*.json*")}
    values["compare"]["sweep"]["learning_rate"] = [1e-3, 3e-3, 1e-2]
    values["compare"]["together"] = 2
    compare(parse(values))
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert len({row["learning_rate"] for row in read_rows(directory / "trials.jsonl")}) == 3


@pytest.mark.slow
def test_seeds_that_draw_positions_at_evaluation_draw_their_own(values):
    """Even though one process measures them all."""
    values["compare"] = {
        "seeds": [0, 1],
        "together": 2,
        "schemes": [{"name": "randomised", "max_length": 40, "test": "random"}],
    }
    directory = compare(parse(values))
    rows = read_rows(directory / "results.jsonl")
    for seed in (0, 1):
        again = {row["length"]: row["window_nll"] for row in evaluate(directory / f"randomised-seed{seed}")}
        assert again == pytest.approx({row["length"]: row["window_nll"] for row in rows if row["seed"] == seed})


def test_a_trial_is_judged_at_the_training_length():
    """Not at a shorter length that is measured too, and not by a task."""
    losses = {4: 1.0, 8: 2.0, 16: 3.0}
    rows = [{"length": n, "train_length": 8, "window_nll": loss, "error": None} for n, loss in losses.items()]
    task = {"length": 8, "train_length": 8, "task": "copy", "error": None}
    assert Trial(Choice(1.0, 1.0), [task, *rows]).loss == 2
    assert Trial(Choice(1.0, 1.0), [rows[0], rows[2]]).loss == 3
