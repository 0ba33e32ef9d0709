"""Decisions of blockwise attention before it runs: sizes of tiles, which are visited, and how each is scored."""

import dataclasses
import importlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.attention import attention
from posjax.attention.blockwise import (
    _added,
    _choose_blocks,
    _finish,
    _inexact_leaves,
    _pair_masks,
    _put,
    _rows_at_once,
    _rows_of_a_plan,
    blockwise,
)
from posjax.attention.operands import Operands, RemappedPair
from posjax.attention.padding import pad
from posjax.attention.tiles import Blocks, Kind, plan_tiles, visits
from posjax.bias import LinearBias
from posjax.masks import Beyond, BlockBounds, Causal, Segments
from posjax.positions import Range, as_array


def operands(*heads, queries=8, keys=8, **slots) -> Operands:
    q, k = np.zeros((*heads, queries, 2), np.float32), np.zeros((*heads[:2], keys, 2), np.float32)
    remap = tuple(RemappedPair(q, k, where) for where in slots.pop("remap", ()))
    places = {"q_positions": Range(0, queries), "kv_positions": Range(0, keys)}
    return Operands(q, k, k, slots.pop("bias", None), **{"mask": None, "remap": remap, **places, **slots})


@pytest.mark.parametrize(
    ("heads", "run", "tokens"),
    [
        # 8 tiles of 512 x 512 have 2^21 logits, 9 have more; 512 tiles of 64 x 64 have as many, and 64 is the least.
        ((2, 2, 2), None, 512),
        ((3, 3, 1), None, 256),
        ((1, 1, 9), None, 256),
        ((8, 8, 8), None, 64),
        ((16, 8, 8), None, 64),
        ((1, 1, 1), 384, 128),
    ],
)
def test_a_tile_has_two_million_logits_at_most_down_to_64_tokens(heads, run, tokens):
    assert _choose_blocks(operands(*heads, queries=2048, keys=1024, run=run)) == Blocks(tokens, tokens)


@pytest.mark.parametrize(
    ("heads", "queries", "wanted"),
    [((1, 2, 8), 1, Blocks(1, 2**17)), ((1, 1, 1), 100, Blocks(100, 2**14)), ((64, 8, 4), 1, Blocks(1, 1024))],
)
def test_of_few_queries_a_tile_has_many_keys(heads, queries, wanted):
    """As many as give 2^21 logits (2^17 keys for 16 heads and one query) or 2^21 features."""
    x = operands(*heads, queries=queries, keys=2**18)
    assert _choose_blocks(x) == wanted
    wide = dataclasses.replace(x, q=np.zeros((1, 2, 8, 1, 64)))
    assert _choose_blocks(wide) == Blocks(1, 2**14)


@pytest.mark.parametrize(
    ("heads", "tokens", "rows"),
    # 8 heads of 128 x 128 have 2^17 logits, and a tile has room for 16 rows of them; 8 heads of 512 x 512 fill a tile.
    [((8, 8, 1), 512, 8), ((32, 8, 1), 512, 16), ((8, 4, 2), 2048, 1), ((6, 2, 2), 2048, 2), ((6, 1, 2), 2048, 3)],
)
def test_rows_that_differ_share_tiles_while_these_are_a_quarter_of_a_row(heads, tokens, rows):
    assert _rows_at_once(operands(*heads, queries=tokens, keys=tokens)) == rows


def test_a_tile_is_no_longer_than_the_row():
    assert _choose_blocks(operands(1, 1, 1, queries=3, keys=100)) == Blocks(3, 100)


FAR, BOTH = Beyond(5), (0, 1)
WHOLE, FAR_WHOLE, BOTH_WHOLE = (Kind(pairs, False) for pairs in ((0,), (1,), BOTH))
MASKED, FAR_MASKED, BOTH_MASKED = (Kind(pairs, True) for pairs in ((0,), (1,), BOTH))
CALLS = {
    "all pairs": ({}, [WHOLE], [[1] * 4] * 4),
    "causal": ({"mask": Causal()}, [WHOLE, MASKED], [[2, 0, 0, 0], [1, 2, 0, 0], [1, 1, 2, 0], [1, 1, 1, 2]]),
    # The remapped pairs are those 5 or more apart.
    "remapped pairs": (
        {"remap": (FAR,)},
        [WHOLE, FAR_WHOLE, BOTH_WHOLE],
        [[1, 1, 1, 1], [1, 1, 1, 1], [3, 1, 1, 1], [2, 3, 1, 1]],
    ),
    "causal and far": (
        {"mask": Causal(), "remap": (FAR,)},
        [WHOLE, FAR_WHOLE, BOTH_WHOLE, MASKED],
        [[4, 0, 0, 0], [1, 4, 0, 0], [3, 1, 4, 0], [2, 3, 1, 4]],
    ),
    # Two rows of a batch: a tile is empty or whole only if it is so in both.
    "packed": (
        {"mask": Segments(np.array([[0] * 8, [0] * 4 + [1] * 4]), np.array([[0] * 8, [0] * 4 + [1] * 4]))},
        [WHOLE, MASKED],
        [[1, 1, 2, 2], [1, 1, 2, 2], [2, 2, 1, 1], [2, 2, 1, 1]],
    ),
}


