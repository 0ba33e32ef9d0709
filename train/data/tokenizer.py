"""Bytes as tokens: ids 0 to 255 are the bytes themselves, 256 to 259 the four special tokens below."""

import numpy as np
from jaxtyping import UInt16

BOS = 256  # before each document
EOS = 257  # after each document
MASK = 258  # stands for a token to be predicted, in the masked-token loss
PADDING = 259  # fills the last row; its segment id is negative, so it is neither attended to nor predicted
VOCABULARY_SIZE = 260


def encode(text: bytes) -> UInt16[np.ndarray, "tokens"]:
    """The tokens of one document: BOS, its bytes, EOS."""
    tokens = np.empty(len(text) + 2, np.uint16)
    tokens[0], tokens[-1] = BOS, EOS
    tokens[1:-1] = np.frombuffer(text, np.uint8)
    return tokens


def decode(tokens: np.ndarray) -> bytes:
    """The bytes among `tokens`; special tokens are left out."""
    tokens = np.asarray(tokens)
    return tokens[tokens < 256].astype(np.uint8).tobytes()
