"""Which tokens of the held-out documents are scored, and in what context.

All measurements look at *pieces*: runs of at most `span + 1` tokens of one document, where `span` is the longest
evaluation length. The pieces are the same at every length, so the curves differ only by the context.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from train.data.learned import ids_of, labels_of

Tokens = Int[np.ndarray, "n"]


class Windows(NamedTuple):
    """Windows of one length: inputs are `tokens[:, :-1]`, targets `tokens[:, 1:]`, each scored `weights` times."""

    tokens: Int[np.ndarray, "windows length+1"]
    weights: Float[np.ndarray, "windows length"]

    @property
    def scored(self) -> int:
        """The number of tokens scored."""
        return int(self.weights.sum())


def pieces(documents: Sequence[Tokens], span: int, tokens: int) -> list[Tokens]:
    """Cuts every document into pieces of at most `span + 1` tokens and keeps about `tokens` targets of them.

    Neighbouring pieces share one token, the last target of one and the first input of the next, so that every token but
    a document's first is a target once. The kept pieces are spread evenly over all documents, in order.
    """
    starts = [(document, start) for document in documents for start in range(0, len(document) - 1, span)]
    cut = [document[start : start + span + 1] for document, start in starts]
    return _evenly(cut, _share(tokens, sum(len(piece) - 1 for piece in cut), len(cut)))


def full_pieces(documents: Sequence[Tokens], span: int, tokens: int, stride: int = 0) -> list[Tokens]:
    """The pieces of exactly `span + 1` tokens, at most `tokens // span` of them, evenly over all documents.

    With a `stride` they overlap: each piece begins `stride` tokens after the previous piece of its document, so the
    last `stride` targets of one piece are followed by those of the next.
    """
    step = stride or span
    starts = [(document, start) for document in documents for start in range(0, len(document) - span, step)]
    return _evenly([document[start : start + span + 1] for document, start in starts], max(1, tokens // span))


def whole_windows(chosen: Sequence[Tokens], length: int) -> Windows:
    """Non-overlapping windows of `length` over every piece; a piece's last one may be shorter. Every target counts."""
    cut = [piece[start : start + length + 1] for piece in chosen for start in range(0, len(piece) - 1, length)]
    return _padded(cut, length)


def ending(tokens: Tokens, length: int, opening: Sequence[int] = ()) -> Tokens:
    """The window of `length` at the end of a text, which begins with the tokens of `opening` if there are any."""
    return np.concatenate([np.array(opening, np.int32), tokens[len(opening) - length - 1 :]]).astype(np.int32)


def last_windows(chosen: Sequence[Tokens], length: int, scored: int) -> Windows:
    """One window of `length` at the end of every piece, of which only the last `scored` targets count.

    The targets are the same at every length; only the context before them grows.
    """
    windows = _padded([ending(piece, length) for piece in chosen], length)
    windows.weights[:, : length - scored] = 0
    return windows


def _padded(cut: Sequence[Tokens], length: int) -> Windows:
    """Stacks windows of up to `length + 1` tokens; shorter ones are padded with zeros of weight 0, and unlearned tokens
    of conversations have weight 0 too."""
    tokens = np.zeros((len(cut), length + 1), np.int32)
    weights = np.zeros((len(cut), length), np.float32)
    for row, window in enumerate(cut):
        tokens[row, : len(window)] = ids_of(window)
        weights[row, : len(window) - 1] = labels_of(window[1:]) >= 0
    return Windows(tokens, weights)


def _evenly(values: Sequence, count: int) -> list:
    """`count` of `values`, or all of them, evenly spread, in order."""
    count = min(count, len(values))
    return [values[(2 * index + 1) * len(values) // (2 * count)] for index in range(count)]


def _share(wanted: int, total: int, count: int) -> int:
    """How many of `count` items, which have `total` tokens together, have about `wanted` tokens; at least one."""
    return count if wanted >= total else max(1, math.floor(wanted / total * count))
