"""Encoded documents in shards: their index, and the tokens of any document."""

import hashlib
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int64

from train.data.index import Filter, Index
from train.data.left_out import LeftOut
from train.data.storage import Folder, Span

INDEX, SIZES, HASHES = "index.npz", "documents.sizes", "documents.hashes"
"""Three files of a folder: its contents, written last; and the size and the hash of every document."""


@dataclass(frozen=True)
class Corpus:
    """Encoded documents; not even their sizes are in memory. Offsets count tokens through all shards.

    `files` counts all files, omitted ones too.
    """

    folder: Folder
    kind: np.dtype
    shards: Sequence[str]
    shard_starts: Int64[np.ndarray, "shards"]
    index: Index
    digest: str
    left_out: LeftOut
    files: int

    @property
    def tokens(self) -> int:
        """How many tokens the documents have."""
        return self.index.tokens

    def select(self, keeps: Filter) -> "Corpus":
        """The corpus with another choice of its documents."""
        index = self.index.select(keeps)
        return replace(self, index=index, digest=digest_of([self.digest], index))

    def read(self, starts: Int64[np.ndarray, "runs"], sizes: Int64[np.ndarray, "runs"]) -> list[np.ndarray]:
        """Runs of tokens, each within one document, by offset and size."""
        shards = np.searchsorted(self.shard_starts, starts, side="right") - 1
        first = (starts - self.shard_starts[shards]) * self.kind.itemsize
        stop = first + sizes * self.kind.itemsize
        names = [self.shards[shard] for shard in shards.tolist()]
        spans = list(map(Span, names, first.tolist(), stop.tolist()))
        return [np.frombuffer(content, self.kind) for content in self.folder.spans(spans)]


@dataclass(frozen=True)
class HeldOutText:
    """A few documents of several corpora, one after the other; only their sizes and offsets are in memory.

    It is read like one corpus, whose offsets count only the tokens of these documents.
    """

    corpora: Sequence[Corpus]
    owners: Int64[np.ndarray, "documents"]
    offsets: Int64[np.ndarray, "documents"]
    index: Index

    @property
    def tokens(self) -> int:
        """How many tokens the documents have."""
        return self.index.tokens

    def read(self, starts: Int64[np.ndarray, "runs"], sizes: Int64[np.ndarray, "runs"]) -> list[np.ndarray]:
        """Runs of tokens, each within one document, by offset and size."""
        begins = np.cumsum(self.index.sizes) - self.index.sizes
        documents = np.searchsorted(begins, starts, side="right") - 1
        offsets, owners = self.offsets[documents] + starts - begins[documents], self.owners[documents]
        found: list[Any] = [None] * len(starts)
        for owner in np.unique(owners):
            mine = np.flatnonzero(owners == owner)
            for run, tokens in zip(mine.tolist(), self.corpora[owner].read(offsets[mine], sizes[mine]), strict=True):
                found[run] = tokens
        return found

    def documents(self) -> list[np.ndarray]:
        """All documents, in order."""
        sizes = np.asarray(self.index.sizes)
        return self.read(np.cumsum(sizes) - sizes, sizes)


def sample(corpora: Sequence[Corpus], filters: Sequence[Filter]) -> HeldOutText:
    """The chosen documents of each corpus."""
    owners, offsets, sizes = [], [], []
    for owner, (corpus, keeps) in enumerate(zip(corpora, filters, strict=True)):
        for run in corpus.index.select(keeps).runs():
            owners.append(np.full(len(run.sizes), owner))
            offsets.append(run.starts)
            sizes.append(run.sizes)
    sizes = np.concatenate(sizes)
    return HeldOutText(
        corpora, np.concatenate(owners), np.concatenate(offsets), Index(sizes, np.zeros(len(sizes), np.uint64))
    )


def open_corpus(folder: Folder) -> Corpus | None:
    """The corpus in a folder; None while it is incomplete. Raises ValueError if a file is missing or truncated."""
    content = folder.read(INDEX)
    if content is None:
        return None
    arrays = load_arrays(content)
    about = json.loads(str(arrays["about"]))
    kind, documents = np.dtype(about["kind"]), about["documents"]
    left_out = LeftOut.load(about["left_out"])
    sizes = arrays["shard_sizes"]
    names = shard_names(arrays["shards"].tolist())
    wanted = dict(zip(names, (sizes * kind.itemsize).tolist(), strict=True))
    wanted |= dict.fromkeys((SIZES, HASHES), 8 * documents)
    found = folder.sizes()
    for name, size in wanted.items():
        if found.get(name) != size:
            raise damaged(folder, name)
    starts, index = np.cumsum(sizes) - sizes, read_index(folder)
    return Corpus(folder, kind, names, starts, index, about["digest"], left_out, about["files"])


def damaged(folder: Folder, name: str) -> ValueError:
    """The error for a file that changed after it was written."""
    return ValueError(f"data.cache: {folder}/{name} is damaged; delete {folder} to build it anew")


def read_index(folder: Folder) -> Index:
    """The documents of a folder."""
    return Index(folder.map(SIZES, np.dtype(np.int64)), folder.map(HASHES, np.dtype(np.uint64)))


def shard_names(counts: Iterable[int]) -> list[str]:
    """The files of tokens of all pieces, from the number of shards of each piece."""
    return [tokens_name(piece, shard) for piece, count in enumerate(counts) for shard in range(count)]


def tokens_name(piece: int, shard: int) -> str:
    """The file with the tokens of a shard."""
    return f"shard-{piece:06}-{shard:06}.tokens"


def digest_of(before: Iterable[str], index: Index) -> str:
    """A short hash of texts, and of offsets and sizes of documents."""
    found = hashlib.sha256()
    for text in before:
        found.update(text.encode())
    for run in index.runs():
        found.update(run.starts.data)
    for run in index.runs():
        found.update(run.sizes.data)
    return found.hexdigest()[:16]


def dump_arrays(**arrays: Any) -> bytes:
    """Arrays and texts as the bytes of an .npz file."""
    content = io.BytesIO()
    np.savez(content, **arrays)
    return content.getvalue()


def load_arrays(content: bytes) -> dict[str, np.ndarray]:
    """The arrays and texts that `dump_arrays` was given."""
    with np.load(io.BytesIO(content)) as arrays:
        return dict(arrays)
