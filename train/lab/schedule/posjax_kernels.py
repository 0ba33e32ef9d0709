"""posjax's own kernels as implementations: their extra arguments, and how often the parts of their kernels run.

The counts come from the plan of tiles that the kernels themselves use (`posjax.attention.tiles`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posjax.attention.call import Call, RemappedPair
from posjax.attention.formulas import bias_form
from posjax.attention.platform import computed, everywhere
from posjax.attention.tiles import Blocks, Kind, TilePlan, plan_tiles
from posjax.attention.tpu.backend import TPU
from posjax.attention.tpu.blocks import TARGETS, Target
from posjax.attention.tpu.entry import Options
from posjax.bias import T5, ALiBi, Kerple
from posjax.masks import Beyond, Causal, FirstTokens, Mask, Segments, Window
from posjax.positions import Range
from train.lab.schedule.cost import Executions, Implementation, KernelProgram, KernelShape, Launch
from train.model.flops import prefix_pairs
from train.runtime.chips import Product

DOCUMENTS = 8
"""The number of equal segments that counts assume; the compiler does not know them."""

_ELSEWHERE = Blocks(512, 512, 512)
"""The block sizes of the kernel that is not measured."""


@dataclass(frozen=True)
class KernelCase:
    """The arguments and options of attention, in addition to queries, keys and values."""

    bias: Any = None  # one of `posjax.bias`
    mask: Mask = field(default_factory=Causal)
    packed: bool = False  # whether a row has several segments
    beyond: int | None = None  # the distance from which a second pair of features scores
    bounded: bool | None = None  # whether a bound replaces the running maximum; None: as is best for the chip
    learned: bool = False  # whether gradients of the bias' parameters are wanted

    def is_bounded(self, chip: str) -> bool:
        """Whether a bound replaces the running maximum on a chip."""
        return target_of(chip).wide if self.bounded is None else self.bounded


def target_of(chip: str) -> Target:
    """The facts on a chip that the kernels use."""
    return next(found for found in TARGETS.values() if found.name == chip)


def call(case: KernelCase, q, k, v, params, ids) -> Call:
    """A call of attention, with its usual scale.

    The features of remapped pairs differ from those of near ones; their values do not matter.
    """
    heads, tokens = k.shape[1:3]
    remap = () if case.beyond is None else (RemappedPair(_other(q), _other(k), Beyond(case.beyond)),)
    bias = case.bias and case.bias.bind(params, num_heads=heads)
    mask = case.mask & Segments(ids) if case.packed else case.mask
    return Call(q, k, v, bias, mask, Range(0, tokens), Range(0, tokens), remap, scale=q.shape[-1] ** -0.5)


def _other(x):
    return x if isinstance(x, jax.ShapeDtypeStruct) else 2 * x


def arguments(case: KernelCase, shape: KernelShape) -> list:
    """Abstract arguments for `call`; every query head has its own keys."""
    keys = jax.ShapeDtypeStruct((1, shape.heads, shape.length, shape.head_dim), jnp.bfloat16)
    queries = jax.ShapeDtypeStruct((1, shape.heads, 1, *keys.shape[2:]), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, shape.length), jnp.int32)
    params = jax.eval_shape(lambda: case.bias.init(jax.random.key(0), shape.heads)) if case.bias else {}
    return [queries, keys, keys, params, ids]


class Tiles(NamedTuple):
    """How many tiles of a kind all heads have, and how many of these are the first and the last of their block of
    queries in the backward kernel."""

    every: int
    first: int
    last: int


def tiles(case: KernelCase, shape: KernelShape, blocks: Blocks) -> dict[Kind, Tiles]:
    """The tiles of each kind. Kinds that would occur only with other segments have none."""
    kinds: list[Kind] = []
    jax.eval_shape(lambda ids: kinds.extend(_planned(case, shape, blocks, ids).kinds), arguments(case, shape)[-1])
    found = _planned(case, shape, blocks, documents(shape))
    visited = found.grid > 0
    order = visited.cumsum(-1)
    which = visited, visited & (order == 1), visited & (order == order[..., -1:])
    counts = [Counter(found.grid[each].tolist()) for each in which]
    numbers = {kind: n for n, kind in enumerate(found.kinds, start=1)}
    return {kind: Tiles(*(shape.heads * count[numbers.get(kind)] for count in counts)) for kind in kinds}


def _planned(case: KernelCase, shape: KernelShape, blocks: Blocks, ids) -> TilePlan:
    *qkv, params, _ = arguments(case, shape)
    x = call(case, *qkv, jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), params), ids)
    return plan_tiles(x, blocks, constant_from=x.bias.constant_from if bias_form(x) == "by distance" else None)


def documents(shape: KernelShape) -> np.ndarray:
    """Segment ids of the tokens, ``[1, length]``."""
    return (np.arange(shape.length, dtype=np.int32) * DOCUMENTS // shape.length)[None]


def needed(case: KernelCase, shape: KernelShape) -> int:
    """The pairs that the mask allows, over all heads."""
    parts = DOCUMENTS if case.packed else 1
    return shape.heads * parts * int(prefix_pairs(case.mask, shape.length // parts)[-1])


def forward(case: KernelCase, shape: KernelShape, blocks: Blocks, chip: str) -> KernelProgram:
    """The forward kernel: for each block of queries one loop for every kind of tile.

    If a bound replaces the running maximum, a row whose weights all vanish under it is computed again; these loops are
    counted as never run.
    """
    counts = tiles(case, shape, blocks)
    rows = shape.heads * shape.length // blocks.q
    runs = [Executions("head start", shape.heads), *_runs(counts, partial(forward_products, blocks, shape.head_dim))]
    if case.is_bounded(chip):
        runs += [Executions(f"{run.name}, again", 0, run.products) for run in runs if run.products]
        lengths = ((8, shape.head_dim, blocks.q),) * (1 + (case.beyond is not None))
        runs.insert(0, Executions("lengths of queries", rows, lengths))
    moved = _moved(case, shape, blocks, counts, tokens=blocks.k, each=4 * shape.head_dim)
    # A row reads its queries, and writes outputs and log-sum-exp.
    moved += rows * blocks.q * ((2 + (case.beyond is not None)) * 2 * shape.head_dim + 4)
    launch = _launch("posjax_attention_forward", case, shape, blocks, counts, rows, runs, moved)
    return KernelProgram(lambda: (partial(_attend, case, chip, (blocks, _ELSEWHERE)), arguments(case, shape)), launch)


def backward(case: KernelCase, shape: KernelShape, blocks: Blocks, chip: str) -> KernelProgram:
    """The backward kernel: for each block of keys one loop for every kind of tile, and all gradients from each tile."""
    counts = tiles(case, shape, blocks)
    rows = shape.heads * shape.length // blocks.k
    runs = _runs(counts, partial(_backward_products, blocks, shape.head_dim))
    runs = [replace(run, inside=_ends(run.name, found)) for run, found in zip(runs, counts.values(), strict=True)]
    if case.learned:
        runs.insert(0, Executions("head start", shape.heads))  # where sums for the bias begin
    # A tile reads queries, the outputs' gradient and two numbers for each, and reads and writes the queries' gradient;
    # a row reads keys and values, and writes their gradients.
    moved = _moved(case, shape, blocks, counts, tokens=blocks.q, each=(2 + 2 + 4 + 4) * shape.head_dim + 8)
    moved += rows * blocks.k * 4 * 2 * shape.head_dim
    launch = _launch("posjax_attention_backward", case, shape, blocks, counts, rows, runs, moved)
    inputs = arguments(case, shape)
    return KernelProgram(lambda: (partial(_gradients, case, chip, (_ELSEWHERE, blocks)), [*inputs, inputs[0]]), launch)


def _launch(kernel, case, shape, blocks, counts, rows, runs, moved) -> Launch:
    area = sum(found.every for found in counts.values()) * blocks.q * blocks.k
    return Launch(kernel, rows, tuple(runs), area, needed(case, shape), moved)


def _runs(counts: dict[Kind, Tiles], products: Callable[[int], tuple[Product, ...]]) -> list[Executions]:
    return [Executions(_name(kind), found.every, products(len(kind.pairs))) for kind, found in counts.items()]


def _ends(name: str, found: Tiles) -> tuple[Executions, Executions]:
    """The code inside a tile that runs only in the first or the last one of a block of queries."""
    return Executions(f"{name}, cleared", found.first), Executions(f"{name}, finished", found.last)


def _name(kind: Kind) -> str:
    pairs = " and ".join(("near", "remapped")[n] for n in kind.pairs)
    return f"{'masked' if kind.masked else 'whole'}, {pairs}, {kind.reach}"


def forward_products(blocks: Blocks, size: int, pairs: int = 1) -> tuple[Product, ...]:
    """Q K^T for every pair of features, and P V."""
    q, k, part = blocks
    return (((q, size, part),) * pairs + ((q, part, size),)) * (k // part)


def _backward_products(blocks: Blocks, size: int, pairs: int) -> tuple[Product, ...]:
    """V dO^T and P^T dO; K Q^T, dS^T Q and dS K for every pair of features."""
    q, k, part = blocks
    of_pair = (k, size, part), (k, part, size), (part, k, size)
    return ((k, size, part), (k, part, size), *of_pair * pairs) * (q // part)


def _moved(
    case: KernelCase, shape: KernelShape, blocks: Blocks, counts: dict[Kind, Tiles], tokens: int, each: int
) -> float:
    """Bytes that all tiles move: `each` per token, segments, more features, and a window of a bias by distance."""
    window = 32 * (blocks.q + blocks.k) if isinstance(case.bias, T5 | Kerple) else 0
    tile = tokens * (each + 4 * case.packed) + window
    more = tokens * 2 * shape.head_dim
    return sum(found.every * (tile + more * (len(kind.pairs) - 1)) for kind, found in counts.items())


def _attend(case: KernelCase, chip: str, blocks: tuple[Blocks, Blocks], q, k, v, params, ids):
    options = Options(blocks=blocks, bounded=case.is_bounded(chip), on=target_of(chip))
    return computed(everywhere(TPU(options)), call(case, q, k, v, params, ids)).out


def _gradients(case: KernelCase, chip: str, blocks: tuple[Blocks, Blocks], q, k, v, params, ids, d_out):
    """Gradients of queries, keys and values, and of the bias' parameters if they are learned."""
    if not case.learned:
        return jax.vjp(lambda q, k, v: _attend(case, chip, blocks, q, k, v, params, ids), q, k, v)[1](d_out)
    return jax.vjp(lambda *x: _attend(case, chip, blocks, *x, ids), q, k, v, params)[1](d_out)


