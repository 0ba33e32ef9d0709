"""What a config takes from a released model, and what it may change: sizes, scheme, lengths, tokenizer."""

import json
import shutil

import pytest
from refusals import refused
from released_models import LENGTH, TEXT, VOCABULARY, few_steps, with_changes, write_released

import posjax as pj
from posjax import rotary
from posjax.nn import Latent, Norm, Residual, from_pretrained, save_pretrained
from train.config import dump, parse, parse_text
from train.data.tokenizer import load_tokenizer
from train.model.build import Setup, check_model, evaluated_scheme, scheme_of


@pytest.fixture(scope="module")
def values(released, tmp_path_factory):
    return few_steps(released[0], tmp_path_factory.mktemp("text"))


def test_shape_scheme_and_tokenizer_come_from_the_model(released, values):
    folder, decoder = released
    config = parse({"init": str(folder)})
    assert scheme_of(config) == decoder.config.scheme
    assert Setup(config).decoder.vocab_size == VOCABULARY
    assert (config.model.num_layers, config.model.norm.eps, config.model.embedding_scale) == (2, 1e-5, 1.0)
    assert config.train.length == LENGTH
    assert config.evaluate.lengths == (32, 64, 128)
    tokenizer = load_tokenizer(config.data)
    assert tokenizer.vocabulary_size == VOCABULARY
    assert (tokenizer.bos, tokenizer.eos, tokenizer.padding) == (0, 1, 1)
    assert tokenizer.decode(tokenizer.encode_all([TEXT.encode()])[0]) == TEXT.encode()


def test_a_saved_config_does_not_need_the_model_any_more(released, values):
    config = parse(values)
    saved = dump(config).replace(str(released[0]), "/nowhere/tiny")
    again = parse_text(saved, "config.yaml")
    assert again.model == config.model
    assert scheme_of(again) == scheme_of(config)


BLOOM = {"norm": Norm("layer", 1e-5, bias=True), "embedding_norm": True, "biases": ("qkv", "output", "mlp")}
BLOOM |= {"activation": "gelu", "mlp_dim": 128, "num_kv_heads": 4}


def test_another_rotation_keeps_the_base_of_the_model(values):
    assert scheme_of(with_changes(values, scheme={"name": "coca-strict"})).features.frequencies.base == 500.0
    assert scheme_of(with_changes(values, scheme={"name": "coca-strict", "base": 7.0})).features.frequencies.base == 7.0


def test_a_part_of_a_norm_leaves_the_rest_as_the_model_has_it(values, tmp_path):
    write_released(tmp_path, residual=Residual(scale=0.5))
    config = with_changes(values, init=str(tmp_path), model={"residual": {"norm": "before"}})
    assert config.model.residual.scale == 0.5


def test_latent_attention_comes_from_the_model(values, tmp_path):
    sizes = {"num_kv_heads": None, "head_dim": None}
    latent = write_released(tmp_path, latent=Latent(24, 8, 12, 10, query_rank=20), **sizes).config.latent
    config = with_changes(values, init=str(tmp_path))
    assert Setup(config).decoder.latent == latent
    assert parse_text(dump(config), "config.yaml").model == config.model
    refused("model.latent", lambda: with_changes(values, init=str(tmp_path), model={"latent": {"rank": 23}}))


