"""How the time of a call is taken, in the same way for every library."""

import time
from collections.abc import Callable
from typing import Any

_ROWS = 3
_FEWEST, _MOST = 3, 100
"""Calls of a row. The results of all that are queued must fit the device's memory."""


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
