"""Associative recall, copying and induction: random symbols whose continuation appears earlier in the row."""

import numpy as np

from train.evaluate.tasks.passkey import passkey_tokens
from train.evaluate.tasks.sample import Sample, joined, too_short
from train.evaluate.tasks.vocabulary import Vocabulary


def mqar(generator: np.random.Generator, vocabulary: Vocabulary, length: int, pairs: int, power: float) -> Sample:
    """Multi-query associative recall (Arora et al., arXiv 2312.04927, section 4 and appendix).

    `pairs` pairs of a key and a value, then every key again, each followed by its value, which is an answer. The g-th
    of the slots of two symbols after the pairs is chosen with probability proportional to ``g**(power - 1)``, as in the
    paper; the other slots have values. No key appears anywhere else. Unlike in the paper, values may repeat.

    Raises ValueError for a length that is too short for every pair twice, or more pairs than keys.
    """
    symbols = generator.permutation(vocabulary.symbols)
    all_keys, values = np.split(symbols, [len(symbols) // 2])
    if pairs > len(all_keys):
        raise ValueError(f"{pairs} pairs need as many keys, the vocabulary has {len(all_keys)}")
    slots = (length - 1) // 2 - pairs
    if slots < pairs:
        raise too_short(length, 4 * pairs + 1)
    shown = np.stack([all_keys[:pairs], generator.choice(values, pairs)], axis=1)
    law = np.arange(1, slots + 1) ** (power - 1)
    taken = generator.choice(slots, pairs, replace=False, p=law / law.sum())
    behind = generator.choice(values, (slots, 2))
    behind[taken] = shown
    rest = generator.choice(values, length - 1 - 2 * (pairs + slots))
    tokens = np.concatenate([vocabulary.begin, shown.ravel(), behind.ravel(), rest])
    positions = sorted(1 + 2 * (pairs + slot) + 1 for slot in taken.tolist())
    return Sample(tokens.astype(np.int32), tuple((position, position + 1) for position in positions), len(values))


def copy(generator: np.random.Generator, vocabulary: Vocabulary, length: int) -> Sample:
    """A string of random symbols, a marker that does not appear in it, and the string again, every symbol an answer.

    If the length is odd, the second string lacks its last symbol.
    """
    size = length // 2 - 1 + length % 2
    if length < 4:
        raise too_short(length, 4)
    marker, *others = generator.permutation(vocabulary.symbols)
    string = generator.choice(others, size)
    again = [([symbol], True) for symbol in string[: length - 2 - size]]
    return joined([(vocabulary.begin, False), (string, False), ([marker], False), *again], len(others))


def induction(generator: np.random.Generator, vocabulary: Vocabulary, length: int, depth: float) -> Sample:
    """The task of induction heads (Olsson et al., arXiv 2209.11895): ``... a b ... a`` continues with ``b``.

    Random symbols, a pair of them at a depth, and at the end the first of the pair again; the answer is the second. The
    first appears nowhere else; a share `depth` of the other symbols is before the pair.
    """
    return passkey_tokens(generator, vocabulary, length, depth, key_tokens=1)
