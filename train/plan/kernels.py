"""How long posjax's own attention kernels take, by the measured cost of their tiles and the tiles that they visit."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np

from posjax.attention.tpu.costs import BACKWARD, FORWARD
from posjax.layers import Layers
from posjax.masks import Mask, extent
from posjax.positions import Range
from train.flops import allowed
from train.plan.hlo import Array, Instruction, arrays
from train.plan.pods import Pod

HEAD = 128
"""The head size that the costs were measured with; a wider head takes as many times as long, a narrower one as long."""

Share = Callable[[int, int], float]
"""Of tiles of so many queries and keys, the share that is visited."""


def kernel_seconds(line: Instruction, pod: Pod, share: Share) -> float | None:
    """The time of a custom call on one device; None for a kernel that is not known, 0 for what is no kernel.

        cycles = batch x heads x (rows x columns x share x tile + rows x row) x head size / 128 / cores

    Tile and row are the costs in `posjax.attention.tpu.costs`, of whole tiles; masked ones, a few in a hundred, cost
    little more.
    """
    if line.attribute(r'custom_call_target="([^"]*)"') != "tpu_custom_call":
        return 0.0
    name = line.name.partition(".")[0]
    if name not in _KERNELS:
        return None
    table, sizes = _KERNELS[name]
    operands = arrays(line.attribute(r"operand_layout_constraints=\{(.*?)\}, \w+=") or "")
    batch_and_heads, queries, keys, head, by_queries = sizes(line.results, operands)
    order = operands[0].shape  # [batch or 1, rows, 1, columns]
    rows, columns = order[1], order[3]
    tile = (queries // rows, keys // columns) if by_queries else (queries // columns, keys // rows)
    whole, row = _cost(table[pod.generation], *tile)
    cycles = batch_and_heads * (rows * columns * share(*tile) * whole + rows * row) * max(1, head / HEAD) / pod.cores
    return cycles * pod.seconds_per_cycle


def _forward(results: list[Array], operands: list[Array]) -> tuple[int, int, int, int, bool]:
    """Batch times heads, queries, keys, head size: of ``[batch, heads, queries, size]`` and keys of rank 5."""
    batch, heads, queries, _ = results[0].shape
    k = [array for array in operands if len(array.shape) == 5 and array.dtype in ("bf16", "f32")][1]
    return batch * heads, queries, k.shape[3], k.shape[4], True


def _backward(results: list[Array], operands: list[Array]) -> tuple[int, int, int, int, bool]:
    """The same of ``dq``, ``[batch, kv heads, group, pairs, queries, size]``, and of ``dk``."""
    batch, kv_heads, group, _, queries, size = results[0].shape
    return batch * kv_heads * group, queries, results[1].shape[3], size, False


_KERNELS = {"posjax_attention_forward": (FORWARD, _forward), "posjax_attention_backward": (BACKWARD, _backward)}


def _cost(table: dict, queries: int, keys: int) -> tuple[float, float]:
    """Cycles of a whole tile and of a row, from the measured size that is closest in area."""
    size = min(table, key=lambda size: abs(math.log(size[0] * size[1] / (queries * keys))))
    area = queries * keys / (size[0] * size[1])
    return table[size][0] * area, table[size][2] * math.sqrt(area)


def visited_share(layers: Layers, length: int, causal: bool) -> Share:
    """The mean over layers of the share of tiles that some pair of a row of `length` tokens needs.

    A row is taken as one document, the most work it can be. On several shards of the sequence it is the share of all
    tiles: exact where the layout balances the shards.
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
    some, _ = mask.tiles(extent(Range(0, rows * queries), queries), extent(Range(0, columns * keys), keys))
    return float(np.broadcast_to(some, (rows, columns)).mean())
