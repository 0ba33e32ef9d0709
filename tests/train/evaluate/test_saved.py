"""Evaluating a saved run of two stages, from its directory to its page."""

import io
import re
from contextlib import nullcontext
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from posjax.nn.huggingface.load import named_parameters
from train.checkpoint.directory import check_run
from train.checkpoint.restore import config_of, restore_model
from train.config import SchemeConfig, load, parse
from train.evaluate import saved
from train.evaluate.mesh import mesh_for
from train.evaluate.saved import EVALUATION, evaluate, evaluation_documents, last_length, read_rows
from train.evaluate.windows import pieces, whole_windows
from train.loop.fit import fit

pytestmark = pytest.mark.usefixtures("unpainted")

CONFIG = """
data: {source: files, paths: [TEXT/*.txt], held_out: 0.2}
model: {num_layers: 1, model_dim: 16, num_heads: 2, mlp_dim: 16}
train: {length: 16, batch_tokens: 64, steps: 3, warmup_steps: 1, log_every: 1, mesh: {data: 1}}
stages:
  - {name: short}
  - {name: long, train: {length: 32, steps: 2}, scheme: {name: rope, base: 500.0}}
monitor: {tensorboard: false, compilation_cache: ""}
evaluate:
  lengths: [16, 64]
  tokens: 128
  batch_tokens: 128
  stride: 8
  tasks: [induction, copy]
  copy: {lengths: [16, 24], cases: 3}
  induction: {lengths: [32], cases: 2, depths: 3}
"""


def text(length, window=100, last=40, label="rope", error=None):
    """A row of one length."""
    if error:
        window = last = 0
    return {"label": label, "length": length, "window_tokens": window, "last_tokens": last, "error": error}


TASK = {"label": "rope", "task": "copy", "length": 16, "error": None}


@pytest.mark.parametrize(
    ("others", "same"),
    [
        ([text(16), text(64)], True),
        ([text(16), TASK, text(64)], True),
        ([text(16), text(64, error="no")], True),
        ([text(16, window=101), text(64)], False),
        ([text(16), text(64, last=41)], False),
        ([text(16)], False),
        ([text(16), text(32)], False),
    ],
)
def test_evaluations_compare_if_they_scored_the_same_tokens_at_the_same_lengths(tmp_path, others, same):
    """Rows of the label that is measured again are replaced."""
    file, own = tmp_path / EVALUATION, [text(16), text(64)]
    assert saved._comparable(file, own) == []
    old = [{**row, "label": "other"} for row in others]
    saved.write_rows(file, [*own, *old])
    assert saved._comparable(file, own) == (old if same else [])
    assert saved._comparable(file, old) == (own if same else [])


@pytest.mark.parametrize(
    ("own", "stage", "wanted"),
    [
        ("rope", "", ("rope", "rope + linear + base")),
        ("rope", "long", ("rope", "rope, long + linear + base")),
        ("released", "", ("mine", "mine + linear + base")),
        (None, "", ("released", "released + linear + base")),
    ],
)
def test_an_extension_is_labelled_by_the_model_and_what_changes(monkeypatch, own, stage, wanted):
    """A trained model has its name as label if it would be the released model's otherwise; None is no run."""
    trained = SimpleNamespace(scheme=SimpleNamespace(label=own))
    monkeypatch.setattr(saved, "is_run", lambda directory: own is not None)
    monkeypatch.setattr(saved, "read_config", lambda directory: trained)
    changes = {"stage": stage, "extend": {"frequencies": {"name": "linear"}, "base": 500.0}}
    entry = SchemeConfig("rope", label=own or "released", **changes)
    label, found = saved._labels("somewhere", SimpleNamespace(name="mine", scheme=entry))
    assert (label, found.label) == wanted
    named = SchemeConfig("rope", label="a label of its own", **changes)
    assert saved._labels("somewhere", SimpleNamespace(name="mine", scheme=named)) == (wanted[0], named)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"evaluate": {"lengths": [32, 64]}, "train": {"length": 16}}, 16),
        ({"evaluate": {"lengths": [8, 64]}, "train": {"length": 16}}, 8),
        ({"evaluate": {"lengths": [64]}, "train": {"length": 16}, "stages": [{}, {"train": {"length": 8}}]}, 8),
    ],
)
def test_the_last_tokens_are_no_more_than_the_shortest_rows_of_training(values, wanted):
    assert last_length(parse(values)) == wanted


