"""What a run tells while it runs: throughput, memory, JSON lines, and a progress bar or plain lines."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from train.config import TrainConfig
from train.machine import resident_peak_bytes

Report = Callable[[int, float, float | None], None]


def peak_memory_bytes() -> int:
    """The most memory this process has held: on accelerators, of the first device; on a CPU, resident in RAM."""
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        return statistics["peak_bytes_in_use"]
    return resident_peak_bytes()


class Throughput:
    """Tokens per second from `begin` on, which is called when the first steps, that compile, are done."""

    def __init__(self, tokens_per_step: int, clock: Callable[[], float] = time.perf_counter):
        self._tokens, self._clock = tokens_per_step, clock
        self._began: float | None = None
        self._steps = 0

    def begin(self) -> None:
        """Starts the clock; the devices must be idle."""
        self._began, self._steps = self._clock(), 0

    def step(self) -> None:
        """Counts one more step."""
        self._steps += 1

    def rate(self) -> float | None:
        """Tokens per second of the steps counted, all of which must be done; None before there is one."""
        if self._began is None or not self._steps:
            return None
        return self._steps * self._tokens / (self._clock() - self._began)


class MetricsLog:
    """One JSON object a line, each with a ``step``. Opened again, it goes on after its last whole line.

    A resumed run repeats the steps since its checkpoint; those that stand there already are not written twice.
    """

    def __init__(self, path: Path):
        kept = path.read_bytes() if path.exists() else b""
        whole = kept[: kept.rfind(b"\n") + 1]
        self.last: dict[str, Any] = json.loads(whole.splitlines()[-1]) if whole else {"step": 0}
        self._file = path.open("ab")
        self._file.truncate(len(whole))

    def write(self, step: int, **values: Any) -> None:
        """Appends a line, unless one of this step or a later one stands there."""
        if step > self.last["step"]:
            self.last = {"step": step, **values}
            self._file.write(json.dumps(self.last).encode() + b"\n")
            self._file.flush()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()


@contextmanager
def show_progress(label: str | None, config: TrainConfig) -> Iterator[Report]:
    """A function ``report(step, loss, tokens_per_second)`` that draws a bar on a terminal and else prints plain lines.

    Silent without a label.
    """
    console = Console()
    if label is None:
        yield lambda *_: None
    elif console.is_terminal:
        with _bar(console) as bar:
            task = bar.add_task(label, total=config.steps, status="compiling")
            yield lambda step, *rest: bar.update(task, completed=step, status=_status(config, step, *rest))
    else:
        yield lambda step, *rest: print(
            f"{label}: step {step}/{config.steps} · {_status(config, step, *rest)}", flush=True
        )


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    return Progress(*columns, TextColumn("{task.fields[status]}"), console=console)


def _status(config: TrainConfig, step: int, loss: float, rate: float | None) -> str:
    """``loss 2.345 · 31,000 tokens/s · 0:00:42 left``."""
    if not rate:
        return f"loss {loss:.4f}"
    left = timedelta(seconds=round((config.steps - step) * config.batch_tokens / rate))
    return f"loss {loss:.4f} · {rate:,.0f} tokens/s · {left} left"
