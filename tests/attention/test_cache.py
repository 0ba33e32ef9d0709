"""The cache of decoding: which slot a token gets, what is dropped, and how many slots there are."""

import dataclasses

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.attention.cache import Cache, ring

BATCH, SLOTS, HEADS, KV_HEADS, SIZE = 2, 6, 4, 2, 3


def empty(first: int | None = None, chunk: int = 4, gates: bool = False) -> Cache:
    return Cache(
        k=jnp.full((BATCH, SLOTS, KV_HEADS, SIZE), -7.0, jnp.bfloat16),
        v=jnp.full((BATCH, SLOTS, KV_HEADS, 1), -7.0),
        positions=jnp.full((BATCH, SLOTS), -7, jnp.int32),
        ids=jnp.full((BATCH, SLOTS), -1, jnp.int32),
        gates=jnp.full((BATCH, HEADS, SLOTS), -7.0) if gates else None,
        total=jnp.zeros((BATCH, HEADS)) if gates else None,
        first=first,
        chunk=chunk,
    )


@pytest.mark.parametrize(
    ("first", "slots"),
    [(None, range(12)), (0, [*range(6), *range(6)]), (2, [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 2, 3])],
)
def test_tokens_after_the_first_share_a_ring_of_slots(first, slots):
    cache, index = empty(first), jnp.arange(12)[None]
    assert cache.slots == SLOTS
    np.testing.assert_array_equal(cache.slot(index, jnp.ones((1, 12), bool)), [list(slots)])
    valid = index % 3 > 0
    np.testing.assert_array_equal(cache.slot(index, valid), np.where(valid, [list(slots)], SLOTS))


@pytest.mark.parametrize("gates", [False, True])
def test_tokens_are_written_to_their_slots_and_padding_is_dropped(gates):
    tokens = 3
    k, v = (
        np.arange(BATCH * tokens * KV_HEADS * n, dtype=np.float32).reshape(BATCH, tokens, KV_HEADS, n)
        for n in (SIZE, 1)
    )
    index = jnp.asarray([[0, 1, 2], [4, 5, 6]])
    valid = jnp.asarray([[True, False, True], [True, True, True]])
    new_gates = np.arange(BATCH * HEADS * tokens, dtype=np.float32).reshape(BATCH, HEADS, tokens)
    before = empty(gates=gates)
    found = before.write(k, v, jnp.asarray([10, 11, 12]), index, valid, new_gates if gates else None)
    # (row, slot, token): token 1 of row 0 is padding, token 2 of row 1 is beyond the last slot.
    written = [(0, 0, 0), (0, 2, 2), (1, 4, 0), (1, 5, 1)]
    wanted = {name: np.array(getattr(before, name)) for name in ("k", "v", "positions", "ids")}
    for row, slot, token in written:
        wanted["k"][row, slot], wanted["v"][row, slot] = k[row, token], v[row, token]
        wanted["positions"][row, slot], wanted["ids"][row, slot] = 10 + token, 0
    for name, array in wanted.items():
        chex.assert_trees_all_equal(getattr(found, name), jnp.asarray(array))
    if not gates:
        assert (found.gates, found.total) == (None, None)
        return
    np.testing.assert_array_equal(found.total, new_gates[..., 2])
    kept = np.array(before.gates)
    for row, slot, token in written:
        kept[row, :, slot] = new_gates[row, :, token]
    np.testing.assert_array_equal(found.gates, kept)


def test_at_most_a_chunk_of_tokens_is_written_at_once():
    new = np.zeros((BATCH, 2, KV_HEADS, SIZE), np.float32)
    index, valid = jnp.zeros((BATCH, 2), jnp.int32), jnp.ones((BATCH, 2), bool)
    empty(chunk=2).write(new, new[..., :1], index, index, valid)
    with pytest.raises(ValueError, match=r"^tokens: this cache was made for 1 tokens at a time, found 2; "):
        dataclasses.replace(empty(), chunk=1).write(new, new[..., :1], index, index, valid)


@pytest.mark.parametrize(
    ("kept", "capacity", "chunk", "wanted"),
    [
        (None, 10, 3, (None, 10)),
        ((2, 4), 100, 1, (2, 6)),
        ((2, 4), 100, 3, (2, 8)),
        ((2, 0), 100, 1, (2, 3)),
        ((0, 1), 100, 1, (0, 1)),
        ((2, 4), 9, 3, (2, 8)),
        ((2, 4), 8, 3, (None, 8)),
    ],
)
def test_a_ring_holds_the_recent_tokens_of_the_first_query_of_a_chunk(kept, capacity, chunk, wanted):
    assert ring(kept, capacity, chunk) == wanted
