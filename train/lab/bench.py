"""``python -m train bench``: compares attention with other libraries, time and peak memory, in one run.

Every measurement runs in a separate process, so that its peak memory is its own; this includes the interpreter,
libraries and compiler. Time is the best of several calls after one that compiles.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from posjax._checks import check
from train.lab.gpu.config import GpuConfig
from train.lab.libraries import BACKWARD, FORWARD, LIBRARIES, Shape, refuses
from train.lab.schedule.bench import ScheduleConfig
from train.runtime.machine import processor, versions
from train.runtime.rows import write_rows


@dataclass(frozen=True)
class BenchConfig:
    """The measurements: causal ALiBi attention, batch 1, every library at every length in every direction."""

    name: str = "bench"
    output: str = "runs"
    lengths: tuple[int, ...] = (4096, 8192, 16384)
    num_heads: int = 8
    head_dim: int = 64
    dtype: Literal["float32", "bfloat16"] = "float32"
    directions: tuple[Literal["forward", "forward + backward"], ...] = (FORWARD, BACKWARD)
    libraries: tuple[Literal["posjax", "jax.nn", "torch flex", "torch sdpa"], ...] = tuple(LIBRARIES)
    repeats: int = 5
    timeout: int = 600  # seconds for one measurement, compilation included
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)  # what --schedule compiles
    gpu: GpuConfig | None = None  # with this section a GPU is measured, and nothing else

    def __post_init__(self):
        for name in ("lengths", "directions", "libraries"):
            check(bool(getattr(self, name)), f"{name} is empty: name at least one")
        for name, values in {**vars(self), "lengths": min(self.lengths)}.items():
            check(not isinstance(values, int) or values > 0, f"{name} must be positive, found {values}")

    @property
    def directory(self) -> Path:
        """The directory of the results."""
        return Path(self.output) / self.name

    @property
    def shapes(self) -> Iterator[Shape]:
        """Every shape to measure."""
        for direction, length in itertools.product(self.directions, self.lengths):
            yield Shape(length, self.num_heads, self.head_dim, self.dtype, direction)


@dataclass(frozen=True)
class Timing:
    """The result of one process; `problem` says why there are no numbers."""

    library: str
    shape: Shape
    seconds: float | None = None
    peak_bytes: int | None = None
    problem: str | None = None


def bench(config: BenchConfig) -> list[Timing]:
    """Runs every measurement, prints the table, and writes ``bench.jsonl`` into the run's directory."""
    console = Console()
    config.directory.mkdir(parents=True, exist_ok=True)
    found = versions(("jax", "jaxlib", "torch"))
    results = []
    for shape, name in itertools.product(config.shapes, config.libraries):
        console.print(f"[dim]{shape.direction}, {shape.length} tokens: {name} ...[/dim]")
        results.append(measure(name, shape, config.repeats, config.timeout))
    file = config.directory / "bench.jsonl"
    write_rows(file, [{"machine": processor(), "versions": found}, *map(dataclasses.asdict, results)])
    console.print(table(config, results))
    console.print(f"{processor()} · " + " · ".join(f"{name} {version}" for name, version in found.items()))
    console.print(f"numbers: {file}")
    return results


def measure(name: str, shape: Shape, repeats: int, timeout: int) -> Timing:
    """Runs one measurement in a separate process."""
    problem = refuses(name, shape)
    if problem:
        return Timing(name, shape, problem=problem)
    request = json.dumps({"library": name, "shape": dataclasses.asdict(shape), "repeats": repeats})
    command = [sys.executable, "-m", "train.lab.libraries", request]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return Timing(name, shape, problem=f"longer than {timeout} s")
    if done.returncode == -signal.SIGKILL or "RESOURCE_EXHAUSTED" in done.stderr:
        return Timing(name, shape, problem="out of memory")
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return Timing(name, shape, problem=words[-1][:200])
    return Timing(name, shape, **json.loads(done.stdout.splitlines()[-1]))


def table(config: BenchConfig, results: Sequence[Timing]) -> Table:
    """The measurements: one row for each direction and length, one column for each library."""
    title = (
        f"Causal ALiBi attention, {config.num_heads} heads x {config.head_dim}, {config.dtype}: seconds, peak memory"
    )
    grid = Table("direction", "tokens", *config.libraries, title=title)
    for shape in config.shapes:
        row = {result.library: _cell(result) for result in results if result.shape == shape}
        grid.add_row(shape.direction, f"{shape.length:,}", *(row[name] for name in config.libraries))
    return grid


def _cell(result: Timing) -> str:
    return result.problem or f"{result.seconds:.3f} s, {result.peak_bytes / 2**20:,.0f} MiB"
