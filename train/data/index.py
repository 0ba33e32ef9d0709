"""The index of a corpus: the length of each document and the hash of its name, memory-mapped from disk.

Memory holds only two numbers for each block of documents; documents of a block are looked up on demand.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, UInt64

BLOCK = 512  # documents
GONE = np.uint64(2**64 - 1)
"""The hash of documents of damaged files, which are never read; no name has this hash."""
_RUN = 2**7  # blocks read at a time

Filter = Callable[[Int64[np.ndarray, "n"], UInt64[np.ndarray, "n"]], Bool[np.ndarray, "n"]]
"""A function that chooses documents, by their numbers and hashes."""


def readable(_: Int64[np.ndarray, "n"], hashes: UInt64[np.ndarray, "n"]) -> Bool[np.ndarray, "n"]:
    """All documents except those of damaged files."""
    return hashes != GONE


class Documents(NamedTuple):
    """Where documents begin in the corpus, how many tokens they have, and where each ends in the stream of the chosen
    ones."""

    starts: Int64[np.ndarray, "documents"]
    sizes: Int64[np.ndarray, "documents"]
    ends: Int64[np.ndarray, "documents"]


@dataclass(frozen=True)
class Index:
    """Documents by number, in the order of their tokens in the corpus; at least one.

    `sizes` and `hashes` have an entry for every document; `keeps` chooses some of them.
    """

    sizes: Int64[np.ndarray, "documents"]
    hashes: UInt64[np.ndarray, "documents"]
    keeps: Filter = readable

    def select(self, keeps: Filter) -> "Index":
        """The same documents, chosen by another `keeps`."""
        return replace(self, keeps=keeps)

    @property
    def tokens(self) -> int:
        """How many tokens the chosen documents have."""
        return int(self.stream[-1])

    @cached_property
    def stream(self) -> Int64[np.ndarray, "blocks+1"]:
        """How many chosen tokens come before each block, and before the end."""
        return self._before(lambda part: np.where(self._chosen(part), self.sizes[part], 0))

    @cached_property
    def _offsets(self) -> Int64[np.ndarray, "blocks+1"]:
        """How many tokens, chosen or not, come before each block, and before the end."""
        return self._before(lambda part: self.sizes[part])

    def runs(self) -> Iterator[Documents]:
        """All chosen documents, some ten thousand at a time."""
        blocks = len(self.stream) - 1
        for first in range(0, blocks, _RUN):
            yield self.load(np.arange(first, min(first + _RUN, blocks)))

    def columns(self) -> Iterator[tuple[UInt64[np.ndarray, "n"], Int64[np.ndarray, "n"]]]:
        """Hashes and sizes of all documents, chosen or not, some ten thousand at a time."""
        for part in self._parts():
            yield self.hashes[part], self.sizes[part]

    def load(self, blocks: Int64[np.ndarray, "blocks"]) -> Documents:
        """The chosen documents of these blocks, which must be in ascending order."""
        counts = np.minimum(BLOCK, len(self.sizes) - blocks * BLOCK)
        numbers = ranges(blocks * BLOCK, counts)
        sizes = np.asarray(self.sizes[numbers])
        chosen = self.keeps(numbers, self.hashes[numbers])
        chosen_sizes = np.where(chosen, sizes, 0)
        starts = _running(sizes, counts, self._offsets[blocks])
        ends = _running(chosen_sizes, counts, self.stream[blocks]) + chosen_sizes
        return Documents(starts[chosen], sizes[chosen], ends[chosen])

    def _parts(self) -> Iterator[slice]:
        """The numbers of all documents, run by run."""
        size = BLOCK * _RUN
        return (slice(first, min(first + size, len(self.sizes))) for first in range(0, len(self.sizes), size))

    def _chosen(self, part: slice) -> Bool[np.ndarray, "n"]:
        return self.keeps(np.arange(part.start, part.stop), self.hashes[part])

    def _before(self, of: Callable[[slice], Int64[np.ndarray, "n"]]) -> Int64[np.ndarray, "blocks+1"]:
        sums = [np.add.reduceat(of(part), np.arange(0, part.stop - part.start, BLOCK)) for part in self._parts()]
        return np.cumsum(np.concatenate([[0], *sums]), dtype=np.int64)


def ranges(firsts: Int64[np.ndarray, "n"], counts: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "total"]:
    """``counts[i]`` whole numbers from ``firsts[i]`` on, for one i after the other."""
    return np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())


def _running(
    sizes: Int64[np.ndarray, "total"], counts: Int64[np.ndarray, "blocks"], bases: Int64[np.ndarray, "blocks"]
) -> Int64[np.ndarray, "total"]:
    """For each size, the base of its block plus the sizes before it in the block; block i has ``counts[i]`` sizes."""
    before = np.cumsum(sizes) - sizes
    return before + np.repeat(bases - before[np.cumsum(counts) - counts], counts)
