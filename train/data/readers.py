"""The texts in a file of each format, one after the other, however large the file is."""

import codecs
import json
import reprlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

from posjax._checks import IS_POINTER, POINTER
from train.config.settings.checks import check, nearest
from train.data.chat import ChatTemplate, Rendered
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


class BadRecord(NamedTuple):
    """A line, row or record without a text that can be read; the reason says where in the file it is."""

    name: str
    reason: str


class Conversation(NamedTuple):
    """One conversation, as `Document`; its text is that of a chat template, with the assistant's turns."""

    name: str
    text: Rendered


Record = Document | Conversation | BadRecord


class Wanted(NamedTuple):
    """What is read of a record: the text under a key; or, with a template, the conversation of the messages there."""

    key: str
    chat: ChatTemplate | None = None


def texts(path: str, wanted: Wanted) -> Iterator[Record]:
    """The records of a file, in order, with names that distinguish them within it: ":3" for the third line or record.

    Raises CorruptFile at the first damage to the file itself, after which no further record can be found.
    """
    read = _READERS[_format(path)]
    system, name = open_url(path, "data.paths")
    try:
        with system.open(name, "rb") as file:
            yield from read(file, path, wanted)
    except CorruptFile:
        with system.open(name, "rb") as file:  # anew, since not every file at a URL can go back to its start
            _refuse_pointer(file.read(len(POINTER)))
        raise
    except FileNotFoundError:
        if is_url(path) or not Path(name).is_symlink():
            raise
        raise CorruptFile("a link that leads nowhere") from None


def check_readable(path: str, conversations: bool = False) -> None:
    """Raises ValueError unless the name has the ending of a known format, in which conversations are if asked for."""
    check(_format(path) in _READERS, f"data.paths: {path} has no known format (known: {', '.join(_READERS)})")
    is_lines = _format(path) == ".jsonl"
    check(is_lines or not conversations, f"data.messages_key: conversations are read from .jsonl, found {path}")


def _format(path: str) -> str:
    name, _, ending = path.removesuffix(".gz").removesuffix(".zst").rpartition(".")
    return f".{ending}" if name else ""


def _read_whole(file: BinaryIO, path: str, _: Wanted) -> Iterator[Document]:
    yield Document("", b"".join(_chunks(file, path)))


def _read_lines(file: BinaryIO, path: str, wanted: Wanted) -> Iterator[Record]:
    for number, line in enumerate(_lines(_chunks(file, path)), start=1):
        if line.strip():
            yield _of_line(line, number, wanted)


def _chunks(file: BinaryIO, path: str) -> Iterator[bytes]:
    """The UTF-8 of a file, decompressed if its name says that it is compressed; without a byte order mark."""
    chunks = _unpacked(file, path)
    first = b""
    while len(first) < len(POINTER) and (chunk := next(chunks, b"")):
        first += chunk
    _refuse_pointer(first)
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise CorruptFile("UTF-16, not UTF-8; convert it by: iconv -f UTF-16 -t UTF-8")
    yield first.removeprefix(codecs.BOM_UTF8)
    yield from chunks


def _refuse_pointer(head: bytes) -> None:
    if head.startswith(POINTER):
        raise CorruptFile(IS_POINTER)


def _unpacked(file: BinaryIO, path: str) -> Iterator[bytes]:
    ending = PurePosixPath(path).suffix
    if ending not in _COMPRESSED:
        yield from iter(lambda: file.read(_CHUNK_BYTES), b"")
        return
    with _arrow_damage(f"reading {ending}") as arrow:
        source = arrow.CompressedInputStream(arrow.PythonFile(file, "r"), _COMPRESSED[ending])
        yield from iter(lambda: source.read(_CHUNK_BYTES), b"")


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    yield rest


def _of_line(line: bytes, number: int, wanted: Wanted) -> Record:
    where, key = f"line {number}", wanted.key
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return BadRecord(f":{number}", f"{where}: not valid UTF-8: {error}")
    except (ValueError, RecursionError) as error:
        return BadRecord(f":{number}", f"{where}: not valid JSON: {in_a_line(error, 100)}")
    if not isinstance(record, dict):
        return BadRecord(f":{number}", f"{where}: nothing under {key!r}, found {_kind(record)}")
    if key not in record:
        return BadRecord(f":{number}", f"{where}: {_no_key(key, list(record), 'messages' if wanted.chat else 'text')}")
    if wanted.chat:
        return _of_messages(record, number, where, wanted)
    return _of_value(record[key], number, where, key)


