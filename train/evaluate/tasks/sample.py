"""One case of a task: tokens, some of which are the answers."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

Tokens = Int[np.ndarray, "n"]


class Sample(NamedTuple):
    """Tokens of exactly the requested length; the answers are their parts ``tokens[start:stop]``, in order.

    `choices` is the number of equally likely answers for guessing; 0 if there are too many to guess.
    """

    tokens: Tokens
    answers: tuple[tuple[int, int], ...]
    choices: int = 0


def joined(parts: list[tuple[Tokens, bool]], choices: int = 0) -> Sample:
    """A sample of parts, each with whether it is an answer."""
    sizes = [len(tokens) for tokens, _ in parts]
    ends = np.cumsum(sizes).tolist()
    spans = zip(ends, sizes, parts, strict=True)
    answers = tuple((end - size, end) for end, size, (_, answer) in spans if answer)
    return Sample(np.concatenate([tokens for tokens, _ in parts]).astype(np.int32), answers, choices)


def too_short(length: int, needed: int) -> ValueError:
    """The error for a length that is too short for a case of a task."""
    return ValueError(f"a length of {length} tokens is too short: it takes {needed} at least")
