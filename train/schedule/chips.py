"""The TPUs a kernel can be compiled for, and what their matrix units and memory can do at most."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from posjax._checks import check_choice

Product = tuple[int, int, int]
"""A matrix product [rows, contraction] x [contraction, columns]. The matrix units hold the second operand."""


@dataclass(frozen=True)
class Chip:
    """One TPU. Bandwidth and peak are published for a whole chip, whose cores share them."""

    topology: str  # the smallest one that libtpu knows
    cores: int
    multiply_adds: int  # of one core in one cycle, bf16
    array: int  # how wide and how high one systolic array is
    gigahertz: float  # follows from the published peak: 2 x multiply-adds x cores x clock
    bandwidth: float  # GB/s of HBM
    branch_slots: int  # bundles that still run behind a branch
    clock_is_assumed: bool = False

    @property
    def bytes_per_cycle(self) -> float:
        """HBM bytes that one core can move in one cycle: bandwidth / cores / clock."""
        return self.bandwidth / self.cores / self.gigahertz

    def mxu_floor(self, products: Iterable[Product]) -> float:
        """The least cycles that the matrix units of one core need for some matrix products.

        A product costs rows x up(contraction) x up(columns) / (multiply-adds per cycle), where `up` rounds up to whole
        arrays: what stands in an array is contraction x columns, and a part of it that is not filled idles.
        """
        products = [(rows, *(math.ceil(n / self.array) * self.array for n in held)) for rows, *held in products]
        return sum(map(math.prod, products)) / self.multiply_adds


CHIPS = {
    "v4": Chip("v4:2x2x1", 2, 65_536, 128, 1.05, 1228.0, 1),
    "v5e": Chip("v5e:2x2", 1, 65_536, 128, 1.5, 819.0, 4),
    "v5p": Chip("v5p:2x2x1", 2, 65_536, 128, 1.75, 2765.0, 4),
    "v6e": Chip("v6e:2x2", 1, 262_144, 256, 1.75, 1640.0, 4),
    # The clock makes the published 2307 TFLOP/s out of arrays like those of v6e.
    "7x": Chip("tpu7x:2x2x1", 2, 262_144, 256, 2.2, 7380.0, 6, clock_is_assumed=True),
}


def chip(name: str) -> Chip:
    """The chip of that name, or a ValueError that names the known ones."""
    check_choice("chip", name, tuple(CHIPS))
    return CHIPS[name]
