"""Decisions of the TPU kernels for a call: tile sizes by cost and memory, estimates of work, and int32 limits."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.attention.operands import Operands
from posjax.attention.tiles import Blocks
from posjax.attention.tpu.biases import _band, _leaves_int32
from posjax.attention.tpu.blocks import (
    TARGETS,
    Target,
    _backward_bytes,
    _forward_bytes,
    _tiles,
    cheapest_backward,
    cheapest_forward,
    divide,
    fit,
    target,
)
from posjax.attention.tpu.call import work
from posjax.attention.tpu.costs import BACKWARD, FORWARD
from posjax.attention.tpu.entry import refusal
from posjax.masks import Causal, Segments, Window
from posjax.positions import Range


@pytest.mark.parametrize("run", [128, 1152, 2048, 4096])
def test_no_tile_holds_tokens_of_two_runs(run):
    """A bias relative to the first token of a block would lose precision across the gap between runs."""
    q, kv = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 2, 4, 2 * run, 128), (1, 2, 2 * run, 128)))
    places = np.concatenate([np.arange(run), np.arange(run) + 2**20]).astype(np.int32)
    x = Operands(q, kv, kv, None, Causal(), places, places, run=run)
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


@pytest.mark.parametrize("mask", MASKS, ids=["none", "causal", "window"])
@pytest.mark.parametrize(("queries", "keys"), [(128, 1536), (640, 384), (2048, 4096)])
@pytest.mark.parametrize("chip", TARGETS.values(), ids=lambda chip: chip.name)
def test_the_blocks_of_the_fewest_cycles_are_taken(chip, queries, keys, mask):
    """Cycles of a full and of a masked tile, measured as q x k: ``cycles QK / qk``, for padded lengths.

    A row of tiles costs ``cycles Q / q``; backward, ``cycles K / k``.
    """
    q, kv = (jax.ShapeDtypeStruct((1, 1, *shape, 64), jnp.bfloat16) for shape in ((1, queries), (keys,)))
    x = Operands(q, kv, kv, None, mask, Range(0, queries), Range(0, keys))
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


def test_the_target_is_the_chip_of_this_machine_or_v5e(monkeypatch):
    for kind, name in (("TPU7x", "7x"), ("cpu", "v5e")):
        monkeypatch.setattr(jax, "devices", lambda kind=kind: [SimpleNamespace(device_kind=kind)])
        assert target().name == name


@pytest.mark.parametrize(
    ("queries", "keys", "blocks"),
    [(640, 1100, (640, 1536, 512)), (1024, 1024, (1024, 1024, 512)), (1152, 4200, (1024, 1536, 512)),
     (130, 300, (256, 384, 384))],
)  # fmt: skip
def test_fitted_blocks_are_nearly_equal_and_pad_little(queries, keys, blocks):
    """In units of 128 tokens up to 1,024 tokens, of 512 beyond."""
    assert fit(Blocks(1024, 2048, 512), queries, keys) == Blocks(*blocks)


def test_the_fast_memory_of_a_tile_by_hand():
    """256 queries, 512 keys, 128 keys or queries at a time; heads of 64 numbers in 2 bytes, values of 32."""
    blocks = Blocks(256, 512, 128)
    q, k, v = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 1, 1, 256, 64), (1, 1, 512, 64), (1, 1, 512, 32)))
    x = Operands(q, k, v, None, None, Range(0, 256), Range(0, 512))
    # Twice: keys and values, and queries and outputs; scaled queries; in float32 the maximum, the sum and the output;
    # 10 for a logit.
    forward = 2 * 2 * (512 * 96 + 256 * 96) + 2 * 256 * 64 + 4 * 256 * (128 + 128 + 32) + 10 * 256 * 128
    assert _forward_bytes(x, blocks, False) == forward
    # Two buffers for the sums so far, and results in float32 instead of bfloat16.
    assert _forward_bytes(x, blocks, True) == forward + 2 * (4 + 2) * 256 * 32
    # Twice: queries and gradients of outputs, keys, values and their gradients; three of dq; dk and dv; 16 for a logit.
    backward = 2 * 2 * (256 * 96 + 2 * 512 * 96) + 3 * 4 * 256 * 64 + 4 * 512 * 96 + 16 * 512 * 128
    # Scaled keys, and finished gradients of queries.
    backward += 2 * (512 + 256) * 64
    assert _backward_bytes(x, blocks, False) == backward
    assert _backward_bytes(x, blocks, True) == backward + 2 * (4 + 2) * 512 * 96
    relative = dataclasses.replace(x, bias=SimpleNamespace(by_distance=True))
    extra = [
        bytes_of(relative, blocks, False) - bytes_of(x, blocks, False) for bytes_of in (_forward_bytes, _backward_bytes)
    ]
    assert extra == [512 * (256 + 512), 1024 * (256 + 512)]


def test_sums_by_distance_may_take_half_of_fast_memory():
    """64 bytes per query, per key and per query head of a group: 409,600 tokens take 50 MiB, half of a chip's 100."""

    def why(tokens):
        q, kv = (jax.ShapeDtypeStruct((1, 1, *shape, 64), jnp.bfloat16) for shape in ((1, tokens), (tokens,)))
        bias = SimpleNamespace(by_distance=True, only_adds=True, constant_from=None)
        return refusal(Operands(q, kv, kv, bias, None, Range(0, tokens), Range(0, tokens)))

    assert why(409_600) is None
    assert "does not fit in fast memory at this length" in why(409_601)


