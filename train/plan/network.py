"""Collectives of a compiled program: the mesh axes over which they run, the bytes they move, and their time.

For B bytes on n devices that fill a box of the torus, k_d of them along dimension d, with links of W_d bytes a second
one way, and r_d = 2 directions if the row is a ring, else 1:

    all-gather, reduce-scatter   B (n - 1) / n / sum_d r_d W_d               B: the whole, gathered or before scattering
    all-reduce                   twice that
    all-to-all                   max_d  B k_d / (8 or 4) / W_d               B: of one device; 8 on a ring, 4 on a row
    collective-permute           B x (pairs routed over the busiest link) / W

and `LATENCY` for each hop. If neighbours of a group are s devices apart, s groups share the links.

Data between slices passes through the hosts. The compiler splits such a collective: it does what it can within a slice,
and hosts exchange the rest, each device its share. For k slices and W bytes a second per device,

    all-reduce                   2 B (k - 1) / k / W
    all-gather, reduce-scatter   B (k - 1) / k / W                           B: the larger of what is given and got
    others                       B / W

and `DCN_LATENCY`, which concurrent exchanges share.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from train.plan.hlo import Instruction
from train.plan.pods import DCN_LATENCY, LATENCY, Coordinates, Pod, box

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "collective-broadcast")

DCN = "replica (DCN)"
"""The label for traffic between slices, in place of mesh axes; slices are along `replica` only."""

_EXPLICIT = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^)]*(?:\)[^)]*)?)\))? ?\{([^}]*)\}")
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


def kind_of(line: Instruction) -> str | None:
    """Which collective an instruction is or starts; None for others, and for instructions that only wait."""
    opcode = line.opcode.removesuffix("-start")
    return opcode if opcode in COLLECTIVES else None


def between_slices(line: Instruction) -> str | None:
    """The kind of collective, such as ``all-reduce``, if an instruction is the hosts' part of one; None for others."""
    found = _BETWEEN_SLICES.search(line.attributes)
    kind = found[1].lower().replace("_", "-") if found else None
    return "collective-permute" if kind == "one-to-one" else kind


def groups_of(line: Instruction, devices: int) -> list[list[int]]:
    """The groups of devices that communicate; for a permutation the pairs of source and target."""
    if found := _PAIRS.search(line.attributes):
        return [list(map(int, pair.split(","))) for pair in re.findall(r"\{([\d,]+)\}", found[1])]
    if found := _NAMED.search(line.attributes):
        return _named_groups(found[1], found[2], found[3])
    if found := _IOTA.search(line.attributes):
        shape, source, order = (_numbers(text) for text in found.groups(default=""))
        ids = np.arange(math.prod(source)).reshape(source)
        return (ids.transpose(order) if order else ids).reshape(shape).tolist()
    found = _EXPLICIT.search(line.attributes)
    listed = [_numbers(group) for group in re.findall(r"\{([\d,]*)\}", found[1])] if found else []
    return [list(group) for group in listed if group] or [list(range(devices))]


