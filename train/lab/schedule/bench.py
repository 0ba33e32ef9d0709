"""``python -m train bench CONFIG --schedule v5e,v6e``: the cost of attention kernels on TPUs, by static schedules."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from posjax._checks import check_choice
from train.lab.schedule import layer
from train.lab.schedule.config import Prediction, ScheduleConfig
from train.lab.schedule.implementations import SCHEDULED, missing, schedule_of
from train.lab.schedule.posjax_kernels import CAUSAL
from train.lab.schedule.program import Blocks, KernelShape
from train.lab.schedule.report import by_shape, notes, table
from train.runtime.chips import CHIPS
from train.runtime.compiler import check_compiler
from train.runtime.lines import in_a_line
from train.runtime.machine import versions
from train.runtime.paths import write_file

_WIDTH = 190
"""The width of tables if there is no terminal."""


def bench_schedules(config: ScheduleConfig, chips: str, directory: Path) -> list[Prediction | layer.AttentionLayer]:
    """Compiles all implementations for all chips, prints the tables, and writes ``schedule.jsonl`` into `directory`."""
    names = [name.strip() for name in chips.split(",")]
    for name in names:
        check_choice("--schedule", name, tuple(CHIPS))
    check_compiler()
    directory.mkdir(parents=True, exist_ok=True)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    found = versions(("jax", "jaxlib", "libtpu"))
    results, other_shapes, layers = [], [], []
    for chip in names:
        for name in config.implementations:
            console.print(f"[dim]{chip}: {name} ...[/dim]")
            results += measure_all(name, chip, config.shape, config.timeout)
        for name, shape in itertools.product(CAUSAL, config.shapes):
            console.print(f"[dim]{chip}: {name}, {shape.length} x {shape.head_dim} ...[/dim]")
            other_shapes += measure_all(name, chip, shape, config.timeout)
        for name in config.layers:
            console.print(f"[dim]{chip}: a layer of {name} ...[/dim]")
            layers.append(layer.measure(name, chip, config.timeout))
    lines = [{"config": dataclasses.asdict(config), "versions": found}]
    lines += map(dataclasses.asdict, (everything := [*results, *other_shapes, *layers]))
    write_file(directory / "schedule.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    for chip in names:
        for make, predictions in ((table, results), (by_shape, other_shapes)):
            if of_chip := [result for result in predictions if result.chip == chip]:
                console.print(make(chip, config, of_chip))
    if layers:
        console.print(layer.table(layers))
    console.print(notes(names), highlight=False)
    console.print(" · ".join(f"{name} {version}" for name, version in found.items()))
    console.print(f"numbers: {directory / 'schedule.jsonl'}")
    return everything


def measure_all(name: str, chip: str, shape: KernelShape, timeout: int) -> Iterator[Prediction]:
    """Measures one implementation on one chip at all of its block sizes."""
    problem = missing(name)
    if problem:
        yield Prediction(chip, name, shape, {}, problem=problem)
        return
    for blocks in SCHEDULED[name].sweep:
        if all(shape.length % size == 0 for size in blocks.values()):
            yield measure(name, chip, shape, blocks, timeout)


def measure(name: str, chip: str, shape: KernelShape, blocks: Blocks, timeout: int = 600) -> Prediction:
    """Measures one program; if it does not compile, or not into the expected parts, the result has a problem."""
    try:
        return Prediction(chip, name, shape, blocks, *schedule_of(name, chip, shape, blocks, timeout))
    except ValueError as error:
        return Prediction(chip, name, shape, blocks, problem=in_a_line(error))