def test_the_band_of_distances_in_which_a_bias_varies_needs_both_starts():
    """The rows of 128 distances that the kernels store of a bias by distance: some, or all if a start is traced."""

    def band(start, keys_from=0):
        shapes = {"q": np.zeros((1, 1, 1, 128, 8)), "k": np.zeros((1, 1, 4096, 8))}
        return _band(SimpleNamespace(**shapes, bias=SimpleNamespace(constant_from=128)), 256, start - keys_from)

    whole, found = (0, 33), []
    # The bias varies up to 128 from distance 0, in row 16; a tile reads 256 more and a row is spare on either side.
    assert band(2048) == band(2148, 100) == (12, 20)
    # At and beyond the ends of all distances the band is what one tile reads.
    assert [band(start) for start in (4000, 10_000, 64, -10_000)] == [(0, 5), (0, 2), (27, 33), (31, 33)]
    jax.eval_shape(lambda start: found.append(band(start)), jnp.int32(2048))
    assert found == [whole]


@pytest.mark.parametrize(
    ("name", "vmem", "blocks"),
    [
        # 1024 x 2048 in parts of 512, for heads of 128, take 10,223,616 bytes, and its half 3,538,944.
        ("v4", 10_223_616, (1024, 2048, 512)),
        ("v4", 10_223_615, (512, 1024, 512)),
        ("v4", 3_538_944, (256, 512, 256)),
        ("v5e", 10_223_616, (1024, 2048, 512)),
        ("v5e", 1, (256, 512, 256)),
    ],
)
def test_tiles_that_do_not_fit_fast_memory_are_halved_down_to_256(name, vmem, blocks):
    q, kv = (jax.ShapeDtypeStruct((1, 1, *shape, 128), jnp.bfloat16) for shape in ((1, 4096), (4096,)))
    x = Operands(q, kv, kv, None, None, Range(0, 4096), Range(0, 4096))
    assert cheapest_forward(Target(name, vmem, wide=False), x) == Blocks(*blocks)


def test_tiles_at_the_last_positions_of_int32_are_counted_as_elsewhere():
    """300 tokens in blocks of 128: the last block would pass the largest int32."""
    q, kv = (jax.ShapeDtypeStruct((1, 1, *shape, 64), jnp.bfloat16) for shape in ((1, 300), (300,)))
    ranges = [Range(start, 300) for start in (2**31 - 300, 0)]
    found = [_tiles(Operands(q, kv, kv, None, Causal(), at, at), Blocks(128, 128, 128), 3, 3) for at in ranges]
    assert found == [(6, 3)] * 2


def test_tiles_are_counted_as_causal_where_they_are_not_known():
    """Two blocks of queries and three of keys: the numbers of tiles that are not empty and that are full."""
    q, kv = (jax.ShapeDtypeStruct((1, 1, *shape, 64), jnp.bfloat16) for shape in ((1, 256), (384,)))

    def counted(mask, start=0, keys=None):
        x = Operands(q, kv, kv, None, mask, Range(start, 256), Range(0, 384) if keys is None else keys)
        return tuple(map(float, _tiles(x, Blocks(128, 128, 128), 2, 3)))

    causal = ((6 + 2) / 2, (6 - 2) / 2)
    assert counted(None) == (6, 6)
    assert counted(Causal()) == (3, 1)
    assert counted(Causal(), start=128) == (5, 3)
    assert counted(Causal(), start=jnp.int32(0)) == counted(Causal(), keys=np.arange(384, dtype=np.int32)) == causal
    assert counted(Segments(np.zeros((1, 256), np.int32), np.zeros((1, 384), np.int32))) == causal


@pytest.mark.parametrize(
    ("q_start", "kv_start", "leaves"),
    [
        (2**31 - 129, 0, False),
        (2**31 - 128, 0, True),
        (-1, 2**31 - 257, False),
        (-1, 2**31 - 256, True),
        (2**31 - 128, 2**31 - 256, False),
    ],
)
def test_distances_may_reach_the_last_int32(q_start, kv_start, leaves):
    """128 queries and 256 keys."""
    places = {"q_positions": Range(q_start, 128), "kv_positions": Range(kv_start, 256)}
    assert _leaves_int32(SimpleNamespace(**places)) == leaves


def test_the_work_of_a_kernel_by_hand():
    """Half of 2 x 4 x 256 x 512 pairs, three products over 64 features and two over 32 values; bytes in and out."""
    shapes = {"q": (2, 4, 1, 256, 64), "k": (2, 2, 1, 512, 64), "v": (2, 2, 512, 32)}
    x = SimpleNamespace(**{name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()})
    call = SimpleNamespace(heads=4, size=64, value_size=32)
    found, pairs = work(call, x, 3, 2), 2 * 4 * 256 * 512 // 2
    assert found.transcendentals == pairs
    assert found.flops == 2 * pairs * (3 * 64 + 2 * 32)
    assert found.bytes_accessed == 2 * 2 * (2 * 4 * 256 * 64 + 2 * 2 * 512 * 64 + 2 * 2 * 512 * 32)
