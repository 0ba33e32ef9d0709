"""How arrays are cut, sent and joined along a sequence that devices share, each device's numbers checked in NumPy."""

import dataclasses
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from posjax.attention.operands import Operands
from posjax.attention.sharded.exchange import gathered, ulysses
from posjax.attention.sharded.line import Call, Line, join
from posjax.attention.sharded.neighbour import _Inside, neighbour
from posjax.bias import ALiBi
from posjax.layout import KINDS, Layout
from posjax.masks import Causal, Window, materialise
from posjax.positions import Range, as_array

DEVICES, LENGTH = 4, 32


def call_of(q, k, v, mask=None, q_positions=None, kv_positions=None) -> Call:
    row = Range(0, LENGTH)
    positions = row if q_positions is None else q_positions, row if kv_positions is None else kv_positions
    return Call(Operands(q, k, v, None, mask, *positions), 1.0)


def on_devices(layout: Layout, function, *arrays):
    """``function`` of each device's tokens, which are along the second last axis; results in the original order."""
    devices = jax.devices()[: layout.shards]
    mesh = jax.make_mesh((layout.shards,), ("line",), axis_types=(AxisType.Auto,), devices=devices)

    def tokens(array):
        return PartitionSpec(*[None] * (array.ndim - 2), "line", None)

    placed = [layout.apply(jnp.asarray(array), -2) for array in arrays]
    out = PartitionSpec(None, None, None, "line", None)
    run = jax.shard_map(function, mesh=mesh, in_specs=tuple(map(tokens, placed)), out_specs=out, check_vma=False)
    return np.asarray(layout.restore(jax.jit(run)(*placed), 3))


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(1, 99, shape).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_gathered_keys_are_in_their_original_order(kind):
    layout, k, v = Layout(kind, DEVICES), numbers(2, 1, LENGTH, 1), numbers(2, 1, LENGTH, 3)
    line = Line("line", DEVICES, 1, layout, LENGTH)

    def function(q, k, v):
        x = gathered(line, call_of(q, k, v)).x
        chex.assert_shape(x.q, (2, 1, 1, LENGTH // DEVICES, 1))
        # Each device writes the numbers of all keys into each of its queries.
        row = jnp.concatenate([x.k[..., 0], x.v.reshape(2, 1, -1)], -1)[:, :, None, None]
        return jnp.broadcast_to(row, (*x.q.shape[:4], row.shape[-1]))

    found = on_devices(layout, function, numbers(2, 1, 1, LENGTH, 1), k, v)
    want = np.concatenate([k[..., 0], v.reshape(2, 1, -1)], -1)[:, :, None, None]
    np.testing.assert_array_equal(found, np.broadcast_to(want, found.shape))


@pytest.mark.parametrize(
    ("kind", "width", "kv_heads"), [("contiguous", 4, 2), ("zigzag", 4, 1), ("zigzag", 2, 2), ("contiguous", 2, 1)]
)
def test_heads_are_exchanged_for_the_tokens_of_a_group_and_sent_back(kind, width, kv_heads):
    """Every query has its own key's number added, and the sum of all numbers of its group's values."""
    layout, heads, groups = Layout(kind, DEVICES), 4, DEVICES // width
    q, k, v = numbers(1, kv_heads, heads // kv_heads, LENGTH, 1), *numbers(2, 1, kv_heads, LENGTH, 1)
    line = Line("line", groups, width, layout, LENGTH, split=False)
    of_group = Layout(kind if groups > 1 else "contiguous", groups).order(LENGTH).reshape(groups, -1)

    def run(call):
        x = call.x
        chex.assert_shape(x.q, (1, max(1, kv_heads // width), None, LENGTH // groups, 1))
        # Ascending within the group, so that a running sum counts earlier tokens.
        before = jnp.cumsum(x.v, axis=2)
        return x.q + 100 * x.k[:, :, None] + 1e4 * before[:, :, None], None

    found = on_devices(layout, lambda q, k, v: ulysses(line, call_of(q, k, v), run)[0], q, k, v)
    before = np.zeros_like(v)
    for tokens in of_group:
        before[:, :, np.sort(tokens)] = np.cumsum(v[:, :, np.sort(tokens)], axis=2)
    np.testing.assert_array_equal(found, q + 100 * k[:, :, None] + 1e4 * before[:, :, None])


def summed(call: Call) -> tuple:
    """For each query the sum of the values that the mask shows."""
    x = call.x
    seen = materialise(x.mask, x.q_positions, x.kv_positions).astype(jnp.float32)
    return (jnp.einsum("ij,bhjc->bhic", seen.reshape(seen.shape[-2:]), x.v)[:, :, None],)


@pytest.mark.parametrize(
    ("kind", "causal", "rows"),
    [
        ("contiguous", True, "packed documents"),
        ("contiguous", False, "a range"),
        ("zigzag", True, "a range"),
        ("zigzag", False, "a range"),
        ("zigzag", False, "packed documents"),
    ],
)
def test_every_query_sees_the_keys_of_its_window(kind, causal, rows):
    """Four tokens back, in chunks of 4 or 8 tokens, some of them next to another chunk of the same device."""
    layout, v = Layout(kind, DEVICES), numbers(2, 1, LENGTH, 3)
    line = Line("line", DEVICES, 1, layout, LENGTH)
    places = 100 + np.arange(LENGTH) + (0 if rows == "a range" else 1000 * (np.arange(LENGTH) >= 11))
    mask = Window(4) & Causal() if causal else Window(4)

    def function(v, positions):
        given = Range(100, LENGTH) if rows == "a range" else positions[:, 0]
        call = call_of(jnp.zeros((2, 1, 1, LENGTH // DEVICES, 3)), v, v, mask, given, given)
        return neighbour(line, call, 4, summed)[0]

    found = on_devices(layout, function, v, places[:, None])
    r = places[:, None] - places
    seen = (r < 4) & (r >= (0 if causal else -3))
    np.testing.assert_array_equal(found[:, :, 0], np.einsum("ij,bhjc->bhic", seen, v))


def test_two_devices_whose_chunks_are_next_to_each_other_on_one_side_only_count_no_key_twice():
    """The widest window: the first query of the second device sees the first key of all, which is sent twice."""
    layout, v = Layout("contiguous", 2), numbers(2, 1, LENGTH, 3)
    line, places = Line("line", 2, 1, layout, LENGTH), np.arange(LENGTH)

    def function(v, positions):
        call = call_of(jnp.zeros((2, 1, 1, LENGTH // 2, 3)), v, v, Window(17), positions[:, 0], positions[:, 0])
        return neighbour(line, call, 17, summed)[0]

    found = on_devices(layout, function, v, places[:, None])
    seen = np.abs(places[:, None] - places) < 17
    np.testing.assert_array_equal(found[:, :, 0], np.einsum("ij,bhjc->bhic", seen, v))


def test_tiles_of_keys_before_and_after_the_sequence_are_known():
    """The keys 3 to 8 of 12: whether a tile from ``low`` to ``high`` has some of them, and nothing else."""
    inside = _Inside(3, 8)
    np.testing.assert_array_equal(inside.pairs(np.zeros(12), np.arange(12)), np.isin(np.arange(12), np.arange(3, 9)))
    for low, high in itertools.combinations_with_replacement(range(12), 2):
        keys = np.isin(np.arange(low, high + 1), np.arange(3, 9))
        assert inside.bounds(0, 0, low, high) == (keys.any(), keys.all())


@pytest.mark.parametrize("size", [3, 128], ids=["narrow heads", "heads that fill the lanes"])
@pytest.mark.parametrize("scales", [1, 4], ids=["a scale of all heads", "a scale of each head"])
def test_halves_of_a_call_have_half_of_the_heads(size, scales):
    """A bias for 8 heads becomes one for the first four, and one for the last four."""
    q, k, scale = numbers(2, 4, 2, 8, size), numbers(2, 4, 8, size), numbers(2, scales, 1, 8, 1)
    bias = ALiBi().bind(None, num_heads=8)
    call = Call(dataclasses.replace(call_of(jnp.asarray(q), jnp.asarray(k), jnp.asarray(k)).x, bias=bias), scale)
    for half, heads in zip(call.halves(), (slice(0, 2), slice(2, 4)), strict=True):
        np.testing.assert_array_equal(half.x.q, q[:, heads])
        np.testing.assert_array_equal(half.x.k, k[:, heads])
        np.testing.assert_array_equal(half.scale, scale if scales == 1 else scale[:, heads])
        distances = half.x.bias.values(jnp.arange(3), jnp.zeros(1, jnp.int32))
        slopes = 2.0 ** -np.arange(1 + 2 * heads.start, 1 + 2 * heads.stop)
        np.testing.assert_allclose(np.ravel(distances[..., 2, 0]), -2 * slopes)


@pytest.mark.parametrize(("size", "axis"), [(3, 1), (128, 3)])
def test_heads_that_fill_the_lanes_are_halved_in_the_layout_of_projections(size, axis):
    """There the heads of a token are adjacent, so halves of them are halves of the columns."""
    q, k = np.zeros((2, 1, 4, 8, 3)), np.zeros((2, 4, 8, size))

    def keys(k):
        return [half.x.k for half in call_of(q, k, k).halves()]

    program = jax.make_jaxpr(keys)(k)
    assert {equation.params["axis"] for equation in program.eqns if equation.primitive.name == "split"} == {axis}


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(("kind", "shards", "width"), [("zigzag", 4, 1), ("zigzag", 2, 2), ("contiguous", 2, 2)])
def test_positions_of_a_piece_are_those_of_its_tokens(kind, shards, width, split):
    """Pieces in turn hold the tokens of a group in the layout over groups, at positions from 100."""
    line = Line("line", shards, width, Layout(kind, shards * width), LENGTH, split)
    assert line.chunks == (2 if split and kind == "zigzag" else 1)
    assert line.piece * line.chunks * shards == LENGTH
    found = [line.positions(Range(100, LENGTH), s, n) for s in range(shards) for n in range(line.chunks)]
    assert all(isinstance(piece, Range) == (split or kind == "contiguous") for piece in found)
    np.testing.assert_array_equal(
        np.concatenate([as_array(p) for p in found]), 100 + Layout(kind, shards).order(LENGTH)
    )


@pytest.mark.parametrize("split", [True, False])
def test_keys_of_another_device_keep_their_positions(split):
    """Queries of every device and keys of the last one, by pieces or, joined, as two runs of 4 tokens."""
    layout = Layout("zigzag", DEVICES)
    line = Line("line", DEVICES, 1, layout, LENGTH, split)

    def function(q):
        placed = [line.placed(call_of(q, q[:, 0], q[:, 0]), n, n, DEVICES - 1).x for n in range(line.chunks)]
        assert [x.run for x in placed] == ([None, None] if split else [4])
        own = jnp.concatenate([as_array(x.q_positions) for x in placed])
        keys = jnp.concatenate([as_array(x.kv_positions) for x in placed])
        return jnp.concatenate([own[:, None], jnp.tile(keys, (len(own), 1))], 1)[None, None, None]

    found = on_devices(layout, function, numbers(1, 1, 1, LENGTH, 1))[0, 0, 0]
    np.testing.assert_array_equal(found[:, 0], np.arange(LENGTH))
    np.testing.assert_array_equal(found[:, 1:], [layout.order(LENGTH)[-8:]] * LENGTH)


@pytest.mark.parametrize(("shards", "width"), [(4, 1), (2, 2), (1, 4)])
def test_neighbouring_devices_form_a_group_that_sorts_its_tokens(shards, width):
    layout = Layout("zigzag", DEVICES)
    line = Line("line", shards, width, layout, LENGTH)
    groups = layout.order(LENGTH).reshape(shards, -1)
    np.testing.assert_array_equal(groups[:, line.ascending], np.sort(groups, axis=1))
    found = on_devices(Layout("contiguous", DEVICES), lambda x: x + line.shard, np.zeros((1, 1, 1, DEVICES, 1)))
    np.testing.assert_array_equal(found.ravel(), np.arange(DEVICES) // width)


def test_a_group_of_one_holds_a_row_in_the_layout_for_several_devices():
    layout = Layout("zigzag", 4)
    line = Line(None, 1, 1, layout, LENGTH)
    assert (line.shard, line.chunks, line.groups) == (0, 1, Layout("contiguous", 1))
    np.testing.assert_array_equal(layout.order(LENGTH)[line.ascending], np.arange(LENGTH))


def test_pieces_are_cut_out_and_stored_at_their_place():
    line, x = Line("line", 4, 1, Layout("zigzag", 4), LENGTH), numbers(2, 8, 3)
    pieces = [line.cut(n)(jnp.asarray(x), -2) for n in range(2)]
    np.testing.assert_array_equal(pieces[0], x[:, :4])
    np.testing.assert_array_equal(pieces[1], x[:, 4:])
    for n, piece in enumerate(pieces):
        want = np.zeros_like(x)
        want[:, 4 * n : 4 * n + 4] = piece
        np.testing.assert_array_equal(line.stored(n, jnp.zeros_like(x), piece, -2), want)
    joined = dataclasses.replace(line, split=False)
    assert joined.cut(0)(x, -2) is x
    assert joined.stored(0, None, x, -2) is x


def test_results_of_pieces_are_joined_along_the_queries():
    parts = [(numbers(1, 2, 1, n, 3), numbers(1, 2, 1, n)) for n in (2, 3)]
    for got, pair in zip(join(parts), zip(*parts, strict=True), strict=True):
        np.testing.assert_array_equal(got, np.concatenate(pair, axis=3))
    assert join(parts[:1]) is parts[0]
