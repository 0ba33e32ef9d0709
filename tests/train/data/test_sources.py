"""Documents: found, named, read and split; a missing or unreadable text gives an error of one line."""

import pytest
from documents import split

from train.config import DataConfig
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


def test_standard_library_leaves_out_packages_and_tests():
    found = all_documents(DataConfig())
    names = [name for name, _ in found]
    assert len(names) == len(set(names)) > 300
    assert {"json/decoder.py", "argparse.py", "textwrap.py"} <= set(names)
    unwanted = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    assert all(unwanted.isdisjoint(name.split("/")) for name in names)
    assert all(text for _, text in found)
    _, held_out = split(DataConfig())
    assert 0.02 < len(held_out) / len(names) < 0.1


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


@pytest.mark.parametrize("share", [1e-9, 0.999999])
def test_each_side_gets_a_document(books, share):
    config = from_files(books / "**" / "*.txt", held_out=share)
    assert sorted(map(len, split(config))) == [1, 19]


def test_nothing_held_out(books):
    config = from_files(books / "shelf0" / "0.txt", held_out=0.0)
    assert all_documents(config) == [("0.txt", b"book 0")]
    with pytest.raises(ValueError, match=r"data.held_out is 0"):
        split(config)


def test_jsonl_has_a_document_on_each_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"body": "één"}\n\n{"body": "two\\nlines"}\n{"body": ""}\n')
    found = everything(from_files(file, text_key="body"))
    assert found == {"a.jsonl:1": "één".encode(), "a.jsonl:3": b"two\nlines"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "{",
            r"1 of 2 records, .* are bad, more than data.bad_records=0.01 allows: .*a.jsonl \(line 2: not valid JSON",
        ),
        ('{"texts": "x"}', "line 2: no text under 'text', found keys .'texts'.; did you mean data.text_key=texts"),
        ('{"text": 3}', "line 2: no text under 'text', found a value of type int"),
        ('{"text": null}', "line 2: no text under 'text', found null.; data.bad_records=0.5 would leave them out"),
        ("[1]", "line 2: no text under 'text', found a value of type list"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good"}\n' + line)
    with pytest.raises(ValueError, match=message) as error:
        all_documents(from_files(file))
    assert "\n" not in str(error.value)


def test_missing_and_unreadable_paths(tmp_path, books):
    with pytest.raises(FileNotFoundError, match=r"data.paths: no file matches '.*none.txt'"):
        all_documents(from_files(tmp_path / "none.txt"))
    with pytest.raises(FileNotFoundError, match=r"for all of a folder write .*books/\*\*/\*.txt"):
        all_documents(from_files(books))
    (tmp_path / "a.pdf").write_text("x")
    with pytest.raises(ValueError, match=r"a.pdf has no known format \(known: .txt, .py, .jsonl"):
        all_documents(from_files(tmp_path / "a.pdf"))


def test_empty_text_and_name_clashes(tmp_path, books):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"no text in .*empty.txt; every document is empty"):
        all_documents(from_files(tmp_path / "empty.txt"))
    (books / "shelf1" / "0.txt").write_text("other")
    with pytest.raises(ValueError, match=r"are both called '0.txt'"):
        all_documents(from_files(books / "shelf0" / "*.txt", books / "shelf1" / "*.txt"))


def test_a_library_without_sources_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match=r"data.source=stdlib: no .py files under"):
        all_documents(DataConfig())


def test_one_file_under_two_names_is_one_document(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"text {number}")
    twice = DataConfig(source="files", paths=(f"{tmp_path}/**/*.txt", f"{folder}/*.txt"))
    assert sorted(text for _, text in all_documents(twice)) == [b"text 0", b"text 1", b"text 2"]
