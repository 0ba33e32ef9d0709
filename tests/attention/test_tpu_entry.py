"""How the operands of a call become the arrays of the TPU kernels."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.attention.operands import Operands, RemappedPair
from posjax.attention.tpu import entry
from posjax.attention.tpu.terms import Joined, OfArrays
from posjax.masks import And, Beyond, Causal, Segments
from posjax.positions import Range

ROWS, KV_HEADS, GROUP, QUERIES, KEYS = 2, 2, 3, 4, 6


def arrays(size: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return (
        rng.standard_normal((ROWS, KV_HEADS, GROUP, QUERIES, size), np.float32),
        rng.standard_normal((ROWS, KV_HEADS, KEYS, size), np.float32),
    )


@pytest.mark.parametrize("size", [8, 128], ids=["narrow heads", "heads that fill the lanes"])
def test_the_bound_has_the_longest_key_of_each_pair_and_the_most_of_the_bias(size):
    (q, k), most = arrays(size), np.arange(KV_HEADS * GROUP, dtype=np.float32)
    pair = RemappedPair(jnp.asarray(2 * q), jnp.asarray(2 * k), Beyond(2))
    x = Operands(*map(jnp.asarray, (q, k, k)), None, None, Range(0, QUERIES), Range(0, KEYS), remap=(pair,))
    inputs = entry._inputs(x, [7, 9], None, ((), ()), {})
    merged = (ROWS, 1, 2, KEYS, KV_HEADS * size) if size == 128 else (ROWS, KV_HEADS, 2, KEYS, size)
    chex.assert_shape(inputs.k, merged)
    np.testing.assert_array_equal(inputs.starts, [7, 9])
    found = entry._bound(x, inputs.k, jnp.asarray(most))
    longest = np.repeat(np.linalg.norm(k, axis=-1).max(-1), GROUP, axis=1)
    want = np.stack([longest, 2 * longest, np.broadcast_to(most, longest.shape)], -1)
    np.testing.assert_allclose(found, want[:, :, None], rtol=1e-5)


@pytest.mark.parametrize("ranged", [True, False])
def test_numbers_of_tokens_are_positions_and_then_those_of_the_mask_and_of_the_branches(ranged):
    q, k = arrays(8)
    ids = [[np.full((ROWS, tokens), n, np.int32) for tokens in (QUERIES, KEYS)] for n in (1, 2)]
    places = (Range(0, QUERIES), Range(0, KEYS)) if ranged else (np.arange(QUERIES), np.arange(KEYS))
    pair = RemappedPair(q, k, Segments(*ids[1]))
    found, numbers = entry._pattern(Operands(q, k, k, None, Causal() & Segments(*ids[0]), *places, remap=(pair,)))
    assert found.mask == Joined(And, Causal(), OfArrays(Segments))
    assert found.branches == (OfArrays(Segments),)
    for got, tokens, side in zip(numbers, (QUERIES, KEYS), (0, 1), strict=True):
        if not ranged:
            np.testing.assert_array_equal(got[0], np.arange(tokens)[None, None, None])
        of_masks = got if ranged else got[1:]
        np.testing.assert_array_equal(of_masks, np.stack([own[side] for own in ids])[:, :, None, None])
        assert all(row.dtype == np.int32 for row in got)
