"""The programs that ``--schedule`` compiles, and their predictions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from posjax._checks import check_choice, check_count
from posjax.scheme.presets import scheme_names
from train.lab.schedule.cost import Cost
from train.lab.schedule.implementations import SCHEDULED
from train.lab.schedule.program import Blocks, KernelShape


@dataclass(frozen=True)
class ScheduleConfig:
    """The programs: causal attention in bfloat16, batch 1, every implementation at all of its block sizes.

    If there are `lengths` or `head_dims`, our own causal kernels are compiled for all of these too. Whole attention
    layers are compiled for the schemes in `layers`, whose features need no other kernel than causal attention.
    """

    length: int = 32768
    num_heads: int = 4
    head_dim: int = 128
    implementations: tuple[str, ...] = tuple(SCHEDULED)
    lengths: tuple[int, ...] = ()
    head_dims: tuple[int, ...] = ()
    layers: tuple[str, ...] = ()
    timeout: int = 600  # seconds for one compilation

    def __post_init__(self):
        for name in ("length", "num_heads", "head_dim", "timeout"):
            check_count(f"schedule.{name}", getattr(self, name))
        for name in ("lengths", "head_dims"):
            for value in getattr(self, name):
                check_count(f"schedule.{name}", value)
        for name in self.implementations:
            check_choice("schedule.implementations", name, tuple(SCHEDULED))
        for name in self.layers:
            check_choice("schedule.layers", name, scheme_names())

    @property
    def shape(self) -> KernelShape:
        """The shape of the attention."""
        return KernelShape(self.length, self.num_heads, self.head_dim)

    @property
    def shapes(self) -> Iterator[KernelShape]:
        """All lengths, each with all head sizes."""
        if self.lengths or self.head_dims:
            for head_dim in self.head_dims or (self.head_dim,):
                for length in self.lengths or (self.length,):
                    yield KernelShape(length, self.num_heads, head_dim)


@dataclass(frozen=True)
class Prediction:
    """One program on one chip; `problem` says why there are no numbers."""

    chip: str
    implementation: str
    shape: KernelShape
    blocks: Blocks
    costs: tuple[Cost, ...] = ()  # one for every kernel of the implementation
    temp_bytes: int | None = None  # of the whole function, with the forward pass that a gradient needs
    problem: str | None = None
