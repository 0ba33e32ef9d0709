"""Texts of an exact number of tokens: an opening, filler sentences with others hidden among them, a question, answers.

No token spans two parts, so lengths and positions are exact with any tokenizer.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from train.evaluate.tasks.sample import Sample, Tokens, joined, too_short
from train.evaluate.tasks.vocabulary import Vocabulary

IDLE = (
    "The river is wide. ",
    "Bread is best when it is warm. ",
    "A cat sleeps on the wall. ",
    "Nobody knows who built the old bridge. ",
    "It rained for most of the week. ",
    "The kettle takes its time. ",
    "Some doors open to the left. ",
    "The evening train was late again. ",
    "Apples keep well in a cool room. ",
    "She walked home along the harbour. ",
    "The clock in the hall has stopped. ",
    "Two boats lay on the sand. ",
    "He left his coat on the chair. ",
    "The garden needs water in June. ",
    "Every path here leads uphill. ",
    "They talked about the weather. ",
)
"""Sentences that are irrelevant to any question."""

Answer = tuple[str, bool]
"""A part of the end of a text, and whether it is an answer."""


def drawn(generator: np.random.Generator, sentences: Sequence[str] = IDLE) -> Iterator[str]:
    """The sentences in random order, endlessly: all of them once, then again in another order."""
    while True:
        yield from (sentences[index] for index in generator.permutation(len(sentences)))


def different(count: int, draw_one: Callable[[], str]) -> list[str]:
    """This many different draws, in the order of drawing."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw_one()] = None
    return list(found)


def filling(vocabulary: Vocabulary, sentences: Iterator[str], size: int) -> list[Tokens]:
    """Sentences with `size` tokens together, at least one; if the first one does not fit, its beginning is cut off."""
    chosen, surplus = [], -size
    while surplus < 0:
        chosen.append(vocabulary.tokens(next(sentences)))
        surplus += len(chosen[-1])
    while surplus >= len(chosen[0]):
        surplus -= len(chosen.pop(0))
    return [chosen[0][surplus:], *chosen[1:]]


def with_needles(filling: Sequence[Tokens], needles: Sequence[Tokens], depths: Sequence[float]) -> list[Tokens]:
    """The filling with every needle inserted at the sentence start nearest to its depth; 0 is the front, 1 the back.

    Needles are in order of depth; those at one position keep the given order. A needle at depth x has a share x of the
    filling before it, up to half a sentence.
    """
    boundaries = np.cumsum([0, *map(len, filling)])
    nearest = [int(np.argmin(np.abs(boundaries - depth * boundaries[-1]))) for depth in depths]
    inside = sorted(zip(nearest, range(len(needles)), strict=True))
    found = list(filling)
    for boundary, index in reversed(inside):
        found.insert(boundary, needles[index])
    return found


def compose(
    vocabulary: Vocabulary,
    length: int,
    opening: str,
    sentences: Iterator[str],
    needles: Sequence[str],
    depths: Sequence[float],
    ending: Sequence[Answer],
) -> Sample:
    """The beginning of a document, opening, needles in as much filling as needed, ending; `length` tokens in all.

    Raises ValueError for a length that is too short for these parts and some filling.
    """
    first = [vocabulary.begin, vocabulary.tokens(opening)]
    before = ["", *(text for text, _ in ending)]
    pairs = zip(before, ending, strict=False)
    last = [(vocabulary.tokens(text, after if answer else ""), answer) for after, (text, answer) in pairs]
    inserted = [vocabulary.tokens(needle) for needle in needles]
    fixed = sum(map(len, first)) + sum(map(len, inserted)) + sum(len(tokens) for tokens, _ in last)
    if fixed >= length:
        raise too_short(length, fixed + 1)
    middle = with_needles(filling(vocabulary, sentences, length - fixed), inserted, depths)
    return joined([*((tokens, False) for tokens in (*first, *middle)), *last])


def listed(answers: Sequence[str]) -> list[Answer]:
    """Answers one after the other, " a, b, c.", as the end of a text."""
    marks = [","] * (len(answers) - 1) + ["."]
    return [part for answer, mark in zip(answers, marks, strict=True) for part in ((f" {answer}", True), (mark, False))]
