"""A thread that reports a hang: which step, on which process, and what every Python thread is doing."""

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any


class Watchdog:
    """Reports when no step has finished for `seconds`, on standard error and by `write`; it stops nothing.

    `beat(step, value)` tells it that a step was dispatched whose result, a scalar on the devices, is `value`. Dispatch
    runs ahead of the devices, so the thread asks the values whether they are ready, without waiting. Every hang is
    reported once, and once more when it is over. With 0 seconds nothing is watched.
    """

    def __init__(self, seconds: float, write: Callable[[str], Any], *, process: int = 0):
        self._seconds, self._write, self._process = seconds, write, process
        self._pending: deque[tuple[int, Any]] = deque()
        self._finished: int | None = None
        self._since, self._has_reported = time.monotonic(), False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self, step: int, value: Any) -> None:
        """Call it after a step was dispatched whose result is `value`."""
        if self._seconds:
            self._pending.append((step, value))

    def __enter__(self):
        if self._seconds:
            self._since = time.monotonic()
            self._thread.start()
        return self

    def __exit__(self, *_):
        if self._seconds:
            self._stop.set()
            self._thread.join()

    def _watch(self) -> None:
        # Often enough to be at most a tenth late, and rarely enough to cost nothing.
        while not self._stop.wait(min(self._seconds / 10, 5.0)):
            self._look()

    def _look(self) -> None:
        """Checks once what has finished since the last check."""
        moved = False
        while self._pending and self._pending[0][1].is_ready():
            self._finished, moved = self._pending.popleft()[0], True
        if moved:
            self._since = time.monotonic()
            if self._has_reported:
                self._tell(f"continued: step {self._finished} has finished")
            self._has_reported = False
        elif not self._has_reported and time.monotonic() - self._since > self._seconds:
            self._has_reported = True
            self._tell(f"{self._hang()}\n{thread_stacks()}")

    def _hang(self) -> str:
        dispatched = (
            f"step {self._pending[0][0]} was dispatched and is not done" if self._pending else "none is running"
        )
        last = "none so far" if self._finished is None else f"step {self._finished}"
        return f"no step has finished for {self._seconds:g} s; last finished: {last}; {dispatched}; the threads:"

    def _tell(self, message: str) -> None:
        when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        text = f"watchdog: {when}, process {self._process}: {message}\n"
        print(text, end="", file=sys.stderr, flush=True)
        self._write(text)


def thread_stacks() -> str:
    """The stack of every Python thread of this process, by the name of the thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Thread {names.get(number, number)} (most recent call last):\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    )
