"""What a comparison trains, in which order, and what it does when a part is finished or fails."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from flags import QUICK
from rich.console import Console

from train.checkpoint.directory import RESULTS
from train.compare import compare as module
from train.compare.compare import _passing_on, compare, finished, run_group, trainings
from train.compare.training import ASKED
from train.config import dump, load, parse, to_dict
from train.data import cache
from train.data.cache import TOKENS
from train.data.pipeline import held_out_documents
from train.evaluate.saved import EVALUATION, evaluate, read_rows, write_rows

LENGTHS = (8, 16, 32)
WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "and",
    "then",
    "sleeps",
    "under",
    "a",
    "tree",
)


@pytest.fixture
def values(tmp_path, monkeypatch):
    # One device in each process that a test starts, and quick compilation.
    jax.devices()  # this process's own devices are settled before the flags of its children are set
    monkeypatch.setenv("XLA_FLAGS", " ".join(QUICK))
    for number in range(12):
        text = " ".join(WORDS[(number + 3 * index + index // 7) % len(WORDS)] for index in range(150))
        (tmp_path / f"{number}.txt").write_text(text)
    return {
        "name": "small",
        "output": str(tmp_path / "runs"),
        "data": {"source": "files", "paths": [f"{tmp_path}/*.txt"], "held_out": 0.2},
        "model": {"num_layers": 1, "model_dim": 16, "num_heads": 2},
        "train": {"length": 8, "batch_tokens": 64, "steps": 4, "warmup_steps": 1, "log_every": 2},
        "evaluate": {"lengths": list(LENGTHS), "tokens": 256, "batch_tokens": 64},
        "compare": {
            "seeds": [0, 1],
            "schemes": [
                "rope",
                {"name": "rope", "label": "rope + NTK", "extend": {"frequencies": NTK}},
                {"name": "alibi", "label": "linear bias"},
            ],
        },
    }


NTK = {"name": "dynamic-ntk", "original_length": 8}


def fake(training):
    """Writes the files of a finished training, without training."""
    training.directory.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "label": entry.label, "base": training.scheme.label if entry.extend else None, "seed": training.seed,
            "length": length, "train_length": training.train.length, "window_perplexity": 5.0, "window_tokens": 10,
            "last_perplexity": 4.0, "last_tokens": 5, "tokens_per_second": 1e4, "error": None,
            "train_tokens_per_second": 1e3, "peak_memory_bytes": 2**20,
        }
        for entry in training.compare.schemes for length in training.evaluate.lengths
    ]  # fmt: skip
    write_rows(training.directory / RESULTS, rows)
    (training.directory / ASKED).write_text(dump(training))
    (training.directory / "versions.json").write_text(json.dumps({"jax": "0"}))
    (training.directory / "config.yaml").write_text(dump(training))


@pytest.fixture
def started(monkeypatch):
    """Names of the trainings that were started; none of them really trains."""
    names = []

    def run(group, trials):
        names.extend(training.name for training in group)
        for training in group:
            fake(training)

    monkeypatch.setattr(module, "run_group", run)
    return names


def every_training(values):
    return [training for group in trainings(parse(values)) for training in group]


def silent():
    return Console(file=io.StringIO(), width=160)


def test_every_scheme_trains_once_per_seed_and_extensions_do_not(values):
    planned = every_training(values)
    assert [training.name for training in planned] == [
        "rope-seed0", "rope-seed1", "linear-bias-seed0", "linear-bias-seed1",
    ]  # fmt: skip
    assert [training.seed for training in planned] == [0, 1, 0, 1]
    assert [entry.label for entry in planned[0].compare.schemes] == ["rope", "rope + NTK"]
    assert [entry.label for entry in planned[2].compare.schemes] == ["linear bias"]
    assert planned[1].directory == Path(values["output"]) / "small" / "rope-seed1"
    assert planned[3].scheme.name == "alibi"


def test_members_differ_from_the_base_config_by_scheme_and_seed_alone(values):
    config = parse(values)
    for training in every_training(values):
        same = dataclasses.replace(
            training, name=config.name, output=config.output, seed=config.seed, scheme=config.scheme,
            compare=config.compare,
        )  # fmt: skip
        assert same == config


def test_an_entry_may_train_with_a_rate_of_its_own(values, started):
    """The same scheme twice, and an extension of one of them; a sweep leaves such entries alone."""
    slow = {"name": "rope", "label": "slow", "train": {"learning_rate": 1e-4, "learning_rate_factors": {"embed": 2.0}}}
    values["compare"]["schemes"] = ["rope", slow, {**slow, "label": "slow + NTK", "extend": {"frequencies": NTK}}]
    values["compare"]["sweep"] = {"learning_rate": [1e-3]}
    plain, slow = trainings(parse(values))
    assert (plain[0].train.learning_rate, slow[0].train.learning_rate) == (3e-3, 1e-4)
    assert slow[0].train.learning_rate_factors == {"embed": 2.0}
    assert [entry.label for entry in slow[0].compare.schemes] == ["slow", "slow + NTK"]
    assert slow[0].train.steps == plain[0].train.steps
    assert parse(to_dict(slow[0])) == slow[0]
    assert parse(to_dict(parse(values))) == parse(values)
    with pytest.raises(ValueError, match=r"belongs to entries of compare\.schemes"):
        parse({"scheme": {"name": "rope", "train": {"learning_rate": 1e-3}}})
    compare(parse({**values, "compare": {**values["compare"], "schemes": values["compare"]["schemes"][1:]}}), silent())
    assert started == ["slow-seed0", "slow-seed1"]


@pytest.mark.parametrize(
    ("schemes", "message"),
    [
        ([{"name": "rope", "train": {"length": 16}}], r"train\.length is the same for all schemes"),
        ([{"name": "rope", "train": {"rate": 16}}], "unknown key"),
        ([], "compare.schemes is empty"),
        (["ropee"], "unknown scheme 'ropee'; did you mean 'rope'"),
        (["rope", {"name": "rope", "label": "x", "extend": {"frequency": NTK}}], "unknown slot 'frequency'"),
        ([{"name": "rope", "extend": {"frequencies": NTK}}], "'rope' extends a 'rope' that is not trained here"),
        (
            [
                {"name": "rope", "label": "a", "base": 500.0},
                {"name": "rope", "label": "b", "extend": {"frequencies": NTK}},
            ],
            "'b' extends a 'rope' that is not trained here",
        ),
        (["rope", {"name": "rope", "label": "again"}], "'rope' and 'again' are the same"),
        ([{"name": "rope", "label": "a b"}, {"name": "alibi", "label": "a-b"}], "labels name directories"),
    ],
)
def test_lists_that_cannot_be_compared_are_refused(values, schemes, message):
    values["compare"]["schemes"] = schemes
    with pytest.raises(ValueError, match=message):
        trainings(parse(values))


def test_masked_token_models_have_no_perplexity(values, started):
    values["model"]["causal"] = False
    with pytest.raises(ValueError, match=r"model\.causal is false: .* no perplexity"):
        compare(parse(values), silent())
    assert started == []


def test_lengths_that_cannot_be_measured_are_refused_before_training(values, started):
    values["evaluate"] = {"lengths": [8, 4096]}
    with pytest.raises(ValueError, match="length 4096 needs a held-out document of 4097 tokens"):
        compare(parse(values), silent())
    assert started == []


def test_results_are_in_the_order_of_the_list_and_the_report_is_written(values, started):
    directory = compare(parse(values), silent())
    rows = read_rows(directory / RESULTS)
    found = [(row["label"], row["seed"], row["length"]) for row in rows]
    labels = ("rope", "rope + NTK", "linear bias")
    assert found == [(label, seed, length) for label in labels for seed in (0, 1) for length in LENGTHS]
    assert (directory / "figure.png").read_bytes().startswith(b"\x89PNG")
    page = (directory / "index.html").read_text()
    assert "rope + NTK" in page
    assert "original_length: 8" in page
    assert load(directory / "config.yaml") == parse(values)


@pytest.mark.usefixtures("unpainted")
def test_what_is_finished_is_not_run_again(values, started):
    compare(parse(values), silent())
    assert len(started) == 4
    compare(parse(values), silent())
    assert len(started) == 4
    values["compare"]["seeds"] = [0, 1, 2]
    compare(parse(values), silent())
    assert started[4:] == ["rope-seed2", "linear-bias-seed2"]


@pytest.mark.usefixtures("unpainted")
def test_a_new_extension_runs_only_what_it_concerns(values, started):
    compare(parse(values), silent())
    values["compare"]["schemes"].append(
        {"name": "alibi", "label": "windowed", "extend": {"mask": {"name": "window", "size": 8}}}
    )
    compare(parse(values), silent())
    assert started[4:] == ["linear-bias-seed0", "linear-bias-seed1"]


def test_a_new_length_measures_every_model_again(values, started):
    compare(parse(values), silent())
    trained = list(started)
    values["evaluate"]["lengths"] = [*LENGTHS, 64]
    compare(parse(values), silent())
    assert started[4:] == trained


def test_half_a_result_is_not_finished(values):
    training = every_training(values)[0]
    assert not finished(training)
    fake(training)
    assert finished(training)
    (training.directory / ASKED).unlink()
    assert not finished(training)


@pytest.mark.usefixtures("unpainted")
def test_trainings_of_another_config_are_refused_before_anything_runs(values, started):
    compare(parse(values), silent())
    before = (parse(values).directory / RESULTS).read_bytes()
    values["train"]["steps"] = 9
    with pytest.raises(ValueError, match=r"rope-seed0 belongs to another config: train\.steps was 4, now 9"):
        compare(parse(values), silent())
    assert len(started) == 4
    assert (parse(values).directory / RESULTS).read_bytes() == before


@pytest.mark.usefixtures("unpainted")
def test_text_is_encoded_once_for_all_members_and_the_comparison_resumes(values, started, monkeypatch):
    monkeypatch.setattr(cache, "_SMALL_BYTES", 0)
    directory = compare(parse(values), silent())
    assert len(os.listdir(directory / TOKENS)) == 1
    assert os.listdir(directory.parent) == [directory.name]
    monkeypatch.setattr(cache, "build_piece", None)
    for training in every_training(values):
        held_out_documents(training)
    values["compare"]["schemes"].append("cope")
    compare(parse(values), silent())
    assert len(started) == 6


def test_directories_of_other_things_are_left_alone(values, started, tmp_path):
    directory = tmp_path / "runs" / "small"
    directory.mkdir(parents=True)
    for name in ("metrics.jsonl", "thesis.tex"):
        (directory / name).write_text("mine")
        with pytest.raises(ValueError, match=rf"has files that are not of a comparison \({name}\)"):
            compare(parse(values), silent())
        (directory / name).unlink()
    (directory / "config.yaml").write_text("mine: true")
    with pytest.raises(ValueError, match="unknown key 'mine'"):
        compare(parse(values), silent())
    assert (directory / "config.yaml").read_text() == "mine: true"


@pytest.mark.usefixtures("unpainted")
def test_one_failure_is_one_line_and_the_others_are_reported(values, monkeypatch):
    def run(group, trials):
        if group[0].name == "rope-seed1":
            return "no memory"
        fake(group[0])
        return None

    monkeypatch.setattr(module, "run_group", run)
    config = parse(values)
    with pytest.raises(ValueError, match=r"^1 of 4 trainings failed: rope-seed1: no memory$"):
        compare(config, silent())
    rows = read_rows(config.directory / RESULTS)
    failed = {(row["label"], row["seed"]) for row in rows if row["error"] == "no memory"}
    assert failed == {("rope", 1), ("rope + NTK", 1)}
    assert "rope at 8, 16, 32: no memory" in (config.directory / "index.html").read_text()


def test_nothing_is_reported_when_all_fail(values, monkeypatch):
    monkeypatch.setattr(module, "run_group", lambda group, trials: "no memory")
    config = parse(values)
    with pytest.raises(ValueError, match="4 of 4 trainings failed"):
        compare(config, silent())
    assert not (config.directory / RESULTS).exists()


def test_a_member_that_cannot_start_says_why_in_one_line(values, capfd):
    values["train"]["length"] = values["train"]["batch_tokens"] = 64000
    training = every_training(values)[0]
    training.directory.parent.mkdir(parents=True)
    error = run_group([training], trials=False)
    assert "train.length=64000" in error
    assert "\n" not in error
    assert "Traceback" not in capfd.readouterr().err


def test_a_crash_of_a_member_is_one_line_and_its_log_is_kept(values, monkeypatch):
    training = every_training(values)[0]
    training.directory.parent.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    error = run_group([training], trials=False)
    assert error.startswith("no message (status 1")
    assert Path(f"{training.directory}.log").exists()


@pytest.mark.slow
def test_a_comparison_from_text_to_page(values, capfd):
    values["compare"]["seeds"] = [0]
    values["compare"]["schemes"][-1] = {"name": "learned", "max_length": 8}
    config = parse(values)
    directory = compare(config, silent())
    rows = read_rows(directory / RESULTS)
    row_of = {(row["label"], row["length"]): row for row in rows}
    assert len(rows) == 3 * len(LENGTHS)
    trained, extended = row_of["rope", 8], row_of["rope + NTK", 8]
    assert trained["train_tokens_per_second"] > 0
    assert trained["peak_memory_bytes"] > 2**20
    assert extended["train_tokens_per_second"] is None
    assert 1 < trained["window_perplexity"] < 1000
    # Up to the training length dynamic NTK changes nothing; beyond it, the frequencies differ.
    assert extended["window_nll"] == trained["window_nll"]
    assert row_of["rope + NTK", 32]["window_nll"] != row_of["rope", 32]["window_nll"]
    assert len({row["last_tokens"] for row in rows if row["error"] is None}) == 1
    assert row_of["learned", 8]["error"] is None
    assert row_of["learned", 16]["error"]
    capfd.readouterr()

    before = {path: path.stat().st_mtime_ns for path in directory.glob("*/*.json*")}
    compare(config, silent())
    assert {path: path.stat().st_mtime_ns for path in directory.glob("*/*.json*")} == before

    rows = evaluate(directory / "rope-seed0", ["evaluate.lengths=[8, 16, 32]"], silent())
    wanted = [row_of["rope", length]["window_nll"] for length in LENGTHS]
    assert [row["window_nll"] for row in rows] == pytest.approx(wanted, rel=1e-5)
    assert rows[0]["train_tokens_per_second"] == trained["train_tokens_per_second"]
    assert read_rows(directory / "rope-seed0" / EVALUATION) == rows
    with pytest.raises(ValueError, match=r"is trained, so this cannot change: train\.steps was 4, now 5"):
        evaluate(directory / "rope-seed0", ["train.steps=5"], silent())


def test_a_request_to_stop_reaches_the_member_and_ends_the_comparison():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    def ask_to_stop():
        with _passing_on(signal.SIGTERM, process):
            os.kill(os.getpid(), signal.SIGTERM)
            assert process.wait(timeout=30) == -signal.SIGTERM

    with pytest.raises(KeyboardInterrupt):
        ask_to_stop()
