"""The commands with the name of a model at the Hugging Face hub, from a local server, in place of its folder."""

import json

import hub
import numpy as np
import pytest
from nn.huggingface import test_gguf
from released_models import few_steps, write_released

from posjax.nn.huggingface.load import read_values
from train import cli
from train.compare.study.cells import digest_of_model
from train.config import parse
from train.loop.fit import fit
from train.model.build import Setup

constants = pytest.importorskip("huggingface_hub.constants")
NAME = "people/tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("released") / "tiny"
    folder.mkdir()
    write_released(folder)
    return folder


@pytest.fixture(autouse=True)
def served(folder, monkeypatch, tmp_path):
    """A hub with the model, from which this process downloads into an empty cache."""
    with hub.running() as server:
        server.add(NAME, folder)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + hub.TEMPLATE)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.chdir(tmp_path)
        yield server


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_training_keeps_the_commit_and_needs_the_hub_no_more(served, folder, tmp_path, capsys):
    values = few_steps(folder, tmp_path) | {"name": "by-folder"}
    by_folder, by_name = parse(values), parse(values | {"name": "by-name", "init": NAME})
    commit = served.refs[NAME, "main"]
    assert by_name.init.path == f"{NAME}@{commit}"
    assert not any(file.endswith(".safetensors") for file in served.downloaded())
    for config in (by_folder, by_name):
        fit(config)
    np.testing.assert_array_equal(losses(by_name.directory), losses(by_folder.directory))
    assert digest_of_model(Setup(by_name)) == digest_of_model(Setup(by_folder))

    newer = tmp_path / "newer"
    newer.mkdir()
    write_released(newer, seed=1)
    served.add(NAME, newer)
    asked = len(served.asked)
    assert cli.main(["export", str(by_name.directory), "exported"]) == 0, capsys.readouterr().err
    assert (tmp_path / "exported" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert len(served.asked) == asked


def test_generate_and_export_take_a_name(served, folder, capsys):
    options = ["--prompt", "The cat", "--tokens", "5", "--temperature", "0"]
    texts = []
    for model in (str(folder), NAME, f"{NAME}@main"):
        assert cli.main(["generate", model, *options]) == 0, capsys.readouterr().err
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]
    assert cli.main(["export", NAME, "copy"]) == 0, capsys.readouterr().err
    assert read_values("copy")["hidden_size"] == read_values(folder)["hidden_size"]


def test_generate_takes_a_gguf_file(served, tmp_path, capsys):
    (tmp_path / "files").mkdir()
    path = tmp_path / "files" / "tiny.gguf"
    tokenizer = test_gguf.trained("gpt-2")
    values = test_gguf.VALUES | {"vocab_size": tokenizer.get_vocab_size()}
    test_gguf.write(path, values, edit=test_gguf.with_tokenizer(tokenizer, "gpt-2"))
    served.add("people/files", path.parent)
    texts = []
    for model in (str(path), "people/files/tiny.gguf"):
        command = ["generate", model, "--prompt", "the cat", "--tokens", "3", "--temperature", "0"]
        assert cli.main(command) == 0, capsys.readouterr().err
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_mistakes_are_one_line(served, capsys):
    for name in ("people/lost", f"{NAME}@lost"):
        assert cli.main(["generate", name]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert name in lines[0]
