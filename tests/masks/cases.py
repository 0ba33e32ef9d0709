"""Masks and what they must allow, written out pair by pair in NumPy."""

import jax.numpy as jnp
import numpy as np

from posjax.masks import (
    Band,
    Beyond,
    Causal,
    Chunked,
    ChunksApart,
    Dilated,
    FirstTokens,
    GlobalFirst,
    Globals,
    Prefix,
    Segments,
    Window,
)

N = 24
ROW, COLUMN = np.mgrid[:N, :N]
IDS = np.array([[0] * 5 + [1] * 12 + [2] * 4 + [-1] * 3, [-1] * 2 + [7] * 22])
SAME = (IDS[:, :, None] == IDS[:, None, :]) & (IDS[:, :, None] >= 0)
FLAGS = np.array([np.isin(np.arange(N), [3, 17]), np.arange(N) < 2])
DISTANCE, CHUNKS = ROW - COLUMN, ROW // 7 - COLUMN // 7
EITHER = FLAGS[:, :, None] | FLAGS[:, None, :]


def dilated(size, *steps):
    return np.stack([(DISTANCE % d == 0) & (abs(DISTANCE) // d < size) for d in steps])


CASES = {
    "causal": (Causal(), COLUMN <= ROW),
    "window": (Window(5), abs(ROW - COLUMN) < 5),
    "causal window": (Causal() & Window(5), (COLUMN <= ROW) & (ROW - COLUMN < 5)),
    "sinks": (FirstTokens(3), COLUMN < 3),
    "lambda": (Causal() & (Window(4) | FirstTokens(2)), (COLUMN <= ROW) & ((ROW - COLUMN < 4) | (COLUMN < 2))),
    "chunked": (Causal() & Chunked(7), (COLUMN <= ROW) & (ROW // 7 == COLUMN // 7)),
    "odd band": (Band(5), abs(DISTANCE) <= 2),
    "even band": (Band(6), (DISTANCE <= 3) & (DISTANCE >= -2)),
    "beyond": (Beyond(5), DISTANCE >= 5),
    "previous chunk": (ChunksApart(7, 1, 1), CHUNKS == 1),
    "older chunks": (ChunksApart(7, 2), CHUNKS >= 2),
    "dilated": (Dilated(3, 4), dilated(3, 4)[0]),
    "dilated heads": (Dilated(4, (1, 2, 5)), dilated(4, 1, 2, 5)[None]),
    "global first": (GlobalFirst(2), (ROW < 2) | (COLUMN < 2)),
    "window and global": (Window(3) | GlobalFirst(2), (abs(DISTANCE) < 3) | (ROW < 2) | (COLUMN < 2)),
    "globals": (Globals(jnp.asarray(FLAGS)), EITHER[:, None]),
    "longformer": (
        Segments(jnp.asarray(IDS)) & (Dilated(3, (1, 2)) | Globals(jnp.asarray(FLAGS))),
        SAME[:, None] & (dilated(3, 1, 2)[None] | EITHER[:, None]),
    ),
    "prefix": (Causal() | Prefix(6), (COLUMN <= ROW) | ((ROW < 6) & (COLUMN < 6))),
    "segments": (Segments(jnp.asarray(IDS)), SAME[:, None]),
    "packed": (Causal() & Segments(jnp.asarray(IDS)), SAME[:, None] & (COLUMN <= ROW)),
    "either": (Segments(jnp.asarray(IDS)) | FirstTokens(1), SAME[:, None] | (COLUMN < 1)),
}