FORWARD_SIZES = (
    Blocks(256, 512, 512),
    Blocks(512, 512, 512),
    Blocks(512, 1024, 512),
    Blocks(1024, 512, 512),
    Blocks(1024, 1024, 512),
    Blocks(1024, 2048, 256),
    Blocks(1024, 2048, 512),
    Blocks(1024, 4096, 512),
    Blocks(1024, 4096, 1024),
)
BACKWARD_SIZES = (
    Blocks(256, 512, 256),
    Blocks(512, 512, 512),
    Blocks(512, 1024, 512),
    Blocks(1024, 512, 512),
    Blocks(1024, 1024, 256),
    Blocks(1024, 1024, 512),
    Blocks(1024, 2048, 512),
    Blocks(2048, 1024, 1024),
    Blocks(2048, 2048, 512),
)
PLAIN, BOUNDED, BACK = "posjax, forward", "posjax with a bound, forward", "posjax, backward"
"""The names of implementations without extra arguments."""

_FORWARD_CASES = {
    PLAIN: KernelCase(bounded=False),
    BOUNDED: KernelCase(bounded=True),
    "posjax ALiBi, forward": KernelCase(ALiBi()),
    "posjax T5, forward": KernelCase(T5()),
    "posjax KERPLE, forward": KernelCase(Kerple()),
    "posjax ReRoPE, forward": KernelCase(beyond=512),
    "posjax window and sinks, forward": KernelCase(mask=Causal() & (Window(4096) | FirstTokens(4))),
    "posjax segments, forward": KernelCase(packed=True),
}
_BACKWARD_CASES = {
    BACK: KernelCase(),
    "posjax ALiBi, backward": KernelCase(ALiBi()),
    "posjax learned ALiBi, backward": KernelCase(ALiBi(learned=True), learned=True),
    "posjax T5 with its gradient, backward": KernelCase(T5(), learned=True),
    "posjax KERPLE with its gradient, backward": KernelCase(Kerple(), learned=True),
}
POSJAX_KERNELS = {
    **{name: Implementation(partial(forward, case), FORWARD_SIZES) for name, case in _FORWARD_CASES.items()},
    **{name: Implementation(partial(backward, case), BACKWARD_SIZES) for name, case in _BACKWARD_CASES.items()},
}
"""Implementations by their names in tables and configs. Biases use the mode that is best for the chip."""
