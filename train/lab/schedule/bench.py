"""``python -m train bench CONFIG --schedule v5e,v6e``: the cost of attention kernels on TPUs, by static schedules."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from posjax._checks import check_choice
from train.lab.schedule import layer
from train.lab.schedule.config import Prediction, ScheduleConfig
from train.lab.schedule.cost import Cost
from train.lab.schedule.implementations import SCHEDULED, missing, schedule_of
from train.lab.schedule.posjax_kernels import CAUSAL
from train.lab.schedule.program import Blocks, KernelShape
from train.runtime.chips import CHIPS
from train.runtime.compiler import check_compiler
from train.runtime.lines import in_a_line
from train.runtime.machine import versions
from train.runtime.paths import write_file

_WIDTH = 190
"""The width of tables if there is no terminal."""

_COLUMNS = (
    "kernel",
    "blocks",
    "cost",
    "floor",
    "stalls",
    "ratios",
    "needed",
    "HBM",
    "Mcycles",
    "hot bundles",
    "spills",
    "temp",
)


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


def best(results: Sequence[Prediction]) -> list[Prediction]:
    """The cheapest measurement of each kernel of one implementation on one chip, with the cost of that kernel alone."""
    measured = [result for result in results if result.costs]
    kernels = range(len(measured[0].costs) if measured else 0)
    cheapest = [min(measured, key=lambda result, i=i: result.costs[i].bundles) for i in kernels]
    return [dataclasses.replace(result, costs=(result.costs[i],)) for i, result in enumerate(cheapest)]


def table(chip: str, config: ScheduleConfig, results: Sequence[Prediction]) -> Table:
    """One chip's measurements: one row for each kernel, and one for their sum if an implementation has several."""
    title = (
        f"{chip}: cycles for 512 x 512 of visited area; causal, bfloat16, "
        f"{config.num_heads} heads x {config.head_dim}, {config.length:,} tokens"
    )
    grid = Table(title=title)
    for number, column in enumerate(_COLUMNS):
        grid.add_column(column, justify="left" if number < 2 else "right", overflow="fold")
    for name in config.implementations:
        for row in _rows(name, _of(results, name), against(chip, name, results)):
            grid.add_row(*row)
    return grid


def by_shape(chip: str, config: ScheduleConfig, results: Sequence[Prediction]) -> Table:
    """One chip's measurements at other lengths and head sizes: one row for each kernel and head size, one column for
    each length."""
    lengths = sorted({result.shape.length for result in results})
    title = f"{chip}: cost, as a multiple of its floor, and blocks; causal, bfloat16, {config.num_heads} heads"
    grid = Table("kernel", "head size", *(f"{length:,} tokens" for length in lengths), title=title)
    for name in dict.fromkeys(result.implementation for result in results):
        for head_dim in sorted({result.shape.head_dim for result in results}):
            of_size = [result for result in _of(results, name) if result.shape.head_dim == head_dim]
            cells = (_cell([result for result in of_size if result.shape.length == length]) for length in lengths)
            grid.add_row(name, str(head_dim), *cells)
    return grid


def _cell(results: Sequence[Prediction]) -> str:
    if not best(results):
        return results[0].problem if results else "no block sizes that divide the length"
    (kernel,) = best(results)
    (cost,) = kernel.costs
    return f"{cost.bundles:,.0f} ({cost.bundles / cost.floor:.3f}) {' x '.join(map(str, kernel.blocks.values()))}"


def against(chip: str, name: str, results: Sequence[Prediction]) -> Cost | None:
    """The cost, at the best blocks, with which an implementation is compared; None if it is compared with none."""
    other = SCHEDULED[name].against
    found = best(_of(results, other(chip))) if other else []
    return found[0].costs[0] if found else None


def _of(results: Sequence[Prediction], name: str) -> list[Prediction]:
    return [result for result in results if result.implementation == name]


def _rows(name: str, results: Sequence[Prediction], other: Cost | None) -> Iterator[Sequence[str]]:
    kernels = best(results)
    if not kernels:
        yield name, results[0].problem if results else "no block sizes that divide the length"
    for result in kernels:
        (cost,) = result.costs
        label = name if len(kernels) == 1 else f"{name}: {cost.kernel}"
        hot = ", ".join(f"{part.bundles:,}" for part in cost.hot if part.times)
        spills = ", ".join(f"{part.spills:,}" for part in cost.hot if part.times)
        temp = f"{result.temp_bytes / 2**20:,.1f} MiB"
        yield label, _words(result.blocks), *_sums([cost], other), hot, spills, temp
    if len(kernels) > 1:
        yield f"{name}: together", "", *_sums([result.costs[0] for result in kernels], other)


def _sums(costs: Sequence[Cost], other: Cost | None) -> Iterator[str]:
    """The columns from "cost" to "Mcycles", summed over kernels."""
    for field in ("bundles", "floor", "cycles"):
        yield f"{sum(getattr(cost, field) for cost in costs):,.0f}"
    ratios = (sum(getattr(cost, field) for cost in costs) / getattr(other, field) for field in ("bundles", "cycles"))
    yield " / ".join(f"{ratio:.3f}" for ratio in ratios) if other else ""
    for field in ("by_need", "memory_cycles"):
        yield f"{sum(getattr(cost, field) for cost in costs):,.0f}"
    yield f"{sum(cost.total for cost in costs) / 1e6:,.1f}"


def _words(blocks: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in blocks.items())


def notes(chips: Sequence[str]) -> str:
    """The meaning of the columns, one line each."""
    lines = (
        "cost: the bundles of every part, times how often it runs; hot parts (those on the MXU) not below the floor",
        "floor: the cycles that the matrix units need at least",
        "stalls: as cost, with the bundles that the compiler's schedule leaves empty for latencies and busy units",
        "ratios: of the cost, and of that with stalls, to posjax's causal attention in the same direction and mode",
        "needed: the cost for 512 x 512 of allowed pairs; larger tiles visit more masked pairs",
        "  a row for which a bound fails is computed again; this is counted as never happening",
        "HBM: cycles to move the bytes, bytes / (bytes a cycle and core); below the cost, memory keeps up",
        *(f"  {_rates(name)}" for name in chips),
        "Mcycles: millions of cycles in total, as if on one core",
        "hot bundles, spills: of one run of each hot part; spills are moves of registers that did not fit",
        "temp: HBM of the whole function in addition to arguments and results, with a gradient's forward pass",
    )
    return "\n".join(lines)


def _rates(name: str) -> str:
    chip = CHIPS[name]
    cores = f"{chip.cores} core{'s' * (chip.cores > 1)}"
    clock = f"{chip.gigahertz} GHz{' (assumed)' * chip.clock_is_assumed}"
    return f"{name}: {chip.bandwidth:,.0f} GB/s, {cores}, {clock}: {chip.bytes_per_cycle:,.0f} bytes a cycle and core"
