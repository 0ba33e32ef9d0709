"""A number hidden in filler text (Mohtashami and Jaggi, arXiv 2305.16300)."""

import itertools

import numpy as np

from train.evaluate.tasks.sample import Sample, joined, too_short
from train.evaluate.tasks.text import compose
from train.evaluate.tasks.vocabulary import Vocabulary

_OPENING = "One fact is hidden in the idle talk below. Find it and keep it in mind, for it is asked for at the end.\n"
SENTENCES = (
    "Grass is green. ",
    "The sky is blue. ",
    "The sun is yellow. ",
    "Off we go. ",
    "There and back once more. ",
)
QUESTION = "\nWhat is the pass key? The pass key is"


def passkey(generator: np.random.Generator, vocabulary: Vocabulary, length: int, depth: float) -> Sample:
    """An opening, a share `depth` of the filler, the fact, the rest of the filler, the question, and the key, which is
    the only answer. The key is uniform over the integers of five digits; the filler repeats five sentences in their
    order.

    Raises ValueError for a length that is too short.
    """
    key = str(generator.integers(10_000, 100_000))
    fact = f"The pass key is {key}. Remember it. {key} is the pass key. "
    ending = [(QUESTION, False), (f" {key}", True)]
    return compose(vocabulary, length, _OPENING, itertools.cycle(SENTENCES), [fact], [depth], ending)


def passkey_tokens(
    generator: np.random.Generator, vocabulary: Vocabulary, length: int, depth: float, key_tokens: int
) -> Sample:
    """A pass key for models too small for words: random symbols, among them a marker followed by a key of `key_tokens`
    symbols. At the end the marker appears again, and then the key, every symbol of which is an answer.

    The marker is random too and appears nowhere else. A share `depth` of the other symbols is before it.

    Raises ValueError for a length that is too short.
    """
    marker, *others = generator.permutation(vocabulary.symbols)
    idle = length - 1 - 2 * (1 + key_tokens)
    if idle < 1:
        raise too_short(length, length - idle + 1)
    key, filler = generator.choice(others, key_tokens), generator.choice(others, idle)
    before = round(depth * idle)
    parts = [vocabulary.begin, filler[:before], [marker], key, filler[before:], [marker]]
    return joined([*((part, False) for part in parts), *(([symbol], True) for symbol in key)], len(others))