@pytest.mark.parametrize(("path", "steps", "wanted"), [("", 5, 16), ("", 0, 16), ("model", 5, 16), ("model", 0, 32)])
def test_a_released_model_that_is_not_trained_has_no_training_length(path, steps, wanted):
    stage = SimpleNamespace(train=SimpleNamespace(length=16))
    config = SimpleNamespace(init=SimpleNamespace(path=path), steps=steps, every_stage=[stage])
    config.evaluate = SimpleNamespace(lengths=(64, 32))
    assert last_length(config) == wanted


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"window_perplexity": 2.345, "last_perplexity": 1.5, "error": None}, "perplexity 2.35, last tokens 1.50"),
        ({"window_perplexity": None, "last_perplexity": None, "error": "no row"}, "no row"),
        ({"task": "copy", "depth": None, "accuracy": 0.125, "error": None}, "copy: 12.5%"),
        ({"task": "copy", "depth": 0.25, "accuracy": 1.0, "error": None}, "copy, depth 0.25: 100.0%"),
        ({"task": "copy", "depth": 0.25, "accuracy": None, "error": "too long"}, "copy, depth 0.25: too long"),
    ],
)
def test_a_row_is_a_line_of_text(row, line):
    assert saved._in_words({"label": "rope", "length": 16, **row}) == f"rope at 16: {line}"


@pytest.mark.parametrize(
    ("stop_loss", "result", "wanted"),
    [
        (0.0, (7, 1.0), {}),
        (2.0, (7, 1.9), {"stop_loss": 2.0, "updates": 20, "updates_to_loss": 7}),
        (2.0, (20, 2.0), {"stop_loss": 2.0, "updates": 20, "updates_to_loss": None}),
        (2.0, (20, None), {"stop_loss": 2.0, "updates": 20, "updates_to_loss": None}),
        (2.0, None, {"stop_loss": 2.0, "updates": 20, "updates_to_loss": None}),
    ],
)
def test_a_training_that_reached_its_loss_has_the_updates_until_then(monkeypatch, stop_loss, result, wanted):
    fitted = result and SimpleNamespace(steps=result[0], final_loss=result[1])
    monkeypatch.setattr(saved, "read_result", lambda directory: fitted)
    stage = parse({"train": {"steps": 20, "warmup_steps": 1, "stop_loss": stop_loss}})
    assert saved._ending(SimpleNamespace(stage=stage, run=SimpleNamespace(directory=None))) == wanted


@pytest.mark.parametrize("measured", [False, True])
def test_only_a_training_of_its_own_has_a_cost(monkeypatch, tmp_path, measured):
    lines = [{"tokens": 8}, {"tokens": 16, "held_out_loss": 2.0}, {"tokens": 24, "held_out_loss": None}]
    monkeypatch.setattr(saved, "read_metrics", lambda directory: lines)
    fitted = SimpleNamespace(tokens_per_second=5.0, peak_memory_bytes=6, seconds={"steps": 7.0})
    monkeypatch.setattr(saved, "read_result", lambda directory: fitted)
    found = saved._costs(tmp_path, SimpleNamespace(only_measured=measured))
    training = {"tokens": [16], "held_out_loss": [2.0]}
    wanted = (5.0, 6, {"steps": 7.0}, training)
    assert tuple(found.values()) == ((None,) * 4 if measured else wanted)
    monkeypatch.setattr(saved, "read_result", lambda directory: None)
    lines.pop(1)
    assert tuple(saved._costs(tmp_path, SimpleNamespace(only_measured=False)).values()) == (None,) * 4


