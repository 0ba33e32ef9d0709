"""Tiles that plans visit, against a check of every pair of tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.attention.call import Call, RemappedPair
from posjax.attention.tiles import AHEAD, BEHIND, NEAR, Blocks, Kind, TilePlan, plan_tiles
from posjax.masks import (
    ArrayMask,
    Beyond,
    Causal,
    Chunked,
    ChunksApart,
    Dilated,
    FirstTokens,
    Globals,
    Prefix,
    Segments,
    Window,
    materialise,
)
from posjax.positions import Range, as_array, from_segments

QUERIES, KEYS = 24, 36
BLOCKS = [Blocks(4, 6, 2), Blocks(8, 4, 4)]

IDS = np.array([[0] * 3 + [1] * 18 + [-1] * 15, [-1] * 2 + [4] * 5 + [5] * 29], np.int32)
FLAGS = np.zeros((2, KEYS), bool)
FLAGS[0, 5] = FLAGS[1, 20:] = True
SHUFFLED = np.random.default_rng(0).permutation(KEYS).astype(np.int32)
PACKED = np.asarray(from_segments(IDS))


@dataclasses.dataclass(frozen=True)
class Case:
    """Masks and positions. ``exact``: the extents of positions alone determine the kind of every tile."""

    name: str
    mask: object = None
    remap: tuple = ()
    q_positions: object = Range(0, QUERIES)
    kv_positions: object = Range(0, KEYS)
    constant_from: int | None = None
    exact: bool = True

    @property
    def ahead(self) -> int:
        """Distance of the first query from the first key."""
        return int(as_array(self.q_positions)[..., 0].min() - as_array(self.kv_positions)[..., 0].min())


CASES = [
    Case("causal", Causal()),
    Case("causal from further on", Causal(), q_positions=Range(12, QUERIES)),
    Case("band", Window(7)),
    Case("lambda", Causal() & (Window(5) | FirstTokens(2)), exact=False),
    Case("chunked or a prefix", Causal() & Chunked(8) | Prefix(10), exact=False),
    Case("dilated", Dilated(3, 4), exact=False),
    Case("globals", Window(3) | Globals(FLAGS[:, :QUERIES], FLAGS), exact=False),
    Case("nothing", Causal(), kv_positions=Range(100, KEYS)),
    Case("empty rows", Causal() & Window(4), q_positions=Range(20, QUERIES), exact=False),
    Case("remap", Causal(), remap=(Beyond(7),)),
    Case("two branches", Causal(), remap=(ChunksApart(8, 1, 1), ChunksApart(8, 2)), exact=False),
    Case("constant", Causal(), constant_from=11),
    Case("constant on both sides", constant_from=6, q_positions=Range(5, QUERIES)),
    Case("constant and far", Causal() & Window(20), remap=(Beyond(7),), constant_from=11, exact=False),
    Case("shuffled keys", Causal(), kv_positions=SHUFFLED, exact=False),
    Case(
        "packed",
        Causal() & Segments(IDS[:, :QUERIES], IDS),
        remap=(Beyond(3),),
        q_positions=PACKED[:, :QUERIES],
        kv_positions=PACKED,
        exact=False,
    ),
]
cases_and_blocks = pytest.mark.parametrize(
    ("case", "blocks"),
    [
        pytest.param(case, blocks, marks=[] if n % 2 == m % 2 else [pytest.mark.wide])
        for n, case in enumerate(CASES)
        for m, blocks in enumerate(BLOCKS)
    ],
    ids=lambda value: value.name if isinstance(value, Case) else f"{value.q}x{value.k}",
)


def call(case: Case) -> Call:
    q, k = np.zeros((2, 1, 1, QUERIES, 1), np.float32), np.zeros((2, 1, KEYS, 1), np.float32)
    remap = tuple(RemappedPair(q, k, where) for where in case.remap)
    return Call(q, k, k, None, case.mask, case.q_positions, case.kv_positions, remap)


def planned(case: Case, blocks: Blocks):
    return plan_tiles(call(case), blocks, constant_from=case.constant_from, ahead=case.ahead)


def traced(case: Case) -> dict:
    """Masks and positions with no number that is known when tracing."""
    moved = {name: getattr(case, name) for name in ("mask", "remap", "q_positions", "kv_positions")}
    return {
        name: Range(jnp.int32(value.start), value.length) if isinstance(value, Range) else value
        for name, value in moved.items()
    }


def tiles_of(mask, case: Case, blocks: Blocks) -> np.ndarray:
    """Every pair of tokens, ``[batch, q blocks, k blocks, pairs of a tile]``."""
    whole = np.ones((1, QUERIES, KEYS), bool)
    if mask is not None:
        whole = np.asarray(materialise(mask, case.q_positions, case.kv_positions)).reshape(-1, QUERIES, KEYS)
    cut = whole.reshape(-1, QUERIES // blocks.q, blocks.q, KEYS // blocks.k, blocks.k).swapaxes(2, 3)
    return np.broadcast_to(cut.reshape(*cut.shape[:3], -1), (2, *cut.shape[1:3], blocks.q * blocks.k))


def kinds_of(plan) -> np.ndarray:
    """The kind of every tile as an object, None where it is not visited, ``[2, q blocks, k blocks]``."""
    names = np.array([None, *plan.kinds], dtype=object)
    grid = names[np.asarray(plan.grid)]
    return np.broadcast_to(grid, (2, *grid.shape[1:]))


@cases_and_blocks
def test_every_tile_is_of_its_kind(case, blocks):
    """No tile lacks a pair. In an exact case, no tile is visited, masked or scored twice without need."""
    found = kinds_of(planned(case, blocks))
    allowed = tiles_of(case.mask, case, blocks)
    branches = [tiles_of(where, case, blocks) for where in case.remap]
    owner = sum((n * branch for n, branch in enumerate(branches, start=1)), np.zeros(allowed.shape, int))
    for at in np.ndindex(found.shape):
        kind, seen, pairs = found[at], allowed[at], owner[at]
        assert not (kind is None and seen.any())
        assert not (case.exact and kind is not None and not seen.any())
        if kind is None:
            continue
        assert kind.masked or seen.all()
        assert not (case.exact and kind.masked and seen.all())
        assert set(pairs[seen]) <= set(kind.pairs)
        assert len(kind.pairs) in (1, 1 + len(case.remap))
        assert not (case.exact and len(kind.pairs) > 1 and len(set(pairs)) == 1)


@cases_and_blocks
def test_a_bias_is_constant_where_all_distances_of_a_tile_are_beyond(case, blocks):
    i, j = np.arange(QUERIES) + case.ahead, np.arange(KEYS)
    distances = (i[:, None] - j[None]).reshape(QUERIES // blocks.q, blocks.q, KEYS // blocks.k, blocks.k)
    lowest, highest = distances.min((1, 3)), distances.max((1, 3))
    for at in np.ndindex((found := kinds_of(planned(case, blocks))).shape):
        if found[at] is None:
            continue
        if case.constant_from is None:
            assert found[at].reach == NEAR
            continue
        behind, ahead = lowest[at[1:]] >= case.constant_from, highest[at[1:]] <= -case.constant_from
        assert found[at].reach == (BEHIND if behind else AHEAD if ahead else NEAR)


@cases_and_blocks
def test_plans_of_traced_positions_are_the_same(case, blocks):
    """They hold every possible kind, so that one program serves all positions."""
    known, kinds = planned(case, blocks), []

    @jax.jit
    def run(moved, ahead):
        x = call(dataclasses.replace(case, **moved))
        found = plan_tiles(x, blocks, constant_from=case.constant_from, ahead=ahead)
        kinds.extend(found.kinds)
        return found.grid

    grid = run(traced(case), jnp.int32(case.ahead))
    assert set(known.kinds) <= set(kinds)
    np.testing.assert_array_equal(kinds_of(TilePlan(tuple(kinds), grid)), kinds_of(known))


def test_causal_attention_in_square_tiles_masks_the_diagonal_alone():
    """The rows of a batch share the plan, which is known when tracing because the positions are."""
    case = Case("square", Causal(), q_positions=Range(12, QUERIES))
    found = planned(case, Blocks(12, 12, 12))
    assert found.kinds == (Kind((0,), False), Kind((0,), True))
    assert isinstance(found.grid, np.ndarray)
    np.testing.assert_array_equal(found.grid, [[[1, 2, 0], [1, 1, 2]]])


def test_a_block_of_queries_without_keys_gets_a_masked_tile():
    """Without a tile, the gradient of its queries would not be written."""
    whole = Kind((0,), False)
    plan = TilePlan((whole,), np.array([[1, 1], [0, 0]])).with_every_query
    assert plan.kinds == (whole, Kind((0,), True))
    np.testing.assert_array_equal(plan.grid, [[1, 1], [0, 2]])


def test_rows_that_share_tiles_visit_what_any_of_them_needs():
    rows = np.zeros((2, 1, QUERIES, KEYS), bool)
    rows[0, :, :8, :12] = rows[1, :, :8, 12:24] = rows[:, :, 8:16] = True
    case = Case("rows", ArrayMask(rows))
    whole, masked = Kind((0,), False), Kind((0,), True)
    blocks = Blocks(8, 12)
    apart, shared = (plan_tiles(call(case), blocks, together=together) for together in (False, True))
    assert apart.kinds == (whole,)
    np.testing.assert_array_equal(apart.grid, [[[1, 0, 0], [1, 1, 1], [0, 0, 0]], [[0, 1, 0], [1, 1, 1], [0, 0, 0]]])
    assert shared.kinds == (whole, masked)
    np.testing.assert_array_equal(shared.grid, [[[2, 2, 0], [1, 1, 1], [0, 0, 0]]])


def test_a_tile_is_whole_if_it_is_whole_for_all_heads_and_empty_if_for_all():
    heads = np.zeros((1, 2, QUERIES, KEYS), bool)
    heads[:, 0, :12] = heads[:, 1, :12, :18] = True
    found = plan_tiles(call(Case("heads", ArrayMask(heads))), Blocks(12, 18))
    assert found.kinds == (Kind((0,), False), Kind((0,), True))
    np.testing.assert_array_equal(found.grid, [[[1, 2], [0, 0]]])
