"""Published facts about chips: what their units, memory and links can do at most.

What the kernels ask of a TPU is in ``posjax.attention.tpu.blocks.TARGETS``.
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
class Network:
    """The links of a generation; bandwidths in GB/s, one way."""

    hbm_gib: float  # of a chip
    link: float  # between two neighbours
    dcn: float  # of a chip to other slices
    dimensions: int
    devices: int = 1  # that a chip shows itself as; they share its links
    within: float = 0.0  # between the devices of a chip

    def rings(self, sizes: Sequence[int]) -> tuple[bool, ...]:
        """Along which dimensions of a slice the links close into rings.

        In three dimensions along all or none: optical switches join whole cubes of 4 x 4 x 4. In two along those that
        are as wide as a whole pod, 16 chips.
        """
        if self.dimensions == 3:
            return (all(size % 4 == 0 for size in sizes),) * 3
        return tuple(size == 16 for size in sizes)


@dataclass(frozen=True)
class Chip:
    """One TPU. Bandwidth and peak are published for a whole chip, whose cores share them."""

    name: str
    peak: float  # bfloat16 FLOP/s
    topology: str  # the smallest one that libtpu knows
    cores: int
    multiply_adds: int  # of one core in one cycle, bf16
    gigahertz: float  # follows from the published peak: 2 x multiply-adds x cores x clock
    bandwidth: float  # GB/s of HBM
    streaming: float  # GB/s that its compiler expects of the sum of two float32 arrays (jax 0.10.2, libtpu 0.0.42.1)
    branch_slots: int  # bundles that still run behind a branch
    network: Network | None = None  # None where no pod of it is planned
    clock_is_assumed: bool = False

    @property
    def kind(self) -> str:
        """JAX's name for its devices."""
        return next(kind for kind, target in TARGETS.items() if target.name == self.name)

    @property
    def device_streaming(self) -> float:
        """`streaming` of one device: of a chip, or of the half of one that jax calls so."""
        return self.streaming / (self.network.devices if self.network else 1)

    @property
    def array(self) -> int:
        """How wide and how high one systolic array is."""
        return 256 if TARGETS[self.kind].wide else 128

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


# The clock of 7x makes its published 2307 TFLOP/s out of arrays like those of v6e. The link inside a chip of 7x is said
# to be six times as fast as one between chips. The data centre's network has 25 (v5e), 50 (v5p) and 100 Gb/s for each
# chip by Google Cloud's pages of the chips.
_ALL = (
    Chip("v4", 275e12, "v4:2x2x1", 2, 65_536, 1.05, 1228.0, 417.0, 1),
    Chip("v5e", 197e12, "v5e:2x2", 1, 65_536, 1.5, 819.0, 471.0, 4, Network(16, 45, 3.125, 2)),
    Chip("v5p", 459e12, "v5p:2x2x1", 2, 65_536, 1.75, 2765.0, 1235.0, 4, Network(95, 90, 6.25, 3)),
    Chip("v6e", 918e12, "v6e:2x2", 1, 262_144, 1.75, 1640.0, 725.0, 4, Network(32, 90, 12.5, 2)),
    Chip(
        *("7x", 2307e12, "tpu7x:2x2x1", 2, 262_144, 2.2, 7380.0, 6296.0, 6),
        Network(192, 90, 12.5, 3, devices=2, within=540),
        clock_is_assumed=True,
    ),
)

CHIPS = {chip.name: chip for chip in _ALL}

PEAK_FLOPS = {
    **{chip.kind: chip.peak for chip in CHIPS.values()},
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989.5e12,
    "NVIDIA H200": 989.5e12,
    "NVIDIA B200": 2250e12,
}
"""Published bfloat16 FLOP/s of a chip, without sparsity, by the name that JAX gives the kind of its devices."""


def chip(name: str) -> Chip:
    """The chip of that name, or a ValueError that names the known ones."""
    check_choice("chip", name, tuple(CHIPS))
    return CHIPS[name]
