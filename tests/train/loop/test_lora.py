"""Trainings of adapters of a released model: what moves, on a mesh, resumed, exported and gone on with."""

import json

import chex
import jax
import numpy as np
import pytest
from flax import nnx
from programs import shared_programs
from refusals import refused
from released_models import few_steps, with_changes

from posjax.nn import from_pretrained
from posjax.nn.huggingface import load_adapter
from posjax.nn.huggingface.load import named_parameters
from train import cli
from train.checkpoint.restore import restore_model
from train.loop.fit import fit, prepare

LORA = {"rank": 4, "alpha": 8.0, "paths": ["attention/*", "mlp/*"]}


@pytest.fixture(scope="module", autouse=True)
def programs():
    """Runs of one config share their compiled programs."""
    with shared_programs():
        yield


@pytest.fixture(scope="module")
def values(released, tmp_path_factory):
    values = few_steps(released[0], tmp_path_factory.mktemp("text"))
    values["train"] |= {"steps": 10, "learning_rate": 0.02, "checkpoint_every": 5}
    return {**values, "model": {"lora": LORA, "remat": "dots"}}


@pytest.fixture(scope="module")
def trained(values):
    config = with_changes(values)
    fit(config)
    return config


def numbers(model):
    return dict(named_parameters(nnx.to_pure_dict(nnx.state(model, nnx.Param))))


def losses(config):
    return [json.loads(line)["loss"] for line in (config.directory / "metrics.jsonl").read_text().splitlines()]


def logits(model):
    return np.asarray(model(np.arange(24).reshape(1, 24) * 7 % 280))


def logits_by_peft(folder, adapter):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch, model = pytest.importorskip("torch"), transformers.AutoModelForCausalLM.from_pretrained(folder)
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):
        theirs = peft.PeftModel.from_pretrained(model, adapter).eval()
    with torch.no_grad():
        return theirs(torch.arange(24)[None] * 7 % 280).logits.numpy()


def test_only_adapters_are_trained_and_have_moments(released, trained):
    before, after = numbers(released[1]), numbers(restore_model(trained.directory)[1])
    chex.assert_trees_all_equal({name: after[name] for name in before}, before)
    adapters = {name: leaf for name, leaf in after.items() if name not in before}
    assert all(np.abs(leaf).max() > 0 for leaf in adapters.values()), "B started from zero"
    assert losses(trained)[-1] < losses(trained)[0] - 0.05
    moments = [leaf for leaf in jax.tree.leaves(prepare(trained)[0].program.abstract.optimizer) if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * sum(leaf.size for leaf in adapters.values())


def test_a_mesh_of_two_by_two_trains_as_one_device(values, trained):
    mesh = {"data": 1, "fsdp": 2, "tensor": 2}
    config = with_changes(values, name="mesh", train={"mesh": mesh})
    fit(config)
    np.testing.assert_allclose(losses(config), losses(trained), rtol=1e-5)
    wanted, found = (numbers(restore_model(each.directory)[1]) for each in (trained, config))
    chex.assert_trees_all_close(found, wanted, atol=2e-4)
    program = prepare(config)[0].program
    b = program.abstract.parameters["stacks"][0][0]["attention"]["adapters"]["q"]["b"]
    assert b.sharding.shard_shape(b.shape) == (2, 2, 2, 8), "its rank over fsdp, its heads over tensor"


def test_a_killed_run_repeats_the_uninterrupted_one_bit_for_bit(trained, tmp_path, killed):
    killed(trained, tmp_path, 7)
    assert fit(trained, tmp_path).finished
    runs = (numbers(restore_model(directory)[1]) for directory in (tmp_path, trained.directory))
    chex.assert_trees_all_equal(*runs)


@pytest.mark.parity
def test_an_export_is_merged_or_read_by_peft(released, trained, tmp_path):
    run, merged, adapter = str(trained.directory), tmp_path / "merged", tmp_path / "adapter"
    assert cli.main(["export", run, str(merged)]) == 0
    assert cli.main(["export", run, str(adapter), "--adapter"]) == 0
    wanted = logits(restore_model(trained.directory)[1])
    np.testing.assert_allclose(logits(from_pretrained(merged)), wanted, atol=1e-5)
    np.testing.assert_allclose(logits_by_peft(released[0], adapter), wanted, atol=1e-5)


def test_an_adapter_is_gone_on_with_and_evaluated(released, trained, values, tmp_path):
    adapter = tmp_path / "adapter"
    assert cli.main(["export", str(trained.directory), str(adapter), "--adapter"]) == 0
    init = {"path": str(released[0]), "adapter": str(adapter)}
    started = {key: section for key, section in values.items() if key not in ("init", "model")}
    more = with_changes(started, name="more", init=init, train={"steps": 2})
    assert more.model.lora.rank == LORA["rank"]
    fit(more, tmp_path / "more")
    first = json.loads((tmp_path / "more" / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert first < losses(trained)[0] - 0.05
    merged = tmp_path / "merged"
    assert cli.main(["export", str(released[0]), str(merged), f"init.adapter={adapter}"]) == 0
    np.testing.assert_allclose(logits(from_pretrained(merged)), logits(load_adapter(released[1], adapter)), atol=1e-5)


@pytest.mark.parity
def test_embeddings_and_norms_are_trained_beside_adapters(released, values, tmp_path):
    """The embedding is also the head; peft ties both again."""
    trainable = ["*/adapters/*", "embed", "*norm/gain"]
    config = with_changes(values, name="wide", train={"trainable": trainable, "steps": 2})
    fit(config)
    model = restore_model(config.directory)[1]
    before, after = numbers(released[1]), numbers(model)
    moved = {name for name in before if np.any(before[name] != after[name])}
    assert moved == {name for name in before if name == "embed" or name.endswith("norm/gain")}
    assert cli.main(["export", str(config.directory), str(tmp_path / "adapter"), "--adapter"]) == 0
    np.testing.assert_allclose(logits_by_peft(released[0], tmp_path / "adapter"), logits(model), atol=1e-5)
    chex.assert_trees_all_equal(numbers(load_adapter(released[1], tmp_path / "adapter")), after)


def test_mistakes_are_refused_before_anything_compiles(values, released, tmp_path, capsys):
    refused("attention/w", lambda: prepare(with_changes(values, model={"lora": {"paths": ["attention/w"]}})))
    refused("lora.rank", lambda: prepare(with_changes(values, model={"lora": {"rank": 0}})))
    assert cli.main(["export", str(released[0]), str(tmp_path / "new"), "--adapter"]) == 2
    assert "--adapter" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
