"""Several trainings in one program: each has the parameters and the directory that `fit` alone gives it."""

import dataclasses

import chex
import jax
import numpy as np
import pytest
from flax import nnx

from train.checkpoint.restore import restore_model
from train.config import parse
from train.loop import together as together_module
from train.loop.fit import fit, read_result
from train.loop.together import fit_together, stacked_program
from train.model.build import learned_positions
from train.monitor.logs import read_metrics

T5 = {"name": "t5", "num_buckets": 4, "max_distance": 6}


@pytest.fixture
def config(tmp_path):
    """A function that makes the config of one training from its name, its seed, and changes of its ``train``."""
    for number in range(8):
        words = " ".join(["brown", "fox", "lazy", "dog", "sleeps"][(number + n * n) % 5] for n in range(80))
        (tmp_path / f"{number}.txt").write_text(words)

    def make(name, seed=0, scheme=T5, **train):
        sizes = {"length": 8, "batch_tokens": 64, "steps": 20, "warmup_steps": 2, "log_every": 10}
        return parse(
            {
                "name": name, "output": str(tmp_path / "runs"), "seed": seed, "scheme": scheme,
                "data": {"source": "files", "paths": [f"{tmp_path}/*.txt"], "held_out": 0.2},
                "model": {"num_layers": 2, "model_dim": 16, "num_heads": 2, "mlp_dim": 16},
                "train": {**sizes, **train}, "monitor": {"tensorboard": False},
            }
        )  # fmt: skip

    return make


def parameters(config):
    return nnx.to_pure_dict(nnx.state(restore_model(config.directory)[1]))


@pytest.mark.parametrize("way", ["in turn, as on a CPU", "stacked, as on an accelerator"])
def test_trainings_together_are_those_of_single_runs(config, way, monkeypatch):
    """Seeds, rates and factors differ; after 20 updates parameters agree to 1e-5."""
    if way.startswith("stacked"):
        monkeypatch.setattr(together_module, "_in_turn", jax.vmap)
    factors = dict.fromkeys(learned_positions(config("x")), 30.0)
    together = [
        config("plain"),
        config("faster", learning_rate=9e-3, learning_rate_factors=factors),
        config("seeded", seed=7, learning_rate_factors={"embed": 0.5}),
    ]
    results = fit_together(together)
    for each, result in zip(together, results, strict=True):
        alone = dataclasses.replace(each, name=f"{each.name}-alone")
        loss = fit(alone).final_loss
        chex.assert_trees_all_close(parameters(each), parameters(alone), atol=1e-5)
        assert result.final_loss == pytest.approx(loss, abs=1e-5)
        losses = [[line["loss"] for line in read_metrics(run.directory)] for run in (each, alone)]
        np.testing.assert_allclose(*losses, atol=1e-5)
    tables = [parameters(each)["shared"][0]["bias"]["table"] for each in together[:2]]
    assert np.abs(tables[1]).max() > 5 * np.abs(tables[0]).max()


def test_a_training_of_several_is_a_finished_run(config):
    """Its checkpoint has the data position of the last step, so `fit` accepts it as its own finished run."""
    together = [config("one"), config("two", seed=3)]
    results = fit_together(together)
    for each, result in zip(together, results, strict=True):
        assert fit(each) == result == read_result(each.directory)
        assert result.finished
    with pytest.raises(ValueError, match=r"train\.steps was 20, now 21"):
        fit_together([config("one", steps=21)])


def test_each_ends_at_the_loss_that_is_asked_for(config):
    """At the same step as alone, while the others continue."""
    quick = {"learning_rate": 2e-2, "steps": 60, "log_every": 5, "stop_loss": 2.0}
    together = [
        config("quick", **quick),
        config("slow", **(quick | {"learning_rate": 1e-3})),
        config("as", seed=3, **quick),
    ]
    results = fit_together(together)
    alone = [dataclasses.replace(each, name=f"{each.name}-alone") for each in together]
    singles = [fit(each) for each in alone]
    assert [result.steps for result in results] == [result.steps for result in singles]
    assert results[0].steps < 60 == results[1].steps
    assert all(result.finished for result in [*results, *singles])
    assert read_metrics(together[0].directory)[-1]["loss"] < 2.0 < read_metrics(together[0].directory)[-2]["loss"]
    for pair in zip(together, alone, strict=True):
        chex.assert_trees_all_close(*map(parameters, pair), atol=1e-4)
    assert fit(alone[0]) == singles[0]


def test_trainings_lie_on_devices_of_their_own(config):
    """Three trainings on two devices: each device has two, so the third training is computed twice."""
    program = stacked_program([config("a"), config("b", seed=1), config("c", seed=2)], jax.devices()[:2])
    embed = program.initialize().parameters["embed"]
    assert embed.shape[0] == 4
    assert {shard.data.shape[0] for shard in embed.addressable_shards} == {2}
    np.testing.assert_array_equal(embed[2], embed[3])


def test_one_that_diverges_does_not_touch_the_others(config):
    together = [config("well"), config("wild", learning_rate=1e30)]
    well, wild = fit_together(together)
    alone = config("alone")
    fit(alone)
    assert well.finished
    assert not wild.finished
    assert not together[1].directory.exists()
    chex.assert_trees_all_close(parameters(together[0]), parameters(alone), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 30}, r"differ in rates and seeds alone; found train\.steps was 20, now 30"),
        ({"scheme": "alibi"}, r"found scheme\.name was 't5', now 'alibi'"),
    ],
)
def test_trainings_that_differ_in_more_are_refused(config, changes, message):
    with pytest.raises(ValueError, match=message):
        fit_together([config("a"), config("b", **changes)])


def test_what_one_program_cannot_do_is_refused(config):
    staged = parse({"stages": [{}, {"train": {"steps": 3, "warmup_steps": 0}}]})
    with pytest.raises(ValueError, match=r"compare\.together: trainings of several stages run one by one"):
        fit_together([staged])
    watched = dataclasses.replace(config("a"), monitor=parse({"monitor": {"evaluate_every": 5}}).monitor)
    with pytest.raises(ValueError, match=r"set monitor\.evaluate_every=0"):
        fit_together([watched])
