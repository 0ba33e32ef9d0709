"""The parts into which the TPU kernels split a bias, added up for every query and key without a kernel."""

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from posjax.attention.operands import Operands
from posjax.attention.tiles import AHEAD, BEHIND, Blocks, Kind
from posjax.attention.tpu import terms
from posjax.attention.tpu.biases import ByDistance, Gates, KernelBias, LinearInKey, form_of
from posjax.attention.tpu.call import Inputs, KernelConfig, Tiling
from posjax.attention.tpu.dma import Tile, TileRow
from posjax.bias import ForgetBias, LinearBias
from posjax.masks import Causal
from posjax.positions import Range, as_array

HEADS, QUERIES, KEYS = 2, 256, 512
BLOCKS = Blocks(128, 256, 128), Blocks(256, 128, 128)
LOG2E = np.log2(np.e)
NEAR = Kind((0,), False)
SLOPES = np.float32([0.5, 0.125])
RANGES = Range(40, QUERIES), Range(0, KEYS)


class Forward(TileRow):
    """A row of the forward kernel: a block of 128 queries, and tiles of 256 keys."""

    side = 0


class Backward(TileRow):
    """A row of the backward kernel: a block of 128 keys, and tiles of 256 queries."""

    side = 1
    group_head = 0


class Squares:
    """A bias by distance, ``slope (r + 1/2)^2`` of distances ``r`` up to 100 tokens."""

    constant_from = 100
    only_adds = by_distance = True

    def values(self, q_positions, kv_positions):
        r = jnp.clip(q_positions[:, None] - kv_positions, -100, 100)
        return SLOPES[:, None, None] * (r + 0.5) ** 2


def operands(bias, positions=RANGES, mask=None) -> Operands:
    q, kv = np.zeros((1, 1, HEADS, QUERIES, 8), np.float32), np.zeros((1, 1, KEYS, 8), np.float32)
    return Operands(q, kv, kv, bias, mask, *positions)


