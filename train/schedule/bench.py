"""``python -m train bench CONFIG --schedule v5e,v6e``: what attention kernels cost on TPUs, by static schedules."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from posjax._checks import check_choice, check_count
from posjax.presets import scheme_names
from train.machine import versions
from train.paths import write_file
from train.schedule import layer, own
from train.schedule.chips import CHIPS
from train.schedule.compiling import check_compiler
from train.schedule.contenders import CONTENDERS, missing, schedule_of
from train.schedule.cost import Cost
from train.schedule.program import Blocks, Shape
from train.schedule.report import by_shape, notes, table

WIDTH = 190
"""Of the tables where there is no terminal."""


@dataclass(frozen=True)
class ScheduleConfig:
    """What is compiled: causal attention in bfloat16, batch 1, every contender at every one of its block sizes.

    Our own causal kernels are compiled for all `lengths` and `head_dims` too, if there are any, and whole attention
    layers of all schemes named in `layers`, whose features need no other kernel than causal attention.
    """

    length: int = 32768
    heads: int = 4
    head_dim: int = 128
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    lengths: tuple[int, ...] = ()
    head_dims: tuple[int, ...] = ()
    layers: tuple[str, ...] = ()
    timeout: int = 600  # seconds for one compilation

    def __post_init__(self):
        for name in ("length", "heads", "head_dim", "timeout"):
            check_count(f"schedule.{name}", getattr(self, name))
        for name in ("lengths", "head_dims"):
            for value in getattr(self, name):
                check_count(f"schedule.{name}", value)
        for name in self.contenders:
            check_choice("schedule.contenders", name, tuple(CONTENDERS))
        for name in self.layers:
            check_choice("schedule.layers", name, scheme_names())

    @property
    def shape(self) -> Shape:
        """What is attended over."""
        return Shape(self.length, self.heads, self.head_dim)

    @property
    def shapes(self) -> Iterator[Shape]:
        """All lengths, each with all head sizes."""
        if self.lengths or self.head_dims:
            for head_dim in self.head_dims or (self.head_dim,):
                for length in self.lengths or (self.length,):
                    yield Shape(length, self.heads, head_dim)


@dataclass(frozen=True)
class Measurement:
    """One program on one chip; `problem` says why there are no numbers."""

    chip: str
    contender: str
    shape: Shape
    blocks: Blocks
    costs: tuple[Cost, ...] = ()  # one for every kernel of the contender
    temp_bytes: int | None = None  # of the whole function: a gradient's forward pass too
    problem: str | None = None


def bench_schedules(config: ScheduleConfig, chips: str, directory: Path) -> list[Measurement | layer.Layer]:
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
    results, others, layers = [], [], []
    for chip in names:
        for name in config.contenders:
            console.print(f"[dim]{chip}: {name} ...[/dim]")
            results += measure_all(name, chip, config.shape, config.timeout)
        for name, shape in itertools.product(own.CAUSAL, config.shapes):
            console.print(f"[dim]{chip}: {name}, {shape.length} x {shape.head_dim} ...[/dim]")
            others += measure_all(name, chip, shape, config.timeout)
        for name in config.layers:
            console.print(f"[dim]{chip}: a layer of {name} ...[/dim]")
            layers.append(layer.measure(name, chip, config.timeout))
    lines = [{"config": dataclasses.asdict(config), "versions": found}]
    lines += map(dataclasses.asdict, (everything := [*results, *others, *layers]))
    write_file(directory / "schedule.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    for chip in names:
        for make, some in ((table, results), (by_shape, others)):
            if of_chip := [result for result in some if result.chip == chip]:
                console.print(make(chip, config, of_chip))
    if layers:
        console.print(layer.table(layers))
    console.print(notes(names), highlight=False)
    console.print(" · ".join(f"{name} {version}" for name, version in found.items()))
    console.print(f"numbers: {directory / 'schedule.jsonl'}")
    return everything


def measure_all(name: str, chip: str, shape: Shape, timeout: int) -> Iterator[Measurement]:
    """One contender on one chip at all of its block sizes."""
    problem = missing(name)
    if problem:
        yield Measurement(chip, name, shape, {}, problem=problem)
        return
    for blocks in CONTENDERS[name].sweep:
        if all(shape.length % size == 0 for size in blocks.values()):
            yield measure(name, chip, shape, blocks, timeout)


def measure(name: str, chip: str, shape: Shape, blocks: Blocks, timeout: int = 600) -> Measurement:
    """One program; what does not compile, or not into the expected parts, is told as a problem."""
    try:
        return Measurement(chip, name, shape, blocks, *schedule_of(name, chip, shape, blocks, timeout))
    except ValueError as error:
        return Measurement(chip, name, shape, blocks, problem=" ".join(str(error).split()))
