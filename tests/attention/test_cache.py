"""The cache of decoding: which slot a token gets, what is dropped, and how many slots there are."""

import jax.numpy as jnp
import numpy as np
import pytest

from posjax.attention.cache import Cache, ring

BATCH, SLOTS, HEADS, KV_HEADS, SIZE, TOKENS = 2, 6, 4, 2, 3, 3


def test_tokens_are_written_to_their_slots_and_padding_is_dropped():
    """Two first tokens keep their slots, the others share four. Of row 0, the second token is padding."""
    ids = jnp.full((BATCH, SLOTS), -1, jnp.int32)
    k, gates = jnp.full((BATCH, KV_HEADS, SLOTS, SIZE), -7.0, jnp.bfloat16), jnp.full((BATCH, HEADS, SLOTS), -7.0)
    cache = Cache(k, k[..., :1], ids, ids, gates, gates[..., 0], first=2, chunk=TOKENS)
    new = np.arange(BATCH * TOKENS * KV_HEADS * SIZE, dtype=np.float32).reshape(BATCH, TOKENS, KV_HEADS, SIZE)
    new_gates = np.arange(BATCH * HEADS * TOKENS, dtype=np.float32).reshape(BATCH, HEADS, TOKENS)
    index, valid = jnp.asarray([[0, 1, 2], [5, 6, 11]]), jnp.asarray([[True, False, True], [True, True, True]])
    found = cache.write(new, new[..., :1], jnp.asarray([10, 11, 12]), index, valid, new_gates)
    written = {(0, 0): 0, (0, 2): 2, (1, 5): 0, (1, 2): 1, (1, 3): 2}
    for row, slot in np.ndindex(BATCH, SLOTS):
        token = written.get((row, slot))
        unwritten = token is None
        np.testing.assert_array_equal(found.k[row, :, slot], -7 if unwritten else new[row, token])
        np.testing.assert_array_equal(found.v[row, :, slot], -7 if unwritten else new[row, token, :, :1])
        np.testing.assert_array_equal(found.gates[row, :, slot], -7 if unwritten else new_gates[row, :, token])
        assert found.positions[row, slot] == (-1 if unwritten else 10 + token)
        assert found.ids[row, slot] == (-1 if unwritten else 0)
    np.testing.assert_array_equal(found.total, new_gates[..., 2])
    assert (found.k.dtype, found.slots) == (jnp.bfloat16, SLOTS)


def test_without_a_ring_tokens_beyond_the_last_slot_are_dropped():
    k, ids = jnp.zeros((1, 1, 4, SIZE)), jnp.full((1, 4), -1, jnp.int32)
    new, index = jnp.ones((1, TOKENS, 1, SIZE)), jnp.asarray([[2, 3, 4]])
    found = Cache(k, k, ids, ids, None, None, first=None, chunk=TOKENS).write(new, new, index, index, index > 0)
    np.testing.assert_array_equal(found.positions, [[-1, -1, 2, 3]])
    assert (found.gates, found.total) == (None, None)


@pytest.mark.parametrize(
    ("kept", "capacity", "chunk", "wanted"),
    [
        (None, 10, 3, (None, 10)),
        ((2, 4), 100, 1, (2, 6)),
        ((2, 4), 9, 3, (2, 8)),
        ((2, 4), 8, 3, (None, 8)),
        ((2, 0), 100, 1, (2, 3)),
    ],
)
def test_a_ring_holds_the_recent_tokens_of_the_first_query_of_a_chunk(kept, capacity, chunk, wanted):
    assert ring(kept, capacity, chunk) == wanted
