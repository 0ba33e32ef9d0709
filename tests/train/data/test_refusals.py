"""Text and settings of text that are refused: the table of this room."""

import sys

import numpy as np
import pytest
from documents import held_out_sample, pack, training_rows
from refusals import refused

from train.config import DataConfig, parse
from train.data.sources import all_documents
from train.data.tokenizer import load_tokenizer

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n".encode()


def data(**values):
    return parse({"data": values})


def files(**values):
    return data(source="files", **values)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("data.paths", lambda: files()),
        ("data.paths", lambda: data(paths=["a.txt"])),
        ("data.mixture", lambda: files(paths="a.txt", mixture=[{"paths": "b.txt"}])),
        ("data.mixture[0].paths", lambda: files(mixture=[{"weight": 2.0}])),
        ("data.mixture[1].weight", lambda: files(mixture=[{"paths": "a"}, {"paths": "b", "weight": 0}])),
        ("weights", lambda: files(mixture=[{"paths": "a", "weights": 1}])),
        ("data.mixture", lambda: files(mixture={"paths": "a"})),
        ("data.packing", lambda: data(packing="bestfit")),
        ("data.cache", lambda: data(cache=3)),
        ("data.held_out", lambda: data(held_out=1.0)),
        ("data.held_out", lambda: held_out_sample(data(held_out=0.0))),
        ("data.held_out_tokens", lambda: data(held_out_tokens=0)),
        ("train.length=8", lambda: pack([np.arange(8)], 8)),
    ],
)
def test_invalid_settings_are_refused(name, call):
    refused(name, call)


CONTENTS = {
    "a.pdf": "x",
    "empty.txt": "",
    "one/0.txt": "text",
    "two/0.txt": "other",
    "two/1.txt": "more",
    "cut.jsonl": '{"text": "good"}\n{',
    "key.jsonl": '{"text": "good"}\n{"texts": "x"}',
    "null.jsonl": '{"text": "good"}\n{"text": null}',
}


@pytest.fixture
def folder(tmp_path):
    for name, content in CONTENTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


@pytest.mark.parametrize(
    ("named", "paths", "kind"),
    [
        ("data.paths", ["none.txt"], FileNotFoundError),
        ("data.paths", ["two"], FileNotFoundError),  # a folder: the message says what to write
        ("a.pdf", ["a.pdf"], ValueError),
        ("empty.txt", ["empty.txt"], ValueError),
        ("0.txt", ["one/*.txt", "two/*.txt"], ValueError),  # two documents of one name
        ("line 2", ["cut.jsonl"], ValueError),
        ("data.text_key=texts", ["key.jsonl"], ValueError),
        ("data.bad_records=0.5", ["null.jsonl"], ValueError),
        ("nowhere://bucket/a.txt", ["nowhere://bucket/a.txt"], ValueError),
        ("memory://none/*.txt", ["memory://none/*.txt"], FileNotFoundError),
    ],
)
def test_text_that_cannot_be_read_is_refused(folder, named, paths, kind):
    places = tuple(path if "://" in path else f"{folder}/{path}" for path in paths)
    refused(named, lambda: all_documents(DataConfig(source="files", paths=places)), kind)


@pytest.mark.parametrize(
    ("named", "parts", "changes"),
    [
        ("data.held_out=0", ["one/*"], {}),
        ("data.mixture", ["one/*", "*/*"], {}),
        ("data.cache", ["one/*", "two/1.txt"], {"cache": "nowhere://a"}),
    ],
)
def test_text_that_cannot_be_trained_on_is_refused(folder, named, parts, changes):
    mixture = [{"paths": [f"{folder}/{part}"]} for part in parts]
    values = {"data": {"source": "files", "mixture": mixture, **changes}, "train": {"length": 8}}
    refused(named, lambda: training_rows(parse(values)))


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("none.json", None, FileNotFoundError),
        ("a.json", b"{}", ValueError),
        ("a.model", b"x", ValueError),
        ("a.json", POINTER, ValueError),
        ("gpt2", None, ValueError),
    ],
)
def test_an_invalid_tokenizer_is_refused(tmp_path, name, content, kind):
    for package in ("tokenizers", "sentencepiece"):
        pytest.importorskip(package)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    refused("data.tokenizer", lambda: load_tokenizer(DataConfig(tokenizer=str(tmp_path / name))), kind)


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("a.parquet", "pyarrow.parquet", "pyarrow"),
        ("a.jsonl.zst", "pyarrow", "pyarrow"),
        ("a.array_record", "array_record.python.array_record_module", "array_record"),
        ("a.json", "tokenizers", "tokenizers"),
        ("a.model", "sentencepiece", "sentencepiece"),
    ],
)
def test_a_missing_package_is_named(tmp_path, monkeypatch, name, module, package):
    (tmp_path / name).write_text("{}")
    monkeypatch.setitem(sys.modules, module, None)
    if name in ("a.json", "a.model"):
        refused(package, lambda: load_tokenizer(DataConfig(tokenizer=str(tmp_path / name))))
    else:
        refused(package, lambda: all_documents(DataConfig(source="files", paths=(str(tmp_path / name),))))