def _named_groups(axes: str, ids: str | None, used: str) -> list[list[int]]:
    """The groups along the `used` axes of a mesh, from a text ``['a'=2,'b'=4] {'b'}``; ``'b':(2)2`` is a part of b."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    parts = {
        name: (int(before or 1), int(size or 0))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", used)
    }
    shape, chosen = [], []
    for name, size in sizes.items():
        before, extent = parts.get(name, (1, 1))
        extent = extent or size
        shape += [before, extent, size // before // extent]
        chosen += [False, name in parts, False]
    devices = _order(ids, math.prod(sizes.values())).reshape(shape)
    rest = [axis for axis, is_chosen in enumerate(chosen) if not is_chosen]
    along = [axis for axis, is_chosen in enumerate(chosen) if is_chosen]
    count = math.prod(shape[axis] for axis in along)
    return devices.transpose(rest + along).reshape(-1, count).tolist()


def _order(ids: str | None, count: int) -> np.ndarray:
    """The devices in the order of a mesh: 0, 1, ... without `ids`; else transposed, ``[8,2]T(1,0)``, or listed."""
    if not ids:
        return np.arange(count)
    found = re.search(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", ids)
    if found is None:
        return np.array(_numbers(ids))
    devices = np.arange(count).reshape(_numbers(found[1]))
    return (devices.transpose(_numbers(found[2])) if found[2] else devices).reshape(-1)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


WAYS = ("ahead", "back")
"""The two directions of a link, which work at the same time."""


def _way(pairs: Sequence[Sequence[int]]) -> str:
    """The direction in which most pairs of source and target send, in the order of the mesh."""
    ahead = sum(1 if target > source else -1 for source, target in pairs)
    return WAYS[0] if ahead >= 0 else WAYS[1]


@dataclass(frozen=True)
class Traffic:
    """One run of a collective."""

    axes: str  # of the mesh, as in "fsdp" or "data+fsdp"; "all" if no axis varies alone
    bytes: float  # that one device sends
    seconds: float  # for which the links are busy
    delay: float = 0.0  # additional time until arrival, when the links are free again
    dtype: str = ""  # of the largest array
    ways: tuple[str, ...] = WAYS  # the directions in which the links are used


@dataclass(frozen=True)
class Network:
    """The traffic of collectives over a mesh whose devices are placed on a slice."""

    pod: Pod
    axes: dict[str, int]
    coordinates: tuple[Coordinates, ...]  # of a slice's devices, in the order of the mesh

    def traffic(self, line: Instruction, kind: str) -> Traffic:
        """What a collective moves and how long it takes by itself."""
        largest = max(line.results, key=lambda array: array.bytes, default=None)
        return replace(self._traffic(line, kind), dtype=largest.dtype if largest else "")

    def _traffic(self, line: Instruction, kind: str) -> Traffic:
        groups = groups_of(line, len(self.coordinates))
        moved = moved_of(line, kind, len(groups[0]))
        if kind == "collective-permute":
            pairs = [pair for pair in groups if pair[0] != pair[1]]
            sent = moved if pairs else 0.0
            return Traffic(axes_of(self.axes, groups), sent, self._permute(pairs, moved), ways=(_way(pairs),))
        size = len(groups[0])
        if size == 1:
            return Traffic("none", 0.0, 0.0)
        share = (size - 1) / size * (2 if kind == "all-reduce" else 1)
        seconds = self._exchange(groups[0], moved) if kind == "all-to-all" else self._ring(groups[0], moved * share)
        return Traffic(axes_of(self.axes, groups), moved * share, seconds)

    def crossing(self, line: Instruction, kind: str) -> Traffic:
        """The traffic to other slices that a host sends for one device."""
        slices, links = self.pod.slices, self.pod.links
        size = float(sum(array.bytes for array in line.results if array.shape))
        others = (slices - 1) / slices
        moved = size * {"all-reduce": 2 * others, "all-gather": others, "reduce-scatter": others}.get(kind, 1.0)
        return Traffic(DCN, moved, moved * links.devices / (links.dcn * 1e9), DCN_LATENCY)

    def _links(self, group: Sequence[int]) -> Iterator[tuple[int, float, bool]]:
        """For every dimension along which a group extends: devices, bytes a second one way, whether it is a ring."""
        coordinates, links = [self.coordinates[device] for device in group], self.pod.links
        sides = box(coordinates)
        if sides is None:  # no box: treated as a row of chips
            yield len(group), links.link * 1e9, False
            return
        *chips, (on_chip, _) = sides
        sharing = links.devices // on_chip
        along = zip((*self.pod.chips_along, 1), (*self.pod.rings, False), strict=True)
        for (count, apart), (size, is_ring) in zip(chips, along, strict=False):
            if count > 1:
                closed = count * apart == size and is_ring
                yield count, links.link * 1e9 / apart / sharing, closed
        if on_chip > 1 and all(count == 1 for count, _ in chips):
            yield on_chip, links.within * 1e9, False

    def _ring(self, group: Sequence[int], moved: float) -> float:
        links = list(self._links(group))
        bandwidth = sum(link * (2 if closed else 1) for _, link, closed in links)
        return moved / bandwidth + LATENCY * sum(count // (2 if closed else 1) for count, _, closed in links)

    def _exchange(self, group: Sequence[int], moved: float) -> float:
        links = list(self._links(group))
        slowest = max(moved * count / (8 if closed else 4) / link for count, link, closed in links)
        return slowest + LATENCY * sum(count // (2 if closed else 1) for count, _, closed in links)

    def _permute(self, pairs: Sequence[Sequence[int]], moved: float) -> float:
        """The time if every pair is routed the shortest way, one dimension after the other."""
        load: Counter[tuple] = Counter()
        hops = 0
        for source, target in pairs:
            route = list(self._route(self.coordinates[source], self.coordinates[target]))
            load.update(route)
            hops = max(hops, len(route))
        speed = {link: (self.pod.links.within if link[-1] == "chip" else self.pod.links.link) for link in load}
        slowest = max((count * moved / (speed[link] * 1e9) for link, count in load.items()), default=0.0)
        return slowest + LATENCY * hops

    def _route(self, source: Coordinates, target: Coordinates) -> Iterator[tuple]:
        here, goal = list(source), list(target)
        for axis, size in enumerate(self.pod.chips_along):
            ahead = goal[axis] - here[axis]
            if self.pod.rings[axis] and abs(ahead) > size / 2:
                ahead -= int(math.copysign(size, ahead))
            sign = 1 if ahead > 0 else -1
            for _ in range(abs(ahead)):
                yield (*here[:-1], axis, sign)
                here[axis] = (here[axis] + sign) % size
        if here[-1] != goal[-1]:
            yield (*here, "chip")


def axes_of(axes: dict[str, int], groups: Sequence[Sequence[int]]) -> str:
    """The mesh axes along which the devices of some group differ."""
    shape = tuple(axes.values())
    varying = set()
    for group in groups:
        indices = np.unravel_index(np.asarray(group), shape)
        varying |= {axis for axis, at in zip(axes, indices, strict=True) if len(set(at.tolist())) > 1}
    return "+".join(axis for axis in axes if axis in varying) or "none"


def moved_of(line: Instruction, kind: str, size: int) -> float:
    """Bytes of the whole array that a group of `size` devices gathers, scatters or reduces; for other kinds, the
    bytes of one device.
    """
    results = [array.bytes for array in line.results]
    if line.opcode.endswith("-start"):
        # The result of a start is a tuple: the operands, the results, and scalars for synchronisation.
        results = [array.bytes for array in line.results if array.shape]
        results = results[len(results) // 2 :] if len(results) > 1 and kind != "all-reduce" else results
    # An all-reduce after which each device keeps its part is a reduce-scatter too, but its result is the whole array.
    return float(sum(results)) * (size if line.opcode.startswith("reduce-scatter") else 1)
