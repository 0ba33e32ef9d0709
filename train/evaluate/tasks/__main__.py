"""Passkey texts to train on: ``python -m train.evaluate.tasks LENGTH --cases N --seed S > passkey.jsonl``.

One JSON line a text, its key at a random depth and its question answered. The cases that `evaluate` draws come from
other seeds, so none is trained on.
"""

import argparse
import json
from collections.abc import Iterator

import numpy as np

from train.data import load_tokenizer
from train.evaluate.tasks.passkey import passkey
from train.evaluate.tasks.vocabulary import Vocabulary
from train.settings import DataConfig

_SEED = 0x7EA1  # of all that is drawn here, before the user's


def texts(length: int, cases: int, seed: int) -> Iterator[str]:
    """`cases` answered passkey texts of `length` bytes, their answer included."""
    generator = np.random.default_rng([_SEED, seed])
    tokenizer = load_tokenizer(DataConfig())
    vocabulary = Vocabulary(tokenizer)
    for depth in generator.random(cases):
        prompt = passkey(generator, vocabulary, length, float(depth), new_tokens=7)
        yield f"{tokenizer.decode(prompt.tokens).decode()} {prompt.answer.decode()}."


def main() -> None:
    """Prints the texts."""
    parser = argparse.ArgumentParser(prog="python -m train.evaluate.tasks", description="Passkey texts to train on.")
    parser.add_argument("length", type=int, help="bytes of a text")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    for text in texts(**vars(parser.parse_args())):
        print(json.dumps({"text": text}))


if __name__ == "__main__":
    main()
