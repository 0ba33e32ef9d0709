"""Builds a corpus: pieces of files are encoded one by one, by any process, in any order; then the index."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

import numpy as np

from train.data.corpus import (
    HASHES,
    INDEX,
    SIZES,
    damaged,
    digest_of,
    dump_arrays,
    load_arrays,
    read_index,
    tokens_name,
)
from train.data.index import GONE
from train.data.left_out import LeftOut, report
from train.data.readers import BadRecord, CorruptFile, Document, Record
from train.data.sources import Log, SourceFile, name_hash, no_text, read, silent
from train.data.storage import Folder, Scratch
from train.data.tokenizer import Tokenizer, token_type

SHARD_TOKENS = 2**25  # minimum of a shard, except for the last one of a piece; a document is in one shard
PIECE_BYTES = 2**26  # of files: a larger file is a piece by itself, smaller ones share a piece
_GROUP_BYTES = 2**22  # of text that the tokenizer gets at a time
_AT_ONCE = 32  # small files that are read in parallel
_HOPELESS = 1000  # bad records; a file that begins with so many is taken to have no good one


class Piece(NamedTuple):
    """Files that are encoded together: one, or several small ones."""

    number: int
    files: tuple[SourceFile, ...]

    @property
    def size(self) -> int:
        """The total size of the files."""
        return sum(file.size for file in self.files)


def pieces_of(files: Sequence[SourceFile]) -> list[Piece]:
    """All files, in order. The result depends on file sizes only, so every process gets the same pieces."""
    groups: list[list[SourceFile]] = []
    room = -1
    for file in files:
        if file.size > room:
            groups.append([])
            room = PIECE_BYTES
        groups[-1].append(file)
        room -= file.size
    return [Piece(number, tuple(group)) for number, group in enumerate(groups)]


def missing(folder: Folder, pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces that are missing from the folder, or incomplete."""
    found = folder.sizes()
    return [piece for piece in pieces if _piece_name(piece.number) not in found]


def build_piece(
    piece: Piece, text_key: str, bad_records: float, tokenizer: Tokenizer, folder: Folder, log: Log = silent
) -> None:
    """Encodes the documents of a piece into shards of `folder`, and marks the piece as complete at the end.

    Shard n of piece p is two files: shard-p-n.tokens, then shard-p-n.npz, with its documents and the offset in the text
    after it. piece-p.json, written last, has the number of shards and what is left out. A stopped build resumes after
    the last shard that has both files. It then writes the same bytes as an uninterrupted build, or another process at
    the same time. `log` gets a line for every full shard.

    Bad records are counted and left out. Raises ValueError if the first 1,000 records of a file are all bad, unless
    `bad_records` is 1: then most likely the name of the texts is wrong, and reading on would take long.
    """
    if folder.read(_piece_name(piece.number)) is not None:
        return
    build = _Build(piece, text_key, bad_records, tokenizer, folder, log)
    build.run()
    about = {"shards": build.shards, "left_out": build.left_out.dump()}
    folder.write(_piece_name(piece.number), json.dumps(about).encode())


def finish(folder: Folder, files: Sequence[SourceFile], kind: np.dtype) -> None:
    """Writes the index, when all pieces are built. It leaves out all documents of damaged files, even those before the
    damage, which are in the shards. Whether there are too many bad records is for its readers to decide.

    It needs memory for the documents of a few shards. Several processes may write it; all write the same.

    Raises ValueError if no file is readable, none has text, or a shard is missing.
    """
    pieces = pieces_of(files)
    markers = _read_all(folder, [_piece_name(piece.number) for piece in pieces])
    built = [_Built.load(content) for content in markers]
    left_out = LeftOut()
    for piece, about in zip(pieces, built, strict=True):
        left_out.add_all(about.left_out.renamed(lambda file, files=piece.files: files[file].path))
    report(left_out, len(files), 1.0, silent)
    with closing(Scratch(np.int64)) as sizes, closing(Scratch(np.uint64)) as hashes:
        shard_sizes, digests, documents, readable = _collect(folder, built, sizes, hashes)
        if not readable:
            raise no_text(files, left_out)
        folder.write_chunks(SIZES, _chunks(sizes.mapped()))
        folder.write_chunks(HASHES, _chunks(hashes.mapped()))
    about = {"digest": digest_of(digests, read_index(folder)), "left_out": left_out.dump(), "files": len(files)}
    about |= {"kind": kind.str, "documents": documents}
    shards = np.array([piece.shards for piece in built], np.int64)
    shard_sizes = np.array(shard_sizes, np.int64)
    folder.write(INDEX, dump_arrays(shards=shards, shard_sizes=shard_sizes, about=json.dumps(about)))
    folder.remove_leftovers()


