"""Every format of text, on disk and behind URLs, from files that other libraries wrote; damaged files and bad records
are left out."""

import errno
import gzip
import io
import json
import re

import fsspec
import pytest
from refusals import refused

from train.config import DataConfig
from train.data.sources import all_documents

TEXTS = ["één", "two\nlines", "3" * 5000, "𝄞"]


def from_files(*paths, **options):
    return DataConfig(source="files", paths=tuple(str(path) for path in paths), **{"held_out": 0.0, **options})


def found(config, log=lambda _: None):
    return {name: text.decode() for name, text in all_documents(config, log)}


def jsonl(texts=TEXTS, key="text"):
    return "".join(json.dumps({"id": index, key: text}) + "\n" for index, text in enumerate(texts)).encode()


def column(texts):
    """A column of texts; bytes are not checked to be UTF-8, as by writers that do not check them."""
    pyarrow = pytest.importorskip("pyarrow")
    if any(isinstance(text, bytes) for text in texts):
        return pyarrow.array(texts, pyarrow.binary()).view(pyarrow.string())
    return pyarrow.array(texts)


def write_parquet(path, texts=TEXTS):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"id": range(len(texts)), "text": column(texts)})
    parquet.write_table(table, path, row_group_size=2)


def write_records(path, records):
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(path), "group_size:2")
    for record in records:
        writer.write(record)
    writer.close()


def write_zst(path, *frames):
    codec = pytest.importorskip("pyarrow").Codec("zstd")
    path.write_bytes(b"".join(codec.compress(frame, asbytes=True) for frame in frames))


WRITERS = {
    "a.jsonl": lambda path: path.write_bytes(jsonl()),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(jsonl()[:40]) + gzip.compress(jsonl()[40:])),
    "a.jsonl.zst": lambda path: write_zst(path, jsonl()[:40], jsonl()[40:]),
    "a.parquet": write_parquet,
    "a.array_record": lambda path: write_records(path, [text.encode() for text in TEXTS]),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_document_is_a_line_row_or_record_on_disk_and_at_a_url(tmp_path, name):
    WRITERS[name](tmp_path / name)
    wanted = {f"{name}:{n}": text for n, text in enumerate(TEXTS, start=1)}
    fsspec.filesystem("memory").pipe_file(f"/{tmp_path.name}/{name}", (tmp_path / name).read_bytes())
    assert found(from_files(tmp_path / name)) == found(from_files(f"memory://{tmp_path.name}/{name}")) == wanted


@pytest.mark.parametrize("name", ["a.py", "a.txt.gz", "a.txt.zst"])
def test_a_document_is_a_whole_file_without_its_byte_order_mark(tmp_path, name):
    text = "one\ntwo\n"
    content = b"\xef\xbb\xbf" + text.encode()
    if name.endswith(".zst"):
        write_zst(tmp_path / name, content)
    else:
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert found(from_files(tmp_path / name)) == {name: text}


def overwritten(parquet):
    """A Parquet file of which only the magic bytes and the footer are intact."""
    footer = 8 + int.from_bytes(parquet[-8:-4], "little")
    return parquet[:4] + b"\xff" * (len(parquet) - footer - 4) + parquet[-footer:]


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n".encode()
DAMAGE = {
    "cut.jsonl.gz": ("a.jsonl.gz", lambda content: content[:-20]),
    "cut.jsonl.zst": ("a.jsonl.zst", lambda content: content[:-9]),
    "utf16.jsonl": ("a.jsonl", lambda content: content.decode().encode("utf-16")),
    "pointer.jsonl": ("a.jsonl", lambda _: POINTER),
    "pointer.txt": ("a.jsonl", lambda _: POINTER),
    "cut.parquet": ("a.parquet", lambda content: content[:-40]),
    "page.parquet": ("a.parquet", overwritten),
    "cut.array_record": ("a.array_record", lambda content: content[:-100]),
    "short.array_record": ("a.array_record", lambda content: content[:50]),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_named_counted_and_left_out(tmp_path, name):
    source, damage = DAMAGE[name]
    WRITERS[source](tmp_path / source)
    (tmp_path / name).write_bytes(damage((tmp_path / source).read_bytes()))
    (tmp_path / "good.txt").write_text("good")
    lines = []
    assert found(from_files(tmp_path / name, tmp_path / "good.txt"), lines.append) == {"good.txt": "good"}
    (line,) = lines
    assert line.startswith(f"data: 1 of 2 files are damaged and left out: {tmp_path / name} (")
    assert "\n" not in line
    assert ("git lfs pull" in line) == ("pointer" in name)
    refused(name, lambda: all_documents(from_files(tmp_path / name)))


@pytest.mark.parametrize("name", ["a.txt", "a.parquet"])
def test_a_failing_disk_is_not_a_damaged_file(tmp_path, monkeypatch, name):
    class Failing(io.BytesIO):
        def read(self, *_):
            raise OSError(errno.EIO, "Input/output error")

    pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(bytes(100))
    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.open", lambda *_, **__: Failing(bytes(100)))
    with pytest.raises(OSError, match="Input/output error"):
        all_documents(from_files(tmp_path / name))


GOOD = [f"text {number}" for number in range(50)]
BAD_LINES = [b"{", b'{"id": 1}', b'{"text": null}', b'{"text": 3}', b'{"text": ["a"]}', b"[1]", b'{"text": "\xff"}']


def write_bad_lines(path):
    lines = jsonl(GOOD).split(b"\n")
    path.write_bytes(b"\n".join([*lines[:7], *BAD_LINES, *lines[7:]]))


WITH_BAD_ROWS = [text.encode() for text in GOOD[:7]] + [None, b"\xff\xfe"] + [text.encode() for text in GOOD[7:]]
WITH_BAD_RECORDS = {
    "a.jsonl": (write_bad_lines, 7),
    "a.parquet": (lambda path: write_parquet(path, WITH_BAD_ROWS), 2),
    "a.array_record": (lambda path: write_records(path, [text for text in WITH_BAD_ROWS if text]), 1),
}


@pytest.mark.parametrize("name", WITH_BAD_RECORDS)
def test_bad_records_are_named_counted_and_left_out(tmp_path, name):
    write, bad = WITH_BAD_RECORDS[name]
    write(tmp_path / name)
    lines = []
    documents = found(from_files(tmp_path / name, bad_records=0.13), lines.append)
    numbers = [*range(1, 8), *range(8 + bad, 51 + bad)]
    assert documents == {f"{name}:{number}": text for number, text in zip(numbers, GOOD, strict=True)}
    counts = f"data: {bad} of {50 + bad} records, in 1 of 1 files, are bad and left out: "
    assert re.fullmatch(rf"{counts}.*/{name} \({bad}: (line|row|record) 8: .*\)", *lines)
    refused("data.bad_records=0.01", lambda: all_documents(from_files(tmp_path / name)))


def test_links_are_followed_and_may_lead_nowhere(tmp_path):
    (tmp_path / "real.txt").write_text("text")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "a.txt").symlink_to(tmp_path / "real.txt")
    (tmp_path / "linked" / "b.txt").symlink_to(tmp_path / "none.txt")
    lines = []
    assert found(from_files(tmp_path / "linked" / "*.txt"), lines.append) == {"a.txt": "text"}
    assert re.fullmatch(r"data: 1 of 2 files .* left out: .*/linked/b.txt \(a link that leads nowhere\)", *lines)
