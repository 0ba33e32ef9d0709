"""Every task of RULER by its name there, and its cases."""

from train.config.settings.checks import check
from train.config.settings.evaluate import RULER, EvaluateConfig
from train.data.tokenizer import Tokenizer
from train.evaluate.ruler.chains import Chains
from train.evaluate.ruler.lists import CommonWords, FrequentWords
from train.evaluate.ruler.needles import Needles
from train.evaluate.ruler.questions import Questions
from train.evaluate.ruler.sources import Case, Length, Sources

Task = Needles | Chains | CommonWords | FrequentWords | Questions

TASKS: dict[str, Task] = {
    "niah_single_1": Needles("repeat", "words", "numbers"),
    "niah_single_2": Needles("essay", "words", "numbers"),
    "niah_single_3": Needles("essay", "words", "uuids"),
    "niah_multikey_1": Needles("essay", "words", "numbers", num_keys=4),
    "niah_multikey_2": Needles("needle", "words", "numbers"),
    "niah_multikey_3": Needles("needle", "uuids", "uuids"),
    "niah_multivalue": Needles("essay", "words", "numbers", num_values=4),
    "niah_multiquery": Needles("essay", "words", "numbers", num_keys=4, num_queries=4),
    "vt": Chains(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
    "qa_1": Questions("squad"),
    "qa_2": Questions("hotpotqa"),
}
"""The tasks, with the numbers of RULER's own ``synthetic.yaml``."""

assert tuple(TASKS) == RULER


def cases_of(name: str, sources: Sources, tokenizer: Tokenizer, length: int, count: int) -> list[Case]:
    """The first cases of a task, whose prompts leave room for the answer in a length; always the same ones.

    Raises ValueError for a length that is too short, and for files that are missing.
    """
    task = TASKS[name]
    return task.cases(sources, Length(length, task.new, lambda text: len(tokenizer.prompt(text.encode()))), count)


def check_ruler(config: EvaluateConfig, tokenizer: Tokenizer) -> None:
    """Raises ValueError for a task of ``evaluate.ruler`` that has no cases, before any measurement."""
    sources = Sources(config.ruler)
    for name in config.ruler.tasks:
        for length in {min(config.ruler_lengths), max(config.ruler_lengths)}:
            try:
                found = cases_of(name, sources, tokenizer, length, 1)
            except ValueError as error:
                raise ValueError(f"evaluate.ruler.tasks: {name}: {error}") from None
            check(bool(found), f"evaluate.ruler.tasks: {name} has no case")
        if isinstance(task := TASKS[name], Questions):
            task.check_enough(sources, config.ruler.cases)