def _collect(
    folder: Folder, built: Sequence["_Built"], sizes: Scratch, hashes: Scratch
) -> tuple[list[int], list[str], int, int]:
    """Writes size and hash of every document, shard after shard.

    Returns the size and the digest of each shard, how many documents there are, and how many are not of damaged files.
    """
    owners = [piece for piece in built for _ in range(piece.shards)]
    names = [_shard_name(number, shard) for number, piece in enumerate(built) for shard in range(piece.shards)]
    shard_sizes, digests, documents, readable = [], [], 0, 0
    for content, piece in zip(_read_all(folder, names), owners, strict=True):
        shard = _Shard.load(content)
        gone = np.isin(shard.files, list(piece.left_out.corrupt))
        sizes.append(shard.sizes)
        hashes.append(np.where(gone, GONE, shard.hashes))
        shard_sizes.append(int(shard.sizes.sum()))
        digests.append(shard.digest)
        documents += len(gone)
        readable += int((~gone).sum())
    return shard_sizes, digests, documents, readable


def _read_all(folder: Folder, names: Sequence[str]) -> Iterator[bytes]:
    """Files, one after the other; some are read ahead in parallel, because a file at a URL is slow."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for first in range(0, len(names), _AT_ONCE):
            some = names[first : first + _AT_ONCE]
            for name, content in zip(some, pool.map(folder.read, some), strict=True):
                if content is None:
                    raise damaged(folder, name)
                yield content


def _chunks(values: np.ndarray) -> Iterator[memoryview]:
    """The bytes of an array, some megabytes at a time."""
    return (values[first : first + 2**20].data for first in range(0, len(values), 2**20))


class _Built(NamedTuple):
    """What is known of a complete piece: its shards, and what is left out, by the number of a file in it."""

    shards: int
    left_out: LeftOut

    @staticmethod
    def load(content: bytes) -> "_Built":
        about = json.loads(content)
        return _Built(about["shards"], LeftOut.load(about["left_out"]).renamed(int))


@dataclass(frozen=True)
class _Shard:
    """What is known of a shard: its documents, the offset in the text after it, and what is left out up to there."""

    sizes: np.ndarray
    files: np.ndarray
    hashes: np.ndarray
    next_file: int
    next_document: int
    left_out: LeftOut
    digest: str

    def dump(self) -> bytes:
        about = {name: getattr(self, name) for name in ("next_file", "next_document", "digest")}
        about |= {"left_out": self.left_out.dump()}
        return dump_arrays(sizes=self.sizes, files=self.files, hashes=self.hashes, about=json.dumps(about))

    @staticmethod
    def load(content: bytes) -> "_Shard":
        arrays = load_arrays(content)
        about = json.loads(str(arrays.pop("about")))
        about["left_out"] = LeftOut.load(about["left_out"]).renamed(int)
        return _Shard(**arrays, **about)


@dataclass
class _Buffer:
    """Documents that are being collected for a shard."""

    kind: np.dtype
    tokens: list[np.ndarray] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    size: int = 0

    def add(self, file: int, name: str, tokens: np.ndarray) -> None:
        self.tokens.append(tokens.astype(self.kind, copy=False))
        self.files.append(file)
        self.hashes.append(name_hash(name))
        self.size += len(tokens)

    def shard(self, next_file: int, next_document: int, left_out: LeftOut) -> _Shard:
        digest = hashlib.sha256()
        for tokens in self.tokens:
            digest.update(tokens.data)
        return _Shard(
            np.array([len(tokens) for tokens in self.tokens], np.int64),
            np.array(self.files, np.int64),
            np.array(self.hashes, np.uint64),
            next_file,
            next_document,
            left_out,
            digest.hexdigest(),
        )


class _Build:
    """A piece that is being built in a folder: how many shards it has there, and what is left out so far."""

    def __init__(self, piece: Piece, text_key: str, bad_records: float, tokenizer: Tokenizer, folder: Folder, log: Log):
        self._piece, self._text_key, self._bad_records = piece, text_key, bad_records
        self._tokenizer, self._folder, self._log = tokenizer, folder, log
        self._kind = token_type(tokenizer.vocabulary_size)
        self._buffer = _Buffer(self._kind)
        self.shards, last = _finished(folder, piece.number, self._kind)
        self._file, self._done, self.left_out = (
            (last.next_file, last.next_document, last.left_out) if last else (0, 0, LeftOut())
        )

    def run(self) -> None:
        for file in range(self._file, len(self._piece.files)):
            self._add_file(file, self._done if file == self._file else 0)
        if self._buffer.size:
            self._flush(len(self._piece.files), 0)

    def _add_file(self, file: int, done: int) -> None:
        source = self._piece.files[file]
        try:
            for number, (record, tokens) in enumerate(self._encoded(source, done), start=done):
                self.left_out.records += 1
                if isinstance(record, BadRecord):
                    self._add_bad(file, record, number)
                elif len(tokens):
                    self._buffer.add(file, record.name, tokens)
                if self._buffer.size >= SHARD_TOKENS:
                    self._flush(file, number + 1)
                    self._log(f"data: {self.shards} shards of piece {self._piece.number}, in {source.path}")
        except CorruptFile as error:
            self.left_out.corrupt[file] = str(error)

    def _add_bad(self, file: int, record: BadRecord, number: int) -> None:
        self.left_out.add_bad(file, record.reason)
        count, first = self.left_out.bad[file]
        if number + 1 == count == _HOPELESS and self._bad_records < 1:
            raise ValueError(
                f"data: {self._piece.files[file].path}: its first {count:,} records are all bad: {first[0]}; "
                "data.bad_records=1 would leave them out"
            )

    def _encoded(self, file: SourceFile, done: int) -> Iterator[tuple[Record, np.ndarray]]:
        """A file's records after the first `done`, and their tokens; none for a bad one, or one without text."""
        for group in _groups(read(file, self._text_key), done):
            has_text = [isinstance(record, Document) and bool(record.text) for record in group]
            encoded = iter(self._tokenizer.encode_all([record.text for record in compress(group, has_text)]))
            for record, has in zip(group, has_text, strict=True):
                yield record, next(encoded) if has else np.empty(0, np.uint16)

    def _flush(self, next_file: int, next_document: int) -> None:
        buffer, self._buffer = self._buffer, _Buffer(self._kind)
        name = self._piece.number, self.shards
        self._folder.write_chunks(tokens_name(*name), (tokens.data for tokens in buffer.tokens))
        self._folder.write(_shard_name(*name), buffer.shard(next_file, next_document, self.left_out).dump())
        self.shards += 1


