"""Documents packed into rows of one length: concatenated, and split wherever a row is full."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32, UInt16

from train.data.tokenizer import PADDING


class Batch(NamedTuple):
    """Rows of packed documents, int32 [rows, length] each.

    `segment_ids` number the documents in a row from 0 and are -1 for padding; a document cut by a row's end is a new
    segment in the next row. `positions` count from 0 in each segment. `labels` are the next tokens, -1 where the next
    token belongs to another document or is padding: nothing is to be predicted there.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class PackedRows:
    """All documents as one stream; rows are cut from it when asked for.

    Row r holds tokens [r*length, (r+1)*length) and predicts tokens [r*length + 1, (r+1)*length + 1), so every token
    but the first of each document is predicted exactly once. ``starts`` holds where each document begins.
    """

    tokens: UInt16[np.ndarray, "tokens"]
    starts: Int[np.ndarray, "documents"]
    length: int

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.length)

    def batch(self, rows: Int[np.ndarray, "rows"]) -> Batch:
        """The named rows."""
        columns = np.arange(self.length + 1)
        index = np.asarray(rows)[:, None] * self.length + columns
        inside = index < len(self.tokens)
        tokens = np.where(inside, self.tokens[np.minimum(index, len(self.tokens) - 1)], PADDING).astype(np.int32)
        document = np.searchsorted(self.starts, index, side="right")
        segments = np.where(inside, document - document[:, :1], -1).astype(np.int32)
        same = inside[:, 1:] & (segments[:, 1:] == segments[:, :-1])
        labels = np.where(same, tokens[:, 1:], -1).astype(np.int32)
        return Batch(tokens[:, :-1], _positions(segments[:, :-1]), segments[:, :-1], labels)

    def digest(self) -> str:
        """A short hash of all tokens and document borders, by which a resumed run knows its corpus again."""
        return hashlib.sha256(self.tokens.tobytes() + self.starts.tobytes()).hexdigest()[:16]


def pack(documents: Sequence[UInt16[np.ndarray, "_"]], length: int) -> PackedRows:
    """Rows of `length` from encoded documents, in the order given.

    Raises ValueError when they do not fill one row.
    """
    sizes = np.array([len(document) for document in documents], np.int64)
    if sizes.sum() <= length:
        raise ValueError(
            f"data: the corpus has {sizes.sum()} tokens, too few for one row of train.length={length} and the token "
            "after it; add text or train on shorter rows"
        )
    return PackedRows(np.concatenate(documents), np.cumsum(sizes) - sizes, length)


def _positions(segments: Int32[np.ndarray, "rows length"]) -> Int32[np.ndarray, "rows length"]:
    """The index of each token within its run of equal segment ids; 0 for padding."""
    columns = np.arange(segments.shape[1], dtype=np.int32)
    first: Bool[np.ndarray, "rows length"] = np.diff(segments, axis=1, prepend=segments[:, :1] - 1) != 0
    start = np.maximum.accumulate(np.where(first, columns, 0), axis=1)
    return np.where(segments < 0, 0, columns - start)
