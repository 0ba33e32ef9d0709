"""``python -m train bench CONFIG --costs v5e,v6e``: the cost of tiles of posjax's own kernels on TPUs.

It writes the table by which the kernels choose the sizes of their tiles. Chips that are not named keep their entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from posjax._checks import check
from posjax.attention.tiles import Blocks
from posjax.attention.tpu.costs import BACKWARD, FORWARD
from train.lab.schedule.bench import ScheduleConfig
from train.lab.schedule.compiling import chip_names
from train.lab.schedule.cost import Cost, KernelShape
from train.lab.schedule.implementations import SCHEDULED, schedule_of
from train.lab.schedule.posjax_kernels import BACK, BOUNDED, PLAIN, target_of
from train.runtime.chips import CHIPS
from train.runtime.compiler import DoesNotCompile
from train.runtime.machine import versions
from train.runtime.paths import ROOT, write_file

TileCosts = tuple[int, int, int]
"""Cycles of a whole tile, of a masked tile, and of a row."""

COSTS_FILE = ROOT / "posjax" / "attention" / "tpu" / "costs.py"
COST_SHAPE = KernelShape(32768, 4, 128)
"""The causal attention for measuring costs: with so many rows of tiles that its start and end matter little."""


def write_costs(config: ScheduleConfig, chips: str, file: Path = COSTS_FILE) -> None:
    """Compiles the candidates for every chip, prints their costs, and writes the table."""
    tables = [dict(FORWARD), dict(BACKWARD)]
    for chip in chip_names("--costs", chips):
        kernels = BOUNDED if target_of(chip).wide else PLAIN, BACK
        for table, name in zip(tables, kernels, strict=True):
            table[chip] = dict(entries(name, chip, config.timeout))
            check(bool(table[chip]), f"{chip}: no candidate of {name!r} fits into fast memory")
    ordered = [{chip: table[chip] for chip in CHIPS if chip in table} for table in tables]
    write_file(file, module(*ordered, versions(("jax", "libtpu"))))
    print(f"written: {file}")


def entries(name: str, chip: str, timeout: int) -> Iterator[tuple[Blocks, TileCosts]]:
    """The cost of a kernel's tiles on a chip, by size; sizes that do not fit into its fast memory are left out."""
    for size in SCHEDULED[name].sizes:
        try:
            cost, _ = schedule_of(name, chip, COST_SHAPE, size, timeout)
        except DoesNotCompile as error:
            if "memory space vmem" not in str(error):
                raise
            print(f"{chip}: {name}: {tuple(size)} does not fit into fast memory")
            continue
        outer = size.k if name == BACK else size.q
        found = entry(cost, COST_SHAPE.heads * COST_SHAPE.length // outer)
        print(f"{chip}: {name}: {tuple(size)} {found}", flush=True)
        yield size, found


def entry(cost: Cost, rows: int) -> TileCosts:
    """Cycles of a whole tile, of a masked tile, and of a row without its tiles.

    A tile costs no less than its matrix products; a row is the rest of all cycles, divided by the number of rows.
    """
    kinds = ((part.name.partition(",")[0], part) for part in cost.hot if part.times)
    tiles = {kind: part for kind, part in kinds if kind in ("whole", "masked")}
    each = {kind: max(part.cycles, part.floor) for kind, part in tiles.items()}
    spent = sum(part.times * each[kind] for kind, part in tiles.items())
    rest = (cost.total_with_stalls - spent) / rows
    return round(each["whole"]), round(each["masked"]), round(rest)


_HEAD = '''\
"""What tiles cost on each chip, in cycles of the compiler's schedule, as ``python -m train bench --costs`` writes them.

For blocks ``(queries, keys, part)`` of causal attention with head size {} in bfloat16: a whole tile, a masked tile,
and what a row of tiles costs beside its tiles. The sizes of other calls' tiles are chosen by the same numbers.
"""

# Scheduled by libtpu {} under jax {}.
'''


def module(forward: Mapping, backward: Mapping, found: Mapping[str, str]) -> str:
    """The text of the table, a Python module."""
    head = _HEAD.format(COST_SHAPE.head_dim, found["libtpu"], found["jax"])
    return "\n".join((head, _table("FORWARD", forward), _table("BACKWARD", backward)))


def _table(name: str, chips: Mapping[str, Mapping[Blocks, TileCosts]]) -> str:
    lines = [f"{name} = {{"]
    for chip, table in chips.items():
        lines += [f'    "{chip}": {{', *(f"        {tuple(size)}: {cost}," for size, cost in table.items()), "    },"]
    return "\n".join([*lines, "}", ""])
