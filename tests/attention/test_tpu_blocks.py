"""Decisions of the TPU kernels for a call: tile sizes by cost and memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.attention.call import Call
from posjax.attention.tiles import Blocks
from posjax.attention.tpu.blocks import TARGETS, Target, cheapest_backward, cheapest_forward, divide, fit, target
from posjax.attention.tpu.costs import BACKWARD, FORWARD
from posjax.bias import T5
from posjax.masks import Causal, Window
from posjax.positions import Range


def call(queries, keys, mask=None, size=128, places=None, **options) -> Call:
    q, kv = (jax.ShapeDtypeStruct((1, 1, *shape, size), jnp.bfloat16) for shape in ((1, queries), (keys,)))
    places = (Range(0, queries), Range(0, keys)) if places is None else places
    return Call(q, kv, kv, options.pop("bias", None), mask, *places, **options)


@pytest.mark.parametrize("run", [128, 1152, 4096])
def test_no_tile_holds_tokens_of_two_runs(run):
    """A bias relative to the first token of a block would lose precision across the gap between runs."""
    places = np.concatenate([np.arange(run), np.arange(run) + 2**20]).astype(np.int32)
    x = call(2 * run, 2 * run, Causal(), places=(places, places), run=run)
    for chip in TARGETS.values():
        for blocks in (cheapest_forward(chip, x), cheapest_backward(chip, x)):
            assert run % blocks.q == run % blocks.k == 0
            assert blocks.q % blocks.part == 0 or blocks.k % blocks.part == 0


FAR = 2**31
MASKS = {None: (FAR, FAR), Causal(): (FAR, 0), Window(300): (299, 299)}
"""How many tokens behind and ahead of itself a query sees."""


def tiles_of(mask, blocks, queries, keys):
    """How many tiles are not empty, and how many are full: the mask written out, for padded lengths."""
    q, k = (np.arange(-(-n // size) * size) for n, size in ((queries, blocks.q), (keys, blocks.k)))
    behind, ahead = MASKS[mask]
    seen = (q[:, None] - k <= behind) & (k - q[:, None] <= ahead)
    tiles = seen.reshape(len(q) // blocks.q, blocks.q, -1, blocks.k)
    return tiles.any((1, 3)).sum(), tiles.all((1, 3)).sum()


@pytest.mark.parametrize(
    ("mask", "queries", "keys"), [(None, 640, 384), (Causal(), 2048, 4096), (Window(300), 2048, 4096)], ids=str
)
@pytest.mark.parametrize("chip", TARGETS.values(), ids=lambda chip: chip.name)
def test_the_blocks_of_the_fewest_cycles_are_taken(chip, queries, keys, mask):
    """Cycles of a full and of a masked tile, measured as q x k: ``cycles QK / qk``, for padded lengths.

    A row of tiles costs ``cycles Q / q``; backward, ``cycles K / k``.
    """
    x = call(queries, keys, mask, 64)
    kernels = ((cheapest_forward, FORWARD, fit, 0), (cheapest_backward, BACKWARD, divide, 1))
    for cheapest, tables, made_to_fit, outer in kernels:
        cycles = {}
        for measured, (whole, masked, row) in tables[chip.name].items():
            made = made_to_fit(Blocks(*measured), queries, keys)
            some, every = tiles_of(mask, made, queries, keys)
            area = made.q * made.k / (measured[0] * measured[1])
            rows = -(-(queries, keys)[outer] // made[outer]) * made[outer] / measured[outer]
            cost = area * (every * whole + (some - every) * masked) + rows * row
            cycles[made] = min(cycles.get(made, np.inf), cost)
        assert cheapest(chip, x) == min(cycles, key=cycles.get)


def test_tiles_at_the_last_positions_of_int32_are_those_of_other_positions():
    """The padding of 1,100 tokens would pass the largest int32."""
    ends = [Range(start, 1100) for start in (2**31 - 1100, 0)]
    last, first = (call(1100, 1100, Causal(), places=(at, at)) for at in ends)
    for chip in TARGETS.values():
        assert cheapest_forward(chip, last) == cheapest_forward(chip, first)


@pytest.mark.parametrize("places", [(Range(jnp.int32(0), 2048),) * 2, (np.arange(2048),) * 2], ids=["traced", "arrays"])
def test_tiles_of_unknown_positions_are_those_of_causal_ones(places):
    for chip in TARGETS.values():
        known, found = (call(2048, 2048, Causal(), places=at) for at in (None, places))
        assert cheapest_forward(chip, found) == cheapest_forward(chip, known)
        assert cheapest_backward(chip, found) == cheapest_backward(chip, known)


def test_the_target_is_the_chip_of_the_mesh_in_use_or_v5e():
    assert target().name == "v5e"
    device = jax.sharding.AbstractDevice(device_kind="TPU7x", num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("data",), abstract_device=device)):
        assert target().name == "7x"


@pytest.mark.parametrize(
    ("queries", "keys", "blocks"),
    [(640, 1100, (640, 1536, 512)), (1152, 4200, (1024, 1536, 512)), (130, 300, (256, 384, 384))],
)
def test_fitted_blocks_are_nearly_equal_and_pad_little(queries, keys, blocks):
    """In units of 128 tokens up to 1,024 tokens, of 512 beyond."""
    assert fit(Blocks(1024, 2048, 512), queries, keys) == Blocks(*blocks)


# Forward, 1024 queries, 2048 keys, 512 keys at a time; heads of 128 numbers in 2 bytes. Twice: keys, values, queries
# and outputs; scaled queries; in float32 the maximum, the sum and the output; 10 for a logit.
WHOLE = 2 * 2 * (2048 * 256 + 1024 * 256) + 2 * 1024 * 128 + 4 * 1024 * (128 + 128 + 128) + 10 * 1024 * 512
QUARTER = 2 * 2 * (1024 * 256 + 512 * 256) + 2 * 512 * 128 + 4 * 512 * (128 + 128 + 128) + 10 * 512 * 512
# Backward, 1024 by 1024. Twice: queries and gradients of outputs, keys, values and their gradients; three of dq; dk and
# dv; scaled keys and finished gradients of queries; 16 for a logit.
BACK = 2 * 2 * 3 * 1024 * 256 + 3 * 4 * 1024 * 128 + 4 * 1024 * 256 + 2 * 2 * 1024 * 128 + 16 * 1024 * 512


@pytest.mark.parametrize(
    ("cheapest", "options", "most"),
    [
        (cheapest_forward, {}, WHOLE),
        # Two buffers for the sums so far, in float32 instead of bfloat16.
        (cheapest_forward, {"running": True}, WHOLE + 2 * (4 + 2) * 1024 * 128),
        (cheapest_forward, {"by_distance": True}, WHOLE + 512 * (1024 + 2048)),
        (cheapest_backward, {}, BACK),
        (cheapest_backward, {"running": True}, BACK + 2 * (4 + 2) * 1024 * 256),
        (cheapest_backward, {"by_distance": True}, BACK + 1024 * (1024 + 1024)),
    ],
)
def test_tiles_that_do_not_fit_fast_memory_are_halved(cheapest, options, most):
    bias = T5().bind({"table": np.zeros((32, 1))}, num_heads=1) if options.get("by_distance") else None
    x, running = call(4096, 4096, bias=bias), options.get("running", False)
    whole, half = (cheapest(Target("v4", bytes_, wide=False), x, running) for bytes_ in (most, most - 1))
    assert whole == ((1024, 2048, 512) if cheapest is cheapest_forward else (1024, 1024, 512))
    assert half == (whole.q // 2, whole.k // 2, 512)


def test_tiles_are_halved_down_to_256_queries():
    found = [cheapest_forward(Target("v4", vmem, wide=False), call(4096, 4096)) for vmem in (QUARTER, 1)]
    assert found == [Blocks(512, 1024, 512), Blocks(256, 512, 256)]
