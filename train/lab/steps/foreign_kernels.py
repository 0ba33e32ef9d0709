"""The time of jax's splash attention kernels, which other trainers call: forward, and backward in one kernel.

The cost of a tile is read from the schedules that the compiler dumped when it compiled the step. The number of tiles
follows from the call and the mask. If either is unknown, the kernel's time is unknown.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from posjax.attention.tiles import Blocks
from train.lab.schedule.cost import TILE, Cost, KernelShape, cost
from train.lab.schedule.implementations import splash_forward, splash_fused_backward
from train.lab.schedule.kernels import Kernel, read_kernels
from train.plan.hlo import Instruction, arrays
from train.plan.kernels import HEAD, Kernels

_NAME = re.compile(r"splash_m[hq]a_(fwd|dkv)")
_METADATA = re.compile(r"xprof_metadata\W+(\{[^}]*\})")
_FLOAT = ("bf16", "f32", "f16")


class ForeignCall(NamedTuple):
    """The facts that a kernel's call states."""

    name: str
    heads: int  # times batch
    queries: int
    keys: int
    head_dim: int
    blocks: Blocks | None  # None if the call does not state them
    is_backward: bool


@dataclass(frozen=True)
class AnyKernels(Kernels):
    """Kernels of a program on one device, ours and others'."""

    schedules: Path | None = None  # folder of the compiler's dump

    def seconds(self, line: Instruction) -> float | None:
        """The time of a custom call; for a kernel that is not ours

            cycles = cycles for 512 x 512 of area  x  heads x queries x keys x share of tiles visited / 512^2 / cores

        where the first factor comes from the bundles of the kernel's parts: tiles, and starts and ends of rows. No part
        counts less than the minimum for its matrix products. None if the schedule, blocks or parts are unknown.
        """
        ours = super().seconds(line)
        call = None if ours is not None else foreign_call(line)
        if call is None or call.blocks is None:
            return ours
        found = self._cost(call)
        if found is None:
            return None
        area = call.heads * call.queries * call.keys * self.share(*call.blocks[:2])
        return found.bundles * area / TILE**2 / self.pod.cores * self.pod.seconds_per_cycle

    def _cost(self, call: ForeignCall) -> Cost | None:
        kernel = self._dumped.get(call.name) or self._dumped.get(_base(call.name))
        heads, rest = divmod(call.heads * call.queries, call.keys)  # as square attention of the same area
        if kernel is None or rest:
            return None
        program = splash_fused_backward if call.is_backward else splash_forward
        launch = program(KernelShape(call.keys, heads, call.head_dim), call.blocks, self.pod.chip.name).launch
        try:
            return cost(kernel, launch, self.pod.chip)
        except ValueError:  # its parts are not those of such a kernel
            return None

    @cached_property
    def _dumped(self) -> dict[str, Kernel]:
        """Kernels by the names of their calls, and by these names without numbers."""
        found = () if self.schedules is None else read_kernels(self.schedules, self.pod.chip.branch_slots, "splash")
        return {**{_base(kernel.name): kernel for kernel in found}, **{kernel.name: kernel for kernel in found}}


def _base(name: str) -> str:
    return re.sub(r"(\.\d+)+$", "", name)


def foreign_call(line: Instruction) -> ForeignCall | None:
    """The call of a splash kernel, forward or backward for all three gradients; None for anything else.

    Queries and keys are ``[..., heads, tokens, size]``.
    """
    operands = arrays(line.attribute(r"operand_layout_constraints=\{(.*?)\}, \w+=") or "")
    tokens = [array.shape for array in operands if array.dtype in _FLOAT and len(array.shape) >= 3]
    name = _NAME.search(line.name)
    if name is None or len(tokens) < 3:
        return None
    is_backward = name[1] == "dkv"
    gradients = [array for array in line.results if len(array.shape) >= 3 and array.shape[-1] >= HEAD // 2]
    if is_backward and len(gradients) < 3:  # one of two kernels, whose costs are unknown
        return None
    q, k = tokens[:2]
    blocks = _blocks(line, "_dkv" if is_backward else "")
    return ForeignCall(line.name, math.prod(q[:-2]), q[-2], k[-2], q[-1], blocks, is_backward)


def _blocks(line: Instruction, suffix: str) -> Blocks | None:
    """The block sizes in a call's metadata, ``{"block_q": 1024, ...}``, whose names may have a suffix; None if it has
    none."""
    found = _METADATA.search(line.attributes.replace("\\", ""))
    if found is None:
        return None
    sizes = json.loads(found[1])
    q, kv = sizes.get(f"block_q{suffix}"), sizes.get(f"block_kv{suffix}")
    return Blocks(q, kv, sizes.get(f"block_kv{suffix}_compute") or kv) if q and kv else None
