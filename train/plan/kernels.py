"""The time of posjax's own attention kernels, from the measured cost of tiles and the tiles that they visit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from posjax.attention.tpu.costs import BACKWARD, FORWARD
from posjax.masks import Mask, block_bounds
from posjax.positions import Range
from posjax.scheme import Layers
from train.model.flops import allowed
from train.plan.hlo import Array, Instruction, arrays
from train.plan.pods import Pod

HEAD = 128
"""The head size of the measured costs; a wider head takes proportionally longer, a narrower one the same time."""

STREAMING = ("posjax_rotation", "posjax_coca", "posjax_coca_gradient", "posjax_attention_correction")
"""Our memory-bound kernels: they take the time that the compiler expects of a fusion that moves the same bytes."""

Share = Callable[[int, int], float]
"""A function from the queries and keys of a tile to the share of tiles of that size that is visited."""


@dataclass(frozen=True)
class Kernels:
    """The kernels of a program on one device."""

    pod: Pod
    share: Share
    spread: float = float("inf")  # from this many queries on, a call's queries are spread over the row

    def seconds(self, line: Instruction) -> float | None:
        """The time of a custom call; None for an unknown kernel, 0 for an instruction that is not a kernel.

            cycles = batch x heads x (rows x columns x share x tile + rows x row) x head size / 128 / cores

        Tile and row are the costs of a whole tile and of a row in `posjax.attention.tpu.costs`. Masked tiles count as
        whole ones: they are a few percent of all, and cost little more.
        """
        if line.attribute(r'custom_call_target="([^"]*)"') != "tpu_custom_call":
            return 0.0
        if _name(line) in STREAMING:
            return _moved(line) / (self.pod.chip.device_streaming * 1e9)
        call = _call(line)
        if call is None:
            return None
        tile = call.queries // call.q_blocks, call.keys // call.k_blocks
        whole, row = _cost(call.table[self.pod.generation], *tile)
        tiles = call.q_blocks * call.k_blocks * self.share(*tile)
        cycles = call.heads * (tiles * whole + call.rows * row) * max(1, call.head_dim / HEAD) / self.pod.cores
        return cycles * self.pod.seconds_per_cycle

    def chance(self, line: Instruction) -> float | None:
        """The probability that the mask allows any pair of the queries and keys of a call.

        A ring calls the kernel for a part of the queries and a part of the keys, if any of these queries sees any of
        these keys. None for anything but an attention kernel of ours.
        """
        call = _call(line)
        if call is None:
            return None
        return 1.0 if call.queries >= self.spread else self.share(call.queries, call.keys)


class KernelCall(NamedTuple):
    """The facts that a kernel's call states."""

    table: dict  # of costs, by generation
    heads: int  # times batch
    queries: int
    keys: int
    head_dim: int
    q_blocks: int
    k_blocks: int
    rows: int  # of tiles: blocks of queries or of keys


def _name(line: Instruction) -> str:
    return line.name.partition(".")[0]


def operands_of(line: Instruction) -> list[Array]:
    return arrays(line.attribute(r"operand_layout_constraints=\{(.*?)\}, \w+=") or "")


def _moved(line: Instruction) -> float:
    """Bytes of the operands and results of a kernel that reads and writes everything once."""
    return sum(array.bytes for array in (*operands_of(line), *line.results))


def _call(line: Instruction) -> KernelCall | None:
    """The call of an attention kernel of ours; None for anything else."""
    operands = operands_of(line)
    if _name(line) not in _TABLES or not operands:
        return None
    _, rows, _, columns = operands[0].shape  # the first operand is the order in which tiles are visited
    table = _TABLES[_name(line)]
    blocks = (columns, rows) if table is BACKWARD else (rows, columns)  # rows of the backward kernel are blocks of keys
    return KernelCall(table, *_sizes([*operands, *line.results]), *blocks, rows)


def _sizes(found: list[Array]) -> tuple[int, int, int, int]:
    """Heads times batch, queries, keys and head size of a call.

    Queries and keys are ``[batch, heads, pairs, tokens, size]`` or ``[batch, 1, pairs, tokens, heads x size]``. In the
    second case the number of heads is taken from arrays with one number for each query, ``[batch, heads, 1, queries]``.
    """
    q, k = [array for array in found if len(array.shape) == 5 and array.dtype in ("bf16", "f32")][:2]
    batch, several, _, queries, columns = q.shape
    rows = [array.shape for array in found if len(array.shape) == 4 and array.dtype == "f32" and array.shape[2] == 1]
    heads = max([several, *(shape[1] for shape in rows)])
    return batch * heads, queries, k.shape[3], several * columns // heads


_TABLES = {"posjax_attention_forward": FORWARD, "posjax_attention_backward": BACKWARD}


def _cost(table: dict, queries: int, keys: int) -> tuple[float, float]:
    """Cycles of a whole tile and of a row, from the measured size that is closest in area."""
    size = min(table, key=lambda size: abs(math.log(size[0] * size[1] / (queries * keys))))
    area = queries * keys / (size[0] * size[1])
    return table[size][0] * area, table[size][2] * math.sqrt(area)


def visited_share(layers: Layers, length: int, causal: bool) -> Share:
    """The mean over layers of the share of tiles that contain an allowed pair, in a row of `length` tokens.

    A row counts as one document, which is the most work possible. If the sequence is split over devices, the share is
    that of all devices together, which is exact for each if the layout balances them.
    """
    masks = [allowed(scheme, causal) for scheme in layers.schemes if scheme.linear is None]

    @cache
    def share(queries: int, keys: int) -> float:
        shares = {mask: _share(mask, length, queries, keys) for mask in set(masks)}
        return sum(shares[mask] for mask in masks) / max(1, len(masks))

    return share


def _share(mask: Mask | None, length: int, queries: int, keys: int) -> float:
    if mask is None:
        return 1.0
    rows, columns = -(-length // queries), -(-length // keys)
    some, _ = mask.tiles(block_bounds(Range(0, rows * queries), queries), block_bounds(Range(0, columns * keys), keys))
    return float(np.broadcast_to(some, (rows, columns)).mean())
