"""Masks and what they must allow, written out pair by pair in NumPy."""

import jax.numpy as jnp
import numpy as np

from posjax import masks

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
    "causal": (masks.Causal(), COLUMN <= ROW),
    "window": (masks.Window(5), abs(ROW - COLUMN) < 5),
    "causal window": (masks.Causal() & masks.Window(5), (COLUMN <= ROW) & (ROW - COLUMN < 5)),
    "sinks": (masks.FirstTokens(3), COLUMN < 3),
    "lambda": (
        masks.Causal() & (masks.Window(4) | masks.FirstTokens(2)),
        (COLUMN <= ROW) & ((ROW - COLUMN < 4) | (COLUMN < 2)),
    ),
    "chunked": (masks.Causal() & masks.Chunked(7), (COLUMN <= ROW) & (ROW // 7 == COLUMN // 7)),
    "odd band": (masks.Band(5), abs(DISTANCE) <= 2),
    "even band": (masks.Band(6), (DISTANCE <= 3) & (DISTANCE >= -2)),
    "beyond": (masks.Beyond(5), DISTANCE >= 5),
    "previous chunk": (masks.ChunksApart(7, 1, 1), CHUNKS == 1),
    "older chunks": (masks.ChunksApart(7, 2), CHUNKS >= 2),
    "dilated": (masks.Dilated(3, 4), dilated(3, 4)[0]),
    "dilated heads": (masks.Dilated(4, (1, 2, 5)), dilated(4, 1, 2, 5)[None]),
    "global first": (masks.GlobalFirst(2), (ROW < 2) | (COLUMN < 2)),
    "window and global": (masks.Window(3) | masks.GlobalFirst(2), (abs(DISTANCE) < 3) | (ROW < 2) | (COLUMN < 2)),
    "globals": (masks.Globals(jnp.asarray(FLAGS)), EITHER[:, None]),
    "longformer": (
        masks.Segments(jnp.asarray(IDS)) & (masks.Dilated(3, (1, 2)) | masks.Globals(jnp.asarray(FLAGS))),
        SAME[:, None] & (dilated(3, 1, 2)[None] | EITHER[:, None]),
    ),
    "prefix": (masks.Causal() | masks.Prefix(6), (COLUMN <= ROW) | ((ROW < 6) & (COLUMN < 6))),
    "segments": (masks.Segments(jnp.asarray(IDS)), SAME[:, None]),
    "packed": (masks.Causal() & masks.Segments(jnp.asarray(IDS)), SAME[:, None] & (COLUMN <= ROW)),
    "either": (masks.Segments(jnp.asarray(IDS)) | masks.FirstTokens(1), SAME[:, None] | (COLUMN < 1)),
}
