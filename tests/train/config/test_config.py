"""The config: every key is typed, and every mistake is reported in one line that names the cause."""

import dataclasses
import subprocess
import sys

import pytest
import yaml

from train.config import Config, SchemeConfig, differences, dump, load, migrated, parse, parse_text, to_dict

FULL = {
    "name": "small",
    "seed": 3,
    "data": {"source": "files", "paths": ["a/*.txt", "b.jsonl"]},
    "model": {"num_kv_heads": 2, "compute_dtype": "bfloat16"},
    "scheme": {"name": "alibi", "learned": True},
    "train": {"length": 16, "batch_tokens": 64, "learning_rate": 1, "mesh": {"data": 2}},
    "compare": {
        "seeds": [0, 1],
        "schemes": ["rope", {"name": "rope", "label": "rope, far", "extend": {"frequencies": {"name": "dynamic-ntk"}}}],
    },
}


@pytest.mark.parametrize("values", [{}, FULL])
def test_round_trip_through_yaml(values):
    config = parse(values)
    assert parse(yaml.safe_load(dump(config))) == config
    assert parse(to_dict(config)) == config


@pytest.mark.parametrize(
    ("saved", "found"),
    [
        ({"remap": {"name": "streaming", "sinks": 4}}, {"remap": {"name": "streaming", "first": 4}}),
        ({"mask": {"name": "lambda", "window": 8, "sinks": 4}}, {"mask": {"name": "lambda", "window": 8, "first": 4}}),
        ({"mask": {"name": "sinks", "count": 4}}, {"mask": {"name": "first-tokens", "count": 4}}),
        ({"sinks": {"name": "learned"}}, {"sinks": {"name": "learned"}}),
    ],
)
def test_a_spec_of_first_tokens_that_an_earlier_version_saved(saved, found):
    saved = yaml.safe_dump({"scheme": {"name": "rope", "extend": saved}})
    assert parse_text(saved, "config.yaml").scheme.extend == found


def test_a_layout_that_an_earlier_version_saved():
    """Striped layouts are gone. The order of tokens over devices changes no number, so any other will do."""
    assert parse_text("train: {context: {layout: striped}}", "c.yaml") == parse({})


def test_what_an_earlier_version_saved_has_the_names_of_today():
    far, remap = ({"name": "rope", "extend": {slot: {"name": "rerope"}}} for slot in ("far", "remap"))
    saved = {"scheme": far, "compare": {"schemes": ["alibi", far]}, "stages": [{}, {"train": {"trains": ["embed"]}}]}
    found = parse_text(yaml.safe_dump(saved), "config.yaml")
    assert found.scheme.extend == {"remap": {"name": "rerope"}}
    assert found == parse(
        {"scheme": remap, "compare": {"schemes": ["alibi", remap]}, "stages": [{}, {"train": {"trainable": ["embed"]}}]}
    )


def test_options_and_sizes_that_an_earlier_version_saved():
    drawn = {"name": "equal-mean"}
    saved = {"model": {"vocabulary": 300}, "scheme": {"name": "mixed", "axes": 3, "positions": drawn}}
    scheme = {"name": "mixed", "num_axes": 3, "training_positions": drawn}
    assert parse_text(yaml.safe_dump(saved), "config.yaml") == parse({"model": {"vocab_size": 300}, "scheme": scheme})
    own = {"name": "mine", "positions": 4, "axes": 2, "vocabulary": 3}
    saved = {
        "init": {"values": {"vocabulary": 3, "far": 1}},
        "scheme": own | {"mask": own},
        "compare": {"schemes": [own]},
    }
    assert migrated(saved) == saved, "options of own methods, and values of a released model"
    row = {"label": "drawn", "extend": {"positions": drawn, "mask": own}}
    assert migrated(row)["extend"] == {"training_positions": drawn, "mask": own}


@pytest.mark.parametrize(
    ("given", "found"),
    [("ring", "ring"), (["ring"], "ring"), (["neighbour", "ring"], ("neighbour", "ring"))],
    ids=str,
)
def test_a_context_strategy_is_a_name_or_a_list_of_names(given, found):
    config = parse({"train": {"context": {"strategy": given}}})
    assert config.train.context.strategy == found
    assert parse(yaml.safe_load(dump(config))) == config


