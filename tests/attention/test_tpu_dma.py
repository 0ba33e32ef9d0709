"""Blocks, copies and loops that both TPU kernels share, run without a kernel."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.attention.tiles import Blocks, Kind, TilePlan
from posjax.attention.tpu import call, dma, terms
from posjax.attention.tpu.call import LOG2E, KernelConfig, Tiling
from posjax.attention.tpu.dma import BiasArrays, Buffers, KernelArrays, Tile, TileRow
from posjax.attention.tpu.tile_lists import Lists, is_first, is_last, lists

LANES = terms.LANES


def test_an_output_aliases_the_argument_of_its_name_if_there_is_one():
    """Arguments are counted array by array; None counts as no argument."""
    arrays = KernelArrays(Lists(0, 1), 2, ((3, 4), (5,)), BiasArrays(scalars=6, origins=(7, 8)), 9, None, 10, 11, dq=12)
    assert arrays.aliases(v=0, lse=1, dq=2) == {11: 0, 12: 2}


def index_of(spec, *step):
    return tuple(map(int, spec.index_map(*step)))


@pytest.mark.parametrize(
    ("shape", "axis", "size", "block", "index"),
    [
        ((2, 3, 1, 512), -1, 128, (1, 128), (1, 2, 0, 5)),
        ((2, 3, 512, 64), -2, 128, (128, 64), (1, 2, 5, 0)),
        ((1, 1, 1, 512), -1, 128, (1, 128), (0, 0, 0, 5)),
        ((2, 1, 1, 9), None, None, (1, 9), (1, 0, 0, 0)),
        ((1, 3, 1, 9), None, None, (1, 9), (0, 2, 0, 0)),
    ],
)
def test_blocks_of_rows_and_heads(shape, axis, size, block, index):
    """The block of row 1, head 2 and step 5; an axis of size 1 has one block."""
    spec = dma.block_spec(shape, axis, size)
    assert spec.block_shape == (None, None, *block)
    assert index_of(spec, 1, 2, 5) == index


@pytest.mark.parametrize(
    ("shape", "block", "index"),
    [
        ((2, 3, 512, 64), (128, 64), (1, 2, 5, 0)),
        ((2, 1, 512, 3 * 64), (128, 64), (1, 0, 5, 2)),
        ((2, 1, 4, 512, 3 * 64), (4, 128, 64), (1, 0, 0, 5, 2)),
        ((2, 3, 4, 512, 64), (4, 128, 64), (1, 2, 0, 5, 0)),
    ],
)
def test_blocks_of_features_are_those_of_one_head(shape, block, index):
    spec = dma.feature_spec(shape, 64, 128)
    assert spec.block_shape == (None, None, *block)
    assert index_of(spec, 1, 2, 5) == index


def test_each_argument_of_a_kernel_has_its_block():
    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.int32)

    arrays = KernelArrays(
        visits=Lists(shape(2, 4, 1, 6), shape(1, 4, 1, 3)),
        starts=shape(2),
        numbers=((shape(2, 1, 1, 512),), (shape(1, 1, 1, 768),)),
        bias=BiasArrays(shape(3), (shape(1, 3, 1, 4), shape(2, 3, 1, 6)), shape(2, 3, 1, 512), shape(2, 3, 1, 768)),
        q=shape(2, 3, 1, 512, 64),
        bound=shape(2, 3, 1, 2),
        k=shape(2, 3, 1, 768, 64),
        v=shape(2, 3, 768, 32),
        out=shape(2, 3, 512, 32),
        lse=shape(2, 3, 1, 512),
    )
    found = dma.specs(arrays, 0, 128, q=64, out=32)
    blocks = {
        (None, None, 1, 6): [(found.visits.order, (1, 3, 0, 0)), (found.bias.origins[1], (1, 2, 0, 0))],
        (None, None, 1, 3): [(found.visits.ends, (0, 3, 0, 0))],
        (None, None, 1, 128): [
            (found.numbers[0][0], (1, 0, 0, 3)),
            (found.bias.outer, (1, 2, 0, 3)),
            (found.lse, (1, 2, 0, 3)),
        ],
        (None, None, 1, 4): [(found.bias.origins[0], (0, 2, 0, 0))],
        (None, None, 1, 2): [(found.bound, (1, 2, 0, 0))],
        (None, None, 1, 128, 64): [(found.q, (1, 2, 0, 3, 0))],
        (None, None, 128, 32): [(found.out, (1, 2, 3, 0))],
    }
    for block, specs in blocks.items():
        for spec, index in specs:
            assert (spec.block_shape, index_of(spec, 1, 2, 3)) == (block, index)
    assert found.starts == found.bias.scalars == dma.scalar_memory
    assert found.numbers[1][0] == found.bias.copied == found.k == found.v == dma.anywhere


@pytest.mark.parametrize(
    ("shape", "size", "index", "columns"),
    [((2, 3, 512, 64), 64, 2, None), ((2, 1, 512, 128), 128, 0, None), ((2, 1, 512, 384), 128, 0, (256, 128))],
)
def test_the_features_of_the_third_head(shape, size, index, columns):
    found, where = call.features_at(shape, 2, size)
    assert found == index
    assert where == slice(None) if columns is None else (where.start, where.size) == columns


def test_queries_times_their_factor_are_rounded_once():
    x = jnp.asarray([1.01, 3.0], jnp.bfloat16)
    assert call.times_factor(SimpleNamespace(factor=1), x) is x
    found = call.times_factor(SimpleNamespace(factor=LOG2E / 8), x)
    wide = np.asarray(x, np.float32) * np.float32(np.log2(np.e) / 8)
    np.testing.assert_array_equal(found, wide.astype(jnp.bfloat16))
    assert found.dtype == jnp.bfloat16


@pytest.mark.parametrize(("dtype", "precision"), [(np.float32, jax.lax.Precision.HIGHEST), (jnp.bfloat16, None)])
@pytest.mark.parametrize(
    ("contract", "sum_over"),
    [((1, 1), "ac,bc->ab"), ((0, 1), "ca,bc->ab"), ((1, 0), "ac,cb->ab"), ((0, 0), "ca,cb->ab")],
)
def test_products_sum_in_float32_over_one_axis_of_each_matrix(contract, sum_over, dtype, precision):
    a, b = np.random.default_rng(0).integers(-9, 9, (2, 4, 4)).astype(dtype)
    program = jax.make_jaxpr(lambda a, b: call.product(a, b, contract))(a, b)
    assert program.eqns[0].params["precision"] == (precision and (precision, precision))
    found = call.product(jnp.asarray(a), jnp.asarray(b), contract)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.einsum(sum_over, a.astype(int), b.astype(int)))


def config(**options) -> KernelConfig:
    """Tiles of 256 x 384 forward and of 128 x 512 backward, computed in parts of 128."""
    given = dict.fromkeys(("heads", "kv_heads", "size", "value_size", "pattern", "bias", "softcap", "vmem"))
    kinds = Kind((0,), False), Kind((0,), True), Kind((1,), True)
    tilings = Tiling(Blocks(256, 384, 128), kinds, 2), Tiling(Blocks(128, 512, 128), kinds, 3)
    defaults = {"ranged": (True, True), "factor": 1.0, "bounded": False, "spare": False, "tilings": tilings}
    return KernelConfig(**given | defaults | options)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("spare", [False, True])
def test_a_bound_is_a_feature_if_features_are_spare_and_logits_are_not_capped(spare, bounded, softcap):
    found = config(spare=spare, bounded=bounded, softcap=softcap).bound_in_features
    assert found == (spare and bounded and softcap is None)


class Forward(TileRow):
    """A row of the forward kernel."""

    side = 0


class Backward(TileRow):
    """A row of the backward kernel."""

    side = 1


def row(kind: type, **given) -> TileRow:
    names = ("x", "buffers", "sums", "arrived", "batch", "head", "kv_head", "block", "count")
    return kind(**dict.fromkeys(names) | {"config": config()} | given)


def test_a_row_of_tiles_knows_its_sizes():
    forward, backward = row(Forward), row(Backward)
    assert (forward.sizes, backward.sizes) == ((256, 384), (512, 128))
    assert [(forward.tokens(n).start, forward.tokens(n).size) for n in range(3)] == [(0, 384), (384, 384), (768, 384)]
    assert (backward.tokens(3).start, backward.tokens(3).size) == (384, 128)
    assert [forward.slot(n) for n in range(4)] == [0, 1, 0, 1]
    assert forward.of_head("all") == "all"


class Ref:
    """Records by which index a reference is read; ``shape`` is its shape."""

    def __init__(self, name, *shape):
        self.name, self.shape, self.at = name, shape, self

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        return (self.name, *((int(n.start), n.size) if hasattr(n, "size") else n for n in index))


@pytest.mark.parametrize("kind", [Forward, Backward])
def test_the_axes_of_a_part_of_a_tile(kind):
    """Block 2 of the outer axis and tile 3 of the inner one, from token 128 on; numbers of the second slot."""
    columns = np.ones((4, LANES)), np.zeros((4, LANES))
    given = {"buffers": SimpleNamespace(numbers=(Ref("numbers"),)), "sums": SimpleNamespace(columns=columns)}
    given |= {"x": SimpleNamespace(starts=[1000, 5000]), "block": 2, "config": config(ranged=(True, False))}
    axes = row(kind, **given).axes(Tile(None, 3, 1), 128)
    outer, inner = axes if kind is Forward else axes[::-1]
    assert (outer.dimension, inner.dimension) == (0, 1)
    assert [axis.ranged for axis in axes] == [True, False]
    if kind is Forward:
        assert (outer.first, inner.first) == (1000 + 2 * 256, 5000 + 3 * 384 + 128)
    else:
        assert (outer.first, inner.first) == (5000 + 2 * 512, 1000 + 3 * 128 + 128)
    np.testing.assert_array_equal(outer.numbers, columns)
    assert inner.numbers == (("numbers", 1, slice(None), (128, 128)),)


def test_pairs_of_features_are_counted_in_the_copied_side():
    q, k = np.zeros((2, 3, 8)), np.zeros((2, 4, 8))
    assert row(Backward, buffers=Buffers(q, None, None, (), None, None)).pairs == 3
    assert row(Forward, buffers=Buffers(None, k, None, (), None, None)).pairs == 4


def test_numbers_of_the_outer_axis_are_written_as_columns():
    numbers, found = np.arange(8.0)[None], np.zeros((8, LANES))
    x, sums = SimpleNamespace(numbers=((numbers,), ())), SimpleNamespace(columns=(found,))
    row(Forward, x=x, sums=sums).make_columns()
    np.testing.assert_array_equal(found, np.repeat(numbers.T, LANES, axis=1))


@pytest.mark.parametrize("rows", [1, 2])
def test_the_copies_of_a_tile(monkeypatch, rows):
    """First the kernel's own, then numbers of the inner axis, of the row of the batch, and then the bias."""
    monkeypatch.setattr(dma.pltpu, "make_async_copy", lambda *arguments: arguments)
    x = SimpleNamespace(numbers=((), (Ref("from", rows, 1, 1, 1152),)), bias=SimpleNamespace(copied=Ref("bias")))
    buffers = Buffers(None, None, None, (Ref("to"),), None, Ref("bias to"))
    bias = SimpleNamespace(part_of=lambda row, tile: (tile, "part"))
    made = row(Forward, x=x, buffers=buffers, arrived=Ref("arrived"), batch=1, config=config(bias=bias))
    object.__setattr__(made, "own_copies", lambda tile, slot: [(tile, slot)])
    assert made.copies(2, 1) == [
        (2, 1, ("arrived", 0, 1)),
        (("from", rows - 1, 0, slice(None), (768, 384)), ("to", 1), ("arrived", 1, 1)),
        (("bias", 2, "part"), ("bias to", 1), ("arrived", 2, 1)),
    ]


