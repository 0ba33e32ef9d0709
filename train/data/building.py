"""Builds a corpus: pieces of files are encoded one by one, by any process, in any order; then the index."""

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from train.config.settings.data import SourceConfig
from train.data.corpus import DOCUMENTS, INDEX, damaged, digest_of, piece_file, read_index
from train.data.index import DOCUMENT, GONE
from train.data.learned import KIND, ids_of
from train.data.readers import Conversation, CorruptFile, Document, Wanted
from train.data.sources import LeftOut, SourceFile, name_hash, no_text, read_documents, report, silent
from train.data.storage import Folder, LocalFolder
from train.data.tokenizer import Tokenizer, token_type

PIECE_BYTES = 2**26  # of files: a larger file is a piece by itself, smaller ones share a piece
_GROUP_BYTES = 2**22  # of text that the tokenizer gets at a time


class Text(NamedTuple):
    """One part of the mixture, and the path or URL of the folder of its tokens, which do not depend on
    `bad_records`."""

    files: Sequence[SourceFile]
    source: SourceConfig
    bad_records: float
    path: str


class Piece(NamedTuple):
    """Files of a text that are encoded together: one, or several small ones. The other fields are those of `Text`."""

    number: int
    files: Sequence[SourceFile]
    source: SourceConfig
    bad_records: float
    path: str

    @property
    def size(self) -> int:
        """The total size of the files."""
        return sum(file.size for file in self.files)


def pieces_of(text: Text) -> list[Piece]:
    """All files, in order. The result depends on file sizes only, so every process gets the same pieces."""
    groups: list[list[SourceFile]] = []
    room = -1
    for file in text.files:
        if file.size > room:
            groups.append([])
            room = PIECE_BYTES
        groups[-1].append(file)
        room -= file.size
    return [Piece(number, group, *text[1:]) for number, group in enumerate(groups)]


def missing(folder: Folder, pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces that are missing from the folder, or incomplete."""
    found = folder.sizes()
    return [piece for piece in pieces if piece_file(piece.number, "json") not in found]


def build_piece(piece: Piece, tokenizer: Tokenizer, folder: Folder) -> None:
    """Encodes the documents of a piece into three files of `folder`: their tokens; size and hash of each document; and,
    written last, piece-p.json with the number of tokens, the largest of conversations, their digest and what is left
    out. Every process writes the same bytes.

    Documents of a damaged file, those before the damage, get the hash `GONE`. Raises ValueError for a file that begins
    with bad records only; see `read_documents`.
    """
    if folder.read(piece_file(piece.number, "json")) is not None:
        return
    sizes, hashes, left_out, digest, largest = array("q"), array("Q"), LeftOut(), hashlib.sha256(), 0
    kind, wanted, encode_all = _kind(piece.source, tokenizer), Wanted(piece.source.text_key), tokenizer.encode_all
    if piece.source.messages_key:
        wanted, encode_all = Wanted(piece.source.messages_key, tokenizer.chat), tokenizer.encode_conversations

    def encode(file: SourceFile) -> Iterator[np.ndarray]:
        nonlocal largest
        for group in _groups(read_documents(file, wanted, piece.bad_records, left_out)):
            encoded = encode_all([document.text for document in group])
            for document, tokens in zip(group, encoded, strict=True):
                sizes.append(len(tokens))
                hashes.append(name_hash(document.name))
                if wanted.chat:
                    largest = max(largest, int(ids_of(tokens).max(initial=0)))
                yield tokens.astype(kind, copy=False)

    def contents() -> Iterator[memoryview]:
        for file in piece.files:
            before = len(hashes)
            try:
                for tokens in encode(file):
                    digest.update(tokens.data)
                    yield tokens.data
            except CorruptFile as error:
                left_out.corrupt[file.path] = str(error)
                hashes[before:] = array("Q", [int(GONE)] * (len(hashes) - before))

    folder.write(piece_file(piece.number, "tokens"), contents())
    documents = np.empty(len(sizes), DOCUMENT)
    documents["size"], documents["hash"] = sizes, hashes
    folder.write(piece_file(piece.number, "documents"), [documents.tobytes()])
    about = {
        "tokens": sum(sizes),
        "largest": largest,
        "digest": digest.hexdigest(),
        "left_out": vars(left_out),
    }
    folder.write(piece_file(piece.number, "json"), [json.dumps(about).encode()])


def _kind(source: SourceConfig, tokenizer: Tokenizer) -> np.dtype:
    """The type of the tokens of a part of the mixture."""
    return KIND if source.messages_key else token_type(tokenizer.vocabulary_size)


def _groups(documents: Iterator[Document | Conversation]) -> Iterator[list[Document | Conversation]]:
    """The documents, some megabytes at a time."""
    group: list[Document | Conversation] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.text if isinstance(document, Document) else document.text.text)
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def finish(folder: Folder, text: Text, tokenizer: Tokenizer) -> None:
    """Writes the documents of all pieces, and the index, when all pieces are built. Whether there are too many bad
    records is for its readers to decide.

    It needs memory for the documents of a few pieces. Several processes may write it; all write the same.

    Raises ValueError if no file is readable, none has text, or a piece is missing.
    """
    count = len(pieces_of(text))
    pieces = [json.loads(content) for content in _read_all(folder, "json", count, 32)]
    left_out = LeftOut()
    for piece in pieces:
        left_out.add_all(LeftOut(**piece["left_out"]))
    report(left_out, len(text.files), 1.0, silent)
    if not any(piece["tokens"] for piece in pieces):
        raise no_text(text.files, left_out)
    folder.write(DOCUMENTS, _read_all(folder, "documents", count, 4))
    index = read_index(folder)
    if not index.tokens:
        raise no_text(text.files, left_out)
    about = {
        "kind": _kind(text.source, tokenizer).str,
        "largest": max(piece.get("largest", 0) for piece in pieces),
        "tokens": [piece["tokens"] for piece in pieces],
        "documents": len(index.documents),
        "digest": digest_of([piece["digest"] for piece in pieces], index),
        "files": len(text.files),
        "left_out": vars(left_out),
    }
    folder.write(INDEX, [json.dumps(about).encode()])
    if isinstance(folder, LocalFolder):
        folder.remove_leftovers()


def _read_all(folder: Folder, ending: str, count: int, at_once: int) -> Iterator[bytes]:
    """Files of all pieces, one after the other; some are read ahead in parallel, because a file at a URL is slow."""
    names = [piece_file(number, ending) for number in range(count)]
    with ThreadPoolExecutor(at_once) as pool:
        for first in range(0, count, at_once):
            some = names[first : first + at_once]
            for name, content in zip(some, pool.map(folder.read, some), strict=True):
                if content is None:
                    raise damaged(folder, name)
                yield content
