"""Needles in a haystack: sentences that assign numbers to things (Hsieh et al., RULER, arXiv 2404.06654, section 3)."""

from collections.abc import Sequence

import numpy as np

from train.evaluate.tasks.sample import Sample
from train.evaluate.tasks.text import compose, different, drawn, listed
from train.evaluate.tasks.vocabulary import Vocabulary
from train.evaluate.tasks.words import NOUNS

_OPENING = "Some things in this text have numbers. Keep them in mind.\n"


def needle_single(
    generator: np.random.Generator, vocabulary: Vocabulary, length: int, depth: float, digits: int
) -> Sample:
    """One thing with a number, at a depth of the filler text; its number is asked for."""
    (thing,), (number,) = _things(generator, 1), _numbers(generator, 1, digits)
    return _text(generator, vocabulary, length, [(thing, number)], [depth], _one(thing, number))


def needle_multi_key(
    generator: np.random.Generator, vocabulary: Vocabulary, length: int, keys: int, digits: int
) -> Sample:
    """`keys` things with a number each, anywhere in the filler text; the number of one of them is asked for."""
    pairs = list(zip(_things(generator, keys), _numbers(generator, keys, digits), strict=True))
    asked = pairs[generator.integers(keys)]
    return _text(generator, vocabulary, length, pairs, _depths(generator, keys), _one(*asked))


def needle_multi_value(
    generator: np.random.Generator, vocabulary: Vocabulary, length: int, values: int, digits: int
) -> Sample:
    """One thing with `values` numbers; all are asked for, in the order of the text."""
    (thing,), numbers = _things(generator, 1), _numbers(generator, values, digits)
    question = f"\nWhat are the {values} numbers of the {thing}, in the order of the text? They are"
    pairs = [(thing, number) for number in numbers]
    return _text(
        generator, vocabulary, length, pairs, _depths(generator, values), [(question, False), *listed(numbers)]
    )


def needle_multi_query(
    generator: np.random.Generator, vocabulary: Vocabulary, length: int, queries: int, digits: int
) -> Sample:
    """`queries` things with a number each; all numbers are asked for, thing by thing, in a random order."""
    pairs = list(zip(_things(generator, queries), _numbers(generator, queries, digits), strict=True))
    asked = [pairs[index] for index in generator.permutation(queries)]
    question = f"\nWhat are the numbers of the {', the '.join(thing for thing, _ in asked)}? They are"
    ending = [(question, False), *listed([number for _, number in asked])]
    return _text(generator, vocabulary, length, pairs, _depths(generator, queries), ending)


def _text(generator, vocabulary, length, pairs: Sequence[tuple[str, str]], depths, ending) -> Sample:
    needles = [f"The number of the {thing} is {number}. " for thing, number in pairs]
    return compose(vocabulary, length, _OPENING, drawn(generator), needles, depths, ending)


def _one(thing: str, number: str) -> list[tuple[str, bool]]:
    question = f"\nWhat is the number of the {thing}? The number of the {thing} is"
    return [(question, False), *listed([number])]


def _things(generator: np.random.Generator, count: int) -> list[str]:
    return generator.choice(NOUNS, count, replace=False).tolist()


def _numbers(generator: np.random.Generator, count: int, digits: int) -> list[str]:
    """Different numbers with this many digits."""
    return different(count, lambda: str(generator.integers(10 ** (digits - 1), 10**digits)))


def _depths(generator: np.random.Generator, count: int) -> list[float]:
    """Random depths, lowest first, so that needles have the same order in the text as in the list."""
    return sorted(generator.random(count).tolist())