@pytest.mark.parametrize(
    ("sweep", "trials", "wanted"),
    [(False, False, [0, 1, 2, 3, 4]), (True, False, [0, 2, 4]), (True, True, [1, 3])],
)
def test_trials_are_compared_on_every_second_document(monkeypatch, sweep, trials, wanted):
    documents = [np.full(100, number) for number in range(5)]
    monkeypatch.setattr(saved, "held_out_documents", lambda config: documents)
    values = {"evaluate": {"lengths": [16]}, "train": {"length": 16}}
    config = parse({**values, "compare": {"sweep": {"learning_rate": [1e-3, 1e-2]}}} if sweep else values)
    found = [int(each[0]) for each in evaluation_documents(config, trials)]
    assert found == wanted
    del documents[2:]
    assert len(evaluation_documents(config, trials)) == (1 if sweep else 2)
    documents.pop()
    with pytest.raises(ValueError, match=r"compare\.sweep: the held-out text is a single") if sweep else nullcontext():
        evaluation_documents(config, trials)


def test_a_batch_has_as_many_rows_as_the_longest_length_allows(monkeypatch):
    asked = []
    monkeypatch.setattr(saved, "mesh_for", lambda config, rows: asked.append(rows))
    config = parse({"evaluate": {"lengths": [16, 48], "batch_tokens": 100}, "train": {"length": 16}})
    assert saved.measure_runs([saved.SavedRun(None, config)] * 2, [], []) == [[], []]
    assert asked == [2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    for index in range(5):
        (folder / f"{index}.txt").write_text("the quick brown fox jumps over the lazy dog. " * 6)
    file = folder / "tiny.yaml"
    file.write_text(CONFIG.replace("TEXT", str(folder)))
    config = load(file, [f"output={folder / 'runs'}"])
    fit(config)
    return config


@pytest.fixture(scope="module")
def rows(run):
    console = Console(file=io.StringIO(), width=160)
    found = evaluate(run.directory, console=console)
    assert "Copy: right answers" in console.file.getvalue()
    return found


def test_rows_tell_perplexity_and_tasks_apart(run, rows):
    assert read_rows(run.directory / EVALUATION) == rows
    perplexities = [row for row in rows if "task" not in row]
    assert [row["length"] for row in perplexities] == [16, 64]
    found = [(row["task"], row["length"], row["depth"], row["cases"]) for row in rows if "task" in row]
    assert found == [("induction", 32, depth, 2) for depth in (0, 0.5, 1)] + [("copy", n, None, 3) for n in (16, 24)]
    assert all(row["error"] is None for row in rows)
    assert all(0 <= row["accuracy"] <= 1 for row in rows if "task" in row)


def logits_of(model, tokens, length):
    return np.asarray(nnx.jit(lambda model: model(tokens, length=length))(model), np.float64)


def test_a_curriculum_is_measured_as_its_last_stage_and_from_the_length_of_its_first(run, rows):
    assert {row["train_length"] for row in rows} == {32}
    assert {row["family"] for row in rows} == {"rotations"}
    assert {row["last_length"] for row in rows if "task" not in row} == {16} == {last_length(run)}
    config, model = restore_model(run.directory)
    assert config.scheme.options == {"base": 500.0}
    logits = logits_of(model, windows(run).tokens[:, :-1], length=64)
    exact = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, windows(run).tokens[:, 1:, None], -1)[..., 0]
    weights = windows(run).weights
    assert rows[1]["window_nll"] == pytest.approx((exact * weights).sum() / weights.sum(), rel=1e-5)
    assert rows[1]["window_tokens"] == weights.sum()


def windows(run):
    return whole_windows(pieces(evaluation_documents(run), 64, run.evaluate.tokens), 64)


def test_the_page_has_the_pictures_that_say_something_and_the_run_can_still_resume(run, rows):
    names = {path.name for path in run.directory.iterdir()}
    assert {"index.html", "figure.png"} <= names
    assert {"positions.png", "tasks.png", "depths.png"} & names == set()  # two windows, and nothing was learned
    page = (run.directory / "index.html").read_text()
    assert page.count("data:image/png;base64,") == 1
    assert "perplexity by position: too few windows were measured" in page
    assert "Copy, Induction: no scheme is above a guess" in page
    assert "3 steps of 64 tokens, then 2 steps of 64 tokens" in page
    check_run(run, run.directory)
    assert fit(run).finished


