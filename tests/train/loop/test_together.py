"""Several trainings in one program: each has the parameters and the directory that `fit` alone gives it."""

import dataclasses

import chex
import jax
import numpy as np
import pytest
from flax import nnx
from refusals import refused

from train.checkpoint.restore import restore_model
from train.config import parse
from train.loop import together as together_module
from train.loop.fit import fit, read_result
from train.loop.together import fit_together, stacked_program
from train.model.build import Setup, learned_positions
from train.monitor.logs import read_metrics

T5 = {"name": "t5", "num_buckets": 4, "max_distance": 6}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A function that makes the config of one training from its name, its seed, and changes of its ``train``."""
    folder = tmp_path_factory.mktemp("together")
    for number in range(8):
        words = " ".join(["brown", "fox", "lazy", "dog", "sleeps"][(number + n * n) % 5] for n in range(80))
        (folder / f"{number}.txt").write_text(words)

    def make(name, seed=0, scheme=T5, **train):
        sizes = {"length": 8, "batch_tokens": 64, "steps": 20, "warmup_steps": 2, "log_every": 10}
        return parse(
            {
                "name": name, "output": str(folder / "runs"), "seed": seed, "scheme": scheme,
                "data": {"source": "files", "paths": [f"{folder}/*.txt"], "held_out": 0.2},
                "model": {"num_layers": 1, "model_dim": 16, "num_heads": 2, "mlp_dim": 16},
                "train": {**sizes, **train}, "monitor": {"tensorboard": False},
            }
        )  # fmt: skip

    return make


def parameters(config):
    return nnx.to_pure_dict(nnx.state(restore_model(config.directory)[1]))


def trainings(config, suffix=""):
    """Three trainings whose seeds, rates and factors differ."""
    factors = dict.fromkeys(learned_positions(Setup(config("x"))), 30.0)
    return [
        config(f"plain{suffix}"),
        config(f"faster{suffix}", learning_rate=9e-3, learning_rate_factors=factors),
        config(f"seeded{suffix}", seed=7, learning_rate_factors={"embed": 0.5}),
    ]


@pytest.fixture(scope="module")
def alone(config):
    """The same trainings, each by itself, and their results."""
    every = trainings(config, "-alone")
    return every, [fit(each) for each in every]


@pytest.mark.parametrize("way", ["in turn", "stacked"])
def test_trainings_together_are_those_of_single_runs(config, alone, way, monkeypatch):
    """One after the other as on a CPU, and stacked as on an accelerator; each is then a finished run for `fit`."""
    if way == "stacked":
        monkeypatch.setattr(together_module, "_in_turn", jax.vmap)
    together = trainings(config, way)
    results = fit_together(together)
    for each, result, single, wanted in zip(together, results, *alone, strict=True):
        chex.assert_trees_all_close(parameters(each), parameters(single), atol=1e-5)
        assert result.final_loss == pytest.approx(wanted.final_loss, abs=1e-5)
        losses = [[line["loss"] for line in read_metrics(run.directory)] for run in (each, single)]
        np.testing.assert_allclose(*losses, atol=1e-5)
        assert fit(each) == result == read_result(each.directory)
        assert result.finished
    tables = [parameters(each)["shared"][0]["bias"]["table"] for each in together[:2]]
    assert np.abs(tables[1]).max() > 5 * np.abs(tables[0]).max()
    refused("train.steps", lambda: fit_together([config(f"plain{way}", steps=21)]))


def test_each_ends_at_the_loss_that_is_asked_for(config):
    """At the same step as alone, while the other continues."""
    quick = {"learning_rate": 2e-2, "steps": 60, "log_every": 5, "stop_loss": 2.0}
    together = [config("quick", **quick), config("slow", **(quick | {"learning_rate": 1e-3}))]
    results = fit_together(together)
    single = dataclasses.replace(together[0], name="quick-alone")
    assert results[0].steps == fit(single).steps < 60 == results[1].steps
    assert results[0].finished
    assert results[1].finished
    losses = [line["loss"] for line in read_metrics(together[0].directory)]
    assert losses[-1] < 2.0 < losses[-2]
    chex.assert_trees_all_close(parameters(together[0]), parameters(single), atol=1e-4)


def test_trainings_lie_on_devices_of_their_own(config):
    """Three trainings on two devices: each device has two, so the third training is computed twice."""
    program = stacked_program([config("a"), config("b", seed=1), config("c", seed=2)], jax.devices()[:2])
    embed = program.initialize().parameters["embed"]
    assert embed.shape[0] == 4
    assert {shard.data.shape[0] for shard in embed.addressable_shards} == {2}
    np.testing.assert_array_equal(embed[2], embed[3])


def test_one_that_diverges_does_not_touch_the_others(config, alone):
    together = [config("well"), config("wild", learning_rate=1e30)]
    well, wild = fit_together(together)
    assert (well.finished, wild.finished) == (True, False)
    assert not together[1].directory.exists()
    chex.assert_trees_all_close(parameters(together[0]), parameters(alone[0][0]), atol=1e-5)


def test_what_one_program_cannot_train_is_refused(config):
    staged = parse({"stages": [{}, {"train": {"steps": 3, "warmup_steps": 0}}]})
    watched = dataclasses.replace(config("a"), monitor=parse({"monitor": {"evaluate_every": 5}}).monitor)
    for name, configs in {
        "train.steps": [config("a"), config("b", steps=30)],
        "scheme.name": [config("a"), config("b", scheme="alibi")],
        "compare.together": [staged],
        "monitor.evaluate_every=0": [watched],
    }.items():
        refused(name, lambda configs=configs: fit_together(configs))
