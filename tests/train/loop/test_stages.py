"""A curriculum: each stage starts from the weights of the one before, and a run resumes inside any stage."""

import dataclasses
import json
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest
from flax import nnx
from killed import killed
from programs import shared_programs

from posjax.coca import Coca
from posjax.nn.huggingface.load import named_parameters
from posjax.rotary import YaRN
from train.checkpoint.restore import restore_model
from train.config import MeshConfig, parse, to_dict
from train.loop import fit as loop
from train.loop.fit import _Evaluation, fit
from train.model.build import build_model
from train.model.convert import check_continues, convert
from train.model.mesh import make_mesh

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
    return parse(
        {
            "data": {"source": "files", "paths": [f"{text}/*.txt"]},
            "model": {"num_layers": 1, "model_dim": 16, "num_heads": 2, "mlp_dim": 16, "scan_layers": False},
            "train": {
                "length": 16,
                "batch_tokens": 256,
                "steps": 4,
                "warmup_steps": 1,
                "log_every": 1,
                "checkpoint_every": 3,
                "mesh": {"data": 2},
            },
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


def test_held_out_rows_are_spread_and_come_in_batches(config):
    """Of 40 rows, 24 are evaluated, 8 at a time."""

    class Rows:
        def __len__(self):
            return 40

        def batch(self, numbers):
            return numbers.tolist()

    train = dataclasses.replace(config.train, batch_tokens=16 * 8)
    stage = SimpleNamespace(
        config=dataclasses.replace(config, train=train),
        mesh=make_mesh(MeshConfig(data=1), 8),
        held_out=Rows(),
        on_devices=lambda rows, size, part: rows,
    )
    found = _Evaluation(stage, dataclasses.replace(config.monitor, evaluate_tokens=24 * 16), 0)._batches
    assert found == np.linspace(0, 39, 24).astype(int).reshape(3, 8).tolist()


def test_a_stage_changes_the_base(uninterrupted):
    found = [restore_model(uninterrupted.directory, stage)[1].config for stage in ("collinear", "attention")]
    assert [model.layers.schemes[0].features.frequencies.base for model in found] == [10_000.0, 500.0]


def test_the_last_stage_is_what_is_restored(uninterrupted):
    config, model = restore_model(uninterrupted.directory)
    assert config.train.length == 32
    features = model.config.layers.schemes[0].features
    assert isinstance(features, Coca)
    assert features.frequencies == YaRN(base=500.0, factor=2.0, original_length=16)
    chex.assert_shape(model.stacks[0][0].attention.k[...], (1, 16, 2, 4))


def weights(directory, stage):
    return dict(named_parameters(nnx.to_pure_dict(nnx.state(restore_model(directory, stage)[1]))))


def test_the_middle_step_of_a_conversion_moves_attentions_projections(uninterrupted):
    before, after = (weights(uninterrupted.directory, stage) for stage in ("collinear", "attention"))
    assert before.keys() == after.keys()
    moved = {name for name in after if not np.array_equal(before[name], after[name])}
    assert moved == {f"stacks/0/0/attention/{name}" for name in "qkv"}


def test_a_run_killed_in_every_stage_resumes_bit_for_bit(config, uninterrupted, tmp_path, monkeypatch):
    for killed_after in (2, 4, 5, 9, 11):
        killed(config, tmp_path / "run", killed_after, monkeypatch)
        assert losses(tmp_path / "run") == losses(uninterrupted.directory)[:killed_after]
    assert fit(config, tmp_path / "run").finished
    assert losses(tmp_path / "run") == losses(uninterrupted.directory)


def schemes(before, after):
    return [parse({"model": {"num_layers": 2, "model_dim": 16, "num_heads": 2}, "scheme": s}) for s in (before, after)]


@pytest.mark.parametrize("variant", ["strict", "slack", "relative", "tied"])
def test_rope_becomes_coca_by_the_mean_of_each_plane(variant):
    before, after = schemes("rope", f"coca-{variant}")
    shapes, wanted = (nnx.eval_shape(lambda c=c: nnx.to_pure_dict(nnx.state(build_model(c)))) for c in (before, after))
    random = np.random.default_rng(0)
    old = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(leaf.dtype), shapes)
    new = convert(before, after, old)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, wanted)
    pairs = zip(named_parameters(old), named_parameters(new), strict=True)
    changed = [name for (name, a), (_, b) in pairs if a is not b]
    narrowed = ["k", "q"] if variant == "tied" else ["k"]
    assert changed == [f"stacks/0/0/attention/{name}" for name in narrowed]
    k, t = (np.asarray(tree["stacks"][0][0]["attention"]["k"]) for tree in (old, new))
    np.testing.assert_allclose(t[1, :, :, 2], (k[1, :, :, 2] + k[1, :, :, 6]) / 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("alibi", "coca-slack", r"'coca-slack' cannot start from the weights of 'alibi': stacks/0/0/attention/k was"),
        ("rope", "t5", r"shared/0/bias/.* was not trained"),
        ("t5", "rope", r"'rope' would lose parameters that 't5' has learned: shared/0/bias"),
    ],
)
def test_schemes_that_do_not_follow_from_each_other_are_refused(before, after, message):
    with pytest.raises(ValueError, match=message):
        check_continues(*schemes(before, after))


