"""Evaluating a saved run of two stages, from its directory to its page."""

import io

import chex
import jax
import numpy as np
import pytest
from flax import nnx
from refusals import refused
from rich.console import Console

from posjax.nn.huggingface.load import named_parameters
from train.checkpoint.directory import check_run
from train.checkpoint.restore import config_of, restore_model
from train.config import load
from train.evaluate.mesh import mesh_for
from train.evaluate.saved import EVALUATION, evaluate, evaluation_documents, last_length
from train.evaluate.windows import pieces, whole_windows
from train.loop.fit import fit
from train.model.build import Setup
from train.runtime.rows import read_rows

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
    return evaluate(run.directory, console=Console(file=io.StringIO(), width=160))


def test_rows_tell_perplexity_and_tasks_apart(run, rows):
    assert read_rows(run.directory / EVALUATION) == rows
    perplexities = [row for row in rows if "task" not in row]
    assert [row["length"] for row in perplexities] == [16, 64]
    found = [(row["task"], row["length"], row["depth"], row["cases"]) for row in rows if "task" in row]
    assert found == [("induction", 32, depth, 2) for depth in (0, 0.5, 1)] + [("copy", n, None, 3) for n in (16, 24)]
    assert all(row["error"] is None for row in rows)
    assert all(0 <= row["accuracy"] <= 1 for row in rows if "task" in row)


def exact_nll(model, chosen, length):
    """The loss per token of windows, in float64 from the model's logits."""
    tokens = chosen.tokens
    logits = np.asarray(nnx.jit(lambda model: model(tokens[:, :-1], length=length))(model), np.float64)
    costs = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return pytest.approx((costs * chosen.weights).sum() / chosen.weights.sum(), rel=1e-5)


def test_a_curriculum_is_measured_as_its_last_stage_and_from_the_length_of_its_first(run, rows):
    assert {row["train_length"] for row in rows} == {32}
    assert {row["family"] for row in rows} == {"rotations"}
    assert {row["last_length"] for row in rows if "task" not in row} == {16} == {last_length(run)}
    config, model = restore_model(run.directory)
    assert config.scheme.options == {"base": 500.0}
    chosen = whole_windows(pieces(evaluation_documents(Setup(run)), 64, run.evaluate.tokens), 64)
    assert rows[1]["window_nll"] == exact_nll(model, chosen, length=64)
    assert rows[1]["window_tokens"] == chosen.weights.sum()


def test_the_page_has_the_pictures_that_say_something_and_the_run_can_still_resume(run, rows):
    names = {path.name for path in run.directory.iterdir()}
    assert {"index.html", "figure.png"} <= names
    assert not {"positions.png", "tasks.png", "depths.png"} & names, "two windows, and nothing was learned"
    assert "3 steps of 64 tokens, then 2 steps of 64 tokens" in (run.directory / "index.html").read_text()
    check_run(run, run.directory)
    assert fit(run).finished


def test_an_extension_is_measured_over_the_parameters_of_the_last_stage(run, rows):
    (run.directory / "tasks.png").write_bytes(b"of an earlier evaluation")
    extend = "scheme.extend={frequencies: {name: linear, factor: 2.0}}"
    found = evaluate(run.directory, [extend, "evaluate.tasks=[]", "evaluate.stride=0"], Console(file=io.StringIO()))
    assert [(row["label"], row["base"], row["sliding_nll"]) for row in found] == [("rope + linear", "rope", None)] * 2
    assert found[0]["window_nll"] != rows[0]["window_nll"]
    assert found[0]["train_tokens_per_second"] is None
    assert not (run.directory / "tasks.png").exists()
    together = read_rows(run.directory / EVALUATION)
    assert [row for row in together if row["label"] == "rope"] == rows  # measured on the same text
    assert together[len(rows) :] == found
    assert "rope + linear" in (run.directory / "index.html").read_text()


def test_tasks_and_stages_that_do_not_exist_here_are_refused(run):
    refused(
        "evaluate.tasks", lambda: evaluation_documents(Setup(config_of(run.directory, ["evaluate.tasks=[passkey]"])))
    )
    refused("stage", lambda: evaluate(run.directory, ["scheme.stage=shrt"]))


def test_an_earlier_stage_is_measured_also_below_its_training_length(run, rows):
    overrides = ["scheme.stage=short", "evaluate.tasks=[]", "evaluate.stride=0", "evaluate.lengths=[8, 32]"]
    found = evaluate(run.directory, overrides, Console(file=io.StringIO()))
    config, model = restore_model(run.directory, "short")
    assert (config.train.length, config.scheme.options) == (16, {})
    for row, length in zip(found, (8, 32), strict=True):
        assert (row["label"], row["base"]) == ("rope, short", "rope")
        assert (row["length"], row["train_length"], row["last_length"]) == (length, 16, 8)
        chosen = whole_windows(pieces(evaluation_documents(Setup(run)), 32, run.evaluate.tokens), length)
        assert row["window_nll"] == exact_nll(model, chosen, length=length)
    assert read_rows(run.directory / EVALUATION) == found, "earlier rows were measured on other text"


def test_numbers_do_not_depend_on_how_many_devices_measure(run, rows):
    """All eight by default, or one."""
    overrides = ["evaluate.mesh.data=1", "evaluate.tasks=[]"]
    alone = evaluate(run.directory, overrides, console=Console(file=io.StringIO()))
    for one, many in zip(alone, rows[:2], strict=True):
        for name in ("window_nll", "last_nll", "sliding_nll", "position_nll"):
            np.testing.assert_allclose(many[name], one[name], rtol=1e-5)


def test_parameters_are_split_as_they_are_restored(run):
    where = mesh_for(run, rows=2)
    assert where.shape["fsdp"] * where.shape["context"] == 8
    model, whole = restore_model(run.directory, mesh=where)[1], restore_model(run.directory)[1]
    for name, leaf in named_parameters(nnx.to_pure_dict(nnx.state(model))):
        share = 1 if "learned" in name else 8
        assert {shard.data.size for shard in leaf.addressable_shards} == {leaf.size // share}, name
    chex.assert_trees_all_equal(*(jax.device_get(nnx.to_pure_dict(nnx.state(m))) for m in (model, whole)))
