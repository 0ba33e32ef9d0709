"""Common and frequent words: which words appear most often in a list (RULER, arXiv 2404.06654, section 3)."""

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int

from train.evaluate.tasks.sample import Sample, too_short
from train.evaluate.tasks.text import Answer, compose, drawn, listed
from train.evaluate.tasks.vocabulary import Vocabulary
from train.evaluate.tasks.words import NOUNS

_OPENING = "Behind some idle talk stands a list of words.\n"
LIST = "\nList:"


def common_words(
    generator: np.random.Generator, vocabulary: Vocabulary, length: int, common: int, often: int, seldom: int
) -> Sample:
    """A list in random order: `common` words `often` times each, and as many others as fit, `seldom` times each.

    Asked for: the common ones, in the order in which they first appear. Raises ValueError for a length that is too
    short for them and one other.
    """
    words = itertools.chain(generator.permutation(NOUNS).tolist(), _made_up(generator))
    chosen = list(itertools.islice(words, common))
    found = chosen * often + [next(words)] * seldom
    question = f"\nThe {common} words that stand there {often} times, in the order of the list, are"
    room = length - _size(vocabulary, found, question, chosen)
    if room < 0:
        raise too_short(length, length - room)
    for word in words:
        room -= seldom * _sizes(vocabulary, [word]).sum()
        if room < 0:
            break
        found += [word] * seldom
    found = generator.permutation(found).tolist()
    answers = sorted(chosen, key=found.index)
    return _text(generator, vocabulary, length, found, [(question, False), *listed(answers)])


def frequent_words(
    generator: np.random.Generator, vocabulary: Vocabulary, length: int, frequent: int, power: float
) -> Sample:
    """A list of made-up words in random order, the n-th of them ``round(c n**-power)`` times, as in natural text; c is
    the largest integer for which the list fits and the words asked for differ in their counts.

    Asked for: the `frequent` most frequent ones, the most frequent first. Raises ValueError for a length that is too
    short for any such c.
    """
    most = math.ceil((2 * length) ** (1 / power))  # words with round(c n**-power) > 0, for c equal to the length
    words = list(itertools.islice(_made_up(generator), frequent + 1 + min(length, most)))
    sizes = _sizes(vocabulary, words)
    question = f"\nThe {frequent} most frequent words, the most frequent first, are"
    room = length - _size(vocabulary, [], question, words[:frequent])

    def size(c: int) -> int:
        return int(_counts(c, len(words), power) @ sizes)

    def differ(c: int) -> bool:
        return bool((np.diff(_counts(c, len(words), power)[: frequent + 1]) < 0).all())

    fitting = bisect.bisect_right(range(1, max(1, room)), room, key=size)
    chosen = next(filter(differ, range(fitting, 0, -1)), None)
    if chosen is None:
        raise too_short(length, length - room + size(next(filter(differ, itertools.count(1)))))
    found = generator.permutation(np.repeat(words, _counts(chosen, len(words), power))).tolist()
    return _text(generator, vocabulary, length, found, [(question, False), *listed(words[:frequent])])


def _counts(c: int, words: int, power: float) -> Int[np.ndarray, "words"]:
    return np.round(c * np.arange(1, words + 1) ** -float(power)).astype(int)


def _text(generator, vocabulary, length: int, words: Sequence[str], ending: Sequence[Answer]) -> Sample:
    """Filler sentences, the list, the end."""
    return compose(vocabulary, length, _OPENING, drawn(generator), [_written(words)], [1.0], ending)


def _written(words: Sequence[str]) -> str:
    return LIST + "".join(f" {word}" for word in words) + "."


def _size(vocabulary: Vocabulary, words: Sequence[str], question: str, answers: Sequence[str]) -> int:
    """The number of tokens of a text with this list and this end, and one token of filler."""
    ends = sum(len(vocabulary.tokens(part)) for part, _ in [(_OPENING, False), (question, False), *listed(answers)])
    return 2 + ends + len(vocabulary.tokens(_written([]))) + int(_sizes(vocabulary, words).sum())


def _sizes(vocabulary: Vocabulary, words: Sequence[str]) -> Int[np.ndarray, "words"]:
    return np.array([len(vocabulary.tokens(f" {word}")) for word in words], int)


def _made_up(generator: np.random.Generator) -> Iterator[str]:
    """Different meaningless words of three syllables."""
    seen = set(NOUNS)
    while True:
        pairs = zip(generator.choice(list("bdfgklmnprstvz"), 3), generator.choice(list("aeiou"), 3), strict=True)
        word = "".join(letter for pair in pairs for letter in pair)
        if word not in seen:
            seen.add(word)
            yield word
