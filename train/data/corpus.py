"""Encoded documents in shards: built once, piece by piece, and read span by span."""

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64, UInt64

from train.data.readers import CorruptFile
from train.data.sources import Document, SourceFile, Told, name_hash, no_text, read, report_corrupt, untold
from train.data.storage import Folder, MemoryFolder, Span
from train.data.tokenizer import Tokenizer, token_type

SHARD_TOKENS = 2**25  # at least so many, except in the last shard; a document lies in one
_GROUP_BYTES = 2**22  # of text, handed to the tokenizer at a time
_INDEX = "index.npz"


@dataclass(frozen=True)
class Corpus:
    """Encoded documents, of which only sizes and places are in memory. Places count tokens through all shards.

    `corrupt` maps each file that was left out to the reason; `files` counts them and the others.
    """

    folder: Folder
    kind: np.dtype
    shard_starts: Int64[np.ndarray, "shards"]
    starts: Int64[np.ndarray, "documents"]
    sizes: Int64[np.ndarray, "documents"]
    hashes: UInt64[np.ndarray, "documents"]
    digest: str
    corrupt: dict[str, str]
    files: int

    def __len__(self) -> int:
        return len(self.sizes)

    def select(self, mask: Bool[np.ndarray, "documents"]) -> "Corpus":
        """The documents where `mask` is true."""
        parts = {name: getattr(self, name)[mask] for name in ("starts", "sizes", "hashes")}
        return replace(self, **parts, digest=_digest(self.digest, parts["starts"], parts["sizes"]))

    def read(self, starts: Int64[np.ndarray, "runs"], sizes: Int64[np.ndarray, "runs"]) -> list[np.ndarray]:
        """Runs of tokens, each within one document, by place and size."""
        shards = np.searchsorted(self.shard_starts, starts, side="right") - 1
        first = (starts - self.shard_starts[shards]) * self.kind.itemsize
        stop = first + sizes * self.kind.itemsize
        names = map(_tokens_name, shards.tolist())
        spans = list(map(Span, names, first.tolist(), stop.tolist()))
        return [np.frombuffer(content, self.kind) for content in self.folder.spans(spans)]

    def documents(self) -> list[np.ndarray]:
        """All documents, in order."""
        return self.read(self.starts, self.sizes)


def open_corpus(folder: Folder) -> Corpus | None:
    """The corpus in a folder; None while it is not whole. Raises ValueError when a shard of it is missing or cut."""
    content = folder.read(_INDEX)
    if content is None:
        return None
    index = _load(content)
    kind = np.dtype(str(index["kind"]))
    shard_sizes = index["shard_sizes"]
    found = folder.sizes()
    for shard, size in enumerate(shard_sizes.tolist()):
        if found.get(_tokens_name(shard)) != size * kind.itemsize:
            raise ValueError(f"data.cache: {folder}/{_tokens_name(shard)} is damaged; delete {folder} to build it anew")
    documents = {name: index[name] for name in ("starts", "sizes", "hashes")}
    about = json.loads(str(index["about"]))
    return Corpus(folder, kind, np.cumsum(shard_sizes) - shard_sizes, **documents, **about)


def build_corpus(
    files: Sequence[SourceFile], text_key: str, tokenizer: Tokenizer, folder: Folder, told: Told = untold
) -> None:
    """Encodes the documents of the files into shards of `folder`, and writes the index when all are there.

    Shard n is two files: shard-n.tokens, then shard-n.npz, which says what is in it and where the text after it
    begins. A build that was stopped resumes after the last shard that has both; what it then writes is what it would
    have written without the stop. Of a file that turns out to be damaged no document is in the index, though what came
    before the damage is in the shards. `told` gets a line for every full shard.

    Raises ValueError when no file is readable, or none has text.
    """
    shards = _finished(folder, token_type(tokenizer.vocabulary_size))
    build = _Build(files, text_key, tokenizer, folder, told, shards)
    build.run()
    build.write_index()


@dataclass(frozen=True)
class _Shard:
    """What is in a shard, by document; the place of the text after it; and the files known to be damaged so far."""

    sizes: np.ndarray
    files: np.ndarray
    hashes: np.ndarray
    next_file: int
    next_document: int
    corrupt: dict[int, str]
    digest: str

    def dump(self) -> bytes:
        about = {name: getattr(self, name) for name in ("next_file", "next_document", "corrupt", "digest")}
        return _dump(sizes=self.sizes, files=self.files, hashes=self.hashes, about=json.dumps(about))

    @staticmethod
    def load(content: bytes) -> "_Shard":
        arrays = _load(content)
        about = json.loads(str(arrays.pop("about")))
        about["corrupt"] = {int(file): reason for file, reason in about["corrupt"].items()}
        return _Shard(**arrays, **about)


@dataclass
class _Buffer:
    """Documents on their way into a shard."""

    tokens: list[np.ndarray] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    size: int = 0

    def add(self, file: int, name: str, tokens: np.ndarray) -> None:
        self.tokens.append(tokens)
        self.files.append(file)
        self.hashes.append(name_hash(name))
        self.size += len(tokens)