def test_an_extension_is_measured_over_the_parameters_of_the_last_stage(run, rows):
    (run.directory / "tasks.png").write_bytes(b"of an earlier evaluation")
    extend = "scheme.extend={frequencies: {name: linear, factor: 2.0}}"
    found = evaluate(run.directory, [extend, "evaluate.tasks=[]", "evaluate.stride=0"], Console(file=io.StringIO()))
    assert [(row["label"], row["base"], row["sliding_nll"]) for row in found] == [("rope + linear", "rope", None)] * 2
    assert found[0]["window_nll"] != rows[0]["window_nll"]
    assert found[0]["train_tokens_per_second"] is None
    names = {path.name for path in run.directory.iterdir()}
    assert {"tasks.png", "depths.png"} & names == set()  # those of an earlier evaluation are removed
    together = read_rows(run.directory / EVALUATION)
    assert [row for row in together if row["label"] == "rope"] == rows  # measured on the same text
    assert together[len(rows) :] == found
    assert "rope + linear" in (run.directory / "index.html").read_text()


def test_a_task_that_fits_no_length_is_refused_before_anything_is_read(run):
    with pytest.raises(ValueError, match=r"evaluate\.tasks: passkey: a length of 64 tokens is too short") as error:
        evaluation_documents(config_of(run.directory, ["evaluate.tasks=[passkey]"]))
    needed = int(re.search(r"takes (\d+)", str(error.value))[1])
    assert 250 < needed < 500


def test_an_earlier_stage_is_measured_with_its_own_weights_and_scheme(run):
    overrides = ["scheme.stage=short", "evaluate.tasks=[]", "evaluate.stride=0", "evaluate.lengths=[16, 32]"]
    found = evaluate(run.directory, overrides, Console(file=io.StringIO()))
    config, model = restore_model(run.directory, "short")
    assert (config.train.length, config.scheme.options) == (16, {})
    chosen = whole_windows(pieces(evaluation_documents(run), 32, run.evaluate.tokens), 32)
    logits = logits_of(model, chosen.tokens[:, :-1], length=32)
    exact = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, chosen.tokens[:, 1:, None], -1)[..., 0]
    nll = (exact * chosen.weights).sum() / chosen.weights.sum()
    assert found[1]["window_nll"] == pytest.approx(nll, rel=1e-5)
    assert found[0]["train_length"] == 16
    with pytest.raises(ValueError, match="unknown stage 'shrt'; did you mean 'short'"):
        evaluate(run.directory, ["scheme.stage=shrt"])


def test_numbers_do_not_depend_on_how_many_devices_measure(run, rows):
    """All eight by default, or one."""
    alone = evaluate(run.directory, ["evaluate.mesh.data=1"], console=Console(file=io.StringIO()))
    for one, many in zip(alone, rows, strict=True):
        for name in ("window_nll", "last_nll", "sliding_nll", "position_nll", "accuracy"):
            np.testing.assert_allclose(many.get(name, 0), one.get(name, 0), rtol=1e-5)


def test_parameters_are_split_as_they_are_restored(run):
    where = mesh_for(run, rows=2)
    assert where.shape["fsdp"] * where.shape["context"] == 8
    model, whole = restore_model(run.directory, mesh=where)[1], restore_model(run.directory)[1]
    for name, leaf in named_parameters(nnx.to_pure_dict(nnx.state(model))):
        share = 1 if "learned" in name else 8
        assert {shard.data.size for shard in leaf.addressable_shards} == {leaf.size // share}, name
    chex.assert_trees_all_equal(*(jax.device_get(nnx.to_pure_dict(nnx.state(m))) for m in (model, whole)))


def test_a_length_below_the_training_length_is_measured_too(run):
    overrides = ["evaluate.lengths=[8, 16]", "evaluate.tasks=[]"]
    found = evaluate(run.directory, overrides, Console(file=io.StringIO()))
    assert [(row["length"], row["last_length"], row["error"]) for row in found] == [(8, 8, None), (16, 8, None)]
    assert read_rows(run.directory / EVALUATION) == found  # earlier rows were measured on other text
    chosen = whole_windows(pieces(evaluation_documents(run), 16, run.evaluate.tokens), 8)
    logits = logits_of(restore_model(run.directory)[1], chosen.tokens[:, :-1], length=8)
    exact = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, chosen.tokens[:, 1:, None], -1)[..., 0]
    nll = (exact * chosen.weights).sum() / chosen.weights.sum()
    assert found[0]["window_nll"] == pytest.approx(nll, rel=1e-5)
