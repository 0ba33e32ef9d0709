"""Builds a corpus: pieces of files are encoded one by one, by any process, in any order; then the index."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
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
from train.data.readers import CorruptFile, Document
from train.data.sources import Log, SourceFile, name_hash, no_text, read, report_corrupt, silent
from train.data.storage import Folder, Scratch
from train.data.tokenizer import Tokenizer, token_type

SHARD_TOKENS = 2**25  # minimum of a shard, except for the last one of a piece; a document is in one shard
PIECE_BYTES = 2**26  # of files: a larger file is a piece by itself, smaller ones share a piece
_GROUP_BYTES = 2**22  # of text that the tokenizer gets at a time
_AT_ONCE = 32  # small files that are read in parallel


class Piece(NamedTuple):
    """Files that are encoded together: one, or several small ones. `first` is its first file's number among all
    files."""

    number: int
    first: int
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
    firsts = np.cumsum([0, *map(len, groups)]).tolist()
    return [
        Piece(number, first, tuple(group)) for number, (first, group) in enumerate(zip(firsts, groups, strict=False))
    ]


def missing(folder: Folder, pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces that are missing from the folder, or incomplete."""
    found = folder.sizes()
    return [piece for piece in pieces if _piece_name(piece.number) not in found]


def build_piece(piece: Piece, text_key: str, tokenizer: Tokenizer, folder: Folder, log: Log = silent) -> None:
    """Encodes the documents of a piece into shards of `folder`, and marks the piece as complete at the end.

    Shard n of piece p is two files: shard-p-n.tokens, then shard-p-n.npz, with its documents and the offset in the text
    after it. piece-p.json, written last, has the number of shards and the damaged files. A stopped build resumes after
    the last shard that has both files. It then writes the same bytes as an uninterrupted build, or another process at
    the same time. `log` gets a line for every full shard.
    """
    if folder.read(_piece_name(piece.number)) is not None:
        return
    build = _Build(piece, text_key, tokenizer, folder, log)
    build.run()
    about = {"shards": build.shards, "corrupt": build.corrupt}
    folder.write(_piece_name(piece.number), json.dumps(about).encode())


def finish(folder: Folder, files: Sequence[SourceFile], kind: np.dtype) -> None:
    """Writes the index, when all pieces are built. It leaves out all documents of damaged files, even those before the
    damage, which are in the shards.

    It needs memory for the documents of a few shards. Several processes may write it; all write the same.

    Raises ValueError if no file is readable, none has text, or a shard is missing.
    """
    pieces = pieces_of(files)
    markers = _read_all(folder, [_piece_name(piece.number) for piece in pieces])
    built = [_Built.of(content, piece) for content, piece in zip(markers, pieces, strict=True)]
    corrupt = {files[piece.first + file].path: why for piece in built for file, why in piece.corrupt.items()}
    report_corrupt(corrupt, len(files), silent)
    with closing(Scratch(np.int64)) as sizes, closing(Scratch(np.uint64)) as hashes:
        shard_sizes, digests, documents, readable = _collect(folder, built, sizes, hashes)
        if not readable:
            raise no_text(files)
        folder.write_chunks(SIZES, _chunks(sizes.mapped()))
        folder.write_chunks(HASHES, _chunks(hashes.mapped()))
    about = {"digest": digest_of(digests, read_index(folder)), "corrupt": corrupt, "files": len(files)}
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
    names = [_shard_name(piece.number, shard) for piece in built for shard in range(piece.shards)]
    shard_sizes, digests, documents, readable = [], [], 0, 0
    for content, piece in zip(_read_all(folder, names), owners, strict=True):
        shard = _Shard.load(content)
        gone = np.isin(shard.files, list(piece.corrupt))
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
    """The record of a complete piece: its shards, and its damaged files by their number in it."""

    number: int
    first: int
    shards: int
    corrupt: dict[int, str]

    @staticmethod
    def of(content: bytes, piece: Piece) -> "_Built":
        about = json.loads(content)
        corrupt = {int(file): reason for file, reason in about["corrupt"].items()}
        return _Built(piece.number, piece.first, about["shards"], corrupt)


