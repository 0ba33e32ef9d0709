"""Documents: found, named, read and split; the parts of a mixture."""

import pytest
from documents import split
from refusals import refused

from train.config import DataConfig, parse
from train.data.sources import all_documents


def from_files(*paths, **options):
    return DataConfig(source="files", paths=tuple(str(path) for path in paths), **options)


def everything(config):
    return dict(all_documents(config))


@pytest.fixture
def books(tmp_path):
    for index in range(20):
        file = tmp_path / "books" / f"shelf{index % 2}" / f"{index}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"book {index}")
    return tmp_path / "books"


def test_standard_library_leaves_out_packages_and_tests(tmp_path, monkeypatch):
    found = all_documents(DataConfig())
    names = [name for name, _ in found]
    assert len(names) == len(set(names)) > 300
    assert {"json/decoder.py", "argparse.py", "textwrap.py"} <= set(names)
    unwanted = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    assert all(unwanted.isdisjoint(name.split("/")) for name in names)
    assert all(text for _, text in found)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    refused("data.source=stdlib", lambda: all_documents(DataConfig()))


def test_globs_and_names_do_not_depend_on_where_the_data_lies(books, tmp_path):
    found = everything(from_files(books / "**" / "*.txt"))
    assert len(found) == 20
    assert found["shelf1/3.txt"] == b"book 3"
    assert everything(from_files(books / "shelf1" / "3.txt", books / "shelf0" / "*.txt")).keys() >= {"3.txt", "4.txt"}
    before = split(from_files(books / "**" / "*.txt", held_out=0.3))
    books.rename(tmp_path / "moved")
    assert split(from_files(tmp_path / "moved" / "**" / "*.txt", held_out=0.3)) == before


def test_splits_are_disjoint_and_a_new_document_moves_no_other(books):
    config = from_files(books / "**" / "*.txt", held_out=0.3)
    train, held_out = map(set, split(config))
    assert train.isdisjoint(held_out)
    assert len(train | held_out) == 20
    (books / "new.txt").write_text("new")
    assert set(split(config)[1]) - {b"new"} == held_out


def test_jsonl_has_a_document_on_each_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"body": "één"}\n\n{"body": "two\\nlines"}\n{"body": ""}\n')
    found = everything(from_files(file, text_key="body"))
    assert found == {"a.jsonl:1": "één".encode(), "a.jsonl:3": b"two\nlines"}


def test_one_file_under_two_names_is_one_document(books):
    twice = from_files(books.parent / "**" / "*.txt", books / "shelf0" / "*.txt")
    assert len(all_documents(twice)) == 20


@pytest.fixture
def folder(tmp_path):
    for name, count in (("a", 8), ("b", 3), ("lone", 1)):
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / f"{number}.txt").write_text(f"{name} {number} " * 5)
    return tmp_path


def mixture(folder, *names, held_out=0.05):
    parts = [{"paths": [f"{folder}/{name}/*.txt"], "weight": 1.0 + index} for index, name in enumerate(names)]
    return parse({"data": {"source": "files", "mixture": parts, "held_out": held_out}, "train": {"length": 8}})


@pytest.mark.parametrize(("share", "least"), [(1e-9, 1), (0.3, 1), (0.999999, 9)])
def test_every_part_is_trained_on_and_some_are_held_out(folder, share, least):
    texts = split(mixture(folder, "lone", "a", "b", held_out=share).data)
    train, held_out = ([text.split()[0] for text in side] for side in texts)
    assert set(train) == {b"lone", b"a", b"b"}
    assert len(train) + len(held_out) == 12
    assert b"lone" not in held_out
    assert len(held_out) >= least


def test_text_keys_of_parts_differ(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": "one"}')
    (tmp_path / "b.jsonl").write_text('{"y": "two"}')
    parts = [{"paths": f"{tmp_path}/{name}.jsonl", "text_key": key} for name, key in (("a", "x"), ("b", "y"))]
    config = parse({"data": {"source": "files", "mixture": parts, "held_out": 0.0}}).data
    assert [text for _, text in all_documents(config)] == [b"one", b"two"]