def _groups(records: Iterator[Record], done: int) -> Iterator[list[Record]]:
    """The records after the first `done`, some megabytes at a time; those before damage are yielded before the
    error."""
    group: list[Record] = []
    size = 0
    try:
        for number, record in enumerate(records):
            if number >= done:
                group.append(record)
                size += len(record[1])  # the text, or what is wrong with it
            if size >= _GROUP_BYTES:
                yield group
                group, size = [], 0
    except CorruptFile:
        yield group
        raise
    yield group


def _finished(folder: Folder, piece: int, kind: np.dtype) -> tuple[int, _Shard | None]:
    """How many shards at the beginning of a piece are complete, and the last of them."""
    if folder.read(_shard_name(piece, 0)) is None:  # the usual case, and listing a folder of many files takes long
        return 0, None
    found, count, last = folder.sizes(), 0, None
    while _shard_name(piece, count) in found:
        shard = _Shard.load(folder.read(_shard_name(piece, count)))
        if found.get(tokens_name(piece, count)) != shard.sizes.sum() * kind.itemsize:
            break
        count, last = count + 1, shard
    return count, last


def _piece_name(piece: int) -> str:
    return f"piece-{piece:06}.json"


def _shard_name(piece: int, shard: int) -> str:
    return f"shard-{piece:06}-{shard:06}.npz"
