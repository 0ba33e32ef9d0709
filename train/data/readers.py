"""The texts in a file of each format, one after the other, however large the file is."""

import gzip
import json
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, BinaryIO, NamedTuple

from train.data.storage import is_url, open_url, optional
from train.runtime.lines import in_a_line

_CHUNK_BYTES = 2**20
_RECORDS = 1024  # read at a time, where a format has records


class CorruptFile(Exception):
    """A file whose content does not match its name; the message says where and why."""


class Document(NamedTuple):
    """One text. The name decides whether it is held out, and does not depend on where the data is on a machine."""

    name: str
    text: bytes


def texts(path: str, text_key: str) -> Iterator[Document]:
    """The texts of a file, in order, with names that distinguish them within it: ":3" for the third line or record.

    Raises CorruptFile at the first damage in its content.
    """
    read = _READERS[_format(path)]
    system, name = open_url(path, "data.paths")
    with system.open(name, "rb") as file:
        yield from read(file, path, text_key)


def is_readable(path: str) -> bool:
    """Whether the name has the ending of a known format."""
    return _format(path) in _READERS


def known_formats() -> str:
    """The formats that `texts` can read, in words."""
    return ", ".join([*_READERS, "folders of Hugging Face datasets"])


def _format(path: str) -> str:
    name, _, ending = path.removesuffix(".gz").removesuffix(".zst").rpartition(".")
    return f".{ending}" if name else ""


def _read_whole(file: BinaryIO, path: str, _: str) -> Iterator[Document]:
    yield Document("", b"".join(_chunks(file, path)))


def _read_lines(file: BinaryIO, path: str, text_key: str) -> Iterator[Document]:
    for number, line in enumerate(_lines(_chunks(file, path)), start=1):
        if line.strip():
            yield Document(f":{number}", _text_of_line(line, f"line {number}", text_key))


def _chunks(file: BinaryIO, path: str) -> Iterator[bytes]:
    """The content of a file, decompressed if its name says that it is compressed."""
    if path.endswith(".zst"):
        yield from _unpacked_zst(file)
        return
    source: Any = gzip.GzipFile(fileobj=file) if path.endswith(".gz") else file
    with _damage(EOFError, zlib.error, gzip.BadGzipFile):
        while chunk := source.read(_CHUNK_BYTES):
            yield chunk


def _unpacked_zst(file: BinaryIO) -> Iterator[bytes]:
    """Decompresses frame after frame; the library's own stream reader does not notice a truncated file."""
    zstandard = optional("zstandard", "reading .zst")
    inside = None
    with _damage(zstandard.ZstdError):
        while packed := file.read(_CHUNK_BYTES):
            while packed:
                inside = inside or zstandard.ZstdDecompressor().decompressobj()
                yield inside.decompress(packed)
                packed = inside.unused_data if inside.eof else b""
                inside = None if inside.eof else inside
    if inside is not None:
        raise CorruptFile("the file ends inside a compressed frame")


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    yield rest


def _text_of_line(line: bytes, where: str, text_key: str) -> bytes:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{where}: not valid JSON: {error}") from None
    keys = list(record) if isinstance(record, dict) else []
    return _as_bytes(record[text_key] if text_key in keys else None, where, text_key, keys)


def _as_bytes(value: Any, where: str, text_key: str, keys: list[str]) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        near = get_close_matches(text_key, keys, n=1)
        hint = f"; did you mean data.text_key={near[0]}?" if near and near[0] != text_key else ""
        raise CorruptFile(f"{where}: no text under {text_key!r}, found keys {keys}{hint}")
    # A lone surrogate is legal in JSON but not in UTF-8.
    return value.encode(errors="replace")


def _read_parquet(file: BinaryIO, _: str, text_key: str) -> Iterator[Document]:
    parquet = optional("pyarrow.parquet", "reading .parquet")
    with _arrow_damage():
        table = parquet.ParquetFile(file)
        columns = table.schema_arrow.names
        present = [text_key] if text_key in columns else []
        yield from _column(table.iter_batches(_RECORDS, columns=present), text_key, columns)


def _read_arrow(file: BinaryIO, _: str, text_key: str) -> Iterator[Document]:
    ipc = optional("pyarrow.ipc", "reading .arrow")
    with _arrow_damage():
        stream = ipc.open_stream(file)
        yield from _column(stream, text_key, stream.schema.names)


def _column(batches: Iterable[Any], text_key: str, columns: list[str]) -> Iterator[Document]:
    number = 0
    for batch in batches:
        values = batch.column(text_key).to_pylist() if text_key in columns else [None] * batch.num_rows
        for value in values:
            number += 1
            yield Document(f":{number}", _as_bytes(value, f"row {number}", text_key, columns))


def _read_array_record(file: BinaryIO, path: str, _: str) -> Iterator[Document]:
    """Every record is a text. The library reads local files only, so a file at a URL is fetched first."""
    module = optional("array_record.python.array_record_module", "reading .array_record")
    with tempfile.NamedTemporaryFile() as local:
        if is_url(path):
            for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""):
                local.write(chunk)
            local.flush()
        name = local.name if is_url(path) else open_url(path, "data.paths")[1]
        with _damage(RuntimeError, UnicodeDecodeError):
            yield from _records(module.ArrayRecordReader(name))


def _records(reader: Any) -> Iterator[Document]:
    count = reader.num_records()
    if not reader.ok():
        reader.read_all()  # says what is wrong
    for start in range(0, count, _RECORDS):
        for number, record in enumerate(reader.read(start, min(start + _RECORDS, count)), start=start + 1):
            record.decode()  # a serialised message, which is not text
            yield Document(f":{number}", record)


@contextmanager
def _damage(*kinds: type[Exception]) -> Iterator[None]:
    """Converts a library's error about damaged content to CorruptFile, in one line."""
    try:
        yield
    except kinds as error:
        raise CorruptFile(in_a_line(error, 300)) from None


@contextmanager
def _arrow_damage() -> Iterator[None]:
    """Like `_damage`, for Arrow, which raises OSError for damaged content too; such an error has no error number."""
    arrow = optional("pyarrow", "reading .parquet and .arrow")
    try:
        with _damage(arrow.ArrowException, UnicodeDecodeError):
            yield
    except OSError as error:
        if error.errno is not None:
            raise
        raise CorruptFile(in_a_line(error, 300)) from None


_READERS: dict[str, Callable[[BinaryIO, str, str], Iterator[Document]]] = {
    ".txt": _read_whole,
    ".py": _read_whole,
    ".jsonl": _read_lines,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".array_record": _read_array_record,
}
