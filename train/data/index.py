"""The index of a corpus: the length of each document and the hash of its name, memory-mapped from disk.

Memory holds only two numbers for each block of documents; documents of a block are looked up on demand.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, UInt64

BLOCK = 512  # documents
_RUN = 2**7  # blocks read at a time

DOCUMENT = np.dtype([("size", np.int64), ("hash", np.uint64)])
"""What is known of a document: how many tokens it has, and the hash of its name."""

GONE = np.uint64(2**64 - 1)
"""The hash of documents of damaged files, which are never read; no name has this hash."""


def documents_of(sizes: Int64[np.ndarray, "documents"]) -> np.ndarray:
    """Documents of these sizes, of type `DOCUMENT`; every hash is 0."""
    found = np.zeros(len(sizes), DOCUMENT)
    found["size"] = sizes
    return found


class Documents(NamedTuple):
    """Where documents begin in the corpus, how many tokens they have, and where each ends in the stream of the chosen
    ones."""

    starts: Int64[np.ndarray, "documents"]
    sizes: Int64[np.ndarray, "documents"]
    ends: Int64[np.ndarray, "documents"]


@dataclass(frozen=True)
class Index:
    """Documents by number, in the order of their tokens in the corpus; at least one.

    `documents` are all of them, of type `DOCUMENT`. Chosen are those with a hash from `least` up to below `stop`; by
    default all but those of damaged files.
    """

    documents: np.ndarray
    least: int = 0
    stop: int = int(GONE)

    @property
    def tokens(self) -> int:
        """How many tokens the chosen documents have."""
        return int(self.stream[-1])

    @cached_property
    def stream(self) -> Int64[np.ndarray, "blocks+1"]:
        """How many chosen tokens come before each block, and before the end."""
        return self._before(lambda part: np.where(self._chosen(part["hash"]), part["size"], 0))

    @cached_property
    def _offsets(self) -> Int64[np.ndarray, "blocks+1"]:
        """How many tokens, chosen or not, come before each block, and before the end."""
        return self._before(lambda part: part["size"])

    def runs(self) -> Iterator[Documents]:
        """All chosen documents, some ten thousand at a time."""
        blocks = len(self.stream) - 1
        for first in range(0, blocks, _RUN):
            yield self.load(np.arange(first, min(first + _RUN, blocks)))

    def load(self, blocks: Int64[np.ndarray, "blocks"]) -> Documents:
        """The chosen documents of these blocks, which must be in ascending order."""
        counts = np.minimum(BLOCK, len(self.documents) - blocks * BLOCK)
        found = np.asarray(self.documents)[ranges(blocks * BLOCK, counts)]
        sizes, chosen = found["size"], self._chosen(found["hash"])
        chosen_sizes = np.where(chosen, sizes, 0)
        starts = _running(sizes, counts, self._offsets[blocks])
        ends = _running(chosen_sizes, counts, self.stream[blocks]) + chosen_sizes
        return Documents(starts[chosen], sizes[chosen], ends[chosen])

    def parts(self) -> Iterator[np.ndarray]:
        """All documents, chosen or not, some ten thousand at a time."""
        size = BLOCK * _RUN
        return (self.documents[first : first + size] for first in range(0, len(self.documents), size))

    def _chosen(self, hashes: UInt64[np.ndarray, "n"]) -> Bool[np.ndarray, "n"]:
        return (hashes >= np.uint64(self.least)) & (hashes < np.uint64(self.stop))

    def _before(self, of: Callable[[np.ndarray], Int64[np.ndarray, "n"]]) -> Int64[np.ndarray, "blocks+1"]:
        sums = [np.add.reduceat(of(part), np.arange(0, len(part), BLOCK)) for part in self.parts()]
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