def test_contradictions_are_refused_by_name(released, values, tmp_path):
    write_released(tmp_path, scheme=pj.scheme("alibi"), trained_length=None, **BLOOM)
    masked = parse({**values, "init": "", "scheme": "rope", "model": {"causal": False}} | {
        "data": {**values["data"], "tokenizer": f"{values['init']}/tokenizer.json", "special_tokens": "own"}
    })  # fmt: skip
    for name, call in (
        ("model.num_layers", lambda: with_changes(values, model={"num_layers": 3})),
        ("model.norm", lambda: with_changes(values, model={"norm": {"eps": 1e-6}})),
        ("model.vocab_size", lambda: with_changes(values, model={"vocab_size": 281})),
        ("model.trained_length", lambda: with_changes(values, init=str(tmp_path))),
        ("init", lambda: with_changes(values, init=3)),
        ("dtype", lambda: parse({**values, "init": {"path": "tiny", "dtype": "bfloat16"}})),
        ("init.values", lambda: parse({**values, "init": {"path": "tiny", "values": 3}})),
        ("init", lambda: scheme_of(parse({"scheme": "released"}))),
        ("data.special_tokens", lambda: check_model(Setup(masked))),
    ):
        refused(name, call)
    for path in ("/nowhere/model", "/nowhere/model.gguf"):
        refused("/nowhere/model", lambda path=path: with_changes(values, init=path), FileNotFoundError)
    config = with_changes(values, init=str(tmp_path), model={"trained_length": 16, "compute_dtype": "bfloat16"})
    assert (config.model.trained_length, config.model.compute_dtype) == (16, "bfloat16")


@pytest.mark.parametrize(
    ("train", "wanted"),
    [
        ({"steps": 0}, (LENGTH // 4, LENGTH, 2 * LENGTH, 4 * LENGTH)),
        ({}, (LENGTH, 2 * LENGTH, 4 * LENGTH)),
        ({"length": 64}, (64, 4 * LENGTH)),
        ({"length": 16, "stages": 100}, (100, 4 * LENGTH)),
    ],
)
def test_lengths_are_measured_from_that_of_training(released, train, wanted):
    train = dict(train)
    stages = [{"name": "a"}, {"name": "b", "train": {"length": train.pop("stages")}}] if "stages" in train else []
    config = parse({"init": str(released[0]), "train": {"batch_tokens": 1600, **train}, "stages": stages})
    assert config.evaluate.lengths == wanted


def test_options_of_extensions_follow_from_the_lengths(values):
    config = with_changes(values, train={"steps": 0, "length": LENGTH})
    entry = parse({**values, "scheme": {"name": "released", "extend": {"frequencies": {"name": "yarn"}}}}).scheme
    rule = evaluated_scheme(config, entry, length=128).features.frequencies
    assert (rule.factor, rule.original_length, rule.base) == (4.0, LENGTH, 500.0)
    assert evaluated_scheme(config, entry, length=16) == scheme_of(config)


def test_special_tokens_come_from_config_json_where_nothing_else_names_them(released, tmp_path):
    shutil.copytree(released[0], tmp_path / "tiny")
    (tmp_path / "tiny" / "tokenizer_config.json").unlink()
    stated = json.loads((tmp_path / "tiny" / "config.json").read_text())
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(stated | {"bos_token_id": 7, "eos_token_id": [9, 3]}))
    tokenizer = load_tokenizer(parse({"init": str(tmp_path / "tiny")}).data)
    assert (tokenizer.bos, tokenizer.eos) == (7, 9)


def test_llama_3_2_has_the_length_that_it_states(tmp_path):
    """Its rule would reach twice as far: 32 times 8,192, where 131,072 is stated. Here 32 times 8, where 128 is."""
    rule = rotary.Llama3(32.0, 8, base=500.0)
    write_released(tmp_path, scheme=pj.Scheme(features=rotary.Rotary(rule)), trained_length=128)
    stated = json.loads((tmp_path / "config.json").read_text())
    assert stated["max_position_embeddings"] == 128
    assert parse({"init": str(tmp_path)}).model.trained_length == 128
    save_pretrained(from_pretrained(tmp_path), tmp_path / "again", like=tmp_path)
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == stated
    assert parse({"init": str(tmp_path), "model": {"trained_length": 256}}).model.trained_length == 256


def test_a_scaling_says_how_far_a_model_reaches(tmp_path):
    """As in Qwen's config, where max_position_embeddings is still the length before the extension."""
    write_released(tmp_path, scheme=pj.Scheme(features=rotary.Rotary(rotary.YaRN(4.0, LENGTH, base=500.0))))
    stated = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stated | {"max_position_embeddings": LENGTH}))
    assert parse({"init": str(tmp_path)}).train.length == 4 * LENGTH
