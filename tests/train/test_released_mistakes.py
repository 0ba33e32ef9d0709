"""Mistakes with a released model, each named in one line, and the files beside the weights that are read."""

import json

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from refusals import refused
from released_models import GPT2, LENGTH, TEXT, VOCABULARY, few_steps, with_changes, write_released

import posjax as pj
from posjax import norms, rotary
from posjax.nn import from_pretrained
from train import cli
from train.compare.compare import compare
from train.config import parse
from train.data.tokenizer import ends_of_text, load_tokenizer
from train.evaluate.generate import SamplingOptions, tokens_after
from train.loop.fit import fit
from train.model.build import Setup, check_model


@pytest.fixture
def tiny(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    write_released(folder)
    return folder


def edit(place, **changes):
    values = json.loads(place.read_text())
    place.write_text(json.dumps(values | changes))


COMMANDS = {
    "evaluate": ["evaluate", "TINY"],
    "generate": ["generate", "TINY", "--prompt", "The"],
    "export": ["export", "TINY", "OUT"],
    "search": ["search", "TINY", "--length", "64"],
}
YARN = "scheme.extend={frequencies: {name: yarn}}"
MISTAKES = [
    *(("scheme", name, change) for name, change in (("evaluate", "scheme=alibi"), ("export", "scheme=alibi"))),
    ("scheme.extend", "generate", "scheme.frequencies={name: yarn, factor: 4}"),
    ("longrope", "generate", "scheme.extend={frequencies: {name: longrope}}"),
    ("scheme.extend", "export", YARN, f"evaluate.lengths=[16,{LENGTH}]"),
    ("scheme.extend", "search", YARN),
    ("remap", "export", "scheme.extend={remap: {name: rerope}}"),
    ("length", "evaluate", "train.length=64"),
    ("length", "export", "train.length=64"),
    ("model.vocab_size", "generate", "data.special_tokens=added"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=[" ".join(m[:2]) + f" {n}" for n, m in enumerate(MISTAKES)])
def test_a_mistake_at_the_command_line_is_named_in_one_line(mistake, tiny, tmp_path, capsys):
    name, command, *changes = mistake
    places = {"TINY": str(tiny), "OUT": str(tmp_path / "out")}
    assert cli.main([*(places.get(each, each) for each in COMMANDS[command]), *changes]) == 2
    error = capsys.readouterr().err
    assert name in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("place", ["", "nowhere"])
def test_a_place_without_a_model_is_named(command, place, tmp_path, capsys):
    places = {"TINY": str(tmp_path / place), "OUT": str(tmp_path / "out")}
    assert cli.main([places.get(each, each) for each in COMMANDS[command]]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / place) in error
    assert error.count("\n") == 1


def test_a_place_that_cannot_be_reached_is_one_line(monkeypatch, capsys):
    def unreachable(*_):
        raise RuntimeError("no\nnetwork")

    for name in ("isfile", "isdir", "ls", "info"):
        monkeypatch.setattr(MemoryFileSystem, name, unreachable)
    for command in (["compare", "configs/extend.yaml", "init=memory://tiny"], ["generate", "memory://tiny"]):
        assert cli.main(command) == 2
        assert "cannot be reached: RuntimeError: no network" in capsys.readouterr().err


def test_a_tokenizer_of_another_kind_beside_the_model_is_named(tiny, capsys):
    (tiny / "tokenizer.json").rename(tiny / "tokenizer.model")
    assert cli.main(["generate", str(tiny), "--prompt", "The"]) == 2
    assert "tokenizer.model" in capsys.readouterr().err


def test_what_cannot_be_trained_is_refused(tmp_path):
    """CoCA has no place for norms of queries and keys, which Qwen3 has, nor for channels that do not rotate."""
    normed = pj.Scheme(features=rotary.Rotary(rotary.Plain(500.0)), norm=norms.QKNorm(eps=1e-5))
    half = pj.Scheme(features=rotary.Rotary(rotary.Plain(500.0, partial_rotary_factor=0.5)))
    for name, scheme in (("qwen3", normed), ("half", half)):
        (tmp_path / name).mkdir()
        write_released(tmp_path / name, scheme=scheme)
    values = few_steps(tmp_path / "qwen3", tmp_path)
    schemes = [{"name": "released"}, {"name": "coca-strict", "label": "CoCA"}]
    refused("CoCA", lambda: compare(parse({**values, "compare": {"schemes": schemes}})))
    refused("released", lambda: fit(with_changes(values, init=str(tmp_path / "half"), scheme="coca-strict")))
    refused("released", lambda: fit(with_changes(values, scheme="fox")))
    refused("train.steps", lambda: fit(with_changes(values, train={"steps": 0, "length": LENGTH})))


def test_learned_positions_have_an_end(tmp_path, capsys):
    write_released(tmp_path, **GPT2)
    assert cli.main(["generate", str(tmp_path), "--prompt", "The", "--tokens", str(LENGTH)]) == 2
    assert "--tokens" in capsys.readouterr().err
    refused("train.length", lambda: check_model(Setup(parse({"init": str(tmp_path), "train": {"length": 64}}))))


# --- tokenizers -------------------------------------------------------------------------------------------------------


def test_special_tokens_beyond_the_vocabulary_are_not_used(tiny, capsys):
    """Gemma 3's ``<image_soft_token>`` has no embedding."""
    tokens = json.loads((tiny / "tokenizer.json").read_text())
    spare = {"id": VOCABULARY, "content": "<image>", "single_word": False, "lstrip": False, "rstrip": False}
    spare |= {"normalized": False, "special": True}
    edit(tiny / "tokenizer.json", added_tokens=[*tokens["added_tokens"], spare])
    config = parse({"init": str(tiny)})
    check_model(Setup(config))
    tokenizer = load_tokenizer(config.data)
    assert (tokenizer.vocabulary_size, tokenizer.encoded_size) == (VOCABULARY + 1, VOCABULARY)
    assert max(tokenizer.encode_all([b"an <image> of " + TEXT.encode()])[0]) < VOCABULARY
    edit(tiny / "tokenizer_config.json", additional_special_tokens=["<image>"])
    assert cli.main(["generate", str(tiny), "--prompt", "a <image>"]) == 2
    assert f"no embedding for [{VOCABULARY}]" in capsys.readouterr().err
    edit(tiny / "tokenizer_config.json", eos_token="<image>")
    refused("model.vocab_size", lambda: check_model(Setup(parse({"init": str(tiny)}))))


def test_a_chat_model_ends_its_turn_by_its_own_token(tiny, capsys):
    config = parse({"init": str(tiny)})
    tokenizer = load_tokenizer(config.data)
    assert ends_of_text(config.data, tokenizer) == {tokenizer.eos}
    prompt = tokenizer.encode_all([b"The cat"])[0][:-1]
    first = next(tokens_after(from_pretrained(tiny), prompt, SamplingOptions(tokens=8, temperature=0), {tokenizer.eos}))
    edit(tiny / "config.json", eos_token_id=tokenizer.eos)
    (tiny / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.eos, first]}))
    assert ends_of_text(config.data, tokenizer) == {tokenizer.eos, first}
    assert cli.main(["generate", str(tiny), "--prompt", "The cat", "--tokens", "8", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "The cat\n"
