"""How fast a run is, which share of the chips' peak that is, and how much memory it uses.

Metrics are written at log steps. The rates of a line are those of the updates since the line before, in wall-clock
time, which includes evaluation and checkpoints:

* ``tokens_per_second``: tokens of the batches, padding included; ``tokens_per_second_per_chip``: the same per chip.
* ``model_flops_per_second_per_chip``: the FLOPs of the model's mathematics, as `train.model.flops` counts them: forward
  and backward, without recomputation, and of attention only the pairs that the mask allows. The pairs are counted in
  the batch of the log step, which represents the batches since the last one.
* ``mfu``: ``model_flops_per_second_per_chip`` over the chip's published bfloat16 peak, also for computation in another
  dtype; null for chips that are not in `train.runtime.chips.PEAK_FLOPS`, such as CPUs.
* ``data_wait``: the share of time for which the loop waited for the next batch.
* ``peak_memory_bytes``: the most memory used so far; see `peak_memory_bytes`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from train.runtime.machine import resident_peak_bytes


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
        self._began = self._clock()
        self._steps, self._tokens, self._waited = 0, 0, 0.0

    def pause(self) -> None:
        """Stops the clock until `begin`; counts since the last `read` are dropped."""
        self.begin()
        self._began = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside a `with` as waiting for data."""
        began = self._clock()
        yield
        self._waited += self._clock() - began

    def step(self, tokens: int) -> None:
        """Counts one more update."""
        self._steps += 1
        self._tokens += tokens

    def read(self, flops: float | None = None) -> dict[str, float | None]:
        """The rates since `begin` or the last `read`; the devices must be idle. None while the clock is stopped.

        `flops` are the model FLOPs of one update over all chips.
        """
        now = self._clock()
        names = ("tokens_per_second", "tokens_per_second_per_chip", "model_flops_per_second_per_chip", "mfu")
        if self._began is None or not self._steps:
            return dict.fromkeys((*names, "data_wait"))
        seconds, tokens = now - self._began, self._tokens
        done = None if flops is None else flops * self._steps / seconds / self._chips
        share = None if done is None or self._peak is None else done / self._peak
        rates = (tokens / seconds, tokens / seconds / self._chips, done, share)
        found = {**dict(zip(names, rates, strict=True)), "data_wait": self._waited / seconds}
        self._all_tokens, self._all_seconds = self._all_tokens + tokens, self._all_seconds + seconds
        self._began, self._steps, self._tokens, self._waited = now, 0, 0, 0.0
        return found

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second over everything that was read; None before the first `read`."""
        return self._all_tokens / self._all_seconds if self._all_seconds else None
