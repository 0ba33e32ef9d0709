"""The config: typed values, overrides, and mistakes that are named by their key."""

import dataclasses
import subprocess
import sys

import pytest
import yaml
from refusals import refused

from train.config import Config, SchemeConfig, differences, dump, load, parse, to_dict

NTK = {"name": "rope", "label": "rope, far", "extend": {"frequencies": {"name": "dynamic-ntk"}}}
FULL = {
    "name": "small",
    "seed": 3,
    "data": {"source": "files", "paths": ["a/*.txt", "b.jsonl"]},
    "model": {"num_kv_heads": 2, "compute_dtype": "bfloat16"},
    "scheme": {"name": "alibi", "learned": True},
    "train": {"length": 16, "batch_tokens": 64, "learning_rate": 1, "mesh": {"data": 2}},
    "compare": {"seeds": [0, 1], "schemes": ["rope", NTK]},
}
MIXTURE = [{"paths": ["b.txt"], "weight": 2}, {"paths": ["c.txt"]}]
STAGED = {"data": {"source": "files", "paths": ["a.txt"], "packing": "best-fit"}}
STAGES = {**STAGED, "stages": [{}, {"data": {"mixture": MIXTURE}}, {"data": {"source": "stdlib"}}, {}]}
CONTEXT = {"train": {"context": {"strategy": ["neighbour", "ring"]}}}


@pytest.mark.parametrize("values", [{}, FULL, STAGES, CONTEXT], ids=["empty", "full", "stages", "context"])
def test_round_trip_through_yaml(values):
    config = parse(values)
    assert parse(yaml.safe_load(dump(config))) == config
    assert parse(to_dict(config)) == config


def test_values_arrive_typed():
    config = parse(FULL)
    assert config.data.paths == ("a/*.txt", "b.jsonl")
    assert isinstance(config.train.learning_rate, float)
    assert config.scheme == SchemeConfig("alibi", options={"learned": True})
    first, second = config.compare.schemes
    assert (first.label, second.label) == ("rope", "rope, far")
    assert second.trained() == first.trained() == SchemeConfig("rope")
    assert config.train.rows == 4
    assert parse(CONTEXT).train.context.strategy == ("neighbour", "ring")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1


def test_load_applies_overrides_and_names_the_run_after_the_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("train: {steps: 200}\n")
    config = load(file, ["train.learning_rate=1e-3", "scheme={name: alibi}", "compare.seeds=[4]", "model.head_dim=8"])
    assert str(config.directory) == "runs/mine"
    assert (config.train.steps, config.train.learning_rate) == (200, 1e-3)
    assert (config.scheme.name, config.compare.seeds, config.model.head_dim) == ("alibi", (4,), 8)
    file.write_text("# nothing\n")
    assert dataclasses.replace(load(file), name=Config().name) == Config()


def test_a_stage_reads_its_own_text():
    found = [stage.data for stage in parse(STAGES).every_stage]
    assert [data.paths for data in found] == [("a.txt",), (), (), ()]
    assert [len(data.mixture) for data in found] == [0, 2, 0, 0]
    assert [data.source for data in found] == ["files", "files", "stdlib", "stdlib"]
    assert {data.packing for data in found} == {"best-fit"}


def test_differences_name_only_what_decides_the_training():
    saved = parse(FULL)
    same = parse({**FULL, "name": "other", "evaluate": {"tokens": 8192}, "train": {**FULL["train"], "log_every": 3}})
    assert differences(saved, same) == []
    extended = dataclasses.replace(saved, scheme=dataclasses.replace(saved.scheme, label="x", extend={"mask": 1}))
    assert differences(saved, extended) == []
    changed = parse({**FULL, "seed": 4, "scheme": "alibi"})
    assert differences(saved, changed) == ["seed was 3, now 4", "scheme.learned was True, now None"]
    saved, other, cached = (
        parse({**STAGED, "stages": [{}, {"data": data}]})
        for data in ({"paths": ["b.txt"]}, {"paths": ["c.txt"]}, {"paths": ["b.txt"], "cache": "tokens"})
    )
    assert differences(saved, other) == ["stages[1].data.paths was ['b.txt'], now ['c.txt']"]
    assert differences(saved, cached) == []
    assert differences(parse({}), parse({"imports": ["json"]})) == []


def section(name, /, **values):
    return lambda: parse({name: values})


def whole(**values):
    return lambda: parse(values)


