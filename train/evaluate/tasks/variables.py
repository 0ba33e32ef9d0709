"""Variable tracking: which names have a value after a chain of assignments (RULER, arXiv 2404.06654, section 3)."""

import string

import numpy as np

from train.evaluate.tasks.sample import Sample
from train.evaluate.tasks.text import compose, different, drawn, listed
from train.evaluate.tasks.vocabulary import Vocabulary

_OPENING = "Some lines in this text give values to variables.\n"


def variable_tracking(
    generator: np.random.Generator, vocabulary: Vocabulary, length: int, chains: int, hops: int
) -> Sample:
    """`chains` chains of ``hops + 1`` variables; the first of a chain gets a number, the next the value of the first,
    and so on. Asked for: the variables that have the number of one chain, in the order of the text.

    The lines of all chains are scattered over filler text; those of one chain keep their order.
    """
    names = _names(generator, chains * (hops + 1))
    values = generator.choice(np.arange(10_000, 100_000), chains, replace=False).tolist()
    chain_of_line = generator.permutation(np.repeat(np.arange(chains), hops + 1))
    lines, members = [], [[] for _ in range(chains)]
    for chain, name in zip(chain_of_line, names, strict=True):
        source = members[chain][-1] if members[chain] else values[chain]
        lines.append(f"Let {name} = {source}. ")
        members[chain].append(name)
    asked = generator.integers(chains)
    question = f"\nWhich variables have the value {values[asked]}, in the order of the text? They are"
    depths = sorted(generator.random(len(lines)).tolist())
    ending = [(question, False), *listed(members[asked])]
    return compose(vocabulary, length, _OPENING, drawn(generator), lines, depths, ending)


def _names(generator: np.random.Generator, count: int) -> list[str]:
    """Different names of four capital letters."""
    return different(count, lambda: "".join(generator.choice(list(string.ascii_uppercase), 4)))
