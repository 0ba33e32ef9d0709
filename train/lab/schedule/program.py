"""Implementations to compare: programs to compile, and what their authors state about the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from posjax.attention.tiles import Blocks
from train.lab.schedule.cost import Launch


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
