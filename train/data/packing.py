"""Documents packed into rows of one length, concatenated or best-fit, and any rows of them by number."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int64

from train.data.corpus import Corpus, HeldOutText
from train.data.index import Documents, Index, ranges
from train.data.learned import ids_of, labels_of
from train.data.storage import Scratch
from train.data.tokenizer import PADDING

GROUP_PIECES = 2**21
"""The number of pieces that best fit packs together: larger corpora are packed in groups of about this size."""


class Batch(NamedTuple):
    """Rows of packed documents, int32 [rows, length] each.

    `segment_ids` number the pieces of documents in a row from 0 and are -1 for padding; a document cut by a row's end
    is a new segment in the next row. `positions` count from 0 in each segment. `labels` are the next tokens of the same
    document, even if they are in another row; -1 after its last token and at padding, where nothing is predicted, and
    before an unlearned token of a conversation.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    labels: np.ndarray


class Pieces(NamedTuple):
    """Runs of tokens that follow each other in a row: their start in the corpus, their length, and whether their
    document continues after them."""

    starts: Int64[np.ndarray, "pieces"]
    sizes: Int64[np.ndarray, "pieces"]
    more: Bool[np.ndarray, "pieces"]


@dataclass(frozen=True)
class Concatenated:
    """All documents as one stream, split whenever a row is full.

    Row r holds tokens [r*length, (r+1)*length) of the stream and predicts tokens [r*length + 1, (r+1)*length + 1), so
    every token but the first of each document is predicted exactly once. There are ceil((tokens - 1) / length) rows.
    """

    index: Index
    length: int

    def __len__(self) -> int:
        return -(-(self.index.tokens - 1) // self.length)

    def rows(self, numbers: Int64[np.ndarray, "rows"]) -> tuple[Pieces, Int64[np.ndarray, "rows"]]:
        """The pieces of the rows with these numbers, row by row, and the number of pieces in each row."""
        first = numbers * self.length
        stop = np.minimum(first + self.length, self.index.tokens)
        starts, sizes, ends = self._around(first, stop)
        documents = np.searchsorted(ends, first, side="right")
        counts = np.searchsorted(ends, stop - 1, side="right") + 1 - documents
        document = ranges(documents, counts)
        first, stop, ends = np.repeat(first, counts), np.repeat(stop, counts), ends[document]
        begins = ends - sizes[document]
        inside = np.maximum(first - begins, 0)
        sizes = np.minimum(ends, stop) - begins - inside
        return Pieces(starts[document] + inside, sizes, ends > stop), counts

    def _around(self, first: Int64[np.ndarray, "rows"], stop: Int64[np.ndarray, "rows"]) -> Documents:
        """All documents that overlap these stretches of the stream, and some more."""
        block = np.searchsorted(self.index.stream, first, side="right") - 1
        last = np.searchsorted(self.index.stream, stop - 1, side="right") - 1
        return self.index.load(np.unique(ranges(block, last + 1 - block)))


@dataclass(frozen=True)
class BestFit:
    """Pieces of documents, each in one row; row r is made of the pieces from ``first[r]`` to ``first[r + 1]``."""

    pieces: Pieces
    first: Int64[np.ndarray, "rows+1"]
    groups: int  # number of groups of documents that were packed separately

    def __len__(self) -> int:
        return len(self.first) - 1

    def rows(self, numbers: Int64[np.ndarray, "rows"]) -> tuple[Pieces, Int64[np.ndarray, "rows"]]:
        """The pieces of the rows with these numbers, row by row, and the number of pieces in each row."""
        counts = self.first[numbers + 1] - self.first[numbers]
        inside = ranges(self.first[numbers], counts)
        starts, sizes, more = (part[inside] for part in self.pieces)
        return Pieces(starts, sizes.astype(np.int64), more), counts


def best_fit(index: Index, length: int) -> BestFit:
    """Documents cut into pieces of at most `length` tokens; pieces, the largest first, each put into the row with the
    least room that holds it, or a new row (Ding et al. 2024, arXiv:2404.10830).

    A document of n tokens is cut at multiples of `length`; a last piece of one token is omitted, since it predicts
    nothing and the piece before predicts it. Equal pieces keep their order; of rows with equal room the one filled most
    recently takes the piece. Neighbouring documents with about `GROUP_PIECES` pieces are packed as one group, and the
    rows of all groups are in a memory-mapped file, so that memory is bounded.
    """
    columns = Scratch(np.int64), Scratch(np.int32), Scratch(np.bool_)
    first, pieces, groups = Scratch(np.int64), 0, 0
    first.append(np.zeros(1))
    for group in _groups(index, length):
        packed, counts = _pack_group(group, length)
        for column, part in zip(columns, packed, strict=True):
            column.append(part)
        first.append(pieces + np.cumsum(counts))
        pieces, groups = pieces + counts.sum(), groups + 1
    return BestFit(Pieces(*(column.mapped() for column in columns)), first.mapped(), groups)


def _groups(index: Index, length: int) -> Iterator[Pieces]:
    """The pieces of all documents, in order, in groups."""
    cut: list[Pieces] = []
    for run in index.runs():
        cut.append(_cut(run.starts, run.sizes, length))
        if sum(len(each.sizes) for each in cut) >= GROUP_PIECES:
            yield _joined(cut)
            cut = []
    if cut:
        yield _joined(cut)


def _joined(cut: Sequence[Pieces]) -> Pieces:
    return Pieces(*map(np.concatenate, zip(*cut, strict=True)))


def _pack_group(pieces: Pieces, length: int) -> tuple[Pieces, Int64[np.ndarray, "rows"]]:
    """The pieces row by row, and how many each row has."""
    order = np.argsort(-pieces.sizes, kind="stable")
    row = np.empty(len(order), np.int64)
    row[order] = _rows_by_best_fit(pieces.sizes[order], length)
    by_row = order[np.argsort(row[order], kind="stable")]
    return Pieces(*(part[by_row] for part in pieces)), np.bincount(row)


def _cut(starts: Int64[np.ndarray, "documents"], sizes: Int64[np.ndarray, "documents"], length: int) -> Pieces:
    """The pieces of every document, in order: ceil((n - 1) / length) of a document of n tokens, but at least one."""
    counts = np.maximum(-(-(sizes - 1) // length), 1)
    document = np.repeat(np.arange(len(sizes)), counts)
    offsets = ranges(np.zeros_like(counts), counts) * length
    left = sizes[document] - offsets
    return Pieces(starts[document] + offsets, np.minimum(left, length), left > length)


def _rows_by_best_fit(sizes: Int64[np.ndarray, "pieces"], length: int) -> Int64[np.ndarray, "pieces"]:
    """The row of each piece, for sizes that descend.

    A row that takes a piece of size s remains the row with the least room for the next such piece, as long as it fits.
    So a row takes floor(room / s) pieces of a size at once.
    """
    found, count = np.empty(len(sizes), np.int64), 0
    rooms: list[int] = []  # that some rows have left, ascending
    rows: dict[int, list[int]] = defaultdict(list)  # by the room they have left
    negative, firsts, counts = np.unique(-sizes, return_index=True, return_counts=True)
    for size, index, pieces in zip((-negative).tolist(), firsts.tolist(), counts.tolist(), strict=True):
        stop = index + pieces
        while index < stop:
            least = bisect_left(rooms, size)
            if least == len(rooms):
                row, room, count = count, length, count + 1
            else:
                room = rooms[least]
                row = rows[room].pop()
                if not rows[room]:
                    del rooms[least]
            taken = min(room // size, stop - index)
            found[index : index + taken] = row
            index, room = index + taken, room - taken * size
            if room and not rows[room]:
                insort(rooms, room)
            if room:
                rows[room].append(row)
    return found


Packing = Concatenated | BestFit
"""Which pieces each row is made of."""


@dataclass(frozen=True)
class Part:
    """The rows of one part of a mixture, and its weight: its share of the training tokens relative to other parts."""

    corpus: Corpus | HeldOutText
    packing: Packing
    weight: float

    @property
    def tokens_per_row(self) -> float:
        """Tokens in a row, on average, without padding."""
        return self.corpus.tokens / len(self.packing)

    @property
    def digest(self) -> str:
        """The corpus' hash, with the number of groups if there are several, because the rows depend on that too."""
        groups = getattr(self.packing, "groups", 1)
        return self.corpus.digest + (f"/{groups}" if groups > 1 else "")


@dataclass(frozen=True)
class PackedRows:
    """The rows of all parts, one part after the other."""

    parts: tuple[Part, ...]
    length: int
    padding: int = PADDING

    @cached_property
    def starts(self) -> Int64[np.ndarray, "parts"]:
        """The number of the first row of each part."""
        counts = np.array([len(part.packing) for part in self.parts], np.int64)
        return np.cumsum(counts) - counts

    def __len__(self) -> int:
        return sum(len(part.packing) for part in self.parts)

    @property
    def tokens(self) -> int:
        """Tokens of the training documents, each counted once."""
        return sum(part.corpus.tokens for part in self.parts)

    def batch(self, rows: Int[np.ndarray, "rows"]) -> Batch:
        """The rows with these numbers. Beyond the returned arrays it needs memory only for the tokens of these rows."""
        shape = (len(rows), self.length)
        batch = Batch(
            np.full(shape, self.padding, np.int32),
            np.zeros(shape, np.int32),
            np.full(shape, -1, np.int32),
            np.full(shape, -1, np.int32),
        )
        columns = np.arange(self.length, dtype=np.int32)
        rows = np.asarray(rows, np.int64)
        owners = np.searchsorted(self.starts, rows, side="right") - 1
        for index in np.unique(owners):
            targets = np.flatnonzero(owners == index)
            _fill(batch, targets, self.parts[index], rows[targets] - self.starts[index], columns)
        return batch

    def digest(self) -> str:
        """A short hash of all tokens, document borders and weights, by which a resumed run recognises its corpus."""
        if len(self.parts) == 1:
            return self.parts[0].digest
        return "-".join(f"{part.digest}:{part.weight:g}" for part in self.parts)


def _fill(batch: Batch, targets: np.ndarray, part: Part, numbers: np.ndarray, columns: np.ndarray) -> None:
    """Fills rows `targets` of the batch with rows `numbers` of a part. One read fetches all: URLs are slow."""
    (starts, sizes, more), counts = part.packing.rows(numbers)
    pieces = iter(zip(part.corpus.read(starts, sizes + more), sizes.tolist(), strict=True))
    for target, count in zip(targets.tolist(), counts.tolist(), strict=True):
        column = 0
        for segment in range(count):
            tokens, size = next(pieces)
            stop = column + size
            batch.tokens[target, column:stop] = ids_of(tokens[:size])
            batch.positions[target, column:stop] = columns[:size]
            batch.segment_ids[target, column:stop] = segment
            batch.labels[target, column : column + len(tokens) - 1] = labels_of(tokens[1:])
            column = stop


def pack_corpora(
    corpora: Sequence[Corpus | HeldOutText], weights: Sequence[float], length: int, packing: str, padding: int
) -> PackedRows:
    """Rows of `length` tokens of encoded documents, in their order.

    Raises ValueError if the documents of a part do not fill one row.
    """
    parts = []
    for corpus, weight in zip(corpora, weights, strict=True):
        total = corpus.tokens
        if total <= length:
            raise ValueError(
                f"data: {'the corpus' if len(corpora) == 1 else f'part {len(parts)} of the mixture'} has {total} "
                f"tokens, too few for one row of train.length={length} and the token after it; add text or train on "
                "shorter rows"
            )
        make = best_fit if packing == "best-fit" else Concatenated
        parts.append(Part(corpus, make(corpus.index, length), weight))
    return PackedRows(tuple(parts), length, padding)


def pack_sample(sample: HeldOutText, length: int) -> PackedRows:
    """Rows of `length` tokens of a few documents as one stream; each row is read on demand.

    Raises ValueError if the documents do not fill one row.
    """
    return pack_corpora([sample], [1.0], length, "concatenate", PADDING)
