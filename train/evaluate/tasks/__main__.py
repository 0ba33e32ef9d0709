"""Texts of tasks to train on: ``python -m train.evaluate.tasks NAME LENGTH --cases N --seed S > NAME.jsonl``.

One JSON line for each text of LENGTH bytes with its answers; tasks with a depth get a random one. The cases of
`evaluate` come from other seeds, so none of them is trained on.
"""

import argparse
import json
from collections.abc import Iterator

import numpy as np

from train.config.settings.data import DataConfig
from train.config.settings.evaluate import EvaluateConfig
from train.data import load_tokenizer
from train.evaluate.tasks.passkey import Prompt
from train.evaluate.tasks.registry import TASKS
from train.evaluate.tasks.vocabulary import Vocabulary

_SEED = 0x7EA1  # first part of the seed, before the user's
_ANSWER = 7  # bytes of a pass key after its question


def texts(name: str, length: int, cases: int, seed: int) -> Iterator[str]:
    """`cases` texts of a task with their answers, `length` bytes each."""
    task, section = TASKS[name], EvaluateConfig().section(name)
    generator, tokenizer = np.random.default_rng([_SEED, seed]), load_tokenizer(DataConfig())
    sizes = {size: getattr(section, size) for size in task.sizes if size not in ("depth", "new_tokens")}
    sizes |= {"new_tokens": _ANSWER} if "new_tokens" in task.sizes else {}
    for _ in range(cases):
        depth = {"depth": float(generator.random())} if task.has_depth else {}
        # The token that begins a document is not one of its bytes.
        made = task.draw(generator, Vocabulary(tokenizer), length + 1, **depth, **sizes)
        text = tokenizer.decode(made.tokens).decode()
        yield f"{text} {made.answer.decode()}." if isinstance(made, Prompt) else text


def main() -> None:
    """Prints the texts."""
    parser = argparse.ArgumentParser(prog="python -m train.evaluate.tasks", description="Texts of tasks to train on.")
    parser.add_argument("name", choices=list(TASKS), metavar="NAME", help=", ".join(TASKS))
    parser.add_argument("length", type=int, metavar="LENGTH", help="bytes of a text")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    for text in texts(**vars(parser.parse_args())):
        print(json.dumps({"text": text}))


if __name__ == "__main__":
    main()
