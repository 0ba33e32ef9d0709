"""From bundles to cycles: programs to compile, and a kernel's parts, times how often each one runs.

A schedule gives the cost of one run of a part, not how often it runs. The author of the kernel states that as
`Executions`, in program order. They are matched to the compiler's parts, hot ones to hot ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from posjax._checks import check
from posjax.attention.tiles import Blocks
from train.lab.schedule.kernels import Kernel, KernelPart
from train.runtime.chips import Chip, Product

TILE = 512
"""Costs are given for this many queries times this many keys."""

_SMALL = 16
"""Conditionals with fewer bundles need no `Executions`: they count as often as the part around them."""


@dataclass(frozen=True)
class Executions:
    """How often one part of a kernel runs in a launch; a part is hot if it multiplies matrices."""

    name: str
    times: float
    products: tuple[Product, ...] = ()  # of one run
    inside: tuple[Executions, ...] = ()  # conditionals in a hot part that run less often than the part


@dataclass(frozen=True)
class Launch:
    """One kernel of an implementation: the facts on one launch that its author knows and the compiler does not."""

    kernel: str  # part of the kernel's name; jax adds the names of transformations
    steps: int  # of the grid
    runs: tuple[Executions, ...]  # in program order; parts that are not named run once per step
    area: float  # the query-key pairs of all visited tiles, over all heads
    needed: float  # the pairs among them that the mask allows
    moved_bytes: float  # between HBM and VMEM


@dataclass(frozen=True)
class KernelShape:
    """The shape of the attention."""

    length: int
    heads: int
    head_dim: int

    @property
    def causal_pairs(self) -> int:
        """The query-key pairs of causal attention, over all heads: n (n + 1) / 2 for each."""
        return self.heads * self.length * (self.length + 1) // 2


@dataclass(frozen=True)
class KernelProgram:
    """A function to compile, built only in the compiling process, and what its author states about its kernel."""

    make: Callable[[], tuple[Callable, list]]  # the function and its abstract arguments
    launch: Launch


@dataclass(frozen=True)
class Implementation:
    """A family of programs, one for every choice of block sizes."""

    program: Callable[[KernelShape, Blocks, str], KernelProgram]  # for one chip, by its name
    sizes: tuple[Blocks, ...]


@dataclass(frozen=True)
class Hot:
    """One part that uses the matrix units."""

    name: str
    times: float
    bundles: int
    cycles: int
    floor: float
    spills: int


@dataclass(frozen=True)
class Cost:
    """The cost of one launch, in cycles of one core for 512 x 512 of visited area."""

    kernel: str
    hot: tuple[Hot, ...]
    bundles: float  # with every hot part at least at the floor of its matrix units
    cycles: float  # from the scheduler's cycles, which include latencies and busy units
    floor: float
    memory_cycles: float  # that HBM needs to move the bytes, at the chip's bandwidth
    area: float
    needed: float  # the area that the mask allows

    @property
    def total_with_stalls(self) -> float:
        """Cycles of the whole launch, by the scheduler's cycles."""
        return self.cycles * self.area / TILE**2

    @property
    def by_need(self) -> float:
        """Cycles for 512 x 512 of allowed pairs, by bundles: larger tiles visit more masked pairs."""
        return self.bundles * self.area / self.needed


def find_cost(kernels: Sequence[Kernel], launch: Launch, chip: Chip) -> Cost:
    """The cost of the one kernel whose name contains that of the launch."""
    found = [kernel for kernel in kernels if launch.kernel in kernel.name]
    names = _words(kernel.name for kernel in kernels)
    check(len(found) == 1, f"expected one kernel named {launch.kernel}, found {names}")
    return cost(found[0], launch, chip)


def cost(kernel: Kernel, launch: Launch, chip: Chip) -> Cost:
    """Cycles for 512 x 512 of visited area,

        512^2 / area  x  sum over parts of  times x max(bundles, MXU floor).

    In parallel the memory needs  moved bytes / area x 512^2 / (HBM bytes per cycle)  cycles.
    """
    named = match_runs(kernel, launch)
    times = _times(kernel, launch, named, chip)
    per_tile = TILE**2 / launch.area
    floors = [chip.mxu_floor(named[i].products) if i in named else 0.0 for i in range(len(kernel.parts))]
    everything = list(zip(kernel.parts, times, floors, strict=True))
    return Cost(
        kernel=launch.kernel,
        hot=tuple(_hot(kernel.parts[i], run, floors[i]) for i, run in named.items() if run.products),
        bundles=per_tile * sum(n * max(part.bundles, floor) for part, n, floor in everything),
        cycles=per_tile * sum(n * max(part.cycles, floor) for part, n, floor in everything),
        floor=per_tile * sum(n * floor for _, n, floor in everything),
        memory_cycles=per_tile * launch.moved_bytes / chip.bytes_per_cycle,
        area=launch.area,
        needed=launch.needed,
    )


def _hot(part: KernelPart, run: Executions, floor: float) -> Hot:
    spills = part.slots.get("SPILL", 0) + part.slots.get("FILL", 0)
    return Hot(run.name, run.times, part.bundles, part.cycles, floor, spills)


