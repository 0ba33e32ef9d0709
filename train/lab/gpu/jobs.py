"""What can be measured, and how the time of a call is taken, in the same way for every library.

Imports no library that computes, because torch must run without jax beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FORMS = ("causal", "alibi", "slopes", "t5", "kerple", "fox", "window", "packed", "capped", "rerope", "array")
"""Forms of causal attention: ``calls.forward`` says what they are."""
DOCUMENT = 1500
"""Tokens of a document in packed rows."""
WINDOW = 1024
"""How many keys a query of the form ``window`` sees."""
LAYERS = 4
"""Caches that a decoded token reads one after the other, as in the layers of a decoder."""

ERRORS, FORWARD, BACKWARD, DECODE, TILES = "errors", "forward", "forward + backward", "decode", "tiles"
STEP, GENERATE = "training step", "generate"
WHOLE_MODELS = (STEP, GENERATE)
OURS = "posjax"
LIBRARIES = {
    "cudnn": ("causal", "window"),
    OURS: FORMS,
    "torch flex": ("causal", "alibi", "window", "packed"),
    "torch sdpa": ("causal",),
    "tokamax": ("causal", "alibi"),
}
"""The libraries whose times are taken side by side, and the forms of each."""
LONGEST_BIAS = 16384
"""The most tokens for which a bias is an array: at 65,536 that of 16 heads has 137 GB."""

OTHER_TILES = {
    "usual": {},
    "forward 64": {"forward": 64},
    "queries 32": {"queries": 32},
    "queries 128": {"queries": 128},
    "keys 32": {"keys": 32},
    "apart": {"together": False},
}
"""Fields of ``posjax.attention.gpu.inputs.TileSizes`` that differ from the usual ones, by a name."""
SWEPT = ("alibi", "t5")
"""The forms of which other tiles are measured."""

STEP_FORMS = {
    "rope, documents": ("rope", True),
    "rope": ("rope", False),
    "alibi, documents": ("alibi", True),
    "coca, documents": ("coca-strict", True),
}
"""Forms of a training step: the scheme, and whether rows are packed with documents of `DOCUMENT` tokens."""
TRANSFORMERS = "torch transformers"
"""What training steps and generation are measured beside; it has no mask of documents."""
ROWS = {"1 row": 1, "32 rows": 32}
"""Forms of generation: how many texts are continued at once."""
NEW_TOKENS = 128
"""Tokens that are generated after a prompt, to the end of a row."""

_ROWS = 3
_FEWEST, _MOST = 3, 100
"""Calls of a row. The results of all that are queued must fit the device's memory."""


@dataclass(frozen=True)
class Shape:
    """One call of batch 1: queries ``[1, length, heads, size]``, keys and values ``[1, length, kv_heads, size]``.

    A decoded token has one query instead, and the form ``decode``.
    """

    form: str
    length: int
    size: int
    heads: int = 16
    kv_heads: int = 16


@dataclass(frozen=True)
class Job:
    """One measurement: errors; or times of a direction, of decoding, with other tiles, of a training step, of tokens.

    `library` is one of ``LIBRARIES``; or ``blockwise`` or ``dense``, implementations of posjax; one of
    ``OTHER_TILES``; or ``TRANSFORMERS``.
    """

    what: str
    library: str
    shape: Shape

    @property
    def process(self) -> str:
        """The process that measures it. Whole models of jax have one of their own, which gives back their memory."""
        name = self.library.partition(" ")[0]
        if name in ("torch", "tokamax"):
            return name
        return "models" if self.what in WHOLE_MODELS else "jax"

    @property
    def package(self) -> str:
        """The package that the process needs."""
        return "jax" if self.process == "models" else self.process

    @property
    def is_tuned(self) -> bool:
        """Whether XLA may try variants of the program's matrix products on the GPU while it compiles them.

        That would disturb other measurements.
        """
        return self.what != ERRORS and self.library in ("blockwise", "dense")

    def __str__(self) -> str:
        shape = self.shape
        heads = f"{shape.heads} heads over {shape.kv_heads}, size {shape.size}"
        return f"{self.what}: {self.library}, {shape.form}, {shape.length:,} tokens, {heads}"


@dataclass(frozen=True)
class Options:
    """How jobs are measured; the keys of the config's section explain them."""

    implementation: str
    threads: int
    row_seconds: float
    step: str  # the config of a training step
    generation: str  # the config of a model that generates


def milliseconds(call: Callable[[], Any], wait: Callable[[Any], Any], row_seconds: float) -> float:
    """The time of a call: the least mean of three rows of calls, which are queued, and waited for once.

    Args:
        call: queues the work, and returns its results.
        wait: returns when the device has computed these results.
        row_seconds: about how long a row takes, if it has no more than a hundred calls.
    """
    wait(call())
    start = time.perf_counter()
    wait(call())
    once = time.perf_counter() - start
    repeats = max(_FEWEST, min(_MOST, int(row_seconds / once)))
    return min(_mean(call, wait, repeats) for _ in range(_ROWS)) * 1e3


def _mean(call: Callable[[], Any], wait: Callable[[Any], Any], repeats: int) -> float:
    """Seconds of a call in one row."""
    start = time.perf_counter()
    for _ in range(repeats):
        results = call()
    wait(results)
    return (time.perf_counter() - start) / repeats
