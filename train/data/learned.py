"""Which tokens of a document a model learns to predict: in a conversation, those of the assistant alone.

The others are stored as their complement ``~token``, a number below 0, so that one array holds both. Documents of plain
text, whose numbers have no sign, are learned as a whole.
"""

import numpy as np
from jaxtyping import Bool, Int, Int32

KIND = np.dtype(np.int32)
"""The type of the tokens of conversations."""


def marked(ids: Int[np.ndarray, "n"], learned: Bool[np.ndarray, "n"]) -> Int32[np.ndarray, "n"]:
    """Tokens by id, the unlearned ones as their complement."""
    ids = ids.astype(KIND)
    return np.where(learned, ids, ~ids)


def ids_of(tokens: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """The ids of tokens, learned or not."""
    return tokens if tokens.dtype.kind == "u" else np.where(tokens < 0, ~tokens, tokens)


def labels_of(tokens: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """The ids of the learned tokens, and -1 for the others."""
    return tokens if tokens.dtype.kind == "u" else np.maximum(tokens, -1)
