"""Predicts the time of a compiled program by simulating it.

The instructions of a computation run in the order in which the compiler scheduled them. A fusion takes the cycles that
the compiler expects, with its HBM traffic. A look-up or a sort, for which the compiler gives no cycles, takes the time
of the bytes that it moves. A kernel takes the time of `train.plan.kernels`, a loop that of all its trips. A
conditional takes the time of its longest branch, times the probability that the mask lets the kernels in it run. A
collective that is started first and awaited later overlaps with the instructions between; a collective inside a fusion
overlaps with the fusion. Collectives over the same mesh axes queue up, except permutations in opposite directions. Any
other collective blocks everything. An exchange between slices starts when the hosts send it or, if the compiler defers
it, with the next exchange that is not deferred, and runs until its result is awaited.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from train.plan.hbm_traffic import is_lookup, moved_bytes
from train.plan.hlo import Instruction, Module, inside
from train.plan.kernels import Kernels
from train.plan.network import Network, Traffic, between_slices, kind_of


@dataclass
class Tally:
    """The time of a computation by kind, in seconds on one device, and the bytes it moves."""

    compute: float = 0.0  # fusions, copies
    kernels: float = 0.0  # written by hand
    exposed: float = 0.0  # waiting for collectives
    moved: Counter = field(default_factory=Counter)  # bytes by axes and kind of collective
    busy: Counter = field(default_factory=Counter)  # seconds of collectives by axes, hidden ones too
    unknown: Counter = field(default_factory=Counter)  # instructions whose time or count is unknown

    @property
    def seconds(self) -> float:
        """The total time."""
        return self.compute + self.kernels + self.exposed

    def add(self, other: Tally, times: int = 1) -> None:
        """Adds another computation, run this many times."""
        self.compute += times * other.compute
        self.kernels += times * other.kernels
        self.exposed += times * other.exposed
        for name in ("moved", "busy", "unknown"):
            for key, value in getattr(other, name).items():
                getattr(self, name)[key] += value * (1 if name == "unknown" else times)


@dataclass
class Simulator:
    """Simulates a program, every computation once."""

    module: Module
    network: Network
    kernels: Kernels
    _tallies: dict[str, Tally] = field(default_factory=dict)

    def run(self, computation: str | None = None) -> Tally:
        """The time of a computation; by default of the whole program."""
        name = computation or self.module.entry
        if name not in self._tallies:
            self._tallies[name] = _Walk(self, name, Tally()).through(self.module.computations[name])
        return self._tallies[name]

    def seconds(self, computation: str, line: Instruction) -> float:
        """The time of an instruction that is neither a kernel nor a collective,

            cycles / clock                                      as the compiler expects
            bytes moved / (bandwidth of HBM / devices a chip)   for a look-up or a sort without cycles

        and 0 for others without cycles: scalars, and instructions that only name an array. The second is a lower bound
        for a look-up; rows shorter than one HBM access take longer.
        """
        pod = self.network.pod
        if line.cycles is not None:
            return line.cycles * pod.seconds_per_cycle
        if not is_lookup(self.module, line):
            return 0.0
        return moved_bytes(self.module, computation, line) / pod.hbm_bandwidth

    def chance(self, branch: str) -> float:
        """The probability that a branch is taken: that of the likeliest kernel in it, or 1."""
        found = (self.kernels.chance(line) for line in self._inside(branch) if line.opcode == "custom-call")
        return max((chance for chance in found if chance is not None), default=1.0)

    def hidden_traffic(self, line: Instruction) -> list[tuple[str, Traffic, str]]:
        """The collectives inside a fusion, or started by an instruction: kind, traffic and channel."""
        found = [(kind, part) for name in line.calls for part in self._inside(name) if (kind := _kind(name, part))]
        channel = r"channel_id=(\d+)"
        return [(kind, self.network.traffic(part, kind), part.attribute(channel) or part.name) for kind, part in found]

    def _inside(self, name: str) -> list[Instruction]:
        return list(inside(self.module, name)) if name in self.module.computations else []


def _kind(computation: str, line: Instruction) -> str | None:
    """The kind of collective; on TPUs a reduce-scatter is an all-reduce in a fusion that slices out each device's
    part."""
    kind = kind_of(line)
    return "reduce-scatter" if kind == "all-reduce" and computation.startswith("all-reduce-scatter") else kind


def _exchange(line: Instruction) -> str | None:
    """The name that matches a send with its receive."""
    return line.attribute(r'_xla_host_transfer_rendezvous="([^"]*)"')


@dataclass
class _Walk:
    """The simulation of one computation."""

    simulator: Simulator
    computation: str
    tally: Tally
    free: dict = field(default_factory=lambda: defaultdict(float))  # by axes and direction, when links are free again
    done: dict[str, float] = field(default_factory=dict)  # by name or channel, when a started transfer is complete
    halves: dict[str | None, list[Instruction]] = field(default_factory=dict)  # sends and receives, by exchange
    deferred: list[Instruction] = field(default_factory=list)  # sent with the next exchange that is not deferred

    def through(self, lines: list[Instruction]) -> Tally:
        for line in lines:
            if between_slices(line):
                self.halves.setdefault(_exchange(line), []).append(line)
        for line in lines:
            self._step(line)
        self._send_deferred()
        self._wait(max(self.done.values(), default=0.0))
        return self.tally

    def _step(self, line: Instruction) -> None:
        kind = kind_of(line)
        if line.opcode == "while":
            self._loop(line)
        elif line.opcode in ("call", "conditional"):
            self._branch(line)
        elif kind:
            self._collective(line, kind, self.simulator.network.traffic(line, kind))
        elif line.opcode in ("async-start", "call-start"):  # the latter on the SparseCores of 7x
            self._asynchronous(line)
        elif between_slices(line):
            self._cross(line)
        elif line.opcode.endswith("-done") and line.operands[0] in self.done:
            self._wait(self.done.pop(line.operands[0]))
        elif line.opcode == "custom-call":
            self._kernel(line)
        else:
            self._compute(line)

    def _asynchronous(self, line: Instruction) -> None:
        found = self.simulator.hidden_traffic(line)
        for kind, traffic, _ in found:
            self._collective(line, kind, traffic)
        if not found:
            self._compute(line)

    def _loop(self, line: Instruction) -> None:
        trips = self.simulator.module.trips(line)
        if trips is None:
            self.tally.unknown[f"trips of {line.name}"] += 1
        body = line.attribute(r"body=%?([\w.\-]+)")
        self.tally.add(self.simulator.run(body), 1 if trips is None else trips)

    def _branch(self, line: Instruction) -> None:
        parts = {name: self.simulator.run(name) for name in line.calls}
        longest = max(parts, key=lambda name: parts[name].seconds)
        self.tally.add(parts[longest])
        if len(parts) > 1:
            # Kernels in the branch are not scaled: their mean number of visited tiles includes the zero tiles of calls
            # in which the branch does not run.
            spared = 1 - self.simulator.chance(longest)
            self.tally.compute -= spared * parts[longest].compute
            self.tally.exposed -= spared * parts[longest].exposed

    def _compute(self, line: Instruction) -> None:
        ends = [self._fused(line, *found) for found in self._hidden(line)]
        self.tally.compute += self.simulator.seconds(self.computation, line)
        self._wait(max(ends, default=0.0))

    def _hidden(self, line: Instruction) -> list[tuple[str, Traffic, str]]:
        found = self.simulator.hidden_traffic(line)
        if found and line.opcode != "fusion":
            self.tally.unknown[f"collectives in a {line.opcode}"] += len(found)
            return []
        return found

    def _fused(self, line: Instruction, kind: str, traffic: Traffic, channel: str) -> float:
        """The time at which a fusion has the result of the collective inside it; 0 if it does not wait for it.

        A collective that one fusion starts and another awaits also appears in each fusion that overlaps with it.
        """
        if line.name.startswith("async-collective-done"):
            return self.done.pop(channel, 0.0)
        if channel in self.done:
            return 0.0
        end = self._start(kind, traffic)
        if line.name.startswith("async-collective-start"):
            self.done[channel] = end
            return 0.0
        return end

    def _kernel(self, line: Instruction) -> None:
        seconds = self.simulator.kernels.seconds(line)
        if seconds is None:
            self.tally.unknown[f"kernel {line.name.split('.')[0]}"] += 1
        self.tally.kernels += seconds or 0.0

    def _collective(self, line: Instruction, kind: str, traffic: Traffic) -> None:
        end = self._start(kind, traffic)
        if line.opcode.endswith("-start"):
            self.done[line.name] = max(end, self.done.get(line.name, 0.0))
        else:
            self._wait(end)

    def _cross(self, line: Instruction) -> None:
        self.deferred.append(line)
        if "AGGREGATE_STATUS_DEFER" not in line.attributes:
            self._send_deferred()

    def _send_deferred(self) -> None:
        for line in self.deferred:
            self._send(line)
        self.deferred.clear()

    def _send(self, line: Instruction) -> None:
        """Starts an exchange with other slices; the ``-done`` instructions of its send and its receive wait for it."""
        halves = self.halves[_exchange(line)]
        if len(halves) == 1:
            self.tally.unknown["exchange without its other half"] += 1
        elif line.opcode == "send":
            larger = max(halves, key=lambda half: sum(array.bytes for array in half.results))
            kind = between_slices(line)
            end = self._start(kind, self.simulator.network.crossing(larger, kind))
            self.done |= {half.name: end for half in halves}

    def _start(self, kind: str, traffic: Traffic) -> float:
        """Starts a collective when its links are free; returns the time at which it is done."""
        self.tally.moved[traffic.axes, kind] += traffic.bytes
        self.tally.busy[traffic.axes] += traffic.seconds
        links = [(traffic.axes, way) for way in traffic.ways]
        end = max(self.tally.seconds, *(self.free[link] for link in links)) + traffic.seconds
        self.free.update(dict.fromkeys(links, end))
        return end + traffic.delay

    def _wait(self, until: float) -> None:
        self.tally.exposed += max(0.0, until - self.tally.seconds)
