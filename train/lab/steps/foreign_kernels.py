"""The time of other libraries' attention kernels: jax's and tokamax' splash kernels, jax's flash kernel.

The cost of a tile is read from the schedules that the compiler dumped when it compiled the step. The number of tiles
follows from the call and the mask. If either is unknown, the kernel's time is unknown.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from posjax._checks import check
from train.lab.schedule import implementations
from train.lab.schedule.cost import TILE, Cost, cost
from train.lab.schedule.kernels import Kernel, read_kernels
from train.lab.schedule.program import KernelProgram, KernelShape
from train.plan.hlo import Array, Instruction, arrays
from train.plan.kernels import HEAD, Kernels
from train.runtime.chips import Chip

Blocks = tuple[int, int, int]
"""Queries and keys of a tile, and how many of the keys are multiplied at once."""

_NAME = re.compile(r"splash|flash")
_METADATA = re.compile(r"xprof_metadata\W+(\{[^}]*\})")
_FLOAT = ("bf16", "f32", "f16")

_Program = Callable[[KernelShape, int, int, int], KernelProgram]


class ForeignCall(NamedTuple):
    """The facts that a kernel's call states."""

    name: str
    heads: int  # times batch
    queries: int
    keys: int
    head_dim: int
    blocks: Blocks | None


@dataclass(frozen=True)
class AnyKernels(Kernels):
    """Kernels of a program on one device, ours and others'."""

    schedules: Path | None = None  # folder of the compiler's dump
    blocks: Blocks | None = None  # block sizes of calls that do not state them

    def seconds(self, line: Instruction) -> float | None:
        """The time of a custom call; for a kernel that is not ours

            cycles = cycles for 512 x 512 of area  x  heads x queries x keys x share of tiles visited / 512^2 / cores

        where the first factor comes from the bundles of the kernel's parts: tiles, and starts and ends of rows. No part
        counts less than the minimum for its matrix products. None if the schedule, blocks or parts are unknown.
        """
        ours = super().seconds(line)
        call = None if ours is not None else foreign_call(line, self.blocks)
        if call is None or call.blocks is None:
            return ours
        found = self._cost(call, line)
        if found is None:
            return None
        area = call.heads * call.queries * call.keys * self.share(*call.blocks[:2])
        return found.bundles * area / TILE**2 / self.pod.cores * self.pod.seconds_per_cycle

    def _cost(self, call: ForeignCall, line: Instruction) -> Cost | None:
        kernel = next((self._dumped[name] for name in (call.name, _base(call.name)) if name in self._dumped), None)
        heads, rest = divmod(call.heads * call.queries, call.keys)  # as square attention of the same area
        if kernel is None or rest:
            return None
        shape = KernelShape(call.keys, heads, call.head_dim)
        fits = (
            _attempt(kernel, program(shape, *call.blocks), index, self.pod.chip) for program, index in _programs(line)
        )
        return next((found for found in fits if found is not None), None)

    @cached_property
    def _dumped(self) -> dict[str, Kernel]:
        """Kernels by the names of their calls, and by these names without numbers."""
        if self.schedules is None:
            return {}
        slots = self.pod.chip.branch_slots
        found = [kernel for part in ("splash", "flash") for kernel in read_kernels(self.schedules, slots, part)]
        custom = {kernel.name: kernel for kernel in found if kernel.is_custom}
        return {**{_base(name): kernel for name, kernel in custom.items()}, **custom}


def _base(name: str) -> str:
    return re.sub(r"(\.\d+)+$", "", name)


def _attempt(kernel: Kernel, program: KernelProgram, index: int, chip: Chip) -> Cost | None:
    """The cost of a kernel as the one with this index in a program; None if its parts do not match."""
    try:
        return cost(kernel, program.launches[index], chip)
    except ValueError:
        return None


def foreign_call(line: Instruction, blocks: Blocks | None = None) -> ForeignCall | None:
    """The call of an attention kernel of another library; None for anything else.

    Queries and keys are ``[..., heads, tokens, size]``. Splash's calls have their block sizes in the metadata; `blocks`
    are used for calls without it.
    """
    operands = arrays(line.attribute(r"operand_layout_constraints=\{(.*?)\}, \w+=") or "")
    tokens = [array.shape for array in operands if array.dtype in _FLOAT and len(array.shape) >= 3]
    if not _NAME.search(line.name) or len(tokens) < 3:
        return None
    q, k = tokens[:2]
    return ForeignCall(line.name, math.prod(q[:-2]), q[-2], k[-2], q[-1], blocks_in_metadata(line) or blocks)


def blocks_in_metadata(line: Instruction) -> Blocks | None:
    """The block sizes in a call's metadata, ``{"block_q": 1024, ...}``; None if it has none.

    The names of backward kernels' sizes have the suffix ``_dq`` or ``_dkv``.
    """
    found = _METADATA.search(line.attributes.replace("\\", ""))
    if found is None:
        return None
    sizes = json.loads(found[1])
    suffix = "_dq" if "_dq" in line.name else "_dkv" if "_dkv" in line.name else ""
    q, kv = sizes.get(f"block_q{suffix}"), sizes.get(f"block_kv{suffix}")
    return (q, kv, sizes.get(f"block_kv{suffix}_compute") or kv) if q and kv else None


def _programs(line: Instruction) -> list[tuple[_Program, int]]:
    """The programs that a call's kernel may belong to, by its name, each with its index among the program's kernels."""
    if "_dq" in line.name:
        return [(implementations.splash_two_kernel_backward, 1)]
    if "_dkv" in line.name:
        fused = [(implementations.splash_fused_backward, 0), (implementations.tokamax_backward, 0)]
        return fused if _gives_dq(line.results) else [(implementations.splash_two_kernel_backward, 0)]
    if "splash" in line.name:
        return [(implementations.splash_forward, 0), (implementations.tokamax_forward, 0)]
    return [(implementations.legacy_forward, 0)]


def _gives_dq(results: list[Array]) -> bool:
    """Whether a backward kernel computes all three gradients."""
    return sum(len(array.shape) >= 3 and array.shape[-1] >= HEAD // 2 for array in results) >= 3


def parse_blocks(text: str) -> Blocks:
    """``2048,1024`` or ``2048,1024,512``: queries and keys of a tile, and the keys multiplied at once.

    Raises ValueError for anything else.
    """
    sizes = [int(part) if part.strip().isdigit() else 0 for part in text.split(",")]
    check(
        len(sizes) in (2, 3) and min(sizes) > 0,
        f"--blocks: expected queries and keys of a tile, and the keys multiplied at once if they are fewer, as in "
        f"2048,2048,512, found {text!r}",
    )
    q, kv, *compute = sizes
    return q, kv, compute[0] if compute else kv
