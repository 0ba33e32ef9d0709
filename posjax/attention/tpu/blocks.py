"""The best settings for a chip: sizes of tiles, by the measured cost of tiles, and which optimisations it uses."""

import math
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from posjax._numbers import LARGEST
from posjax.attention.call import Call
from posjax.attention.tiles import Blocks
from posjax.attention.tpu.costs import BACKWARD, FORWARD
from posjax.masks import block_bounds
from posjax.positions import Range


class Target(NamedTuple):
    """A chip that the kernels are compiled for.

    Args:
        name: as in the table of costs.
        vmem: bytes of fast memory that a kernel may use.
        wide: whether its matrix units are 256 wide. The product ``Q K^T`` of heads of 128 then has spare features, and
            the unit is so fast that the running maximum would be the bottleneck: a bound replaces it.
    """

    name: str
    vmem: int
    wide: bool


TARGETS = {
    "TPU v4": Target("v4", 16 * 2**20, wide=False),
    "TPU v5 lite": Target("v5e", 100 * 2**20, wide=False),
    "TPU v5": Target("v5p", 56 * 2**20, wide=False),
    "TPU v6 lite": Target("v6e", 100 * 2**20, wide=True),
    "TPU7x": Target("7x", 56 * 2**20, wide=True),
}
"""The chips by ``device_kind``."""

USUAL = "TPU v5 lite"
"""The chip that is assumed on a machine without TPU if no mesh of abstract devices is set."""


def target() -> Target:
    """The chip of the mesh in use (``jax.sharding.set_mesh`` or ``use_abstract_mesh``), or that of this machine."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    kind = abstract.device_kind if abstract else jax.devices()[0].device_kind
    return TARGETS.get(kind, TARGETS[USUAL])


def cheapest_forward(on: Target, x: Call, running: bool = False) -> Blocks:
    """The cheapest blocks of the forward kernel for a call; ``running`` if it merges into earlier results."""
    return _cheapest(x, FORWARD[on.name], fit, "q", partial(_forward_bytes, running=running), on.vmem)


def cheapest_backward(on: Target, x: Call, running: bool = False) -> Blocks:
    """The same for the backward kernel, for a call padded for the forward kernel.

    ``running`` if the kernel adds to earlier sums of gradients.
    """
    return _cheapest(x, BACKWARD[on.name], divide, "k", partial(_backward_bytes, running=running), on.vmem)


def _cheapest(x: Call, table: dict, made_to_fit, outer: str, memory, vmem: int) -> Blocks:
    queries, keys = x.q.shape[3], x.k.shape[2]

    def fitted(largest: Blocks) -> Blocks:
        return made_to_fit(largest, queries, keys) if x.run is None else within(largest, x.run)

    def cost(measured: Blocks) -> float:
        """Cycles of a head: of its whole and masked tiles, by their area, and of its rows of tiles."""
        blocks = fitted(measured)
        area = blocks.q * blocks.k / (measured.q * measured.k)
        share = getattr(blocks, outer) / getattr(measured, outer)
        q_blocks, k_blocks = -(-queries // blocks.q), -(-keys // blocks.k)
        some, every = _tiles(x, blocks, q_blocks, k_blocks)
        whole, masked, row = table[measured]
        return area * (every * whole + (some - every) * masked) + share * row * (q_blocks if outer == "q" else k_blocks)

    sizes = [Blocks(*size) for size in table]
    small = [size for size in sizes if memory(x, fitted(size)) <= vmem]
    chosen = min(small, key=cost) if small else min(sizes, key=lambda size: size.q * size.k)
    while memory(x, fitted(chosen)) > vmem and min(chosen.q, chosen.k) >= 512:
        chosen = Blocks(chosen.q // 2, chosen.k // 2, min(chosen.part, chosen.q // 2))
    return fitted(chosen)


def _forward_bytes(x: Call, blocks: Blocks, running: bool) -> float:
    """Approximate fast memory of the forward kernel: buffers of copies, sums, and the logits of a part."""
    q, k, part = blocks
    pairs = len(x.pairs)
    narrow = x.q.dtype.itemsize
    size, value_size = x.q.shape[-1], x.v.shape[-1]
    buffers = 2 * narrow * (k * (pairs * size + value_size) + q * (pairs * size + value_size))
    buffers += narrow * q * pairs * size + running * 2 * (8 - narrow) * q * value_size
    return buffers + 4 * q * (256 + value_size) + 10 * q * part * pairs + 512 * (q + k) * _is_relative(x)


def _backward_bytes(x: Call, blocks: Blocks, running: bool) -> float:
    """Approximate fast memory of the backward kernel, from the same parts."""
    q, k, part = blocks
    pairs = len(x.pairs)
    narrow = x.q.dtype.itemsize
    size = pairs * x.q.shape[-1]
    value_size = x.v.shape[-1]
    buffers = 2 * narrow * (q + 2 * k) * (size + value_size) + 12 * q * size
    buffers += narrow * (k + q) * size + running * 2 * (8 - narrow) * k * (size + value_size)
    return buffers + 4 * k * (size + value_size) + 16 * k * part + 1024 * (q + k) * _is_relative(x)


def _is_relative(x: Call) -> bool:
    return x.bias is not None and x.bias.by_distance


def _tiles(x: Call, blocks: Blocks, q_blocks: int, k_blocks: int) -> tuple[float, float]:
    """How many tiles are visited and how many are full, counted as causal if positions or masks are not known."""
    known = all(isinstance(p, Range) and p.is_static for p in (x.q_positions, x.kv_positions))
    if x.mask is None:
        return q_blocks * k_blocks, q_blocks * k_blocks
    if not known or jax.tree.leaves(x.mask):
        return (q_blocks * k_blocks + q_blocks) / 2, (q_blocks * k_blocks - q_blocks) / 2
    starts = (x.q_positions.start, x.kv_positions.start)
    tokens = (q_blocks * blocks.q, k_blocks * blocks.k)
    # Positions of padding may leave int32; about the same tiles are visited a little earlier.
    beyond = max(0, *(start + more - 1 - LARGEST for start, more in zip(starts, tokens, strict=True)))
    q, k = (block_bounds(Range(starts[n] - beyond, tokens[n]), blocks[n]) for n in range(2))
    some, every = (np.broadcast_to(a, (q_blocks, k_blocks)) for a in x.mask.tiles(q, k))
    return some.sum(), (some & every).sum()


def fit(largest: Blocks, queries: int, keys: int) -> Blocks:
    """Nearly equal blocks no larger than ``largest``, so that padding is small; keys are split into parts."""
    q, k = _block(queries, largest.q), _block(keys, largest.k)
    return Blocks(q, k, _divisor(k, largest.part))


def divide(largest: Blocks, queries: int, keys: int) -> Blocks:
    """The largest blocks up to ``largest`` that divide both lengths; queries are split into parts."""
    q, k = _divisor(queries, largest.q), _divisor(keys, largest.k)
    return Blocks(q, k, _divisor(q, largest.part))


def within(largest: Blocks, run: int) -> Blocks:
    """The largest blocks up to ``largest`` that divide runs of ``run`` tokens; queries or keys are split into parts."""
    q, k = _divisor(run, largest.q), _divisor(run, largest.k)
    return Blocks(q, k, _divisor(math.gcd(q, k), largest.part))


def _divisor(whole: int, largest: int) -> int:
    return max(n for n in range(128, min(whole, largest) + 1, 128) if whole % n == 0)


def _block(tokens: int, largest: int) -> int:
    count = -(-tokens // largest)
    unit = 128 if tokens <= 1024 else 512
    return min(largest, -(-tokens // (count * unit)) * unit)