@pytest.mark.parametrize(
    ("pairs", "choice", "calls"),
    [(1, 1, [(0, 0)]), (3, 0, [(0, 0)]), (3, 2, [(2, 0)]), (3, 3, [(0, 0), (1, 1), (2, 2)])],
)
def test_features_are_copied_for_one_pair_or_for_all(pairs, choice, calls):
    found = []
    dma.for_pairs(pairs, choice, lambda pair, to: found.append((int(pair), to)))
    assert found == calls


def test_copies_are_started_and_waited_for():
    """An entry is a tile plus ``pair << 20``, where a pair after the last one stands for all of them."""
    done = []

    def copy(*of):
        return SimpleNamespace(start=lambda: done.append(("start", *of)), wait=lambda: done.append(("wait", *of)))

    fake = SimpleNamespace(
        pairs=2,
        slot=lambda step: step % 2,
        copies=lambda tile, slot: [copy("tile", tile, slot)],
        features=lambda pair, tile, to, step: [copy("pair", int(pair), tile, to, step)],
    )
    for run, name in ((dma.start, "start"), (dma.wait_for, "wait")):
        run(fake, 5 + (2 << 20), 7)
        assert done == [(name, "tile", 5, 1), (name, "pair", 0, 5, 0, 7), (name, "pair", 1, 5, 1, 7)]
        done.clear()
        run(fake, 5 + (1 << 20), 7)
        assert done == [(name, "tile", 5, 1), (name, "pair", 1, 5, 0, 7)]
        done.clear()
    dma.wait(fake, Kind((0, 1), True), 3)
    assert done == [("wait", "tile", 0, 1), ("wait", "pair", 0, 0, 0, 3), ("wait", "pair", 1, 0, 1, 3)]


def test_a_walk_visits_the_entries_of_each_kind():
    """Three kinds, whose lists end at 2, 2 and 5."""
    found = []
    kinds = config().tilings[0].kinds
    walked = row(Forward, x=SimpleNamespace(visits=Lists(None, np.array([[2, 2, 5, -1]]))))
    with jax.disable_jit():
        dma.walk(walked, lambda kind, n, _: found.append((kind, int(n))))
    assert found == [(kinds[0], 0), (kinds[0], 1), *((kinds[2], n) for n in (2, 3, 4))]


def test_an_entry_says_whether_its_row_is_the_first_or_the_last_in_its_column():
    """Three rows of tiles of three columns; of the last column one row alone visits a tile."""
    plan = TilePlan((Kind((0,), False),), np.array([[[1, 0, 0], [1, 1, 1], [1, 1, 0]]]))
    order, ends = (np.asarray(a)[0, :, 0] for a in lists(plan))
    found = [[(bool(is_first(e)), bool(is_last(e))) for e in order[n, : ends[n, 0]]] for n in range(3)]
    assert found == [
        [(True, False)],
        [(False, False), (True, False), (True, True)],
        [(False, True), (False, True)],
    ]
