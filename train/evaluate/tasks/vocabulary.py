"""The vocabulary of tasks: text through a tokenizer, and single tokens as symbols."""

import string
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from train.data.tokenizer import Tokenizer
from train.evaluate.tasks.sample import Tokens


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model, by its tokenizer."""

    tokenizer: Tokenizer

    def tokens(self, text: str, after: str = "") -> Tokens:
        """The tokens of a piece of text, without the tokens around a document.

        With `after`, they are those that it has behind that text: alone, many tokenizers would start it with a space.
        """
        before = len(self.tokenizer.tokens(after.encode())) if after else 0
        return np.asarray(self.tokenizer.tokens((after + text).encode())[before:], np.int32)

    @cached_property
    def begin(self) -> Tokens:
        """The tokens that begin a document: one or none."""
        return np.array(self.tokenizer.opening, np.int32)

    @cached_property
    def symbols(self) -> Tokens:
        """The visible ASCII characters that are one token each: letters, digits, signs."""
        found = [self.tokens(character) for character in string.digits + string.ascii_letters + string.punctuation]
        return np.unique([tokens[0] for tokens in found if len(tokens) == 1])