def test_a_stage_that_cannot_follow_is_refused_before_the_first_begins(config, tmp_path):
    values = to_dict(config)
    values["stages"] = [{"name": "short"}, {"scheme": "t5"}]
    with pytest.raises(ValueError, match="'t5' cannot start from the weights of 'rope'"):
        fit(parse(values), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_stages_keep_what_they_do_not_change(config):
    last = config.stage(3)
    assert (last.train.warmup_steps, last.train.mesh.context, last.train.trainable) == (1, 2, ())
    assert (last.train.batch_tokens, config.stage(2).train.batch_tokens) == (256, 512)
    assert last.scheme.options == {"base": 500.0, **CURRICULUM[3]["extend"]}
    assert config.stage_names == ("short", "collinear", "attention", "long")


def decaying(config, text):
    """Short rows at a constant rate, then long rows of other text while the rate decays; the moments are kept."""
    values = to_dict(config)
    values["train"] |= {"schedule": "constant"}
    train = {"length": 32, "schedule": "linear", "final_learning_rate": 0.0, "warmup_steps": 0, "keep_moments": True}
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


def test_a_stage_reads_its_text_and_keeps_the_moments_while_its_rate_falls(config, decayed, other_text):
    rates = [line["learning_rate"] for line in lines(decayed.directory)]
    peak = config.train.learning_rate
    np.testing.assert_allclose(rates, [peak, peak, peak, peak, *(peak * share for share in (0.75, 0.5, 0.25, 0))])
    messages = []
    stages = loop.prepare(decaying(config, other_text), messages.append)
    assert messages == []
    seen = [set(stage.rows.batch(np.arange(4)).tokens.ravel().tolist()) for stage in stages]
    digits = set(b"0123456789 ")
    assert seen[1] & set(range(256)) == digits
    assert not seen[0] & set(b"0123456789")


def test_a_stage_that_may_train_on_held_out_text_prints_a_warning(config):
    values, messages = to_dict(config), []
    values["stages"] = [{"name": "stable"}, {"name": "decay", "data": {"held_out": 0.5}}]
    loop.prepare(parse(values), messages.append)
    assert messages[0].startswith("warning: stage 'decay' reads 2 files of data as part of another text")


def test_moments_are_kept_only_when_asked(config, decayed, other_text, tmp_path):
    """The first update with fresh moments changes every parameter by the rate; with kept moments it does not."""
    values = to_dict(decaying(config, other_text))
    values["stages"][1]["train"]["keep_moments"] = False
    fresh = fit(parse(values), tmp_path / "run")
    assert losses(fresh.directory)[:5] == losses(decayed.directory)[:5]
    assert losses(fresh.directory)[5] != losses(decayed.directory)[5]


def test_a_run_with_other_text_in_a_stage_resumes_bit_for_bit(config, decayed, other_text, tmp_path, monkeypatch):
    wanted = decaying(config, other_text)
    for killed_after in (2, 4, 7):
        killed(wanted, tmp_path / "run", killed_after, monkeypatch)
    assert fit(wanted, tmp_path / "run").finished
    assert losses(tmp_path / "run") == losses(decayed.directory)


@pytest.mark.parametrize(
    ("first", "second"), [({"embed": 0.5}, {}), ({}, {"embed": 0.5}), ({"*": 2.0}, {"embed": 2.0})]
)
def test_a_stage_with_other_factors_keeps_the_moments(config, first, second):
    values = to_dict(config)
    values["train"]["learning_rate_factors"] = first
    values["stages"] = [{}, {"train": {"keep_moments": True, "learning_rate_factors": second}}]
    before, after = (stage.program.abstract.optimizer for stage in loop.prepare(parse(values)))
    chex.assert_trees_all_equal_shapes_and_dtypes(before, after)


@pytest.mark.parametrize(
    ("train", "stage", "message"),
    [
        ({"keep_moments": True}, {}, "the first stage has no moments to keep"),
        ({}, {"keep_moments": True, "optimizer": "muon"}, "are those of another optimizer"),
        ({}, {"keep_moments": True, "trainable": ["embed"]}, "of other parameters"),
        ({}, {"keep_moments": True, "moment_dtype": "bfloat16"}, "of another dtype"),
    ],
)
def test_moments_that_cannot_be_kept_are_refused_before_any_text_is_read(config, train, stage, message, tmp_path):
    values = to_dict(config)
    values["train"] |= train
    values["stages"] = [{}, {"train": stage}]
    with pytest.raises(ValueError, match=f"train.keep_moments: .*{message}"):
        fit(parse(values), tmp_path / "run")
    assert not (tmp_path / "run").exists()
