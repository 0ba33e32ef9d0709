"""Buffers of the TPU kernels in fast memory, counted by hand: a buffer too many leaves less room for tiles."""

from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.attention.operands import Operands, RemappedPair
from posjax.attention.rows import PerQuery
from posjax.attention.tiles import Blocks
from posjax.attention.tpu import backward_dma, entry, forward_dma
from posjax.attention.tpu.blocks import TARGETS
from posjax.bias import T5, ALiBi
from posjax.masks import Beyond, Causal, Segments
from posjax.positions import Range

QUERIES, KEYS, VALUES = 256, 384, 32
BLOCKS = Blocks(256, 384, 128), Blocks(128, 384, 128)
SEGMENTS = Segments(np.zeros((1, QUERIES), np.int32), np.zeros((1, KEYS), np.int32))


def calls(monkeypatch, *, chip="TPU v5 lite", size=128, dtype=jnp.bfloat16, bias=None, mask=None, remap=None) -> list:
    """The static call and the shapes of its inputs, as the kernels get them. The kernels do not run."""
    found = []

    def forward(call, x, so_far):
        found.append((call, jax.eval_shape(lambda: x)))
        return jnp.zeros((1, 2, QUERIES, VALUES)), jnp.zeros((1, 2, 1, QUERIES))

    def run(q, k, v):
        bound = bias and bias.bind(bias.init(jax.random.key(0), 2), num_heads=2)
        branches = () if remap is None else (RemappedPair(q, k, remap),)
        x = Operands(
            q, k, v, bound, Causal() if mask is None else mask, Range(0, QUERIES), Range(0, KEYS), remap=branches
        )
        return entry.attend(x, entry.Options(blocks=BLOCKS, on=TARGETS[chip]))

    monkeypatch.setattr(entry, "forward", forward)
    shapes = (1, 1, 2, QUERIES, size), (1, 1, KEYS, size), (1, 1, KEYS, VALUES)
    jax.eval_shape(run, *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))
    return found[0]


def shapes_of(buffers) -> list:
    return [leaf.shape for leaf in jax.tree.leaves(buffers, is_leaf=lambda x: hasattr(x, "shape"))]


# Forward: two buffers each for keys, values, rows and window; maximum, sum, both as rows, output, queries with extra
# features, and the bias; a state; semaphores.
# Backward: two buffers each for queries, rows, gradients of outputs, two numbers per query, and window; dk, dv,
# columns, the bias, its gradient and matrix; three buffers for dq, their contents and whether a result is being
# written, their semaphores, and for one pair of features the result and its semaphore; semaphores.
@pytest.mark.parametrize(
    ("slots", "forward", "backward"),
    [
        (
            {"bias": T5(), "mask": Causal() & SEGMENTS, "remap": Beyond(140)},
            [
                [(2, 2, 384, 128), (2, 384, 32), (2, 1, 384), (2, 5, 8, 128)],
                [(256, 128), (256, 128), (1, 256), (1, 256), (256, 32), (256, 128), (512, 128), (2,), (5, 2)],
            ],
            [
                [(2, 2, 128, 128), (2, 1, 128), (2, 128, 32), (2, 1, 128), (2, 1, 128), (2, 4, 8, 128)],
                [(2, 384, 128), (384, 32), (384, 128), (384, 128), (384, 128)],
                [(3, 2, 128, 128), (4,), (2, 2, 3), (7, 2)],
            ],
        ),
        (
            {"bias": ALiBi()},
            [
                [(2, 1, 384, 128), (2, 384, 32)],
                [(256, 128), (256, 128), (1, 256), (1, 256), (256, 32), (8, 384), (2,), (2, 2)],
            ],
            [
                [(2, 1, 128, 128), (2, 128, 32), (2, 1, 128), (2, 1, 128)],
                [(1, 384, 128), (384, 32), (384, 128), (384, 128)],
                [(3, 1, 128, 128), (4,), (2, 1, 3), (128, 128), (1,), (4, 2)],
            ],
        ),
        (
            {"bias": ALiBi(), "chip": "TPU v6 lite"},
            [
                [(2, 1, 384, 256), (2, 384, 32)],
                [(256, 128), (256, 128), (1, 256), (1, 256), (256, 32), (1, 256, 256), (2,), (2, 2)],
            ],
            [
                [(2, 1, 128, 128), (2, 128, 32), (2, 1, 128), (2, 1, 128)],
                [(1, 384, 128), (384, 32), (384, 128), (384, 128)],
                [(3, 1, 128, 128), (4,), (2, 1, 3), (128, 128), (1,), (4, 2)],
            ],
        ),
    ],
    ids=["bias by distance of segments and remapped pairs", "linear bias", "linear bias among the features"],
)
def test_scratch_holds_only_copied_blocks_and_sums(monkeypatch, slots, forward, backward):
    call, x = calls(monkeypatch, **slots)
    numbers = jax.ShapeDtypeStruct((1, 2, 1, QUERIES), jnp.float32)
    per_query = PerQuery(jax.ShapeDtypeStruct((1, 2, QUERIES, VALUES), jnp.bfloat16), numbers, numbers)
    forward_arrays = jax.eval_shape(lambda x: forward_dma.arrays_of(call, x, None), x)
    backward_arrays = jax.eval_shape(lambda x, y: backward_dma.arrays_of(call, x, y, None), x, per_query)
    assert shapes_of(forward_dma.scratch(call, forward_arrays)) == list(chain(*forward))
    assert shapes_of(backward_dma.scratch(call, backward_arrays, True)) == list(chain(*backward))


@pytest.mark.parametrize(
    ("slots", "spare", "bounded"),
    [
        ({"chip": "TPU v6 lite"}, True, True),
        ({"chip": "TPU v5 lite"}, False, False),
        ({"chip": "TPU v6 lite", "dtype": jnp.float32}, False, True),
        ({"chip": "TPU v6 lite", "size": 64}, False, True),
        ({"chip": "TPU v6 lite", "remap": Beyond(140)}, True, True),
        ({"chip": "TPU v6 lite", "bias": ALiBi()}, True, True),
        ({"chip": "TPU v6 lite", "bias": ALiBi(), "mask": SEGMENTS}, True, False),
    ],
)
def test_wide_units_have_spare_features_for_bfloat16_heads_of_128_and_use_a_known_bound(
    monkeypatch, slots, spare, bounded
):
    call, x = calls(monkeypatch, **slots)
    assert (call.spare, call.bounded, x.bound is not None) == (spare, bounded, bounded)
