"""Common and frequent words: which words are in a list most often."""

import string
from dataclasses import dataclass
from random import Random

import numpy as np

from train.config.settings.checks import check
from train.evaluate.ruler.sources import SEED, Case, Draws, Length, Sources

_COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 "
    "words that appear most often in the list are:"
)
_FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text? Answer: According to the coded text above, the "
    "three most frequently appeared words are:"
)
_STEP = 10
_WORD_LETTERS = 6
_POWER = 2.0


@dataclass(frozen=True)
class CommonWords:
    """The task: the ten words that are in a list thirty times, among words that are there three times, after a solved
    example. Below 4,096 tokens the numbers are six and one."""

    common: int = 10

    new = 120
    """The most tokens of an answer."""

    def cases(self, sources: Sources, length: Length, count: int) -> list[Case]:
        """The first cases of the task. Raises ValueError for a length that is too short."""
        draws, shuffles, words = Draws(), Random(SEED), list(sources.words)
        shuffles.shuffle(words)

        def drawn(size: int, often: int, seldom: int) -> tuple[str, list[str]]:
            chosen = draws.python.sample(words, size)
            common, others = chosen[: self.common], chosen[self.common :]
            listed = common * often + others * seldom
            shuffles.shuffle(listed)
            return _COMMON.format(context=_numbered(listed)), common

        def case(size: int) -> Case:
            is_short = length.total < 4096
            shown, solved = drawn(*((20, 3, 1) if is_short else (40, 10, 3)))
            text, answers = drawn(size, *((6, 1) if is_short else (30, 3)))
            return Case(f"{shown}{_numbered(solved)}\n{text}", tuple(answers))

        def tokens_of(size: int) -> int:
            found = case(size)
            return length.count(f"{found.prompt} {_numbered(found.answers)}")

        size = length.most(_STEP, tokens_of, limit=len(words))
        return [length.fitting(size, _STEP, self.common, case) for _ in range(count)]


def _numbered(words) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


@dataclass(frozen=True)
class FrequentWords:
    """The task: the three most frequent of made-up words, of which the n-th has a share of ``n**-2 / zeta(2)``; dots
    stand for the first."""

    new = 50
    """The most tokens of an answer."""

    def cases(self, sources: Sources, length: Length, count: int) -> list[Case]:
        """The first cases of the task. Raises ValueError for a length that is too short."""
        draws, vocabulary, step = Draws(), length.total // 50, length.total // 32
        check(vocabulary > 3, f"evaluate.ruler.lengths: fwe needs at least 200 tokens, found {length.total}")
        words, size = _made_up(draws, vocabulary), length.room // _WORD_LETTERS
        while length.count(_frequent(words, size).prompt) < length.room:
            size += step
        size -= step
        found = []
        for _ in range(count):
            words = _made_up(draws, vocabulary)
            found.append(length.fitting(size, step, 1, lambda size, words=words: _frequent(words, size)))
        return found


def _made_up(draws: Draws, count: int) -> list[str]:
    """Different words of random letters, the first of which is dots."""
    found: list[str] = []
    while len(found) < count or len(set(found)) < count:
        found.append("".join(draws.python.choices(string.ascii_lowercase, k=_WORD_LETTERS)))
    found = sorted(set(found))
    Random(SEED).shuffle(found)
    return ["...", *found[1:]]


def _frequent(words: list[str], size: int) -> Case:
    """The case with `size` words."""
    from scipy.special import zeta

    counts = (size * np.arange(1.0, len(words) + 1) ** -_POWER / zeta(_POWER)).astype(int)
    drawn = [word for word, times in zip(words, counts, strict=True) for _ in range(times)]
    Random(SEED).shuffle(drawn)
    return Case(_FREQUENT.format(context=" ".join(drawn)), tuple(words[1:4]))
