"""What RULER's texts are made of: words, files that the config names, random draws, and lengths in tokens."""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from train.config.settings.checks import check
from train.config.settings.evaluate import RulerConfig

SEED = 42
"""Of every draw, as in RULER's code: each task begins anew with it at each length."""

_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]?[A-Z0-9])")


class Case(NamedTuple):
    """One case: the text that a model continues, and the answers that are looked for in its continuation."""

    prompt: str
    answers: tuple[str, ...]


@dataclass
class Draws:
    """The random draws of one task at one length, in the order of RULER's code."""

    python: Random = field(default_factory=lambda: Random(SEED))
    numpy: np.random.RandomState = field(default_factory=lambda: np.random.RandomState(SEED))


class WordPairs(Sequence[str]):
    """All ``adjective-noun``, sorted, of which 6 million are too many to write out."""

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]):
        self._nouns = sorted(set(nouns))
        groups: list[list[str]] = []  # adjectives whose pairs mix: "blue-eyed-cat" is among those of "blue"
        for adjective in sorted(set(adjectives), key=lambda word: f"{word}-"):
            if groups and f"{adjective}-".startswith(f"{groups[-1][0]}-"):
                groups[-1].append(adjective)
            else:
                groups.append([adjective])
        self._groups = [
            group if len(group) == 1 else sorted({f"{word}-{noun}" for word in group for noun in self._nouns})
            for group in groups
        ]
        sizes = (len(self._nouns) if len(group) == 1 else len(group) for group in self._groups)
        self._ends = list(accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> str:
        number = bisect_right(self._ends, index)
        group, inside = self._groups[number], index - (self._ends[number - 1] if number else 0)
        return f"{group[0]}-{self._nouns[inside]}" if len(group) == 1 else group[inside]


@dataclass(frozen=True)
class Sources:
    """The words of the package wonderwords, and the files that ``evaluate.ruler`` names; each is read once.

    Raises ValueError for a file that is not named, not there or not what it should be, and without the package.
    """

    config: RulerConfig

    @cached_property
    def _lists(self) -> Mapping[str, list[str]]:
        try:
            from wonderwords import Defaults, RandomWord
        except ImportError:
            needs = 'evaluate.ruler needs the package wonderwords, whose words RULER takes: pip install -e ".[ruler]"'
            raise ValueError(needs) from None
        lists = {"noun": Defaults.NOUNS, "adjective": Defaults.ADJECTIVES, "verb": Defaults.VERBS}
        words = RandomWord(**lists)
        return {name: words.filter(include_categories=[name]) for name in lists}

    @cached_property
    def pairs(self) -> WordPairs:
        """The keys of needles."""
        return WordPairs(self._lists["adjective"], self._lists["noun"])

    @cached_property
    def words(self) -> list[str]:
        """All words, sorted."""
        return sorted({word for words in self._lists.values() for word in words})

    @cached_property
    def essays(self) -> list[str]:
        """The words of the text in which needles are hidden: of a text file, or of the JSON that RULER downloads."""
        what, is_json = "a text, such as Paul Graham's essays", self.config.essays.endswith(".json")
        text = self._json("essays", what, _text) if is_json else self._read("essays", what)
        return re.sub(r"\s+", " ", text).split(" ")

    @cached_property
    def squad(self) -> tuple[list["Question"], list[str]]:
        """The questions of SQuAD that have an answer, and all its paragraphs."""
        return self._json("squad", "dev-v2.0.json of SQuAD", _squad)

    @cached_property
    def hotpotqa(self) -> tuple[list["Question"], list[str]]:
        """The questions of HotpotQA, and all its paragraphs."""
        return self._json("hotpotqa", "hotpot_dev_distractor_v1.json of HotpotQA", _hotpotqa)

    def _read(self, key: str, what: str) -> str:
        path = getattr(self.config, key)
        check(
            bool(path), f"evaluate.ruler.{key} is empty: name a file with {what}, or leave out the tasks that need it"
        )
        check(Path(path).is_file(), f"evaluate.ruler.{key}: there is no file {path!r}")
        try:
            return Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"evaluate.ruler.{key}: {path} is not text in UTF-8: {error}") from None

    def _json(self, key: str, what: str, read: Callable[[Any], Any]) -> Any:
        """What `read` makes of the JSON in a file."""
        path, text = getattr(self.config, key), self._read(key, what)
        try:
            return read(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"evaluate.ruler.{key}: {path} is not JSON: {error}") from None
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"evaluate.ruler.{key}: {path} is not {what}: {error!r}") from None


class Question(NamedTuple):
    """A question, its answers, and the numbers of the documents: those that answer it, and others of one article."""

    text: str
    answers: tuple[str, ...]
    documents: list[int]
    beside: list[int]


def _text(found: Any) -> str:
    return found["text"] + ""  # of anything but a text this is a TypeError


def _squad(found: Any) -> tuple[list[Question], list[str]]:
    articles = found["data"]
    documents = sorted({paragraph["context"] for article in articles for paragraph in article["paragraphs"]})
    number = {document: n for n, document in enumerate(documents)}
    questions = []
    for article in articles:
        beside = [number[paragraph["context"]] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            own = number[paragraph["context"]]
            more = [n for n in beside if n != own]
            questions += [
                Question(each["question"], tuple(answer["text"] for answer in each["answers"]), [own], more)
                for each in paragraph["qas"]
                if not each["is_impossible"]
            ]
    return questions, documents


def _hotpotqa(entries: Any) -> tuple[list[Question], list[str]]:
    texts = [[f"{title}\n{''.join(sentences)}" for title, sentences in each["context"]] for each in entries]
    documents = sorted({text for each in texts for text in each})
    number = {document: n for n, document in enumerate(documents)}
    questions = [
        Question(each["question"], (each["answer"],), [number[text] for text in own], [])
        for each, own in zip(entries, texts, strict=True)
    ]
    return questions, documents


@dataclass(frozen=True)
class Length:
    """A length in tokens, which is that of a prompt and of its answer's ``new`` tokens together."""

    total: int
    new: int
    count: Callable[[str], int]

    @property
    def room(self) -> int:
        """The most tokens of a prompt."""
        return self.total - self.new

    def most(self, step: int, tokens_of: Callable[[int], int], limit: int | None = None, least: int = 0) -> int:
        """The size, in steps, of the longest text that fits; `tokens_of` counts a text of a size and its answers."""
        size, tokens = max(step, least), 0
        while tokens < self.room:
            tokens = tokens_of(size)
            if tokens > self.room:
                return size - step
            size += step
            if limit is not None and size > limit:
                return limit
        return size

    def fitting(self, size: int, step: int, least: int, make: Callable[[int], Case]) -> Case:
        """A case of a size, or of the next smaller one whose prompt fits.

        Raises ValueError if none does.
        """
        while size >= max(least, 1):
            case = make(size)
            needed = self.count(case.prompt)
            if needed <= self.room:
                return case
            size -= step
        raise ValueError(f"no case fits into {self.total} tokens, {self.new} of which are for the answer")


def sentences_of(text: str) -> list[str]:
    """The sentences of a text: they end with a full stop, or the like, before a capital letter or a digit."""
    return _SENTENCE_END.split(text.strip())