@pytest.mark.parametrize(("slots", "kinds", "wanted"), CALLS.values(), ids=CALLS)
def test_the_kinds_of_tiles_of_two_tokens_by_hand(slots, kinds, wanted):
    """Known positions give the kinds that occur; unknown positions give every possible kind."""
    x = operands(2, 1, 1, **slots)
    known = plan_tiles(x, Blocks(2, 2), together=True)
    assert isinstance(known.grid, np.ndarray), "what is known when tracing is no part of the program"
    assert list(known.kinds) == kinds
    np.testing.assert_array_equal(known.grid, [wanted])
    places = jnp.arange(8, dtype=jnp.int32)
    moved = dataclasses.replace(x, q_positions=places, kv_positions=places)
    pairs = [(0,), (1,), BOTH] if x.remap else [(0,)]
    every = [Kind(each, masked) for masked in (False, True) for each in pairs] if slots else kinds
    assert list(plan_tiles(moved, Blocks(2, 2), together=True).kinds) == every
    grid = jax.jit(lambda x: plan_tiles(x, Blocks(2, 2), together=True).grid)(moved)
    names = [None, *every]
    assert [names[n] for n in np.ravel(grid)] == [[None, *kinds][n] for n in np.ravel(wanted)]


def test_visits_go_kind_after_kind_and_leave_out_the_empty():
    found = visits(np.array([[2, 0, 1, 2], [0, 0, 0, 0]]), 2)
    assert found.order[0].tolist() == [2, 0, 3, 1]
    assert found.ends.tolist() == [[1, 3], [0, 0]]


def test_keys_that_padding_has_added_are_hidden():
    """Six of eight keys are real, in blocks of two and of four. The kinds of tiles are known when tracing."""
    mask = pad(operands(1, 1, 1, queries=3, keys=6), 3, 4).mask
    none = np.zeros(3, np.int32)
    for size, some, every in ((2, [[1, 1, 1, 0]], [[1, 1, 1, 0]]), (4, [[1, 1]], [[1, 0]])):
        found = mask.tiles(BlockBounds(none, none, 3), BlockBounds(none, none, size))
        assert all(isinstance(each, np.ndarray) for each in found)
        np.testing.assert_array_equal(found[0][0, 0], some)
        np.testing.assert_array_equal(found[1][0, 0], every)
    assert mask.allowed(np.arange(3), np.arange(8))[0, 0].tolist() == [[True] * 6 + [False] * 2] * 3


def test_positions_stay_a_range_while_padding_stays_within_int32():
    for start, is_range in ((2**31 - 8, True), (2**31 - 7, False)):
        found = pad(operands(1, 1, 1, queries=6, q_positions=Range(start, 6)), 8, 8).q_positions
        assert isinstance(found, Range) == is_range
        assert int(as_array(found)[-1]) == 2**31 - 1 - (not is_range)


@pytest.mark.parametrize("which", ["queries", "keys"])
def test_rows_with_different_positions_are_processed_one_by_one(which):
    """Queries and keys are all zero, so each query gives the mean of the values that it sees."""
    places = np.arange(8, dtype=np.int32) + np.array([[0], [3]], np.int32)
    positions = {f"{'q' if which == 'queries' else 'kv'}_positions": places}
    x = operands(2, 1, 1, mask=Causal(), **positions)
    x = dataclasses.replace(x, v=np.arange(32, dtype=np.float32).reshape(2, 1, 8, 2))
    found = jax.jit(lambda: blockwise(x, Blocks(8, 4)).out)()
    for row, ahead in ((0, 0), (1, 3 if which == "queries" else -3)):
        seen = np.tril(np.ones((8, 8)), k=ahead)
        mean = seen @ x.v[row, 0] / np.maximum(seen.sum(1, keepdims=True), 1)
        np.testing.assert_allclose(found[row, 0, 0], mean, rtol=1e-6)