REFUSED = [
    ("train.steps", section("train", steps=1.5)),
    ("train.steps", section("train", steps=True)),
    ("train.steps", section("train", steps=0)),
    ("train.warmup_steps", section("train", steps=50)),
    ("train.learning_rate", section("train", learning_rate="fast")),
    ("train.learning_rate", section("train", learning_rate=float("nan"))),
    ("train.final_learning_rate", section("train", final_learning_rate=2)),
    ("train.learning_rate_factors", section("train", learning_rate_factors={"embed": 0})),
    ("train.beta2", section("train", beta2=1.0)),
    ("train.weight_decay", section("train", weight_decay=-1)),
    ("train.schedule", section("train", schedule="cosin")),
    ("train.moment_dtype", section("train", optimizer="adafactor", moment_dtype="bfloat16")),
    ("train.stop_loss", section("train", stop_loss=-1.0)),
    ("train.stop_loss", whole(train={"stop_loss": 1.0}, stages=[{}, {}])),
    ("train.length", section("train", length=2**63, batch_tokens=2**63)),
    ("train.batch_tokens", section("train", batch_tokens=100)),
    ("train.mesh.data", section("train", mesh={"data": 0})),
    ("compute_dtype", section("model", compute_dtype="bfloat")),
    ("model.causal", section("model", causal=1)),
    ("model.num_heads", section("model", num_heads=0)),
    ("name", whole(name="")),
    ("seed", whole(seed=-1)),
    ("output", whole(output="memory://runs")),
    ("data.paths", section("data", paths=3)),
    ("data.paths", section("data", source="files")),
    ("data.paths", section("data", paths=["a.txt"])),
    ("data.held_out", section("data", held_out=1)),
    ("data.tokenizer", whole(stages=[{"data": {"tokenizer": "a.json"}}])),
    ("scheme", section("scheme", label="x")),
    ("scheme", whole(scheme={"name": "rope", 3: 4})),
    ("scheme.extend", section("scheme", name="rope", extend=4)),
    ("compare.schemes", section("scheme", name="rope", train={"learning_rate": 1e-3})),
    ("compare.schemes", section("compare", schemes=["rope", "rope"])),
    ("compare.schemes[1]", section("compare", schemes=["rope", 4])),
    ("compare.seeds", section("compare", seeds=[1, 1])),
    ("compare.sweep.learning_rate", section("compare", sweep={"learning_rate": [2e-3, 1e-3]})),
    ("compare.sweep.position_factor", section("compare", sweep={"position_factor": [0, 1]})),
    ("extensions", section("compare", sweep={"extensions": -1})),
    ("evaluate.lengths", section("evaluate", lengths=[])),
    ("evaluate.lengths", section("evaluate", lengths=[64, 32])),
    ("evaluate.lengths", section("evaluate", lengths=[1])),
    ("evaluate.lengths", section("evaluate", lengths=[32, 2**31])),
    ("evaluate.batch_tokens", section("evaluate", batch_tokens=100)),
    ("evaluate.batch_tokens", section("evaluate", copy={"lengths": [64, 8192]})),
    ("evaluate.stride", section("evaluate", stride=33)),
    ("evaluate.tasks", section("evaluate", tasks=["passky"])),
    ("evaluate.tasks", section("evaluate", tasks=["copy", "copy"])),
    ("evaluate.ruler.tasks", section("evaluate", tasks=["niah_single_1"])),
    ("evaluate.copy.lengths", section("evaluate", copy={"lengths": [64, 32]})),
    ("evaluate.mqar.cases", section("evaluate", mqar={"cases": 0})),
    ("evaluate.words.power", section("evaluate", words={"power": 0.1})),
    ("evaluate.induction.depths", section("evaluate", induction={"depths": 1})),
]


@pytest.mark.parametrize(("name", "call"), REFUSED, ids=[name for name, _ in REFUSED])
def test_a_mistake_is_one_line_that_names_the_key(name, call):
    refused(name, call)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"trian": {}}, "config: unknown key 'trian'; did you mean 'train'"),
        ({"steps": 4}, "config: unknown key 'steps'; there is train.steps$"),
        ({"train": {"strategy": "ring"}}, "train: unknown key 'strategy'; there is train.context.strategy$"),
        ({"train": {"mesh": {"dat": 4}}}, "train.mesh: unknown key 'dat'; did you mean 'data'"),
        ({"stages": [{"data": {"path": ["a"]}}]}, r"stages\[0\]: data: unknown key 'path'; did you mean 'paths'"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(values, message):
    with pytest.raises(ValueError, match=message):
        parse(values)


@pytest.mark.parametrize(
    ("text", "overrides", "named"),
    [
        ("- 1\n", [], "run.yaml"),
        ("a: [\n", [], "line 2"),
        ("", ["train.steps"], "key.path=value"),
        ("", ["=3"], "key.path=value"),
        ("name: x", ["name.y=3"], "name"),
        ("", ["train.steps=[1"], "train.steps"),
    ],
)
def test_bad_files_and_overrides(tmp_path, text, overrides, named):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    refused(named, lambda: load(file, overrides))


def test_a_missing_file_is_named(tmp_path):
    refused("none.yaml", lambda: load(tmp_path / "none.yaml"), FileNotFoundError)


def test_reading_a_config_does_not_start_jax():
    code = "import sys, train.config; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