def match_runs(kernel: Kernel, launch: Launch) -> dict[int, Executions]:
    """The part that each stated run belongs to, by the index of the part.

    Hot parts are matched in program order. So are conditionals between two hot parts; if there are more of them than
    stated, the largest ones are taken, and if there are none, the compiler has merged them into the code around them.
    """
    stated, found = _segments(launch.runs, lambda run: bool(run.products)), _candidates(kernel, _grid(kernel, launch))
    expected = f"{kernel.name}: expected {_words(run.name for run in launch.runs)}"
    parts = _segments(found, lambda i: kernel.parts[i].is_hot)
    check(
        len(stated) == len(parts),
        f"{expected}, {len(stated) - 1} of them with matrix products; found {len(parts) - 1} parts that use the MXU, "
        f"of {_words(str(kernel.parts[i].bundles) for i in found if kernel.parts[i].is_hot)} bundles",
    )
    named = {}
    for (hot, runs), (index, cold) in zip(stated, parts, strict=True):
        if hot is not None:
            named[index] = hot
        check(
            not cold or len(runs) <= len(cold),
            f"{expected}; for {_words(run.name for run in runs)} found {len(cold)} conditionals or loops, "
            f"of {_words(str(kernel.parts[i].bundles) for i in cold)} bundles",
        )
        named |= _largest(kernel, cold, runs)
        if hot is not None:
            named |= _largest(kernel, [i for i, part in enumerate(kernel.parts) if part.parent == index], hot.inside)
    return dict(sorted(named.items()))


def _largest(kernel: Kernel, parts: list[int], runs: Sequence[Executions]) -> dict[int, Executions]:
    """The runs, in program order, of the largest of some parts."""
    largest = sorted(parts, key=lambda i: -kernel.parts[i].bundles)[: len(runs)]
    return dict(zip(sorted(largest), runs, strict=False))


def _segments(items: Sequence, is_hot) -> list[tuple]:
    """[(None, cold items before the first hot one), (hot item, cold items after it), ...]."""
    segments = [(None, [])]
    for item in items:
        if is_hot(item):
            segments.append((item, []))
        else:
            segments[-1][1].append(item)
    return segments


def _words(names) -> str:
    return ", ".join(names) or "nothing"


def _candidates(kernel: Kernel, grid: int | None) -> list[int]:
    """The parts that a run can name.

    These are hot parts, loops around them whose trips the compiler does not know, and any other loop or conditional
    that is not small, unless it is inside one of these.
    """
    around, found = _around_hot(kernel), []
    for i, part in enumerate(kernel.parts):
        if i in around and not part.is_hot:
            is_candidate = part.kind == "loop" and part.trips is None and i != grid
        else:
            nested = any(above in found and above not in around for above in _above(kernel, i))
            is_candidate = part.is_hot or (part.bundles >= _SMALL and not nested)
        if is_candidate:
            found.append(i)
    return found


def _above(kernel: Kernel, index: int) -> Iterator[int]:
    while (index := kernel.parts[index].parent) is not None:
        yield index


def _times(kernel: Kernel, launch: Launch, named: dict[int, Executions], chip: Chip) -> list[float]:
    """How often each part runs, over all cores; a part that no run names runs as often as the part around it."""
    grid = _grid(kernel, launch)
    cores, trips = (1, 1) if grid is None else _cores_and_trips(kernel, kernel.parts[grid], launch.steps, chip)
    never, counts = _never(kernel, named), []
    for i, part in enumerate(kernel.parts):
        count = cores if part.parent is None else counts[part.parent]
        if i in named:
            count = named[i].times
        elif i == grid:
            count = cores * trips
        elif i in never:
            count = 0
        elif grid is not None and part.parent == grid and part.kind == "branch" and i in _around_hot(kernel):
            count = launch.steps  # the first and the last trip only fill and drain the pipeline
        elif part.kind == "loop":
            check(part.trips is not None, f"{kernel.name}: a loop of {part.bundles} bundles; state how often it runs")
            count *= part.trips
        counts.append(count)
    return counts


def _never(kernel: Kernel, named: dict[int, Executions]) -> set[int]:
    """Conditionals whose hot parts are all stated to run 0 times."""
    alive = {above for i, run in named.items() if run.times for above in _above(kernel, i)}
    return {i for i in _around_hot(kernel) - alive if kernel.parts[i].kind == "branch"}


def _around_hot(kernel: Kernel) -> set[int]:
    """The parts that contain hot ones."""
    return {above for i, part in enumerate(kernel.parts) if part.is_hot for above in _above(kernel, i)}


def _grid(kernel: Kernel, launch: Launch) -> int | None:
    """The loop over the grid: the outermost loop around hot parts. A grid of one step needs no loop."""
    around = _around_hot(kernel) if launch.steps > 1 else ()
    return next((i for i, part in enumerate(kernel.parts) if part.kind == "loop" and i in around), None)


def _cores_and_trips(kernel: Kernel, grid: KernelPart, steps: int, chip: Chip) -> tuple[int, int]:
    """How many cores share the grid, and how often each runs its loop: up to two trips more than its steps."""
    if grid.trips is None:  # a grid whose size the compiler does not know
        return 1, steps + 2
    for cores in range(1, chip.cores + 1):
        if 0 <= grid.trips - steps / cores <= 2:
            return cores, grid.trips
    raise ValueError(f"{kernel.name}: {steps} grid steps were stated, but the grid's loop has {grid.trips} trips")
