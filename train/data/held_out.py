"""Which documents are held out of training, chosen by their names, up to a number of tokens."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Int64, UInt64

from train.data.index import GONE

_HASH_RANGE = 2**48
_NONE = -1
_MANY = 2**20  # documents that are kept before the excess is dropped

Columns = Iterable[tuple[UInt64[np.ndarray, "n"], Int64[np.ndarray, "n"]]]
"""The hashes and sizes of a part's documents, some at a time."""


@dataclass(frozen=True)
class HeldOut:
    """The rule for holding documents out of one part: those with a hash below `below`, except document number `never`;
    and document number `always`.

    A rule needs no list of documents, so memory does not grow with their number.
    """

    below: int
    never: int
    always: int = _NONE

    def out(self, numbers: Int64[np.ndarray, "n"], hashes: UInt64[np.ndarray, "n"]) -> Bool[np.ndarray, "n"]:
        """Which documents are held out."""
        return (hashes < np.uint64(self.below)) & (numbers != self.never) | (numbers == self.always)

    def trained(self, numbers: Int64[np.ndarray, "n"], hashes: UInt64[np.ndarray, "n"]) -> Bool[np.ndarray, "n"]:
        """Which documents are trained on: the others, without those of damaged files."""
        return ~self.out(numbers, hashes) & (hashes != GONE)


def hold_out(parts: Sequence[Columns], share: float, tokens: float = math.inf) -> list[HeldOut]:
    """What is held out of each part of a mixture.

    A document is held out when the hash of its name, read as a number in [0, 1), is below `share`. If these
    documents have more than `tokens` tokens, only those of all parts with the lowest hashes are held out, up to that
    many tokens. Of every part at least one document is trained on, the one with the highest hash. At least one document
    overall is held out, the one with the lowest hash among the parts with several documents, unless the share is 0.

    Raises ValueError when there is no such document.
    """
    lowest = _Lowest(math.ceil(share * _HASH_RANGE), tokens)
    ends = [_look_through(part, lowest) for part in parts]
    below = lowest.settle()
    found = [HeldOut(below, part.high) for part in ends]
    if share and not any(part.count > 1 and part.low_hash < below for part in ends):
        several = [index for index, part in enumerate(ends) if part.count > 1]
        if not several:
            raise ValueError(
                "data: the text is a single document, so none can be held out; split it into several files, or set "
                "data.held_out=0 to train without evaluation"
            )
        first = min(several, key=lambda index: ends[index].low_hash)
        found[first] = replace(found[first], always=ends[first].low)
    return found


class _Lowest:
    """The hash below which documents are held out, computed from the documents seen so far.

    Excess documents are dropped regularly, so memory is bounded.
    """

    def __init__(self, below: int, tokens: float):
        self._below, self._tokens = below, tokens
        self._seen: list[tuple[np.ndarray, np.ndarray]] = []
        self._new = 0

    def see(self, hashes: UInt64[np.ndarray, "n"], sizes: Int64[np.ndarray, "n"]) -> None:
        """Adds documents."""
        mask = hashes < np.uint64(self._below)
        if math.isfinite(self._tokens) and mask.any():
            self._seen.append((hashes[mask], sizes[mask]))
            self._new += len(self._seen[-1][0])
        if self._new > _MANY:
            self.settle()

    def settle(self) -> int:
        """The hash, computed from all documents seen. Of documents with equal hashes all are below it, or none."""
        if self._seen:
            hashes, sizes = (np.concatenate(column) for column in zip(*self._seen, strict=True))
            order = np.argsort(hashes, kind="stable")
            hashes, sizes = hashes[order], sizes[order]
            over = np.flatnonzero(np.cumsum(sizes) > self._tokens)[:1]
            self._below = int(hashes[over[0]]) if over.size else self._below
            count = np.searchsorted(hashes, np.uint64(self._below))
            self._seen, self._new = [(hashes[:count], sizes[:count])], 0
        return self._below


@dataclass
class _Ends:
    """The documents of a part with the lowest and the highest hash, and how many it has."""

    count: int = 0
    low: int = _NONE
    low_hash: int = 2**64
    high: int = _NONE
    high_hash: int = -1

    def see(self, numbers: Int64[np.ndarray, "n"], hashes: UInt64[np.ndarray, "n"]) -> None:
        """Adds documents; of those with equal hashes the first counts."""
        self.count += len(hashes)
        low, high = int(np.argmin(hashes)), int(np.argmax(hashes))
        if hashes[low] < self.low_hash:
            self.low, self.low_hash = int(numbers[low]), int(hashes[low])
        if hashes[high] > self.high_hash:
            self.high, self.high_hash = int(numbers[high]), int(hashes[high])


def _look_through(part: Columns, lowest: _Lowest) -> _Ends:
    ends, first = _Ends(), 0
    for hashes, sizes in part:
        present = np.flatnonzero(hashes != GONE)
        if present.size:
            ends.see(first + present, hashes[present])
            lowest.see(hashes[present], sizes[present])
        first += len(hashes)
    return ends


def check_held_out(share: float) -> None:
    """Raises ValueError unless documents are held out to evaluate on."""
    if not share:
        raise ValueError("data.held_out is 0, so there are no held-out documents to evaluate on; 0.05 would work")
