"""Variable tracking: the names that get one value through a chain of assignments, after a solved example."""

import string
from dataclasses import dataclass
from itertools import pairwise

from train.evaluate.ruler.sources import Case, Draws, Length, Sources

_TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find "
    "all variables that are assigned the value {query} in the text above. Answer: According to the chain(s) of "
    "variable assignment in the text above, {number} variables are assgined the value {query}, they are: "
)  # The misspelt word is in the code of the paper, and in lm-eval; RULER's own has it right since May 2025.
_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
_EXAMPLE_TOKENS = 500


@dataclass(frozen=True)
class Chains:
    """The task: how many assignments follow the first one."""

    hops: int = 4

    new = 30
    """The most tokens of an answer."""

    def cases(self, sources: Sources, length: Length, count: int) -> list[Case]:
        """The first cases of the task. Raises ValueError for a length that is too short."""
        draws = Draws()
        short = Length(_EXAMPLE_TOKENS, self.new, length.count)
        example, example_answers = self._cases(draws, short, 1, step=5, letters=3)[0]
        shown = f"{example} {' '.join(example_answers)}\n\n"
        taken = length.count(shown)
        left = Length(length.total - taken, self.new, length.count)
        found = self._cases(draws, left, count, step=10, letters=5, example=(shown, example_answers))
        return [Case(case.prompt.strip(), case.answers) for case in found]

    def _cases(
        self, draws: Draws, length: Length, count: int, step: int, letters: int, example: tuple | None = None
    ) -> list[Case]:
        def tokens_of(size: int) -> int:
            case = self._case(draws, size, letters)
            return length.count(f"{case.prompt} {list(case.answers)}")

        size, found = length.most(step, tokens_of), []
        for _ in range(count):
            case = length.fitting(size, step, 1, lambda size: self._case(draws, size, letters))
            before = f"{_renamed(draws, *example)}\n\n" if example else ""
            found.append(Case(before + case.prompt, case.answers))
        return found

    def _case(self, draws: Draws, size: int, letters: int) -> Case:
        names: list[str] = []
        while len(set(names)) < self.hops + 1:
            names.append("".join(draws.python.choices(string.ascii_uppercase, k=letters)))
        names = names[: self.hops + 1]
        value = str(draws.numpy.randint(10000, 99999))
        lines = [f"VAR {names[0]} = {value}"]
        lines += [f"VAR {name} = VAR {source} " for source, name in pairwise(names)]
        sentences = [_NOISE] * size
        if size <= len(lines):
            parts = [part for noise in sentences for part in noise.split(".")]
            sentences = [f"{part}." if part.strip() else part for part in parts]
        places = sorted(draws.python.sample(range(len(sentences)), len(lines)))
        for number, (place, line) in enumerate(zip(places, lines, strict=True)):
            sentences.insert(place + number, line)
        context = " ".join(sentences).replace(". \n", ".\n")
        return Case(_TEMPLATE.format(context=context, query=value, number=self.hops + 1), tuple(names))


def _renamed(draws: Draws, example: str, answers: tuple[str, ...]) -> str:
    """The solved example with other names."""
    for name in answers:
        new = "".join(draws.python.choices(string.ascii_uppercase, k=len(name)))
        example = example.replace(name, new)
    return example