def test_values_arrive_typed():
    config = parse(FULL)
    assert config.data.paths == ("a/*.txt", "b.jsonl")
    assert isinstance(config.train.learning_rate, float)
    assert config.scheme == SchemeConfig("alibi", options={"learned": True})
    first, second = config.compare.schemes
    assert (first.label, second.label) == ("rope", "rope, far")
    assert second.trained() == first.trained() == SchemeConfig("rope")
    assert config.train.rows == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1


def test_load_applies_overrides_and_names_the_run_after_the_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("train: {steps: 200}\n")
    config = load(file, ["train.learning_rate=1e-3", "scheme={name: alibi}", "compare.seeds=[4]", "model.head_dim=8"])
    assert config.name == "mine"
    assert str(config.directory) == "runs/mine"
    assert config.train.steps == 200
    assert config.train.learning_rate == 1e-3
    assert config.scheme.name == "alibi"
    assert config.compare.seeds == (4,)
    assert config.model.head_dim == 8


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_an_empty_file_is_all_defaults(tmp_path, text):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert load(file) == Config()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"trian": {}}, "config: unknown key 'trian'; did you mean 'train'"),
        ({"train": {"lenght": 4}}, "train: unknown key 'lenght'; did you mean 'length'"),
        ({"train": {"mesh": {"dat": 4}}}, "train.mesh: unknown key 'dat'; did you mean 'data'"),
        (
            {"model": {"compute_dtype": "bfloat"}},
            "compute_dtype: unknown value 'bfloat'; did you mean 'bfloat16'",
        ),
        ({"train": {"steps": 1.5}}, "train.steps: expected a whole number, found 1.5"),
        ({"train": {"steps": True}}, "train.steps: expected a whole number, found True"),
        ({"train": {"steps": None}}, "train.steps: expected a whole number, found None"),
        ({"train": {"learning_rate": "fast"}}, "train.learning_rate: expected a number, found 'fast'"),
        ({"train": {"learning_rate": float("nan")}}, "train.learning_rate: expected a finite number"),
        ({"model": {"causal": 1}}, "model.causal: expected true or false, found 1"),
        ({"name": 3}, "name: expected text, found 3"),
        ({"name": ""}, "name is empty"),
        ({"train": 3}, "train: expected a section of keys, found 3"),
        ({"data": {"paths": 3}}, "data.paths: expected a list, found 3"),
        ({"output": "memory://runs"}, "output: memory://runs: checkpoints cannot be written to memory://"),
        ({"scheme": {"name": "rope", 3: 4}}, "scheme: expected the name of an option, found 3"),
        ({"scheme": {"name": "rope", "extend": {1: 2}}}, "scheme: expected the name of an option, found 1"),
        ({"data": {"source": "files"}}, "data.paths is empty"),
        ({"data": {"paths": ["a.txt"]}}, "data.paths is read only with data.source=files"),
        ({"data": {"held_out": 1}}, "data.held_out must be at least 0 and below 1"),
        ({"train": {"batch_tokens": 100}}, r"multiple of train.length \(32\), found 100; 96 would work"),
        ({"train": {"steps": 0}}, "train.steps must be positive, found 0; 0 measures a released model"),
        ({"train": {"steps": 50}}, r"train.warmup_steps must be .* below train.steps \(50\), found 50"),
        ({"train": {"beta2": 1.0}}, "train.beta2 must be"),
        ({"train": {"weight_decay": -1}}, "train.weight_decay must not be negative"),
        ({"train": {"final_learning_rate": 2}}, "train.final_learning_rate is a share"),
        ({"train": {"schedule": "cosin"}}, "train.schedule: unknown value 'cosin'; did you mean 'cosine'"),
        (
            {"train": {"learning_rate_factors": {"embed": 0}}},
            "train.learning_rate_factors: .* found 'embed': 0;",
        ),
        ({"train": {"learning_rate_factors": {"embed": "a"}}}, "train.learning_rate_factors: .* found 'embed': 'a';"),
        ({"train": {"optimizer": "adafactor", "moment_dtype": "bfloat16"}}, "train.moment_dtype is that of first"),
        (
            {"stages": [{"data": {"tokenizer": "a.json"}}]},
            r"stages\[0\]: data.tokenizer: the model has that of the stage",
        ),
        ({"stages": [{"data": {"path": ["a"]}}]}, r"stages\[0\]: data: unknown key 'path'; did you mean 'paths'"),
        ({"train": {"mesh": {"data": 0}}}, "train.mesh.data must be positive, or -1"),
        ({"model": {"num_heads": 0}}, "model.num_heads must be positive"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"scheme": 3}, "scheme: expected a scheme's name"),
        ({"scheme": {"label": "x"}}, "scheme: expected a scheme's name"),
        ({"scheme": {"name": "rope", "extend": 4}}, "scheme.extend: expected a section"),
        ({"compare": {"schemes": ["rope", "rope"]}}, "compare.schemes: 'rope' appears twice"),
        ({"compare": {"schemes": ["rope", 4]}}, r"compare.schemes\[1\]: expected a scheme's name"),
        ({"compare": {"seeds": []}}, "compare.seeds is empty"),
        ({"compare": {"seeds": [1, 1]}}, "compare.seeds: 1 appears twice"),
        ({"evaluate": {"lengths": []}}, "evaluate.lengths is empty"),
        ({"evaluate": {"lengths": [64, 32]}}, "evaluate.lengths must rise"),
        ({"evaluate": {"lengths": [1]}}, "evaluate.lengths must all be above 1"),
        ({"evaluate": {"lengths": [32, 2**31]}}, f"evaluate.lengths must be below .* found {2**31}"),
        ({"train": {"length": 2**63, "batch_tokens": 2**63}}, f"train.length must be below .* found {2**63}"),
        ({"evaluate": {"batch_tokens": 100}}, r"evaluate.batch_tokens must hold the longest window \(512\)"),
    ],
)
def test_mistakes_are_one_line_that_names_the_cause(values, message):
    with pytest.raises(ValueError, match=message) as error:
        parse(values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("- 1\n", [], "a config is a mapping"),
        ("a: [\n", [], "line 2: not valid YAML"),
        ("", ["train.steps"], "write key.path=value"),
        ("", ["=3"], "write key.path=value"),
        ("name: x", ["name.y=3"], "name is a value, not a section"),
        ("", ["train.steps=[1"], "override 'train.steps=.1'.*not valid YAML"),
        ("", ["train.step=9"], "train: unknown key 'step'; did you mean 'steps'"),
    ],
)
def test_bad_files_and_overrides(tmp_path, text, overrides, message):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load(file, overrides)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config file .*none.yaml"):
        load(tmp_path / "none.yaml")