def prepared(form: KernelBias, x: Operands) -> tuple[KernelConfig, Inputs]:
    """The static part of a call, and those of its inputs that a bias reads."""
    places = x.q_positions, x.kv_positions
    ranged = tuple(isinstance(p, Range) for p in places)
    given = dict.fromkeys(("size", "value_size", "pattern", "softcap", "factor", "bounded", "spare", "vmem"))
    given |= {"heads": HEADS, "kv_heads": 1, "ranged": ranged, "bias": form}
    tilings = Tiling(BLOCKS[0], (NEAR,), QUERIES // 128), Tiling(BLOCKS[1], (NEAR,), KEYS // 128)
    ahead = places[0].start - places[1].start if all(ranged) else 0
    starts = np.int32([p.start if isinstance(p, Range) else 0 for p in places])
    numbers = tuple(() if isinstance(p, Range) else (jnp.asarray(p).reshape(-1, 1, 1, len(p)),) for p in places)
    shapes = (np.zeros((1, HEADS, 1, QUERIES, 8)), np.zeros((1, 1, 1, KEYS, 8)), None)
    return KernelConfig(tilings=tilings, **given), Inputs(*shapes, starts, None, numbers, form.numbers(x, ahead), None)


def row_of(kind: type, form, config, x: Inputs, head: int, block: int, tile: int) -> TileRow:
    """The row as a kernel gets it, with the numbers of one tile in the second slot."""
    arrays = form.arrays(config, x, kind.side)
    blocks = config.tilings[kind.side].blocks
    block_size, tile_size = blocks[kind.side], blocks[1 - kind.side]
    own, others = slice(block * block_size, (block + 1) * block_size), slice(tile * tile_size, (tile + 1) * tile_size)

    def part(numbers, tokens):
        return np.asarray(numbers)[0, min(head, numbers.shape[1] - 1), :, tokens]

    def second(rows):
        return np.stack([np.full_like(rows, 99), rows])

    rows = [second(part(a, others)) for a in x.numbers[1 - kind.side]]
    columns = [np.asarray(terms.column(part(a, own))) for a in x.numbers[kind.side]]
    origins = tuple(part(table, slice(None)) for table in arrays.origins)
    outer_row = None if arrays.outer is None else part(arrays.outer, own)
    copied = arrays.copied
    bias = None if copied is None else second(part(copied, others)) if isinstance(form, Gates) else copied
    numbers = tuple(tuple(part(a, own) for a in arrays) for arrays in x.numbers) if kind.side == 0 else ()
    return kind(
        config=config,
        x=SimpleNamespace(
            numbers=numbers, starts=x.starts, bias=arrays._replace(origins=origins, outer=outer_row)
        ),
        buffers=SimpleNamespace(numbers=rows, bias=bias),
        sums=SimpleNamespace(columns=columns, bias=None, d_bias=np.zeros((128, 128), np.float32)),
        arrived=None, batch=0, head=head, kv_head=0, block=block, count=None,
    )  # fmt: skip


SHUFFLED = [np.random.default_rng(n).permutation(900).astype(np.int32)[:n] for n in (QUERIES, KEYS)]
PLACES = [RANGES, SHUFFLED]
GATES = [np.random.default_rng(n).uniform(-9, 0, (1, HEADS, n)).astype(np.float32) for n in (QUERIES, KEYS)]
TOKENS = [
    *[(LinearInKey(False), LinearBias(SLOPES), places) for places in PLACES],
    (Gates(), ForgetBias(*GATES), PLACES[0]),
]
tokens = pytest.mark.parametrize(("form", "bias", "places"), TOKENS, ids=["ranges", "arrays", "gates"])


def wanted(bias, places) -> np.ndarray:
    """The bias of all pairs in base 2, ``[heads, queries, keys]``."""
    if isinstance(bias, ForgetBias):
        return LOG2E * (GATES[0][0, :, :, None] - GATES[1][0, :, None])
    q, k = (np.asarray(as_array(p)) for p in places)
    return -LOG2E * SLOPES[:, None, None] * (q[:, None] - k)


@tokens
def test_a_constant_of_the_query_a_level_and_a_number_of_the_key_add_up_to_the_bias(form, bias, places):
    config, x = prepared(form, operands(bias, places))
    want = wanted(bias, places)
    for head, block, tile in ((0, 0, 1), (1, 1, 0), (1, 1, 1)):
        row = row_of(Forward, form, config, x, head, block, tile)
        constant = np.asarray(form.of_queries(config, x, 0))[0, head, block * 128 :][:128]
        at = Tile(NEAR, tile, 1)
        found = constant[:, None] + form.level(row, at) + form.of_keys(row, at)
        exact = want[head, block * 128 :, tile * 256 :][:128, :256]
        np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-3)
        if isinstance(form, LinearInKey):
            np.testing.assert_allclose(form.own(row)[0], constant, rtol=1e-6)
        row = row_of(Backward, form, config, x, head, block + 1, 0)
        constant = np.asarray(form.of_queries(config, x, 1))[0, head]
        found = constant + form.level(row, Tile(NEAR, 0, 1)) + np.asarray(form.column_of_keys(row))[:, :1]
        np.testing.assert_allclose(found.T, want[head, :, (block + 1) * 128 :][:, :128], rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("places", PLACES, ids=["ranges", "arrays"])
def test_the_gradient_of_a_slope_is_the_sum_of_distances_times_gradients(places):
    form = LinearInKey(False)
    config, x = prepared(form, operands(LinearBias(SLOPES), places))
    row = row_of(Backward, form, config, x, 1, 2, 0)
    object.__setattr__(row, "d_bias", [np.zeros((1, 1, 128), np.float32)])
    d_logits = np.random.default_rng(0).integers(-9, 9, (128, QUERIES)).astype(np.float32)
    for first in (0, 128):
        form.sum_up(row, Tile(NEAR, 0, 1), first, jnp.asarray(d_logits[:, first : first + 128]))
    form.finish_head(row)
    q, k = (np.asarray(as_array(p)).astype(np.float64) for p in places)
    want = (d_logits * (q - k[256:384, None])).sum()
    np.testing.assert_allclose(row.d_bias[0].sum(), want, rtol=1e-5)
    found = form.gradients(x, [np.stack([row.d_bias[0]] * 2)[:, None]], None)["slopes"]
    np.testing.assert_allclose(found, [2 * want * np.log(2)], rtol=1e-5)


def squares() -> np.ndarray:
    """``Squares`` of all pairs in base 2."""
    r = np.clip(40 + np.arange(QUERIES)[:, None] - np.arange(KEYS), -100, 100)
    return LOG2E * SLOPES[:, None, None] * (r + 0.5) ** 2


def by_distance(kind: type, head: int, block: int, tile: int, band=(0, 6)) -> tuple:
    """The form, the row, and the window of the tile as a kernel gets it in the second slot."""
    form = ByDistance(band, 100)
    config, x = prepared(form, operands(Squares()))
    row = row_of(kind, form, config, x, head, block, tile)
    of_head, window = form.part_of(row, tile)
    start = int(window.start)
    rows = np.asarray(row.x.bias.copied)[of_head, start : start + window.size]
    object.__setattr__(row, "buffers", SimpleNamespace(bias=SimpleNamespace(at=[None, rows])))
    row.sums.bias = np.zeros((256, 128), np.float32)
    row.sums.d_bias = np.ones((256, 128), np.float32)
    return form, row, x


@pytest.mark.parametrize("kind", [Forward, Backward])
@pytest.mark.parametrize(("block", "tile"), [(0, 1), (1, 0)])
def test_a_tile_of_a_bias_by_distance_is_made_of_a_window_of_its_vector(monkeypatch, kind, block, tile):
    monkeypatch.setattr(terms.pltpu, "roll", np.roll)
    tile = tile if kind is Forward else 0
    form, row, _ = by_distance(kind, 1, block, tile)
    found, at = [], Tile(NEAR, tile, 1)
    for first in range(0, 256, 128):
        form.begin_part(row, at, first)
        found.append(form.add(row, at, first, np.ones((128, 128), np.float32)) - 1)
    want = squares()[1] if kind is Forward else squares()[1].T
    want = want[block * 128 :, tile * 256 :][:128, :256]
    np.testing.assert_allclose(np.concatenate(found, axis=1), want, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("band", [(0, 6), (1, 6)])
def test_gradients_of_a_bias_by_distance_are_summed_by_distance(monkeypatch, band):
    """Key 128 and those after it: distances from 40 - 255 to 295 - 128 of a vector from 40 - 512."""
    monkeypatch.setattr(terms.pltpu, "roll", np.roll)
    form, row, x = by_distance(Backward, 1, 1, 0, band)
    sums = [np.zeros((1, band[1] - band[0], 8, 128), np.float32), np.zeros((1, 2, 128), np.float32)]
    object.__setattr__(row, "d_bias", sums)
    d_logits = np.random.default_rng(0).integers(-9, 9, (128, QUERIES)).astype(np.float32)
    at = Tile(NEAR, 0, 1)
    form.begin_sums(row, at)
    for first in (0, 128):
        form.sum_up(row, at, first, jnp.asarray(d_logits[:, first : first + 128]))
    form.finish_tile(row, at)
    for reach in (BEHIND, BEHIND, AHEAD):
        form.sum_up(row, Tile(dataclasses.replace(NEAR, reach=reach), 0, 1), 0, jnp.asarray(d_logits))
    found = form.gradients(x, [jnp.asarray(a)[None, None] for a in sums], None)
    want = np.zeros(QUERIES + KEYS)
    np.add.at(want, KEYS + np.arange(QUERIES) - (128 + np.arange(128)[:, None]), d_logits)
    np.testing.assert_allclose(found["values"], want[None] * np.log(2), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(found["edges"], [np.float32([2, 1]) * d_logits.sum() * np.log(2)], rtol=1e-5)


def test_numbers_of_a_bias_by_distance():
    """At distances from 40 - 512 to 295, and far behind and ahead; the most of each head is over all of them."""
    form, x = ByDistance((0, 6), 100), operands(Squares())
    numbers = form.numbers(x, 40)
    r = np.clip(40 + np.arange(-KEYS, QUERIES), -100, 100)
    np.testing.assert_allclose(numbers["values"], LOG2E * SLOPES[:, None] * (r + 0.5) ** 2, rtol=1e-6)
    edges = LOG2E * SLOPES[:, None] * np.float32([100.5, -99.5]) ** 2
    np.testing.assert_allclose(numbers["edges"], edges, rtol=1e-6)
    np.testing.assert_allclose(form.most(x, numbers), edges[:, 0], rtol=1e-6)
    near = {"values": numbers["values"].at[0, 5].set(1e6), "edges": numbers["edges"]}
    np.testing.assert_allclose(form.most(x, near), [1e6, edges[1, 0]], rtol=1e-6)
    row = SimpleNamespace(x=SimpleNamespace(bias=SimpleNamespace(scalars=np.asarray(numbers["edges"]))), head=1)
    levels = [form.level(row, Tile(dataclasses.replace(NEAR, reach=reach), 0, 0)) for reach in (BEHIND, AHEAD)]
    np.testing.assert_allclose(levels, edges[1], rtol=1e-6)
    assert form.level(row, Tile(NEAR, 0, 0)) is None


def test_the_most_that_a_linear_bias_adds_is_known_if_keys_ahead_are_hidden():
    """Queries from 40 to 295 are at most 295 after a key; the bias rises with distance for a negative slope."""
    form, bias = LinearInKey(False), LinearBias(np.float32([0.5, -0.125]))
    x = operands(bias, mask=Causal())
    np.testing.assert_allclose(form.most(x, form.numbers(x, 40)), [0, LOG2E * 0.125 * 295], rtol=1e-6)
    assert form.most(operands(bias), form.numbers(x, 40)) is None
    np.testing.assert_array_equal(KernelBias().most(operands(None), {}), [0, 0])


def test_the_form_of_a_bias():
    gates = ForgetBias(*GATES)
    linear = LinearBias(SLOPES)
    for bias, form in ((None, KernelBias), (linear, LinearInKey), (gates, Gates), (Squares(), ByDistance)):
        assert form_of(operands(bias)) is form
    assert form_of(operands(ForgetBias(*GATES, symmetric=True))) is None
    assert form_of(operands(LinearBias(SLOPES, symmetric=True))) is ByDistance
    capped = [form_of(dataclasses.replace(operands(bias), softcap=3.0)) for bias in (linear, gates)]
    assert capped == [ByDistance, None]
