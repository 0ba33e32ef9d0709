"""A number hidden in filler text (Mohtashami and Jaggi, arXiv 2305.16300)."""

import itertools
from typing import NamedTuple

import numpy as np

from train.evaluate.tasks.sample import Sample, Tokens, joined, too_short
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


class Prompt(NamedTuple):
    """A text that ends in a question, and the answer that its continuation must contain."""

    tokens: np.ndarray
    answer: bytes


def passkey(
    generator: np.random.Generator, vocabulary: Vocabulary, length: int, depth: float, new_tokens: int
) -> Prompt:
    """`length - new_tokens` tokens: an opening, a share `depth` of the filler, the fact, the rest of the filler, the
    question. The key is uniform over the integers of five digits; the filler repeats five sentences in their order.

    Raises ValueError for a length that is too short.
    """
    key = _key(generator)
    return Prompt(_asked(vocabulary, length, depth, key, new_tokens), key.encode())


def passkey_answered(generator: np.random.Generator, vocabulary: Vocabulary, length: int, depth: float) -> Sample:
    """The text of `passkey` for the same key, followed by the key, the only answer; `length` tokens in all.

    The key has the tokens that it has after the question: alone, many tokenizers would start it with an extra space.
    """
    key = _key(generator)
    answer = vocabulary.tokens(f"{QUESTION} {key}")[len(vocabulary.tokens(QUESTION)) :]
    return joined([(_asked(vocabulary, length, depth, key, len(answer)), False), (answer, True)])


def _key(generator: np.random.Generator) -> str:
    return str(generator.integers(10_000, 100_000))


def _asked(vocabulary: Vocabulary, length: int, depth: float, key: str, room: int) -> Tokens:
    """The text up to the end of the question, with `room` for more tokens."""
    fact = f"The pass key is {key}. Remember it. {key} is the pass key. "
    filler, question = itertools.cycle(SENTENCES), [(QUESTION, False)]
    return compose(vocabulary, length, _OPENING, filler, [fact], [depth], question, room).tokens


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
