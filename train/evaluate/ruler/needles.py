"""Needles in a haystack: sentences that give a value to a key, in repeated sentences, in essays, or among others like
them."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Literal

import numpy as np

from train.config.settings.checks import check
from train.evaluate.ruler.sources import SEED, Case, Draws, Length, Sources, sentences_of

_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_TEMPLATE = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in the provided "
    "text? The special magic {kind} for {query} mentioned in the provided text are"
)
_REPEATED = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_DEPTHS = np.round(np.linspace(0, 100, 40)).astype(int).tolist()

Haystack = Literal["repeat", "essay", "needle"]
Kind = Literal["words", "numbers", "uuids"]


@dataclass(frozen=True)
class Needles:
    """A task: what the haystack is made of, what keys and values are, and how many there are of keys, of values of a
    key, and of keys that are asked for."""

    haystack: Haystack
    keys: Kind
    values: Kind
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1

    new = 128
    """The most tokens of an answer."""

    def cases(self, sources: Sources, length: Length, count: int) -> list[Case]:
        """The first cases of the task. Raises ValueError for a length that is too short, and for a text that is."""
        draws, needles = Draws(), self.num_keys * self.num_values
        step = 500 if self.haystack == "essay" else 25 if length.total >= 4096 else 5
        words = len(sources.essays) if self.haystack == "essay" else None

        def tokens_of(size: int) -> int:
            check(words is None or size <= words, self._too_few_words(words, length))
            case = self._case(sources, draws, size)
            return length.count(case.prompt + " ".join(case.answers))

        size = max(length.most(step, tokens_of, least=needles), needles)
        return [
            length.fitting(size, step, needles, lambda size: self._case(sources, draws, size)) for _ in range(count)
        ]

    def _too_few_words(self, words: int | None, length: Length) -> str:
        return f"evaluate.ruler.essays: its {words} words are too few for {length.total} tokens; name a longer text"

    def _case(self, sources: Sources, draws: Draws, size: int) -> Case:
        values: dict[int, tuple[str, list[str]]] = {}
        for number in range(self.num_keys):
            key = _drawn(draws, sources, self.keys)
            values[number] = key, [_drawn(draws, sources, self.values) for _ in range(self.num_values)]
        needles = [self._needle(key, value) for key, of_key in values.values() for value in of_key]
        Random(SEED).shuffle(needles)
        hide = _in_sentences if self.haystack == "essay" else self._in_lines
        context = hide(sources, draws, size, needles)
        asked = [values[number] for number in draws.python.sample(range(self.num_keys), self.num_queries)]
        *others, last = (key for key, _ in asked)
        query = f"{', '.join(others)}, and {last}" if others else last
        answers = tuple(value for _, of_key in asked for value in of_key)
        return Case(self._worded().format(kind=self._kind(), context=context, query=query), answers)

    def _in_lines(self, sources: Sources, draws: Draws, size: int, needles: Sequence[str]) -> str:
        def distractor() -> str:
            key = _drawn(draws, sources, self.keys)
            return self._needle(key, _drawn(draws, sources, self.values))

        lines = [_REPEATED if self.haystack == "repeat" else distractor() for _ in range(size)]
        places = sorted(draws.python.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    def _needle(self, key: str, value: str) -> str:
        return _NEEDLE.format(kind=self.values, key=key, value=value)

    def _worded(self) -> str:
        """The template, in the singular where one value is asked for."""
        if self.num_queries * self.num_values > 1:
            return _TEMPLATE
        return _TEMPLATE.replace("Some", "A").replace("are all", "is").replace("are", "is")

    def _kind(self) -> str:
        return self.values if self.num_queries * self.num_values > 1 else self.values.removesuffix("s")


def _in_sentences(sources: Sources, draws: Draws, size: int, needles: Sequence[str]) -> str:
    sentences = sentences_of(" ".join(sources.essays[:size]))
    depths = draws.python.sample(_DEPTHS, len(needles))
    places = [0, *sorted(int(len(sentences) * (depth / 100)) for depth in depths), len(sentences)]
    parts: list[str] = []
    for number, (start, stop) in enumerate(pairwise(places)):
        parts += [" ".join(sentences[start:stop]), *needles[number : number + 1]]
    return " ".join(parts)


def _drawn(draws: Draws, sources: Sources, kind: Kind) -> str:
    if kind == "words":
        return draws.python.choice(sources.pairs)
    if kind == "numbers":
        return str(draws.python.randint(10**6, 10**7 - 1))
    return str(uuid.UUID(int=draws.python.getrandbits(128), version=4))
