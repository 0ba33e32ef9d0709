"""The scores of RULER's tasks: a model writes an answer, in which the right ones are looked for."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import Mesh

from posjax import nn
from train.config import Config
from train.data.tokenizer import Tokenizer, ends_of_text
from train.evaluate.ruler.sources import Case, Sources
from train.evaluate.ruler.tasks import TASKS, cases_of
from train.evaluate.written import Writer
from train.model.mesh import BATCH_AXES
from train.runtime.lines import in_a_line

_ANY = ("qa_1", "qa_2")
"""Tasks whose answers are several spellings of one."""


def ruler_rows(model: nn.Decoder, tokenizer: Tokenizer, config: Config, mesh: Mesh | None) -> Iterator[dict[str, Any]]:
    """Yields a row of results for every task of ``evaluate.ruler`` at every length; the columns are those of tasks.

    `accuracy` is the mean of `score` over the cases. If the model refuses a length, the row has that as its `error`.
    """
    sizes, sources, ends = config.evaluate, Sources(config.evaluate.ruler), ends_of_text(config.data, tokenizer)
    for length in sizes.ruler_lengths:
        unit = 1 if mesh is None else _rows_of(mesh)
        rows = -(-max(1, sizes.batch_tokens // length) // unit) * unit
        writer = Writer(model, rows, length, ends, config.seed, mesh)
        for name in sizes.ruler.tasks:
            found = cases_of(name, sources, tokenizer, length, sizes.ruler.cases)
            accuracy, error = None, None
            try:
                accuracy = _accuracy(writer, tokenizer, name, found)
            except ValueError as refusal:
                error = in_a_line(refusal)
            about = {"depth": None, "accuracy": accuracy, "answer_nll": None, "chance": None, "cases": len(found)}
            yield {"task": name, "length": length, **about, "error": error}


def _rows_of(mesh: Mesh) -> int:
    """How many devices share the rows of a batch."""
    count = 1
    for axis in BATCH_AXES:
        count *= mesh.shape[axis]
    return count


def _accuracy(writer: Writer, tokenizer: Tokenizer, name: str, cases: Sequence[Case]) -> float:
    prompts = [tokenizer.prompt(case.prompt.encode()).tolist() for case in cases]
    written = writer.after(prompts, TASKS[name].new)
    texts = [tokenizer.text([token for token in tokens if token not in tokenizer.special]) for tokens in written]
    scores = [score(name, text.decode(errors="replace"), case.answers) for text, case in zip(texts, cases, strict=True)]
    return sum(scores) / len(scores)


def score(task: str, written: str, answers: Sequence[str]) -> float:
    """The share of answers that are in a text, whatever their case; for questions, whether one of them is.

    As in RULER's code, characters that cannot be printed count as ends of lines.
    """
    text = re.sub(r"[\x00-\x1f]", "\n", written.strip()).strip().lower()
    found = [answer.lower() in text for answer in answers]
    return float(any(found)) if task in _ANY else sum(found) / len(found)
