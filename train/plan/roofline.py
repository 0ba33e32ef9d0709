"""The time of a program that was compiled for GPUs, by the roofline: the compiler gives no cycles for them.

    instruction    max(FLOPs of its products / rate of products, bytes it moves / rate of memory)
    attention      FLOPs of its products over visited pairs / measured rate of such kernels
    collective     max(bytes over NVLink / its rate, bytes to other nodes / their rate) + `GPU_LATENCY`

The rates are shares of the published ones that large programs reach: `PRODUCTS`, `MEMORY`, `LINKS`. They are assumed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from train.plan.gpus import GPU_LATENCY, IN_A_NODE, Nodes
from train.plan.hbm_traffic import moved_bytes
from train.plan.hlo import Instruction, Module
from train.plan.kernels import operands_of
from train.plan.network import Traffic, axes_of, groups_of, moved_of
from train.plan.timeline import Simulator

PRODUCTS, MEMORY, LINKS = 0.65, 0.85, 0.8
"""Shares of the published rates of bfloat16 products, of memory, and of links; assumed."""

_FLOAT32 = 0.4
"""The rate of products of float32 in TF32, as a share of that in bfloat16; assumed."""

ATTENTION = {64: (0.42, 0.39), 128: (0.57, 0.47)}
"""Shares of the peak that attention reaches, forward and backward, by head size.

They were measured on an H100 at 16,384 tokens with a prototype of our kernels: 415 and 385 TFLOP/s at 64, 562 and 467
at 128, where a backward pass counts five products, though its two kernels compute seven.
"""

_OURS = re.compile(r"posjax_attention_(forward|backward_queries|backward_keys)")
_PRODUCTS_OF = {"forward": 2, "backward_queries": 2, "backward_keys": 3}
_NAMES_ONLY = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "after-all", "partition-id"}


@dataclass
class Roofline(Simulator):
    """The simulation of a program for GPUs."""

    def seconds(self, computation: str, line: Instruction) -> float:
        if line.opcode in _NAMES_ONLY or line.opcode.endswith("-done"):
            return 0.0
        gpu = self.network.pod.gpu
        line = _waited_for(line) if line.opcode == "fusion-start" else line
        products = sum(
            product_seconds(self.module, part, where, gpu.peak) for where, part in self._parts(computation, line)
        )
        return max(products, moved_bytes(self.module, computation, line) / (MEMORY * 1e9 * gpu.bandwidth))

    def _parts(self, computation: str, line: Instruction) -> Iterator[tuple[str, Instruction]]:
        yield computation, line
        for name in self.module.called(line):
            for part in self.module.computations[name]:
                yield from self._parts(name, part)


def _waited_for(line: Instruction) -> Instruction:
    """A started fusion as one that is waited for; its results stand between its operands and a number."""
    results = line.results[len(line.operands) : -1]
    text = ", ".join(f"{array.dtype}[{','.join(map(str, array.shape))}]" for array in results)
    return replace(line, opcode="fusion", type=text)


def product_seconds(module: Module, line: Instruction, computation: str, peak: float) -> float:
    """The time of a matrix product at the rate for its operands' type; 0 for any other instruction."""
    if line.opcode != "dot":
        return 0.0
    factors = [module.named[computation][name].results[0] for name in line.operands]
    contracted = line.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
    terms = math.prod(factors[0].shape[int(axis)] for axis in contracted.split(",") if axis)
    flops = 2 * math.prod(line.results[0].shape) * terms
    wide = any(array.dtype in ("f32", "f64") for array in factors)
    return flops / (peak * PRODUCTS * (_FLOAT32 if wide else 1.0))


@dataclass(frozen=True)
class GPUKernels:
    """Our attention kernels in a program."""

    pod: Nodes
    share: Callable[[int, int], float]  # of the tiles of this many queries and keys, how many are visited
    spread: float = float("inf")  # from this many queries on, a call's queries are spread over the row

    def seconds(self, line: Instruction) -> float | None:
        """The time of a custom call; None for an unknown kernel.

            FLOPs = 2 x products x batch x heads x queries x keys x head size x visited share

        with 2 products forward; of the five that `ATTENTION` counts backward, 2 for queries, 3 for keys and values.
        """
        found = _attention(line)
        if found is None:
            return 0.0 if line.attribute(r'custom_call_target="([^"]*)"') in _FREE else None
        products, q, k = found
        batch, queries, heads, size = q
        rate = ATTENTION[min(ATTENTION, key=lambda known: abs(known - size))][products != 2]
        pairs = batch * heads * queries * k[1] * self.share(128, 128)
        return 2 * products * pairs * size / (rate * self.pod.gpu.peak)

    def chance(self, line: Instruction) -> float | None:
        """The probability that the mask allows any pair of the queries and keys of a call; None for other calls."""
        found = _attention(line)
        if found is None:
            return None
        _, q, k = found
        return 1.0 if q[1] >= self.spread else self.share(q[1], k[1])


_FREE = ("AllocateBuffer", "Sharding", "annotate_device_placement")
"""Calls that run no kernel."""


def _attention(line: Instruction) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
    """Products, and the shapes ``[batch, length, heads, size]`` of queries and keys, of an attention kernel of ours."""
    found = _OURS.search(line.op_name) if line.opcode == "custom-call" else None
    if found is None:
        return None
    q, k = (array.shape for array in operands_of(line)[:2])
    return _PRODUCTS_OF[found[1]], q, k


@dataclass(frozen=True)
class NodeNetwork:
    """The traffic of collectives over a mesh of GPUs, in the order of their nodes."""

    pod: Nodes
    axes: dict[str, int]

    def traffic(self, line: Instruction, kind: str) -> Traffic:
        """What a collective moves and how long it takes by itself.

        For B bytes on n GPUs, m of them in a node, with V bytes a second over NVLink and W to other nodes:

            all-gather, reduce-scatter   B (n - 1) / n / V within a node, and B (1 - m / n) / (m W) between them
            all-reduce                   twice that
            all-to-all                   B (m - 1) / n / V,  B (n - m) / n / W        B: of one GPU
            collective-permute           B / V, or B / W for a pair in two nodes
        """
        groups = groups_of(line, self.pod.devices)
        size = len(groups[0])
        moved = moved_of(line, kind, size)
        if kind == "collective-permute":
            pairs = [pair for pair in groups if pair[0] != pair[1]]
            sent = moved if pairs else 0.0
            crosses = any(_node(one) != _node(other) for one, other in pairs)
            return self._traffic(groups, sent, 0.0 if crosses else sent, sent if crosses else 0.0)
        if size == 1:
            return Traffic("none", 0.0, 0.0)
        near = sum(_node(device) == _node(groups[0][0]) for device in groups[0])
        others = (size - 1) / size
        if kind == "all-to-all":
            return self._traffic(groups, moved * others, moved * (near - 1) / size, moved * (1 - near / size))
        whole = moved * (2 if kind == "all-reduce" else 1)
        return self._traffic(groups, whole * others, whole * others, whole * (1 - near / size) / near)

    def _traffic(self, groups: Sequence[Sequence[int]], sent: float, inside: float, outside: float) -> Traffic:
        gpu = self.pod.gpu
        seconds = max(inside / gpu.nvlink, outside / gpu.network) / (LINKS * 1e9)
        return Traffic(axes_of(self.axes, groups), sent, seconds, GPU_LATENCY if sent else 0.0)


def _node(device: int) -> int:
    return device // IN_A_NODE
