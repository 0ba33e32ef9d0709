"""Folders of files on a disk, in memory and at URLs."""

import numpy as np
import pytest
from refusals import refused

from train.data.storage import LocalFolder, MemoryFolder, RemoteFolder, Span, find, folder_at, open_url
from train.runtime.paths import path


@pytest.fixture(params=["memory", "local", "remote"])
def folder(request, tmp_path):
    if request.param == "memory":
        return MemoryFolder()
    return LocalFolder(tmp_path) if request.param == "local" else RemoteFolder(f"memory://{tmp_path.name}")


def test_a_folder_gives_back_files_and_spans_of_them(folder):
    content = np.random.default_rng(0).bytes(1000)
    assert folder.read("a") is None
    assert folder.sizes() == {}
    folder.write("a", [content])
    folder.write("b", [content[::-1]])
    folder.write("b", [content])
    assert folder.read("b") == content
    assert folder.sizes() == {"a": 1000, "b": 1000}
    spans = [Span("a", 5, 9), Span("b", 990, 1000), Span("a", 0, 5), Span("a", 3, 4), Span("a", 9, 9)]
    spans.append(Span("a", 50, 60))
    assert [bytes(found) for found in folder.spans(spans)] == [content[span.start : span.stop] for span in spans]


def test_a_span_that_cannot_be_read_is_an_error(tmp_path):
    folder = RemoteFolder(f"memory://{tmp_path.name}")
    folder.write("a", [b"content"])
    refused("gone", lambda: folder.spans([Span("a", 0, 3), Span("gone", 0, 3)]), FileNotFoundError)


def test_a_file_at_a_url_is_mapped_from_a_copy(tmp_path):
    folder = RemoteFolder(f"memory://{tmp_path.name}")
    folder.write("sizes", [np.arange(1000).tobytes()])
    found = folder.map("sizes", np.dtype(np.int64))
    np.testing.assert_array_equal(found, np.arange(1000))
    assert isinstance(found, np.memmap)


def test_a_file_that_fails_in_the_middle_is_not_there(folder):
    def failing():
        yield b"half"
        raise KeyError

    with pytest.raises(KeyError):
        folder.write("file", failing())
    assert folder.read("file") is None
    assert folder.sizes() == {}
    folder.write("file", [b"whole", b"ly"])
    assert folder.read("file") == b"wholely"


def test_two_writers_of_one_file_leave_it_whole(tmp_path):
    first, second = LocalFolder(tmp_path), LocalFolder(tmp_path)
    content = [bytes([number]) * 2**16 for number in (1, 2)]

    def interrupted():
        yield content[0]
        second.write("file", content)
        yield content[1]

    first.write("file", interrupted())
    assert first.read("file") == b"".join(content)
    assert first.sizes() == {"file": 2**17}


@pytest.mark.parametrize("scheme", ["file", "local"])
def test_a_url_of_this_machine_is_the_same_folder_for_data_and_for_outputs(tmp_path, scheme):
    """Also with %20 for a space."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "text.txt").write_text("some text")
    address = f"{scheme}://{tmp_path}/a%20folder"
    assert folder_at(address).path == path(address) == folder
    assert list(find(f"{address}/*.txt", "data.paths")) == [str(folder / "text.txt")]
    assert open_url(f"{address}/text.txt", "data.tokenizer")[1] == str(folder / "text.txt")