@dataclass
class _Build:
    files: Sequence[SourceFile]
    text_key: str
    tokenizer: Tokenizer
    folder: Folder
    told: Told
    shards: list[_Shard]
    corrupt: dict[int, str] = field(default_factory=dict)
    buffer: _Buffer = field(default_factory=_Buffer)

    def run(self) -> None:
        first, done = 0, 0
        if self.shards:
            last = self.shards[-1]
            first, done, self.corrupt = last.next_file, last.next_document, dict(last.corrupt)
        for file in range(first, len(self.files)):
            self._add_file(file, done if file == first else 0)
        if self.buffer.size:
            self._flush(len(self.files), 0)

    def _add_file(self, file: int, done: int) -> None:
        try:
            for number, (name, tokens) in enumerate(self._encoded(self.files[file], done), start=done):
                if len(tokens):
                    self.buffer.add(file, name, tokens)
                if self.buffer.size >= SHARD_TOKENS:
                    self._flush(file, number + 1)
                    self.told(f"data: {len(self.shards)} shards, in file {file + 1} of {len(self.files)}")
        except CorruptFile as error:
            self.corrupt[file] = str(error)

    def _encoded(self, file: SourceFile, done: int) -> Iterator[tuple[str, np.ndarray]]:
        """Names and tokens of a file's documents after the first `done`; no tokens for one without text."""
        for group in _groups(read(file, self.text_key), done):
            encoded = iter(self.tokenizer.encode_all([text for _, text in group if text]))
            for name, text in group:
                yield name, next(encoded) if text else np.empty(0, np.uint16)

    def _flush(self, next_file: int, next_document: int) -> None:
        buffer, self.buffer = self.buffer, _Buffer()
        kind = token_type(self.tokenizer.vocabulary_size)
        content = np.concatenate(buffer.tokens).astype(kind, copy=False).tobytes()
        shard = _Shard(
            np.array([len(tokens) for tokens in buffer.tokens], np.int64),
            np.array(buffer.files, np.int64),
            np.array(buffer.hashes, np.uint64),
            next_file,
            next_document,
            dict(self.corrupt),
            hashlib.sha256(content).hexdigest(),
        )
        self.folder.write(_tokens_name(len(self.shards)), content)
        self.folder.write(_shard_name(len(self.shards)), shard.dump())
        self.shards.append(shard)

    def write_index(self) -> None:
        corrupt = {self.files[file].path: reason for file, reason in self.corrupt.items()}
        report_corrupt(corrupt, len(self.files), untold)
        empty = np.empty(0, np.int64)
        sizes, files, hashes = (
            np.concatenate([empty.astype(kind), *(getattr(shard, name) for shard in self.shards)])
            for name, kind in (("sizes", np.int64), ("files", np.int64), ("hashes", np.uint64))
        )
        kept = ~np.isin(files, list(self.corrupt))
        if not kept.any():
            raise no_text(self.files)
        starts = np.cumsum(sizes) - sizes
        digest = _digest(*(shard.digest for shard in self.shards), starts[kept], sizes[kept])
        about = {"digest": digest, "corrupt": corrupt, "files": len(self.files)}
        content = _dump(
            starts=starts[kept],
            sizes=sizes[kept],
            hashes=hashes[kept],
            shard_sizes=np.array([shard.sizes.sum() for shard in self.shards], np.int64),
            kind=token_type(self.tokenizer.vocabulary_size).str,
            about=json.dumps(about),
        )
        self.folder.write(_INDEX, content)


def _groups(documents: Iterator[Document], done: int) -> Iterator[list[Document]]:
    """The documents after the first `done`, some megabytes at a time; all that came before damage come before it."""
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


def _finished(folder: Folder, kind: np.dtype) -> list[_Shard]:
    """The shards at the beginning of a folder that are whole."""
    shards: list[_Shard] = []
    found = folder.sizes()
    while _shard_name(len(shards)) in found:
        shard = _Shard.load(folder.read(_shard_name(len(shards))))
        if found.get(_tokens_name(len(shards))) != shard.sizes.sum() * kind.itemsize:
            break
        shards.append(shard)
    return shards


def _tokens_name(shard: int) -> str:
    return f"shard-{shard:06}.tokens"


def _shard_name(shard: int) -> str:
    return f"shard-{shard:06}.npz"


def _digest(*parts: Any) -> str:
    """A short hash of texts and arrays."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.encode() if isinstance(part, str) else part.tobytes())
    return found.hexdigest()[:16]


def _dump(**arrays: Any) -> bytes:
    content = io.BytesIO()
    np.savez(content, **arrays)
    return content.getvalue()


def _load(content: bytes) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(content)) as arrays:
        return dict(arrays)


def collect(documents: Sequence[np.ndarray]) -> Corpus:
    """A corpus of documents that are encoded already, in memory."""
    sizes = np.array([len(document) for document in documents], np.int64)
    tokens = np.concatenate(documents)
    content, starts = tokens.tobytes(), np.cumsum(sizes) - sizes
    folder = MemoryFolder()
    folder.write(_tokens_name(0), content)
    digest = _digest(hashlib.sha256(content).hexdigest(), starts, sizes)
    no_hashes, first = np.zeros(len(sizes), np.uint64), np.zeros(1, np.int64)
    return Corpus(folder, tokens.dtype, first, starts, sizes, no_hashes, digest, {}, 0)
