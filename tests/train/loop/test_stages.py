"""A curriculum: each stage starts from the weights of the one before, and a run resumes inside any stage."""

import json

import chex
import numpy as np
import pytest
from programs import shared_programs
from refusals import refused

from posjax.coca import Coca
from posjax.rotary import YaRN
from train.checkpoint.restore import restore_model
from train.config import parse, to_dict
from train.loop.fit import fit, prepare

CURRICULUM = [
    {"name": "short"},
    {
        "name": "collinear",
        "scheme": "coca-slack",
        "train": {"steps": 4, "trainable": ["*/attention/k"], "mesh": {"context": 2}},
    },
    {
        "name": "attention",
        "extend": {"base": 500.0},
        "train": {"batch_tokens": 512, "steps": 2, "checkpoint_every": 1, "trainable": ["*/attention/[qkv]"]},
    },
    {
        "name": "long",
        "extend": {"frequencies": {"name": "yarn", "factor": 2.0, "original_length": 16}},
        "train": {"length": 32, "batch_tokens": 256, "steps": 2, "trainable": [], "learning_rate": 1e-3},
    },
]


@pytest.fixture(scope="module", autouse=True)
def programs():
    """Runs of one config share their compiled programs."""
    with shared_programs():
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    text = tmp_path_factory.mktemp("text")
    for n, line in enumerate(("to be or not to be, that is the question; ", "whether it is nobler in the mind ")):
        (text / f"{n}.txt").write_text(line * 60)
    train = {"length": 16, "batch_tokens": 256, "steps": 4, "warmup_steps": 1, "log_every": 1, "checkpoint_every": 3}
    return parse(
        {
            "data": {"source": "files", "paths": [f"{text}/*.txt"]},
            "model": {"num_layers": 1, "model_dim": 16, "num_heads": 2, "mlp_dim": 16, "scan_layers": False},
            "train": {**train, "mesh": {"data": 2}},
            "monitor": {"tensorboard": False, "evaluate_every": 4, "evaluate_tokens": 64},
            "stages": CURRICULUM,
        }
    )


def lines(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def losses(directory):
    return [line["loss"] for line in lines(directory)]


@pytest.fixture(scope="module")
def uninterrupted(config, tmp_path_factory):
    return fit(config, tmp_path_factory.mktemp("straight") / "run")


def test_stages_follow_each_other(config, uninterrupted):
    assert uninterrupted.finished
    assert uninterrupted.steps == config.steps == 12
    found = lines(uninterrupted.directory)
    steps = {"short": 4, "collinear": 4, "attention": 2, "long": 2}
    assert [line["stage"] for line in found] == [name for name, count in steps.items() for _ in range(count)]
    assert [line["tokens"] for line in found] == [256 * n for n in (*range(1, 9), 10, 12, 13, 14)]
    assert [line["step"] for line in found if "held_out_loss" in line] == [4, 8, 10, 12]
    saved = {int(path.name) for path in (uninterrupted.directory / "checkpoints").iterdir()}
    assert {4, 8, 10, 12} <= saved, "the end of every stage is kept"
    assert losses(uninterrupted.directory)[-1] < losses(uninterrupted.directory)[0] - 0.15


def test_the_last_stage_is_what_is_restored(uninterrupted):
    config, model = restore_model(uninterrupted.directory)
    assert config.train.length == 32
    features = model.config.layers.schemes[0].features
    assert isinstance(features, Coca)
    assert features.frequencies == YaRN(base=500.0, factor=2.0, original_length=16)
    chex.assert_shape(model.stacks[0][0].attention.k[...], (1, 16, 2, 4))


def test_a_run_killed_in_every_stage_resumes_bit_for_bit(config, uninterrupted, tmp_path, killed):
    for step in (2, 5, 9, 11):
        killed(config, tmp_path / "run", step)
        assert losses(tmp_path / "run") == losses(uninterrupted.directory)[:step]
    assert fit(config, tmp_path / "run").finished
    assert losses(tmp_path / "run") == losses(uninterrupted.directory)


def decaying(config, text, keep_moments=True):
    """Short rows at a constant rate, then long rows of other text while the rate decays."""
    values = to_dict(config)
    values["train"] |= {"schedule": "constant"}
    train = {"length": 32, "schedule": "linear", "final_learning_rate": 0.0, "warmup_steps": 0}
    train["keep_moments"] = keep_moments
    values["stages"] = [{"name": "stable"}, {"name": "decay", "data": {"paths": [text]}, "train": train}]
    return parse(values)


@pytest.fixture(scope="module")
def other_text(tmp_path_factory):
    text = tmp_path_factory.mktemp("long")
    for n in range(2):
        (text / f"{n}.txt").write_text("0123456789 " * 400)
    return f"{text}/*.txt"


@pytest.fixture(scope="module")
def decayed(config, other_text, tmp_path_factory):
    return fit(decaying(config, other_text), tmp_path_factory.mktemp("decayed") / "run")


def test_a_stage_reads_its_text_while_its_rate_falls(config, decayed, other_text):
    rates = [line["learning_rate"] for line in lines(decayed.directory)]
    peak = config.train.learning_rate
    np.testing.assert_allclose(rates, [peak, peak, peak, peak, *(peak * share for share in (0.75, 0.5, 0.25, 0))])
    messages = []
    stages = prepare(decaying(config, other_text), messages.append)
    assert messages == []
    seen = [set(stage.rows.batch(np.arange(4)).tokens.ravel().tolist()) for stage in stages]
    assert seen[1] & set(range(256)) == set(b"0123456789 ")
    assert not seen[0] & set(b"0123456789")


def test_moments_are_kept_only_when_asked(config, decayed, other_text, tmp_path):
    """The first update with fresh moments changes every parameter by the rate; with kept moments it does not."""
    fresh = fit(decaying(config, other_text, keep_moments=False), tmp_path)
    assert losses(fresh.directory)[:5] == losses(decayed.directory)[:5]
    assert losses(fresh.directory)[5] != losses(decayed.directory)[5]


@pytest.mark.parametrize(("first", "second"), [({"embed": 0.5}, {}), ({"*": 2.0}, {"embed": 2.0})])
def test_a_stage_with_other_factors_keeps_the_moments(config, first, second):
    values = to_dict(config)
    values["train"]["learning_rate_factors"] = first
    values["stages"] = [{}, {"train": {"keep_moments": True, "learning_rate_factors": second}}]
    before, after = (stage.program.abstract.optimizer for stage in prepare(parse(values)))
    chex.assert_trees_all_equal_shapes_and_dtypes(before, after)


@pytest.mark.parametrize(
    ("named", "stages"),
    [
        ("train.keep_moments", [{"train": {"keep_moments": True}}, {}]),
        ("train.keep_moments", [{}, {"train": {"keep_moments": True, "optimizer": "muon"}}]),
        ("train.keep_moments", [{}, {"train": {"keep_moments": True, "trainable": ["embed"]}}]),
        ("train.keep_moments", [{}, {"train": {"keep_moments": True, "moment_dtype": "bfloat16"}}]),
        ("scheme", [{}, {"scheme": "t5"}]),
        ("stages", [{"name": "one"}, {"name": "one"}]),
    ],
)
def test_a_stage_that_cannot_follow_is_refused_before_the_first_begins(config, named, stages, tmp_path):
    refused(named, lambda: fit(parse({**to_dict(config), "stages": stages}), tmp_path / "run"))
    assert not (tmp_path / "run").exists()