def _of_messages(record: dict[str, Any], number: int, where: str, wanted: Wanted) -> Record:
    """The conversation of a record: its messages, and beside them ``tools`` and ``chat_template_kwargs``, if any."""
    try:
        messages, tools = record[wanted.key], record.get("tools")
        is_listed = isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages)
        check(bool(is_listed), f"no messages under {wanted.key!r}, which is a list of objects with role and content")
        check(tools is None or isinstance(tools, list), f"tools: expected a list, found {_kind(tools)}")
        options = record.get("chat_template_kwargs") or {}
        check(isinstance(options, dict), f"chat_template_kwargs: expected an object, found {_kind(options)}")
        text, turns = wanted.chat.render(messages, tools, options)
    except ValueError as error:
        return BadRecord(f":{number}", f"{where}: {error}")
    # As for texts: a lone surrogate becomes one other character.
    return Conversation(f":{number}", Rendered(text.encode(errors="replace").decode(), turns))


def _of_value(value: Any, number: int, where: str, text_key: str) -> Record:
    if isinstance(value, str):
        # A lone surrogate is legal in JSON but not in UTF-8.
        return Document(f":{number}", value.encode(errors="replace"))
    if not isinstance(value, bytes):
        return BadRecord(f":{number}", f"{where}: no text under {text_key!r}, found {_kind(value)}")
    try:
        value.decode()
    except UnicodeDecodeError as error:
        return BadRecord(f":{number}", f"{where}: not valid UTF-8: {error}")
    return Document(f":{number}", value)


def _kind(value: Any) -> str:
    return "null" if value is None else f"a value of type {type(value).__name__}"


def _no_key(key: str, keys: list[str], what: str = "text") -> str:
    hint = nearest(key, keys, f"data.{what}_key={{}}")
    return f"no {what} under {key!r}, found keys {reprlib.repr(keys)}{hint}"


def _read_parquet(file: BinaryIO, _: str, wanted: Wanted) -> Iterator[Record]:
    text_key = wanted.key
    parquet = optional("pyarrow.parquet", "reading .parquet")
    with _arrow_damage("reading .parquet") as arrow:
        table = parquet.ParquetFile(file)
        columns = table.schema_arrow.names
        if text_key not in columns:
            for number in range(1, table.metadata.num_rows + 1):
                yield BadRecord(f":{number}", f"row {number}: {_no_key(text_key, columns)}")
            return
        # Texts are read as bytes, since one that is not UTF-8 would hide the others.
        binary = {arrow.string(): arrow.binary(), arrow.large_string(): arrow.large_binary()}
        found = (batch.column(text_key) for batch in table.iter_batches(_RECORDS, columns=[text_key]))
        values = chain.from_iterable(each.cast(binary.get(each.type, each.type)).to_pylist() for each in found)
        for number, value in enumerate(values, start=1):
            yield _of_value(value, number, f"row {number}", text_key)


def _read_array_record(file: BinaryIO, path: str, _: Wanted) -> Iterator[Record]:
    """Every record is a text. The library reads local files only, so a file at a URL is fetched first."""
    module = optional("array_record.python.array_record_module", "reading .array_record")
    with tempfile.NamedTemporaryFile() as local:
        if is_url(path):
            for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""):
                local.write(chunk)
            local.flush()
        name = local.name if is_url(path) else open_url(path, "data.paths")[1]
        try:
            yield from _records(module.ArrayRecordReader(name))
        except RuntimeError as error:
            raise CorruptFile(in_a_line(error, 300)) from None


def _records(reader: Any) -> Iterator[Record]:
    count = reader.num_records()
    if not reader.ok():
        reader.read_all()  # says what is wrong
    for start in range(0, count, _RECORDS):
        for number, record in enumerate(reader.read(start, min(start + _RECORDS, count)), start=start + 1):
            yield _of_value(record, number, f"record {number}", "")


@contextmanager
def _arrow_damage(wanted_by: str) -> Iterator[ModuleType]:
    """Gives the module of Arrow, and converts its errors about damaged content to CorruptFile, in one line.

    Arrow raises OSError for damaged content too; such an error has no error number.
    """
    arrow = optional("pyarrow", wanted_by)
    try:
        yield arrow
    except (arrow.ArrowException, UnicodeDecodeError, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise
        raise CorruptFile(in_a_line(error, 300)) from None


_COMPRESSED = {".gz": "gzip", ".zst": "zstd"}

_READERS: dict[str, Callable[[BinaryIO, str, Wanted], Iterator[Record]]] = {
    ".txt": _read_whole,
    ".py": _read_whole,
    ".jsonl": _read_lines,
    ".parquet": _read_parquet,
    ".array_record": _read_array_record,
}
