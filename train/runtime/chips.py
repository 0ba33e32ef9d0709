"""Published facts about chips and GPUs: the peak rates of their units, memory and links.

What the kernels require of a TPU is in ``posjax.attention.tpu.blocks.TARGETS``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from posjax._checks import check_choice
from posjax.attention.tpu.blocks import TARGETS

Product = tuple[int, int, int]
"""A matrix product [rows, contraction] x [contraction, columns]. The matrix units hold the second operand."""


@dataclass(frozen=True)
class Links:
    """The links of a generation; bandwidths in GB/s, one way."""

    hbm_gib: float  # of a chip, as much as libtpu 0.0.42.1 lets programs use; the runtime keeps the rest
    link: float  # between two neighbours
    dcn: float  # of a chip to other slices
    dimensions: int
    devices: int = 1  # of jax for each chip; they share its links
    within: float = 0.0  # between the devices of a chip

    def rings(self, sizes: Sequence[int]) -> tuple[bool, ...]:
        """For each dimension of a slice, whether its links form rings.

        A slice of three dimensions has rings along all or none: optical switches join whole cubes of 4 x 4 x 4. A slice
        of two dimensions has rings along those as wide as a whole pod, 16 chips.
        """
        if self.dimensions == 3:
            return (all(size % 4 == 0 for size in sizes),) * 3
        return tuple(size == 16 for size in sizes)


@dataclass(frozen=True)
class Chip:
    """One TPU. Bandwidth and peak are those published for a whole chip; its cores share them."""

    name: str
    peak: float  # bfloat16 FLOP/s
    topology: str  # the smallest one that libtpu knows
    cores: int
    multiply_adds: int  # of one core in one cycle, bf16
    gigahertz: float  # follows from the published peak: 2 x multiply-adds x cores x clock
    bandwidth: float  # GB/s of HBM
    streaming: float  # GB/s that its compiler assumes for the sum of two float32 arrays (jax 0.10.2, libtpu 0.0.42.1)
    branch_slots: int  # bundles that still run after a branch
    links: Links | None = None  # None if pods of this chip are not planned
    clock_is_assumed: bool = False

    @property
    def kind(self) -> str:
        """JAX's name for its devices."""
        return next(kind for kind, target in TARGETS.items() if target.name == self.name)

    @property
    def device_streaming(self) -> float:
        """`streaming` of one device of jax: of a chip, or of half a chip."""
        return self.streaming / (self.links.devices if self.links else 1)

    @property
    def array(self) -> int:
        """The width, and height, of one systolic array."""
        return 256 if TARGETS[self.kind].wide else 128

    @property
    def bytes_per_cycle(self) -> float:
        """HBM bytes that one core can move in one cycle: bandwidth / cores / clock."""
        return self.bandwidth / self.cores / self.gigahertz

    def mxu_floor(self, products: Iterable[Product]) -> float:
        """The minimum number of cycles that the matrix units of one core need for some matrix products.

        A product costs rows x up(contraction) x up(columns) / (multiply-adds per cycle), where `up` rounds up to whole
        arrays: an array holds a block of contraction x columns, and its unfilled part idles.
        """
        products = [(rows, *(math.ceil(n / self.array) * self.array for n in held)) for rows, *held in products]
        return sum(map(math.prod, products)) / self.multiply_adds


# The clock of 7x is the one that gives its published 2307 TFLOP/s with arrays like those of v6e. The link inside a chip
# of 7x is said to be six times as fast as one between chips. The data centre's network has 25 (v5e), 50
# (v5p) and 100 Gb/s for each chip by Google Cloud's pages of the chips.
_ALL = (
    Chip("v4", 275e12, "v4:2x2x1", 2, 65_536, 1.05, 1228.0, 417.0, 1),
    Chip("v5e", 197e12, "v5e:2x2", 1, 65_536, 1.5, 819.0, 471.0, 4, Links(15.75, 45, 3.125, 2)),
    Chip("v5p", 459e12, "v5p:2x2x1", 2, 65_536, 1.75, 2765.0, 1235.0, 4, Links(95.74, 90, 6.25, 3)),
    Chip("v6e", 918e12, "v6e:2x2", 1, 262_144, 1.75, 1640.0, 725.0, 4, Links(31.25, 90, 12.5, 2)),
    Chip(
        *("7x", 2307e12, "tpu7x:2x2x1", 2, 262_144, 2.2, 7380.0, 6296.0, 6),
        Links(189.5, 90, 12.5, 3, devices=2, within=540),
        clock_is_assumed=True,
    ),
)

CHIPS = {chip.name: chip for chip in _ALL}


@dataclass(frozen=True)
class Card:
    """One GPU of a node; published numbers, bandwidths in GB/s one way."""

    name: str
    kind: str  # JAX's name for it
    peak: float  # bfloat16 FLOP/s, without sparsity
    memory: int  # bytes
    bandwidth: float  # of its memory
    nvlink: float  # to the other GPUs of its node together
    network: float  # to other nodes, its share of the node's network cards
    cores: int  # multiprocessors
    gigahertz: float
    shared_memory: int  # bytes of one multiprocessor
    cache: int  # bytes of the second level


_ALL_GPUS = (
    Card("h100", "NVIDIA H100 80GB HBM3", 989.5e12, 84_942_979_072, 3352.0, 450, 50, 132, 1.98, 233_472, 52_428_800),
    Card("h200", "NVIDIA H200", 989.5e12, 150_109_880_320, 4800.0, 450, 50, 132, 1.98, 233_472, 62_914_560),
)

GPUS = {gpu.name: gpu for gpu in _ALL_GPUS}

PEAK_FLOPS = {
    **{chip.kind: chip.peak for chip in CHIPS.values()},
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    **{gpu.kind: gpu.peak for gpu in GPUS.values()},
    "NVIDIA B200": 2250e12,
}
"""Published bfloat16 FLOP/s of a chip, without sparsity, by the name that JAX gives the kind of its devices."""


def chip(name: str) -> Chip:
    """The chip of that name, or a ValueError that names the known ones."""
    check_choice("chip", name, tuple(CHIPS))
    return CHIPS[name]