@pytest.mark.parametrize("start", [0, jnp.int32(5)], ids=["static", "array"])
def test_rows_with_a_plan_each_have_gradients_over_a_range(start, monkeypatch):
    """Masks differ between rows, and rows are too long to share tiles; positions are one range for all."""
    monkeypatch.setattr(importlib.import_module("posjax.attention.blockwise"), "TILE_ELEMENTS", 1)
    q = jax.random.normal(jax.random.key(0), (4, 24, 2, 8))
    mask = Causal() & Segments(np.sort(np.random.default_rng(0).integers(0, 4, (4, 24), np.int32)))
    places = {"q_positions": Range(start, 24), "kv_positions": Range(start, 24)}

    def gradients(implementation):
        def total(q, k, v, slopes):
            bias = LinearBias(slopes)
            found = attention(q, k, v, mask=mask, bias=bias, implementation=implementation, **places)
            return jnp.square(found).sum()

        return jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))(q, q + 1, q - 1, jnp.array([0.5, 0.1]))

    chex.assert_trees_all_close(gradients("blockwise"), gradients("dense"), atol=2e-5)


ROWS = np.zeros((4, 8), np.int32)


@pytest.mark.parametrize(
    ("slots", "differ"),
    [
        ({}, False),
        ({"mask": Causal()}, False),
        ({"mask": Segments(ROWS[:1])}, False),
        ({"mask": Segments(ROWS)}, True),
        ({"remap": (Causal() & Segments(ROWS),)}, True),
        ({"q_positions": ROWS[0]}, False),
        ({"q_positions": ROWS}, True),
        ({"kv_positions": ROWS}, True),
    ],
)
def test_rows_share_a_plan_unless_masks_or_positions_differ(slots, differ, monkeypatch):
    monkeypatch.setattr(importlib.import_module("posjax.attention.blockwise"), "TILE_ELEMENTS", 2 * 8 * 64)
    assert _rows_of_a_plan(operands(4, 1, 1, **slots)) == (2 if differ else 4)
    assert _rows_of_a_plan(operands(0, 1, 1, **slots)) == 0


def test_gradients_of_a_tile_are_added_where_its_tokens_are():
    """An axis of a whole array is cut only if the tile's part of it is shorter."""
    whole, part = np.ones((2, 6, 8), np.float32), np.full((2, 3, 8), 2, jnp.bfloat16)
    found = _added(jnp.asarray(whole), jnp.asarray(part), [5, 3, 4])
    chex.assert_type(found, jnp.float32)
    whole[:, 3:] = 3
    np.testing.assert_array_equal(found, whole)
    np.testing.assert_array_equal(_added(jnp.asarray(whole), jnp.asarray(whole), [5, 3, 4]), 2 * whole)


def test_gradients_of_some_rows_are_put_at_them_or_added_if_rows_share_the_array():
    whole, part = jnp.zeros((3, 4)), jnp.ones((3, 2))
    np.testing.assert_array_equal(_put(whole, part, 1, 1), [[0, 1, 1, 0]] * 3)
    np.testing.assert_array_equal(_put(part, part, 1, None), 2 * part)


def test_leaves_without_derivative_stay_where_others_are_replaced():
    tree = {"a": jnp.ones(2), "b": (jnp.arange(3), jnp.zeros((), jnp.bfloat16))}
    leaves, rebuild = _inexact_leaves(tree)
    chex.assert_trees_all_equal(leaves, [tree["a"], tree["b"][1]])
    assert rebuild(["first", "second"]) == {"a": "first", "b": (tree["b"][0], "second")}


def test_scores_are_masked_only_in_tiles_that_need_it():
    tile = operands(1, 1, 1, mask=Causal(), remap=(Beyond(3),), q_positions=np.arange(8), kv_positions=np.arange(8))
    logits, allowed = np.zeros((1, 1, 1, 8, 8), np.float32), np.tril(np.ones((8, 8), bool))
    np.testing.assert_array_equal(_finish(tile, Kind((0,), True), logits)[0, 0, 0], np.where(allowed, 0, -np.inf))
    assert _finish(tile, Kind((0,), False), logits) is logits
    assert _finish(dataclasses.replace(tile, mask=None), Kind((0,), True), logits) is logits
    assert _pair_masks(tile, Kind((1,), True)) == [None]
    far = np.arange(8)[:, None] - np.arange(8) >= 3
    near, remapped = _pair_masks(tile, Kind((0, 1), False))
    np.testing.assert_array_equal(remapped, far)
    np.testing.assert_array_equal(near, ~far)
