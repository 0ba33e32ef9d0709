"""The clocks of a run: how fast it is, which share of the chips' peak that is, what its time is spent on; and memory.

Metrics are written at log steps. The rates of a line are those of the updates since the line before, in wall-clock
time, which includes evaluation and checkpoints:

* ``tokens_per_second``: tokens of the batches, padding included; ``tokens_per_second_per_chip``: the same per chip.
* ``model_flops_per_second_per_chip``: the FLOPs of the model's mathematics, as `train.model.flops` counts them: forward
  and backward, without recomputation, and of attention only the pairs that the mask allows. The pairs are counted in
  the batch of the log step, which represents the batches since the last one.
* ``mfu``: ``model_flops_per_second_per_chip`` over the chip's published bfloat16 peak, also for computation in another
  dtype; null for chips that are not in `train.runtime.chips.PEAK_FLOPS`, such as CPUs.

``peak_memory_bytes`` is the most memory used so far; see `peak_memory_bytes`. ``seconds_KIND`` is the wall-clock time
that the run spent on something. Every second from the first call of `fit` on is of one kind:

* ``steps``: updates, measured while the training loop waits for them, and everything of no other kind.
* ``input``: waiting for the next batch.
* ``checkpoint``: waiting for a checkpoint. Most of a save is written while the next steps run.
* ``evaluate``: the held-out loss.
* ``compile``: the first update of a stage.
* ``start``: reading text and models, tracing, and restoring, before the first update of a process or a stage.
* ``restart``: from the last metrics of a process that ended early to the start of the next process, and the updates
  that the next process repeats.

The goodput of a run is the share of ``steps``.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from train.runtime.machine import resident_peak_bytes

_RATES = ("tokens_per_second", "tokens_per_second_per_chip", "model_flops_per_second_per_chip", "mfu")
KINDS = ("steps", "input", "checkpoint", "evaluate", "compile", "start", "restart")
_NAME, _TIME = "seconds_{}", "time"


def count_chips(devices: Sequence[Any]) -> int:
    """The number of chips of the devices. JAX shows a 7x as two devices, which have the same coordinates."""
    chips = {
        (getattr(device, "slice_index", 0), tuple(getattr(device, "coords", None) or (device.id,)))
        for device in devices
    }
    return len(chips)


def peak_memory_bytes() -> int:
    """The peak memory so far, in bytes: of the fullest accelerator of this process; on a CPU, resident memory."""
    statistics = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [found["peak_bytes_in_use"] for found in statistics if "peak_bytes_in_use" in found]
    return max(peaks) if peaks else resident_peak_bytes()


class Meter:
    """Rates between moments at which the devices are idle: `begin` (after compilation) and every `read`.

    Between these it never waits for the devices: `step` only counts.
    """

    def __init__(self, chips: int, peak: float | None, clock: Callable[[], float] = time.perf_counter):
        self._chips, self._peak, self._clock = chips, peak, clock
        self._all_tokens, self._all_seconds = 0, 0.0
        self.pause()

    def begin(self) -> None:
        """Starts the clock; the devices must be idle."""
        self._began, self._steps, self._tokens = self._clock(), 0, 0

    def pause(self) -> None:
        """Stops the clock until `begin`; counts since the last `read` are dropped."""
        self._began, self._steps, self._tokens = None, 0, 0

    def step(self, tokens: int) -> None:
        """Counts one more update."""
        self._steps += 1
        self._tokens += tokens

    def read(self, flops: float | None = None) -> dict[str, float | None]:
        """The rates since `begin` or the last `read`; the devices must be idle. None while the clock is stopped.

        `flops` are the model FLOPs of one update over all chips.
        """
        if self._began is None or not self._steps:
            return dict.fromkeys(_RATES)
        seconds = self._clock() - self._began
        speed = self._tokens / seconds
        done = None if flops is None else flops * self._steps / seconds / self._chips
        share = None if done is None or self._peak is None else done / self._peak
        self._all_tokens, self._all_seconds = self._all_tokens + self._tokens, self._all_seconds + seconds
        self.begin()
        return dict(zip(_RATES, (speed, speed / self._chips, done, share), strict=True))

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second over everything that was read; None before the first `read`."""
        return self._all_tokens / self._all_seconds if self._all_seconds else None


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
