"""Questions on documents, of which one or two answer them: SQuAD and HotpotQA, from files of the user's."""

from dataclasses import dataclass
from random import Random
from typing import Literal

from train.config.settings.checks import check
from train.evaluate.ruler.sources import SEED, Case, Draws, Length, Question, Sources

_ASKED = "Answer the question based on the given documents. Only give me the answer and do not output any other words."
_TEMPLATE = f"{_ASKED}\n\nThe following are given documents.\n\n{{context}}\n\n{_ASKED}\n\nQuestion: {{query}} Answer:"
_STEP = 10


@dataclass(frozen=True)
class Questions:
    """The task: whose questions."""

    of: Literal["squad", "hotpotqa"]

    new = 32
    """The most tokens of an answer."""

    def cases(self, sources: Sources, length: Length, count: int) -> list[Case]:
        """The first cases of the task. Raises ValueError for a length that is too short, and for too few questions."""
        self.check_enough(sources, count)
        draws, (questions, documents) = Draws(), getattr(sources, self.of)

        def tokens_of(size: int) -> int:
            case = _case(draws, questions[0], documents, size)
            return length.count(f"{case.prompt} {list(case.answers)}")

        size = max(length.most(_STEP, tokens_of, limit=len(documents)), 1)
        return [self._fitting(draws, question, documents, length, size) for question in questions[:count]]

    def check_enough(self, sources: Sources, count: int) -> None:
        """Raises ValueError for fewer questions than cases."""
        questions, _ = getattr(sources, self.of)
        check(len(questions) >= count, f"evaluate.ruler.cases: {self.of} has {len(questions)} questions, found {count}")

    @staticmethod
    def _fitting(draws: Draws, question: Question, documents: list[str], length: Length, size: int) -> Case:
        """The case of a question, at the least with the documents that answer it."""
        least = len(question.documents)
        for fewer in (*range(max(size, least), least, -_STEP), least):
            case = _case(draws, question, documents, fewer)
            if length.count(case.prompt) <= length.room:
                return case
        return length.fitting(0, _STEP, 1, lambda _: case)  # refuses


def _case(draws: Draws, question: Question, documents: list[str], size: int) -> Case:
    own, beside = question.documents, question.beside
    chosen = list(range(len(documents)))
    if size < len(documents):
        if size - len(own) > len(beside):
            others = [number for number in chosen if number not in {*own, *beside}]
            chosen = own + beside + draws.python.sample(others, size - len(own) - len(beside))
        else:
            chosen = own + draws.python.sample(beside, max(0, size - len(own)))
    texts = [documents[number] for number in chosen]
    Random(SEED).shuffle(texts)
    context = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(texts, start=1))
    return Case(_TEMPLATE.format(context=context, query=question.text), question.answers)