@dataclass(frozen=True)
class _Shard:
    """The record of a shard: its documents, the offset in the text after it, and the damaged files known so far."""

    sizes: np.ndarray
    files: np.ndarray
    hashes: np.ndarray
    next_file: int
    next_document: int
    corrupt: dict[int, str]
    digest: str

    def dump(self) -> bytes:
        about = {name: getattr(self, name) for name in ("next_file", "next_document", "corrupt", "digest")}
        return dump_arrays(sizes=self.sizes, files=self.files, hashes=self.hashes, about=json.dumps(about))

    @staticmethod
    def load(content: bytes) -> "_Shard":
        arrays = load_arrays(content)
        about = json.loads(str(arrays.pop("about")))
        about["corrupt"] = {int(file): reason for file, reason in about["corrupt"].items()}
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

    def shard(self, next_file: int, next_document: int, corrupt: dict[int, str]) -> _Shard:
        digest = hashlib.sha256()
        for tokens in self.tokens:
            digest.update(tokens.data)
        return _Shard(
            np.array([len(tokens) for tokens in self.tokens], np.int64),
            np.array(self.files, np.int64),
            np.array(self.hashes, np.uint64),
            next_file,
            next_document,
            dict(corrupt),
            digest.hexdigest(),
        )


class _Build:
    """A piece that is being built in a folder: how many shards it has there, and its damaged files so far."""

    def __init__(self, piece: Piece, text_key: str, tokenizer: Tokenizer, folder: Folder, log: Log):
        self._piece, self._text_key, self._tokenizer = piece, text_key, tokenizer
        self._folder, self._log = folder, log
        self._kind = token_type(tokenizer.vocabulary_size)
        self._buffer = _Buffer(self._kind)
        self.shards, last = _finished(folder, piece.number, self._kind)
        self._file, self._done, self.corrupt = (
            (last.next_file, last.next_document, last.corrupt) if last else (0, 0, {})
        )

    def run(self) -> None:
        for file in range(self._file, len(self._piece.files)):
            self._add_file(file, self._done if file == self._file else 0)
        if self._buffer.size:
            self._flush(len(self._piece.files), 0)

    def _add_file(self, file: int, done: int) -> None:
        source = self._piece.files[file]
        try:
            for number, (name, tokens) in enumerate(self._encoded(source, done), start=done):
                if len(tokens):
                    self._buffer.add(file, name, tokens)
                if self._buffer.size >= SHARD_TOKENS:
                    self._flush(file, number + 1)
                    self._log(f"data: {self.shards} shards of piece {self._piece.number}, in {source.path}")
        except CorruptFile as error:
            self.corrupt[file] = str(error)

    def _encoded(self, file: SourceFile, done: int) -> Iterator[tuple[str, np.ndarray]]:
        """Names and tokens of a file's documents after the first `done`; no tokens for one without text."""
        for group in _groups(read(file, self._text_key), done):
            encoded = iter(self._tokenizer.encode_all([text for _, text in group if text]))
            for name, text in group:
                yield name, next(encoded) if text else np.empty(0, np.uint16)

    def _flush(self, next_file: int, next_document: int) -> None:
        buffer, self._buffer = self._buffer, _Buffer(self._kind)
        name = self._piece.number, self.shards
        self._folder.write_chunks(tokens_name(*name), (tokens.data for tokens in buffer.tokens))
        self._folder.write(_shard_name(*name), buffer.shard(next_file, next_document, self.corrupt).dump())
        self.shards += 1


def _groups(documents: Iterator[Document], done: int) -> Iterator[list[Document]]:
    """The documents after the first `done`, some megabytes at a time; those before damage are yielded before the
    error."""
    group: list[Document] = []
    size = 0
    try:
        for number, document in enumerate(documents):
            if number >= done:
                group.append(document)
                size += len(document.text)
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
