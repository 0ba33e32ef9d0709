"""TPU pods by name: ``v5p:8x8x8``. The memory of each generation's chips, and how chips and slices are linked."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from posjax._checks import check
from train.runtime.chips import CHIPS, GPUS, Chip, Links

GIB = 2**30

KNOWN = {name: chip for name, chip in CHIPS.items() if chip.links is not None}
"""The chips for whose pods plans are possible."""

Coordinates = tuple[int, ...]
"""Where a device is: the chip's coordinates, and the device's number on its chip."""


LATENCY = 1e-6
"""Seconds for one hop between chips."""

DCN_LATENCY = 1e-4
"""Seconds for one exchange between slices, through their hosts; assumed."""


@dataclass(frozen=True)
class Pod:
    """One slice of a pod, or several equal ones, joined by the data centre's network (DCN)."""

    generation: str
    chips_along: tuple[int, ...]  # of a slice
    slices: int = 1
    platform: ClassVar[str] = "tpu"

    @property
    def chip(self) -> Chip:
        """The data of one chip."""
        return CHIPS[self.generation]

    @property
    def links(self) -> Links:
        """How its chips are linked."""
        return CHIPS[self.generation].links

    @property
    def chips(self) -> int:
        """The number of chips of all slices."""
        return self.slices * math.prod(self.chips_along)

    @property
    def devices(self) -> int:
        """The number of jax's devices; each is a chip, or half a chip."""
        return self.chips * self.links.devices

    @property
    def cores(self) -> int:
        """The number of cores of one device, which share its work."""
        return self.chip.cores // self.links.devices

    @property
    def name(self) -> str:
        """``v5p:8x8x8``, or ``2 slices of v5p:8x8x8``."""
        return self.slice_name if self.slices == 1 else f"{self.slices} slices of {self.slice_name}"

    @property
    def slice_name(self) -> str:
        """``v5p:8x8x8``."""
        return f"{self.generation}:{'x'.join(map(str, self.chips_along))}"

    @property
    def topology(self) -> str:
        """The name by which the compiler knows a slice."""
        return ("tpu" if self.generation == "7x" else "") + self.slice_name

    @property
    def rings(self) -> tuple[bool, ...]:
        """For each dimension of a slice, whether its links form rings."""
        return self.links.rings(self.chips_along)

    @property
    def hbm_bytes(self) -> float:
        """HBM of one device, in bytes."""
        return self.links.hbm_gib * GIB / self.links.devices

    @property
    def hbm_bandwidth(self) -> float:
        """HBM bandwidth of one device, in bytes per second."""
        return 1e9 * self.chip.bandwidth / self.links.devices

    @property
    def peak_flops(self) -> float:
        """FLOP/s of one chip in bfloat16: 2 x multiply-adds x cores x clock."""
        return 2 * self.chip.multiply_adds * self.chip.cores * self.chip.gigahertz * 1e9

    @property
    def seconds_per_cycle(self) -> float:
        """Seconds of one clock cycle of a core."""
        return 1e-9 / self.chip.gigahertz


def pod_of(name: str, slices: int = 1) -> Pod:
    """The pod of that name, with this number of slices.

    Raises ValueError for an invalid name, a shape that the compiler refuses, or a number of slices below 1.
    """
    check(slices > 0, f"--slices: expected at least one, found {slices}")
    found = re.fullmatch(r"(?:tpu)?(\w+):(\d+(?:x\d+)*)", name)
    check(found is not None, f"--topology: expected a pod such as v5p:8x8x8, found {name!r}")
    generation, sizes = found[1], tuple(map(int, found[2].split("x")))
    check(
        generation in KNOWN,
        f"--topology: {name!r}: there is no chip {generation!r} (known: {', '.join((*KNOWN, *GPUS))})",
    )
    wanted = CHIPS[generation].links.dimensions
    example = {2: "16x16", 3: "8x8x8"}[wanted]
    check(
        len(sizes) == wanted and min(sizes) > 0,
        f"--topology: pods of {generation} have {wanted} dimensions, as in {generation}:{example}, found {name!r}",
    )
    return Pod(generation, sizes, slices)


def box(coordinates: Sequence[Coordinates]) -> list[tuple[int, int]] | None:
    """For each dimension of the box that some devices fill: how many devices are along it, and how far apart.

    The last dimension is the device's number on its chip. None if the devices do not fill a box.
    """
    sides = []
    for values in zip(*coordinates, strict=True):
        distinct = sorted(set(values))
        gaps = {b - a for a, b in itertools.pairwise(distinct)}
        if len(gaps) > 1:
            return None
        sides.append((len(distinct), gaps.pop() if gaps else 1))
    return sides if math.prod(count for count, _ in sides) == len(coordinates) else None
