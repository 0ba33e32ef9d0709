"""Paths on a disk and in object stores, files that are written whole, and errors as single lines."""

import pytest
from object_store import of_the_store, serving
from refusals import refused

from train.runtime.lines import Listed, in_a_line, in_lines
from train.runtime.paths import check_checkpoints, look_anew, names_in, path, write_file


@pytest.fixture
def store(monkeypatch):
    """A local server in place of Google's store."""
    system = pytest.importorskip("gcsfs").GCSFileSystem
    with serving() as (store, address):
        for name, value in of_the_store(address).items():
            monkeypatch.setenv(name, value)
        system.clear_instance_cache()
        yield store
        system.clear_instance_cache()


def test_what_others_write_into_an_object_store_is_seen(store):
    """gcsfs caches listings, so it misses what TensorStore and other processes write."""
    store.put("bucket", "run/first", b"")
    folder = path("gs://bucket/run")
    assert names_in(folder) == ["first"]
    store.put("bucket", "run/second", b"")
    assert not (folder / "second").exists()
    look_anew(folder)
    assert (folder / "second").exists()
    store.put("bucket", "run/third", b"")
    assert names_in(folder) == ["first", "second", "third"]
    assert names_in(path("gs://bucket/none")) == []


def test_addresses(tmp_path):
    assert path("runs/a") == path("runs") / "a"
    assert path(f"file://{tmp_path}/a%20b") == tmp_path / "a b"
    assert str(path("memory://runs") / "a") == "memory://runs/a"
    refused("nowhere://x", lambda: path("nowhere://x"))
    check_checkpoints(tmp_path)
    refused("memory://runs", lambda: check_checkpoints(path("memory://runs")))


@pytest.mark.parametrize("where", ["memory://files", None])
def test_files_are_written_whole(tmp_path, where):
    folder = path(where or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    for text in ("first", "second"):
        write_file(folder / "a.txt", text)
        assert (folder / "a.txt").read_text() == text
    assert [place.name for place in folder.iterdir()] == ["a.txt"]


def test_an_error_is_a_line_and_alternatives_are_listed_one_a_line():
    assert in_a_line(ValueError("two\n  lines\t and more")) == "two lines and more"
    assert in_a_line(ValueError("two\n  lines"), 5) == "two l"
    assert in_a_line(EOFError()) == "EOFError"
    assert in_lines(Listed("name one:", ["a", "b"])) == "name one:\n  a\n  b"
    assert in_lines(ValueError("two\n  lines")) == "two lines"
