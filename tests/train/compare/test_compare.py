"""A comparison: what it trains and measures, what it does not repeat, and what a failure leaves."""

import dataclasses
import io
import sys
from pathlib import Path

import jax
import pytest
from flags import QUICK
from refusals import refused
from rich.console import Console

from train.checkpoint.directory import RESULTS
from train.compare.compare import compare
from train.compare.trainings import trainings
from train.config import load, parse, to_dict
from train.evaluate.saved import EVALUATION, evaluate
from train.runtime.rows import read_rows

SENTENCE = "the quick brown fox jumps over a lazy dog and then sleeps under that tree"
LENGTHS = [8, 16, 32]
NTK = {"name": "dynamic-ntk", "original_length": 8}
LEARNED = {"name": "learned", "label": "a learned one", "max_length": 8}
SCHEMES = ["rope", {"name": "rope", "label": "rope + NTK", "extend": {"frequencies": NTK}}, LEARNED]


def values_in(folder):
    """A comparison of small texts that are written into a folder."""
    words = SENTENCE.split()
    for number in range(12):
        text = " ".join(words[(number + 3 * index + index // 7) % len(words)] for index in range(150))
        (folder / f"{number}.txt").write_text(text)
    return {
        "name": "small",
        "output": str(folder / "runs"),
        "data": {"source": "files", "paths": [f"{folder}/*.txt"], "held_out": 0.2},
        "model": {"num_layers": 1, "model_dim": 16, "num_heads": 2},
        "train": {"length": 8, "batch_tokens": 64, "steps": 4, "warmup_steps": 1, "log_every": 2},
        "evaluate": {"lengths": LENGTHS, "tokens": 256, "batch_tokens": 64},
        "compare": {"seeds": [0], "schemes": SCHEMES},
    }


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    return values_in(tmp_path_factory.mktemp("compare"))


def with_schemes(values, schemes, **compare):
    return parse({**values, "compare": {**values["compare"], "schemes": schemes, **compare}})


def silent():
    return Console(file=io.StringIO(), width=160)


def written_times(directory):
    return {path: path.stat().st_mtime_ns for path in directory.glob("*/*.json*")}


@pytest.fixture(scope="module")
def compared(values):
    """The directory of the comparison; its two trainings are processes of their own."""
    return compared_in_processes(values)


def compared_in_processes(values):
    """The directory of a comparison whose processes have one device each."""
    jax.devices()  # this process's own devices are settled before the flags of its children are set
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", " ".join(QUICK))
        return compare(parse(values), silent())


@pytest.fixture
def no_memory(monkeypatch, tmp_path):
    """Every process that is started reads what it is asked for, and ends with an error."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\ncat > /dev/null\necho 'error: no memory' >&2\necho 'core dumped' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.slow
def test_a_comparison_from_text_to_page(values, compared):
    rows = read_rows(compared / RESULTS)
    labels = ["rope", "rope + NTK", "a learned one"]
    assert [(row["label"], row["seed"], row["length"]) for row in rows] == [(x, 0, n) for x in labels for n in LENGTHS]
    row_of = {(row["label"], row["length"]): row for row in rows}
    trained, extended = row_of["rope", 8], row_of["rope + NTK", 8]
    assert trained["train_tokens_per_second"] > 0
    assert trained["peak_memory_bytes"] > 2**20
    assert extended["train_tokens_per_second"] is None
    assert 1 < trained["window_perplexity"] < 1000
    # Up to the training length dynamic NTK changes nothing; beyond it, the frequencies differ.
    assert extended["window_nll"] == trained["window_nll"]
    assert row_of["rope + NTK", 32]["window_nll"] != row_of["rope", 32]["window_nll"]
    assert len({row["last_tokens"] for row in rows if row["error"] is None}) == 1
    assert row_of["a learned one", 8]["error"] is None
    assert "8" in row_of["a learned one", 16]["error"]
    assert (compared / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "rope + NTK" in (compared / "index.html").read_text()
    assert load(compared / "config.yaml") == parse(values)


@pytest.mark.slow
def test_processes_that_share_the_trainings_measure_the_same_but_no_costs(values, compared):
    shared = {**values, "name": "shared", "compare": {**values["compare"], "processes": 2}}
    rows, alone = read_rows(compared_in_processes(shared) / RESULTS), read_rows(compared / RESULTS)
    assert [(row["label"], row["length"], row["error"]) for row in rows] == [
        (row["label"], row["length"], row["error"]) for row in alone
    ]
    measured = [row["window_nll"] for row in alone if row["error"] is None]
    assert [row["window_nll"] for row in rows if row["error"] is None] == pytest.approx(measured, rel=1e-5)
    assert {row["train_tokens_per_second"] for row in rows} == {row["peak_memory_bytes"] for row in rows} == {None}


@pytest.mark.slow
def test_evaluate_finds_the_numbers_of_the_comparison(compared):
    rows = evaluate(compared / "rope-seed0", ["evaluate.lengths=[8, 16, 32]"], silent())
    wanted = [row for row in read_rows(compared / RESULTS) if row["label"] == "rope"]
    assert [row["window_nll"] for row in rows] == pytest.approx([row["window_nll"] for row in wanted], rel=1e-5)
    assert rows[0]["train_tokens_per_second"] == wanted[0]["train_tokens_per_second"]
    assert read_rows(compared / "rope-seed0" / EVALUATION) == rows
    refused("train.steps", lambda: evaluate(compared / "rope-seed0", ["train.steps=5"], silent()))


@pytest.mark.slow
@pytest.mark.usefixtures("unpainted", "no_memory")
def test_only_what_is_new_runs_and_one_failure_is_one_line(values, compared):
    """Everything that is finished is reported, also beside trainings that fail: here, all that are started."""
    before = written_times(compared)
    compare(parse(values), silent())
    windowed = {**LEARNED, "label": "windowed", "extend": {"mask": {"name": "window", "size": 4}}}
    with pytest.raises(
        ValueError, match=r"^2 of 3 trainings failed: a-learned-one-seed0: no memory .*; cope-seed0: no"
    ):
        compare(with_schemes(values, [*SCHEMES, windowed, "cope"]), silent())
    rows = read_rows(compared / RESULTS)
    failed = {row["label"] for row in rows if row["error"] and "no memory" in row["error"]}
    assert failed == {"a learned one", "windowed", "cope"}
    assert sum(row["error"] is None for row in rows) == 6
    assert "cope at 8, 16, 32: no memory" in (compared / "index.html").read_text()
    assert (compared / "cope-seed0.log").exists()
    with pytest.raises(ValueError, match=r"2 of 4 trainings failed: rope-seed1.*a-learned-one-seed1"):
        compare(with_schemes(values, SCHEMES, seeds=[0, 1]), silent())
    with pytest.raises(ValueError, match="2 of 2 trainings failed"):
        compare(parse({**values, "evaluate": {**values["evaluate"], "lengths": [8, 16]}}), silent())
    assert written_times(compared) == before


@pytest.mark.parametrize("processes", [1, 2])
def test_a_request_to_stop_ends_the_training_and_the_comparison(values, tmp_path, monkeypatch, processes):
    """Every process that is started asks this one to stop at once, and would then sleep for a minute."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nkill -TERM $PPID\ncat > /dev/null\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    config = parse({**values, "name": "stopped", "compare": {**values["compare"], "processes": processes}})
    with pytest.raises(KeyboardInterrupt):
        compare(config, silent())
    assert len(list(config.directory.glob("*.log"))) == processes


def test_trainings_differ_from_the_config_by_scheme_and_seed_alone(values):
    """Every scheme trains once per seed, and extensions do not; an entry may have a rate of its own."""
    slow = {"name": "alibi", "label": "slow", "train": {"learning_rate": 1e-4, "learning_rate_factors": {"embed": 2.0}}}
    extended = {**slow, "label": "slow + window", "extend": {"mask": {"name": "window", "size": 4}}}
    config = with_schemes(values, [*SCHEMES[:2], slow, extended], seeds=[0, 1])
    found = [training for group in trainings(config) for training in group]
    assert [(training.name, training.seed, training.scheme.name) for training in found] == [
        ("rope-seed0", 0, "rope"),
        ("rope-seed1", 1, "rope"),
        ("slow-seed0", 0, "alibi"),
        ("slow-seed1", 1, "alibi"),
    ]
    measured = [[entry.label for entry in training.compare.schemes] for training in found]
    assert measured == [["rope", "rope + NTK"]] * 2 + [["slow", "slow + window"]] * 2
    assert found[1].directory == Path(values["output"]) / "small" / "rope-seed1"
    for training in found:
        assert parse(to_dict(training)) == training
        train = training.train
        if training.scheme.name == "alibi":
            assert (train.learning_rate, train.learning_rate_factors) == (1e-4, {"embed": 2.0})
            train = config.train
        kept = {name: getattr(config, name) for name in ("name", "output", "seed", "scheme", "compare")}
        assert dataclasses.replace(training, train=train, **kept) == config


def test_only_selected_schemes_are_trained_with_all_their_extensions_as_the_same_trainings(values):
    """The results of a part of the list are found again when all of it runs."""
    schemes = [*SCHEMES[:2], "alibi", "nope"]
    whole = trainings(with_schemes(values, schemes))
    for only, numbers in ((["alibi"], [1]), (["nope", "rope + NTK"], [0, 2])):
        found = trainings(with_schemes(values, schemes, only=only))
        assert [[training.compare for training in group] for group in found] == [
            [training.compare for training in whole[number]] for number in numbers
        ]


def listed(*schemes):
    return lambda: trainings(parse({"compare": {"schemes": list(schemes)}}))


def extended(label="x", slot="frequencies", **options):
    return {"name": "rope", "label": label, "extend": {slot: NTK}, **options}


REFUSED = [
    ("compare.schemes", listed()),
    ("compare.schemes", listed("ropee")),
    ("compare.only", lambda: parse({"compare": {"schemes": ["rope", "alibi"], "only": ["alibii"]}})),
    ("train.length", listed({"name": "rope", "train": {"length": 16}})),
    ("'rate'", listed({"name": "rope", "train": {"rate": 16}})),
    ("slot", listed("rope", extended(slot="frequency"))),
    ("compare.schemes", listed(extended())),  # of a rope that is not trained here
    ("'b'", listed({"name": "rope", "label": "a", "base": 500.0}, extended("b"))),
    ("'again'", listed("rope", {"name": "rope", "label": "again"})),
    ("labels", listed({"name": "rope", "label": "a b"}, {"name": "alibi", "label": "a-b"})),
    ("mrope", listed({"name": "mrope", "sections": [3, 3, 3]})),
    ("longformer", listed({"name": "longformer", "dilation": [1, 2, 3]})),
    ("max_length=8", listed({"name": "randomised", "max_length": 8})),
    ("tiny", listed({"name": "gemma3", "label": "tiny"})),
    ("mask", listed({"name": "rope", "mask": {"name": ["a"]}})),
]


@pytest.mark.parametrize(("name", "call"), REFUSED, ids=[name for name, _ in REFUSED])
def test_lists_that_cannot_be_compared_are_refused(name, call):
    refused(name, call)


@pytest.mark.parametrize(
    ("named", "sections"),
    [
        ("model.causal", {"model": {"causal": False}}),
        ("evaluate.lengths", {"evaluate": {"lengths": [8, 4096]}}),
    ],
)
def test_what_cannot_be_measured_is_refused_before_training(values, named, sections):
    config = parse({**values, "name": "new", **sections})
    refused(named, lambda: compare(config, silent()))
    assert not config.directory.exists()


@pytest.mark.slow
def test_trainings_of_another_config_are_refused_before_anything_runs(values, compared):
    before = (compared / RESULTS).read_bytes()
    changed = parse({**values, "train": {**values["train"], "steps": 9}})
    refused("train.steps", lambda: compare(changed, silent()))
    assert (compared / RESULTS).read_bytes() == before


@pytest.mark.parametrize(
    ("name", "named"), [("metrics.jsonl", "metrics.jsonl"), ("thesis.tex", "thesis.tex"), ("config.yaml", "'mine'")]
)
def test_directories_of_other_things_are_left_alone(values, tmp_path, name, named):
    directory = tmp_path / "small"
    directory.mkdir()
    (directory / name).write_text("mine: true")
    refused(named, lambda: compare(parse({**values, "output": str(tmp_path)}), silent()))
    assert (directory / name).read_text() == "mine: true"
