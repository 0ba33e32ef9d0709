"""Implementations to compare: programs to compile, and what their authors state about the kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from train.lab.schedule.cost import Launch

Blocks = Mapping[str, int]


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
    """A function to compile, built only in the compiling process, and what its author states about its kernels."""

    make: Callable[[], tuple[Callable, list]]  # the function and its abstract arguments
    launches: tuple[Launch, ...]  # one for each kernel; tables show each at its own best block sizes


@dataclass(frozen=True)
class Implementation:
    """A family of programs, one for every choice of block sizes."""

    build: Callable[..., KernelProgram]  # from a shape, block sizes by name, and if `by_chip` the chip's name
    sweep: tuple[Blocks, ...]
    needs: str | None = None  # a package that may not be installed
    by_chip: bool = False
    against: Callable[[str], str] | None = None  # from a chip's name to the implementation to compare with

    def program(self, shape: KernelShape, blocks: Blocks, chip: str) -> KernelProgram:
        """The program for one chip."""
        return self.build(shape, **blocks, **({"chip": chip} if self.by_chip else {}))
