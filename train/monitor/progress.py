"""A progress bar on a terminal, and plain lines elsewhere."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

Report = Callable[[int, Mapping[str, Any], int], None]
_SECONDS = 10  # between two lines


@contextmanager
def show_progress(label: str | None, steps: int) -> Iterator[Report]:
    """A function ``report(step, values, tokens_left)`` that draws a bar on a terminal and prints plain lines elsewhere.

    `values` are those of a line of metrics; silent without a label.
    """
    console = Console()
    if label is None:
        yield lambda *_: None
    elif console.is_terminal:
        with _bar(console) as bar:
            task = bar.add_task(label, total=steps, status="compiling")
            yield lambda step, *rest: bar.update(task, completed=step, status=status(*rest))
    else:
        yield lambda step, *rest: print(f"{label}: step {step}/{steps} · {status(*rest)}", flush=True)


@contextmanager
def show_share(console: Console) -> Iterator[Callable[[float, str], None]]:
    """A function ``report(share, text)``: a bar on a terminal, and elsewhere a line every `_SECONDS`."""
    if console.is_terminal:
        with _bar(console, "{task.percentage:.0f}%") as bar:
            task = bar.add_task("all trainings", total=1.0, status="starting")
            yield lambda share, text: bar.update(task, completed=share, status=text)
        return
    last = time.monotonic()

    def report(share: float, text: str) -> None:
        nonlocal last
        if time.monotonic() - last > _SECONDS:
            last = time.monotonic()
            console.print(f"all trainings: {share:.0%} · {text}", markup=False)

    yield report


def _bar(console: Console, done: str = "{task.completed}/{task.total}") -> Progress:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn(done))
    return Progress(*columns, TextColumn("{task.fields[status]}", markup=False), console=console)


def status(values: Mapping[str, Any], tokens_left: int) -> str:
    """``extend · loss 2.345 · 31,000 tokens/s · MFU 41.0% · 0:00:42 left``, without unknown values."""
    parts = [values["stage"]] if values.get("stage") else []
    parts.append("loss not finite" if values["loss"] is None else f"loss {values['loss']:.4f}")
    if values.get("skipped"):
        parts.append(f"{values['skipped']} skipped")
    rate, mfu = values.get("tokens_per_second"), values.get("mfu")
    if rate:
        parts.append(f"{rate:,.0f} tokens/s")
    if mfu is not None:
        parts.append(f"MFU {mfu:.1%}")
    if rate:
        parts.append(f"{timedelta(seconds=round(tokens_left / rate))} left")
    return " · ".join(parts)
