"""Measures compiled steps of any trainer in the same way: the time by parts of a decoder and by passes."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from train.lab.steps.parts import Widths, part_of, pass_of
from train.lab.steps.products import products_of
from train.plan.compiling import DeviceMemory
from train.plan.hlo import Instruction
from train.plan.network import Traffic, kind_of
from train.plan.timeline import Simulator, Tally


class Visit(NamedTuple):
    """An instruction of the program that runs separately: in the entry, a loop or a branch."""

    computation: str
    line: Instruction
    times: float  # how often it runs, from the trips of loops
    chance: float  # probability that its enclosing branches are taken


@dataclass
class Total:
    """All launches of a kernel, or all collectives of a kind."""

    times: float = 0.0
    seconds: float | None = 0.0  # of a collective on the links, a hidden one too; None if unknown
    bytes: float = 0.0

    def add(self, times: float, seconds: float | None, size: float = 0.0) -> None:
        """Adds some that are alike."""
        self.times += times
        self.bytes += times * size
        self.seconds = None if seconds is None or self.seconds is None else self.seconds + times * seconds


@dataclass
class Breakdown:
    """The measurements of a step."""

    name: str
    memory: DeviceMemory
    tokens: int
    tally: Tally
    parts: Counter[tuple[str, str]] = field(default_factory=Counter)  # seconds of a device, by part and pass
    kernels: dict[tuple[str, str], Total] = field(default_factory=lambda: defaultdict(Total))
    collectives: dict[tuple[str, str], Total] = field(default_factory=lambda: defaultdict(Total))
    flops: float = 0.0  # of matrix products on a device; those of kernels are unknown

    @property
    def has_unknown(self) -> bool:
        """Whether the time of a kernel is unknown, so that the step takes longer."""
        return any(launches.seconds is None for launches in self.kernels.values())


def measure(name: str, simulator: Simulator, memory: DeviceMemory, tokens: int, widths: Widths) -> Breakdown:
    """Simulates a program and sums its instructions by part and pass.

    The seconds of all parts add up to the timeline's compute; kernels and waiting come in addition.
    """
    breakdown = Breakdown(name, memory, tokens, simulator.run())
    for visit in visits(simulator):
        if visit.line.opcode == "custom-call":
            _add_kernel(breakdown, simulator, visit)
        else:
            _add_part(breakdown, simulator, visit, widths)
    for times, kind, traffic in _collectives(simulator):
        breakdown.collectives[kind, traffic.dtype].add(times, traffic.seconds, traffic.bytes)
    return breakdown


def _collectives(simulator: Simulator) -> Iterator[tuple[float, str, Traffic]]:
    """How often each collective within a slice starts; a collective that is spread over fusions counts once."""
    seen = set()
    for computation, line, times, _ in visits(simulator):
        if kind := kind_of(line):
            yield times, kind, simulator.network.traffic(line, kind)
        elif not line.name.startswith("async-collective-done"):
            for kind, traffic, channel in simulator.hidden_traffic(line):
                if (computation, channel) not in seen:
                    seen.add((computation, channel))
                    yield times, kind, traffic


def visits(
    simulator: Simulator, computation: str | None = None, times: float = 1, chance: float = 1
) -> Iterator[Visit]:
    """Every instruction that runs separately, with its count: through loops, and the longest branch of conditionals."""
    module, name = simulator.module, computation or simulator.module.entry
    for line in module.computations[name]:
        if line.opcode == "while":
            body = line.attribute(r"body=%?([\w.\-]+)")
            yield from visits(simulator, body, times * (module.trips(line) or 1), chance)
        elif line.opcode in ("call", "conditional"):
            longest = max(line.calls, key=lambda branch: simulator.run(branch).seconds)
            taken = simulator.chance(longest) if len(line.calls) > 1 else 1.0
            yield from visits(simulator, longest, times, chance * taken)
        else:
            yield Visit(name, line, times, chance)


def _add_kernel(breakdown: Breakdown, simulator: Simulator, visit: Visit) -> None:
    seconds = simulator.kernels.seconds(visit.line)
    if seconds == 0:  # not a kernel but a custom call that names a buffer
        return
    name = re.sub(r"[.\d]+$", "", visit.line.name)
    breakdown.kernels[name, pass_of(visit.line.op_name)].add(visit.times, seconds)


def _add_part(breakdown: Breakdown, simulator: Simulator, visit: Visit, widths: Widths) -> None:
    computation, line, times, chance = visit
    seconds = simulator.seconds(computation, line)
    if not seconds:
        return
    times = times * chance
    breakdown.parts[part_of(simulator.module, computation, line, widths), pass_of(line.op_name)] += times * seconds
    breakdown.flops += times * sum(product.flops for product in products_of(simulator.module, computation, line))
