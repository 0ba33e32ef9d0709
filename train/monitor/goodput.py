"""What the wall-clock time of a run was spent on; its goodput is the share of ``steps``.

Every second from the first call of `fit` on is of one kind:

* ``steps``: updates, measured while the training loop waits for them, and everything of no other kind.
* ``input``: waiting for the next batch.
* ``checkpoint``: waiting for a checkpoint. Most of a save is written while the next steps run.
* ``evaluate``: the held-out loss.
* ``compile``: the first update of a stage.
* ``start``: reading text and models, tracing, and restoring, before the first update of a process or a stage.
* ``restart``: from the last metrics of a process that ended early to the start of the next process, and the updates
  that the next process repeats.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

KINDS = ("steps", "input", "checkpoint", "evaluate", "compile", "start", "restart")
_NAME, _TIME = "seconds_{}", "time"


class Goodput:
    """The seconds of every kind since the run began, over all processes that trained it in turn.

    Args:
        began: when `fit` was called, in seconds since 1970.
        last: the last line of metrics of the process before, which contains the result of `read`; empty for a new run.
        clock: a function that gives the current time, in seconds since 1970.
    """

    def __init__(self, began: float, last: Mapping[str, Any], clock: Callable[[], float] = time.time):
        self._clock, self._since, self._kind = clock, began, "start"
        self._spent = {kind: last.get(_NAME.format(kind)) or 0.0 for kind in KINDS}
        self._spent["restart"] += max(0.0, began - last.get(_TIME, began))

    def spend(self, kind: str) -> str:
        """Counts time as this kind from now on; returns the kind before."""
        now, before = self._clock(), self._kind
        self._spent[before] += now - self._since
        self._since, self._kind = now, kind
        return before

    @contextmanager
    def spending(self, kind: str) -> Iterator[None]:
        """Counts the time inside a `with` as this kind."""
        before = self.spend(kind)
        try:
            yield
        finally:
            self.spend(before)

    def read(self) -> dict[str, float]:
        """All seconds so far, as values for a line of metrics, and the current time."""
        return {**{_NAME.format(kind): seconds for kind, seconds in self.seconds.items()}, _TIME: self._since}

    @property
    def seconds(self) -> dict[str, float]:
        """All seconds so far, by kind."""
        self.spend(self._kind)
        return dict(self._spent)


def share(seconds: Mapping[str, float]) -> float:
    """The goodput: the share of ``steps`` in all seconds."""
    return seconds["steps"] / sum(seconds.values())