def test_differences_name_only_what_decides_the_training():
    saved = parse(FULL)
    same = parse({**FULL, "name": "other", "evaluate": {"tokens": 8192}, "train": {**FULL["train"], "log_every": 3}})
    assert differences(saved, same) == []
    extended = dataclasses.replace(saved, scheme=dataclasses.replace(saved.scheme, label="x", extend={"mask": 1}))
    assert differences(saved, extended) == []
    changed = parse({**FULL, "seed": 4, "scheme": "alibi"})
    assert differences(saved, changed) == ["seed was 3, now 4", "scheme.learned was True, now None"]


STAGED = {"data": {"source": "files", "paths": ["a.txt"], "packing": "best-fit"}}


def test_a_stage_reads_its_own_text():
    mixture = [{"paths": ["b.txt"], "weight": 2}, {"paths": ["c.txt"]}]
    config = parse({**STAGED, "stages": [{}, {"data": {"mixture": mixture}}, {"data": {"source": "stdlib"}}, {}]})
    assert parse(yaml.safe_load(dump(config))) == config
    found = [stage.data for stage in config.every_stage]
    assert [data.paths for data in found] == [("a.txt",), (), (), ()]
    assert [len(data.mixture) for data in found] == [0, 2, 0, 0]
    assert [data.source for data in found] == ["files", "files", "stdlib", "stdlib"]
    assert {data.packing for data in found} == {"best-fit"}


def test_text_of_a_stage_decides_its_training_and_the_cache_does_not():
    saved, other, cached = (
        parse({**STAGED, "stages": [{}, {"data": data}]})
        for data in ({"paths": ["b.txt"]}, {"paths": ["c.txt"]}, {"paths": ["b.txt"], "cache": "tokens"})
    )
    assert differences(saved, other) == ["stages[1].data.paths was ['b.txt'], now ['c.txt']"]
    assert differences(saved, cached) == []


def test_reading_a_config_does_not_start_jax():
    code = "import sys, train.config; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_run_of_stages_does_not_end_at_a_loss():
    with pytest.raises(ValueError, match=r"train\.stop_loss works only without stages"):
        parse({"train": {"stop_loss": 1.0}, "stages": [{}, {}]})
    with pytest.raises(ValueError, match=r"train\.stop_loss must not be negative, found -1"):
        parse({"train": {"stop_loss": -1.0}})
