"""``python -m train bench CONFIG --schedule v5e,v6e``: what attention kernels cost on TPUs, by static schedules."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from posjax._checks import check_choice, check_count
from train.machine import versions, write_file
from train.schedule.chips import CHIPS
from train.schedule.compiling import check_compiler, compile_for
from train.schedule.contenders import CONTENDERS, missing, order
from train.schedule.cost import Cost, cost, find_kernel
from train.schedule.program import Blocks, Shape
from train.schedule.report import notes, table

WIDTH = 190
"""Of the tables where there is no terminal."""


@dataclass(frozen=True)
class ScheduleConfig:
    """What is compiled: causal attention in bfloat16, batch 1, every contender at every one of its block sizes."""

    length: int = 32768
    heads: int = 4
    head_dim: int = 128
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    timeout: int = 600  # seconds for one compilation

    def __post_init__(self):
        for name in ("length", "heads", "head_dim", "timeout"):
            check_count(f"schedule.{name}", getattr(self, name))
        for name in self.contenders:
            check_choice("schedule.contenders", name, tuple(CONTENDERS))

    @property
    def shape(self) -> Shape:
        """What is attended over."""
        return Shape(self.length, self.heads, self.head_dim)


@dataclass(frozen=True)
class Measurement:
    """One program on one chip; `problem` says why there are no numbers."""

    chip: str
    contender: str
    blocks: Blocks
    costs: tuple[Cost, ...] = ()  # one for every kernel of the contender
    temp_bytes: int | None = None  # of the whole function: a gradient's forward pass too
    problem: str | None = None


def bench_schedules(config: ScheduleConfig, chips: str, directory: Path) -> list[Measurement]:
    """Compiles every contender for every chip, prints the tables, and writes ``schedule.jsonl`` into `directory`."""
    names = [name.strip() for name in chips.split(",")]
    for name in names:
        check_choice("--schedule", name, tuple(CHIPS))
    check_compiler()
    directory.mkdir(parents=True, exist_ok=True)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    found = versions(("jax", "jaxlib", "libtpu"))
    results = []
    for chip in names:
        for name in config.contenders:
            console.print(f"[dim]{chip}: {name} ...[/dim]")
            results += measure_all(name, chip, config)
    lines = [{"config": dataclasses.asdict(config), "versions": found}, *map(dataclasses.asdict, results)]
    write_file(directory / "schedule.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    for chip in names:
        console.print(table(chip, config, [result for result in results if result.chip == chip]))
    console.print(notes(names), highlight=False)
    console.print(" · ".join(f"{name} {version}" for name, version in found.items()))
    console.print(f"numbers: {directory / 'schedule.jsonl'}")
    return results


def measure_all(name: str, chip: str, config: ScheduleConfig) -> Iterator[Measurement]:
    """One contender on one chip at all of its block sizes."""
    problem = missing(name)
    if problem:
        yield Measurement(chip, name, {}, problem=problem)
        return
    for blocks in CONTENDERS[name].sweep:
        if all(config.length % size == 0 for size in blocks.values()):
            yield measure(name, chip, blocks, config)


def measure(name: str, chip: str, blocks: Blocks, config: ScheduleConfig) -> Measurement:
    """One program; what does not compile, or not into the expected parts, is told as a problem."""
    try:
        return Measurement(chip, name, blocks, *schedule_of(name, chip, blocks, config.shape, config.timeout))
    except ValueError as error:
        return Measurement(chip, name, blocks, problem=" ".join(str(error).split()))


def schedule_of(name: str, chip: str, blocks: Blocks, shape: Shape, timeout: int) -> tuple[tuple[Cost, ...], int]:
    """Compiles one program: the cost of each of its kernels, and the HBM that it takes beside arguments and results."""
    arguments = order(name, shape, blocks, chip)
    compiled = compile_for(chip, "train.schedule.contenders:make", arguments, timeout=timeout)
    launches = CONTENDERS[name].program(shape, blocks, chip).launches
    kernels = [(find_kernel(compiled.kernels, launch.kernel), launch) for launch in launches]
    return tuple(cost(kernel, launch, CHIPS[chip]) for kernel, launch in kernels), compiled.temp_bytes
