"""``python -m train bench CONFIG --schedule v5e,v6e``: the cost of attention kernels on TPUs, by static schedules."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from posjax._checks import check_choice, check_count
from posjax.attention.tiles import Blocks
from train.lab.schedule.compiling import chip_names
from train.lab.schedule.cost import Cost, KernelShape
from train.lab.schedule.implementations import SCHEDULED, schedule_of
from train.plan.report import new_console
from train.runtime.lines import in_a_line
from train.runtime.machine import versions
from train.runtime.rows import write_rows

_COLUMNS = ("kernel", "blocks", "cost", "floor", "stalls", "needed", "HBM", "hot bundles (spills)", "temp")
_NOTES = """\
cost: the bundles of every part, times how often it runs; hot parts (those on the MXU) not below the floor
floor: the cycles that the matrix units need at least
stalls: as cost, with the bundles that the compiler's schedule leaves empty for latencies and busy units
needed: the cost for 512 x 512 of allowed pairs; larger tiles visit more masked pairs
  a row for which a bound fails is computed again; this is counted as never happening
HBM: cycles to move the bytes, bytes / (bytes a cycle and core); below the cost, memory keeps up
hot bundles (spills): of one run of each hot part; spills are moves of registers that did not fit
temp: HBM of the whole function in addition to arguments and results, with a gradient's forward pass"""


@dataclass(frozen=True)
class ScheduleConfig:
    """The programs: causal attention in bfloat16, batch 1, every implementation at all of its block sizes."""

    length: int = 32768
    num_heads: int = 4
    head_dim: int = 128
    implementations: tuple[str, ...] = tuple(SCHEDULED)
    timeout: int = 600  # seconds for one compilation

    def __post_init__(self):
        for name in ("length", "num_heads", "head_dim", "timeout"):
            check_count(f"schedule.{name}", getattr(self, name))
        for name in self.implementations:
            check_choice("schedule.implementations", name, tuple(SCHEDULED))

    @property
    def shape(self) -> KernelShape:
        """The shape of the attention."""
        return KernelShape(self.length, self.num_heads, self.head_dim)


@dataclass(frozen=True)
class Prediction:
    """One program on one chip; `problem` says why there are no numbers."""

    chip: str
    implementation: str
    shape: KernelShape
    blocks: Blocks
    cost: Cost | None = None
    temp_bytes: int | None = None  # of the whole function, with the forward pass that a gradient needs
    problem: str | None = None


def bench_schedules(config: ScheduleConfig, chips: str, directory: Path) -> list[Prediction]:
    """Compiles all implementations for all chips, prints the tables, and writes ``schedule.jsonl`` into `directory`."""
    names, console, results = chip_names("--schedule", chips), new_console(), []
    directory.mkdir(parents=True, exist_ok=True)
    found = versions(("jax", "jaxlib", "libtpu"))
    for chip, name in itertools.product(names, config.implementations):
        console.print(f"[dim]{chip}: {name} ...[/dim]")
        sizes = [blocks for blocks in SCHEDULED[name].sizes if all(config.length % size == 0 for size in blocks)]
        results += [measure(name, chip, config.shape, blocks, config.timeout) for blocks in sizes]
    file = directory / "schedule.jsonl"
    write_rows(file, [{"config": asdict(config), "versions": found}, *map(asdict, results)])
    for chip in names:
        console.print(table(chip, config, [result for result in results if result.chip == chip]))
    console.print(_NOTES, highlight=False)
    console.print(" · ".join(f"{name} {version}" for name, version in found.items()))
    console.print(f"numbers: {file}")
    return results


def measure(name: str, chip: str, shape: KernelShape, blocks: Blocks, timeout: int = 600) -> Prediction:
    """Measures one program; if it does not compile, or not into the expected parts, the result has a problem."""
    try:
        return Prediction(chip, name, shape, blocks, *schedule_of(name, chip, shape, blocks, timeout))
    except ValueError as error:
        return Prediction(chip, name, shape, blocks, problem=in_a_line(error))


def table(chip: str, config: ScheduleConfig, results: Sequence[Prediction]) -> Table:
    """One chip's measurements: a row for each implementation, at its cheapest blocks."""
    title = (
        f"{chip}: cycles for 512 x 512 of visited area; causal, bfloat16, "
        f"{config.num_heads} heads x {config.head_dim}, {config.length:,} tokens"
    )
    grid = Table(*_COLUMNS, title=title)
    for name in config.implementations:
        grid.add_row(name, *_cells([result for result in results if result.implementation == name]))
    return grid


def _cells(results: Sequence[Prediction]) -> Sequence[str]:
    """The columns after the name of one implementation."""
    measured = [result for result in results if result.cost]
    if not measured:
        return (results[0].problem if results else "no block sizes that divide the length",)
    best = min(measured, key=lambda result: result.cost.bundles)
    cost = best.cost
    numbers = (cost.bundles, cost.floor, cost.cycles, cost.by_need, cost.memory_cycles)
    hot = [part for part in cost.hot if part.times]
    return (
        f"{best.blocks.q} x {best.blocks.k}, {best.blocks.part}",
        *(f"{number:,.0f}" for number in numbers),
        ", ".join(f"{part.bundles:,} ({part.spills:,})" for part in hot),
        f"{best.temp_bytes / 2**20:,.1f} MiB",
    )
