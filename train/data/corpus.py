"""Encoded documents in pieces: their index, and the tokens of any document."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Int64

from train.data.index import DOCUMENT, Index, documents_of
from train.data.sources import LeftOut
from train.data.storage import Folder, Span

INDEX, DOCUMENTS = "index.json", "documents"
"""Two files of a folder: its contents, written last; and size and hash of every document."""


@dataclass(frozen=True)
class Corpus:
    """Encoded documents; not even their sizes are in memory. Offsets count tokens through all pieces.

    `files` counts all files, omitted ones too; `largest` is the largest token of conversations, which may spell any
    special token, and 0 for plain text. Unlearned tokens are read as `train.data.learned` says.
    """

    folder: Folder
    kind: np.dtype
    piece_starts: Int64[np.ndarray, "pieces"]
    index: Index
    digest: str
    left_out: LeftOut
    files: int
    largest: int = 0

    @property
    def tokens(self) -> int:
        """How many tokens the documents have."""
        return self.index.tokens

    def select(self, least: int, stop: int) -> "Corpus":
        """The corpus with another choice of its documents; see `Index`."""
        index = replace(self.index, least=least, stop=stop)
        return replace(self, index=index, digest=digest_of([self.digest], index))

    def read(self, starts: Int64[np.ndarray, "runs"], sizes: Int64[np.ndarray, "runs"]) -> list[np.ndarray]:
        """Runs of tokens, each within one document, by offset and size."""
        pieces = np.searchsorted(self.piece_starts, starts, side="right") - 1
        first = (starts - self.piece_starts[pieces]) * self.kind.itemsize
        stop = first + sizes * self.kind.itemsize
        names = [piece_file(piece, "tokens") for piece in pieces.tolist()]
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
        begins = self._begins()
        documents = np.searchsorted(begins, starts, side="right") - 1
        offsets, owners = self.offsets[documents] + starts - begins[documents], self.owners[documents]
        found: list[Any] = [None] * len(starts)
        for owner in np.unique(owners):
            mine = np.flatnonzero(owners == owner)
            for run, tokens in zip(mine.tolist(), self.corpora[owner].read(offsets[mine], sizes[mine]), strict=True):
                found[run] = tokens
        return found

    def documents(self) -> list[np.ndarray]:
        """All documents, in order; unlearned tokens as `train.data.learned` says."""
        return self.read(self._begins(), self.index.documents["size"])

    def _begins(self) -> Int64[np.ndarray, "documents"]:
        sizes = self.index.documents["size"]
        return np.cumsum(sizes) - sizes


def join(corpora: Sequence[Corpus]) -> HeldOutText:
    """The chosen documents of each corpus."""
    found = [(owner, run) for owner, corpus in enumerate(corpora) for run in corpus.index.runs()]
    owners = np.concatenate([np.full(len(run.sizes), owner) for owner, run in found])
    offsets, sizes = (np.concatenate([run[column] for _, run in found]) for column in (0, 1))
    return HeldOutText(corpora, owners, offsets, Index(documents_of(sizes)))


def open_corpus(folder: Folder) -> Corpus | None:
    """The corpus in a folder; None while it is incomplete. Raises ValueError if a file is missing or truncated."""
    content = folder.read(INDEX)
    if content is None:
        return None
    about = json.loads(content)
    kind, tokens = np.dtype(about["kind"]), np.array(about["tokens"], np.int64)
    wanted = {piece_file(piece, "tokens"): count * kind.itemsize for piece, count in enumerate(about["tokens"])}
    wanted[DOCUMENTS] = DOCUMENT.itemsize * about["documents"]
    found = folder.sizes()
    for name, size in wanted.items():
        if found.get(name) != size:
            raise damaged(folder, name)
    left_out = LeftOut(**about["left_out"])
    starts = np.cumsum(tokens) - tokens
    found = about["digest"], left_out, about["files"], about.get("largest", 0)
    return Corpus(folder, kind, starts, read_index(folder), *found)


def damaged(folder: Folder, name: str) -> ValueError:
    """The error for a file that changed after it was written."""
    return ValueError(f"data.cache: {folder}/{name} is damaged; delete {folder} to build it anew")


def read_index(folder: Folder) -> Index:
    """The documents of a folder."""
    return Index(folder.map(DOCUMENTS, DOCUMENT))


def piece_file(piece: int, ending: str) -> str:
    """The name of a file of a piece: its ``tokens``, its ``documents``, or the ``json`` that marks it as complete."""
    return f"piece-{piece:06}.{ending}"


def digest_of(before: Iterable[str], index: Index) -> str:
    """A short hash of texts, and of offsets and sizes of documents."""
    found = hashlib.sha256()
    for text in before:
        found.update(text.encode())
    for run in index.runs():
        found.update(run.starts.tobytes())
        found.update(run.sizes.tobytes())
    return found.hexdigest()[:16]
