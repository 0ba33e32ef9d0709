"""Placements: what they refuse and choose, what their programs send and store, and attention against NumPy."""

import dataclasses
import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from attention import spread
from jax.sharding import AxisType

import posjax as pj
from posjax import masks
from posjax.attention.sharded import Placement, Sizes, attend_on_mesh, choose, context_attention
from posjax.attention.sharded.choice import bytes_exchanged, bytes_gathered
from posjax.attention.sharded.line import Line, taken
from posjax.bias import T5, ALiBi
from posjax.layout import KINDS, Layout
from posjax.positions import Range

MESH = {"batch": 2, "context": 4, "heads": 2}
FITS = {"batch": 4, "length": 64, "heads": 8, "kv_heads": 4}


def over(strategy="auto", kind="contiguous", **options) -> Placement:
    return Placement(("batch",), "context", "heads", strategy, Layout(kind, 4), **options)


@pytest.mark.parametrize("strategy", ["auto", "ring", "all-gather", "ulysses"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_fits_passes(strategy, kind):
    over(strategy, kind).check(MESH, **FITS)


@pytest.mark.parametrize(
    ("where", "changes", "message"),
    [
        (over(), {"batch": 3}, "a batch of 3 rows cannot be split evenly over 2 devices along ('batch',)"),
        (over(), {"heads": 9}, "axis 'heads' splits heads over 2 devices, which do not divide 9 query heads"),
        (over(), {"length": 66}, "multiple of 4 for a contiguous layout over 4 shards, found 66; 64 would work"),
        (over(kind="zigzag"), {"length": 68}, "must be a multiple of 8 for a zigzag layout over 4 shards, found 68"),
        (Placement(context="context", layout=Layout("zigzag", 2)), {}, "made for 2 shards, but axis 'context' has 4"),
        (Placement(context="line"), {}, "the mesh in use has no axis ['line']; it has ['batch', 'context', 'heads']"),
        (over("ulysses"), {"heads": 4}, "the 2 query heads of a device over 4 shards, which do not divide them"),
        (over("ulysses"), {"heads": 4}, "use 'ring-ulysses' with ulysses=2"),
        (over("ulysses"), {"heads": 2, "kv_heads": 2}, "use 'ring' or 'all-gather'"),
        (over("ring-ulysses", ulysses=3), {}, "ulysses must divide the 4 shards, and be neither 1 nor all of them"),
        (over("ring-ulysses"), {}, "found 1; use 'ring' or 'ulysses' for those"),
        (
            over("neighbour"),
            {"scheme": pj.Scheme(mask=masks.Window(18))},
            "a window of 18 reaches beyond the chunk of 16 tokens",
        ),
        (over("neighbour"), {"scheme": pj.Scheme()}, "needs a mask that shows only recent keys"),
        (over("neighbour"), {"scheme": pj.Scheme(mask=masks.Window(4) | masks.FirstTokens(2))}, "with sinks"),
        (over("neighbour"), {"scheme": pj.Scheme(bias=pj.bias.CoPE())}, "CoPE counts along whole sequences"),
        (over("ring"), {"scheme": pj.Scheme(bias=pj.bias.CoPE())}, "use strategy 'all-gather', or 'ulysses'"),
        (
            over(("neighbour", "ulysses")),
            {"scheme": pj.Scheme(), "heads": 4},
            "strategy='neighbour': 'neighbour' needs a",
        ),
        (
            over(("neighbour", "ulysses")),
            {"scheme": pj.Scheme(), "heads": 4},
            "; strategy='ulysses': Ulysses splits the",
        ),
        (over(("ulysses", "ring-ulysses")), {"heads": 4}, "; strategy='ring-ulysses': 'ring-ulysses' needs groups"),
        (over(), {"scheme": pj.Scheme(linear=pj.linear.Elu())}, "linear attention carries a state along the sequence"),
    ],
)
def test_what_cannot_be_split_is_refused_with_what_would_work(where, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        where.check(MESH, **FITS | changes)


@pytest.mark.parametrize(
    "scheme", [None, pj.Scheme(), pj.Scheme(mask=masks.Window(17)), pj.Scheme(mask=masks.Window(18))]
)
def test_one_strategy_that_fits_is_enough(scheme):
    over(("ulysses", "neighbour", "ring")).check(MESH, **FITS | {"heads": 4, "scheme": scheme})


def test_a_window_that_is_not_known_may_fit():
    over(("ulysses", "neighbour")).check(MESH, **FITS | {"heads": 4})


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("ulises", "did you mean 'ulysses'"),
        (("neighbour", "rings"), "strategy: unknown value 'rings'; did you mean 'ring'"),
        ((), "strategy must be a name, or a tuple of names in order of preference, found ()"),
        (["neighbour", "ring"], "or a tuple of names in order of preference, found ['neighbour', 'ring']"),
        (
            ("neighbour", "auto"),
            "'auto' compares all strategies for each layer and cannot be in a tuple, found ('neighbour', 'auto')",
        ),
    ],
)
def test_strategies_are_known_names(strategy, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Placement(strategy=strategy)


def test_a_placement_names_its_parts():
    assert hash(over(("neighbour", "ring"))) != hash(over(("ring", "neighbour")))
    with pytest.raises(ValueError, match="every axis can be named only once"):
        Placement(("x",), "x")
    assert over().axes == ("batch", "context", "heads")


LARGE = Sizes(batch=1, length=2**20, heads=32, kv_heads=8, shards=16)


@pytest.mark.parametrize(
    ("sizes", "strategy"),
    [
        (LARGE._replace(length=2**15, heads=32, kv_heads=32), "ulysses"),
        # Grouped heads: each shard sends all its queries, or receives few keys. 32 + 16 heads against 15/16 16 x 8.
        (LARGE._replace(length=2**15), "ulysses"),
        (LARGE._replace(length=2**15, shards=4), "all-gather"),
        # Keys and values of a row are 1 MiB for 256 tokens: 1 GiB at 262,144.
        (LARGE._replace(heads=8, kv_heads=8, length=2**18), "all-gather"),
        (LARGE._replace(heads=8, kv_heads=8, length=2**19), "ring"),
        (LARGE._replace(heads=8, kv_heads=8, length=2**19, counts=True), "all-gather"),
        (LARGE._replace(window=4096), "neighbour"),
        (LARGE._replace(window=2**16 + 1), "neighbour"),
        (LARGE._replace(window=2**16 + 2), "ulysses"),
        (LARGE._replace(window=2**15 + 2, layout=Layout("zigzag", 16)), "ulysses"),
    ],
)
def test_the_cost_rule(sizes, strategy):
    assert choose(sizes) == strategy


def test_bytes_that_a_device_receives_by_hand():
    """4 devices with 16 tokens each: 3/4 of the queries and of the keys, whose 2 heads are sent twice; or 48 keys."""
    sizes = Sizes(batch=2, length=64, heads=8, kv_heads=2, shards=4, features=24, query_features=40, itemsize=2)
    assert bytes_exchanged(sizes) == 2 * 16 * (8 * 40 + 4 * 24) * 2 * 3 // 4
    assert bytes_gathered(sizes) == 2 * 48 * 2 * 24 * 2


HEADS, KV_HEADS, SIZE = 4, 2, 8
CAUSAL = masks.Causal()


def projections(rows, length, dtype=np.float32):
    rng = np.random.default_rng(5)
    return [rng.standard_normal((rows, length, n, SIZE)).astype(dtype) for n in (HEADS, KV_HEADS, KV_HEADS)]


def spread_attention(placement: Placement, mesh, q, k, v, rows=None, **options):
    """``context_attention`` over a mesh; inputs and outputs are in the order of the tokens."""
    layout = placement.layout
    take = partial(layout.apply, axis=1)

    def inside(_, projected, rows):
        return context_attention(*projected, placement=placement, **options, **rows)

    with jax.set_mesh(mesh):
        call = jax.jit(partial(attend_on_mesh, inside, placement))
        out = call((), [take(q), take(k), take(v)], jax.tree.map(layout.apply, rows or {}))
    return jax.tree.map(lambda a: np.asarray(layout.restore(jax.device_get(a), 1)), out)


@pytest.mark.parametrize(("mesh", "kind"), [("2x4", "zigzag"), ("4x2", "contiguous")])
def test_a_ring_against_numpy(mesh, kind):
    """ALiBi, a soft cap, sinks and packed rows, one logit at a time in float64."""
    rows, length = 4, 16
    q, k, v = projections(rows, length)
    ids = np.sort(np.random.default_rng(1).integers(-1, 3, (rows, length)), axis=-1)[:, ::-1].astype(np.int32)
    sinks = np.array([0.3, -1.0, 0.0, 2.0], np.float32)
    r = np.arange(length)[:, None] - np.arange(length)
    allowed = (r >= 0) & (ids[:, None, :, None] == ids[:, None, None]) & (ids >= 0)[:, None, None]
    bias = -(2.0 ** -(2 * np.arange(1, HEADS + 1)))[:, None, None] * r
    want = oracles.attention(q, k, v, bias=bias, allowed=allowed, sinks=sinks, softcap=2.0)

    placement = spread.placement(mesh, "ring", kind)

    def inside(sinks, projected, rows):
        mask = masks.Causal() & masks.Segments(rows["ids"])
        options = {"bias": ALiBi(), "mask": mask, "sinks": sinks, "softcap": 2.0, "return_residuals": True}
        return context_attention(*projected, placement=placement, **options)

    with jax.set_mesh(spread.device_mesh(mesh)):
        placed = [placement.layout.apply(x, 1) for x in (q, k, v)]
        found = attend_on_mesh(inside, placement, jnp.asarray(sinks), placed, {"ids": placement.layout.apply(ids)})
    for got, wanted in zip(found, want, strict=True):
        np.testing.assert_allclose(placement.layout.restore(np.asarray(got), 1), wanted, atol=2e-6)


@pytest.mark.parametrize("strategy", ["ring", "all-gather", "ulysses"])
def test_a_range_covers_the_whole_row(strategy):
    q, k, v = projections(2, 16)
    start = Range(1000, 16)
    options = {"bias": pj.bias.FIRE(4).bind(pj.bias.FIRE(4).init(jax.random.key(0), HEADS), num_heads=HEADS)}
    options |= {"mask": masks.Causal(), "q_positions": start, "kv_positions": start}
    found = spread_attention(spread.placement("2x4", strategy, "zigzag"), spread.device_mesh("2x4"), q, k, v, **options)
    want = jax.jit(partial(pj.attention, **options))(q, k, v)
    chex.assert_trees_all_close(found, np.asarray(want), atol=1e-5)


def test_another_range_is_refused():
    placement, mesh = spread.placement("2x4", "ring", "contiguous"), spread.device_mesh("2x4")
    with pytest.raises(
        ValueError, match="whole sequence of 16 tokens whose start is known, or an array over the 4 tokens"
    ):
        spread_attention(placement, mesh, *projections(2, 16), kv_positions=Range(0, 4))


@pytest.mark.parametrize("bias", ["alibi", "cope"])
def test_one_device_may_hold_a_row_laid_out_for_several(bias):
    """Without a mesh, one device takes tokens in the order of the layout."""
    q, k, v = projections(2, 16)
    scheme = pj.Scheme(bias=ALiBi() if bias == "alibi" else pj.bias.CoPE(4))
    params = scheme.init(jax.random.key(1), HEADS, SIZE)
    rng = np.random.default_rng(2)
    params = jax.tree.map(lambda a: np.asarray(a) + rng.standard_normal(a.shape, np.float32), params)
    placement = over("ring", "zigzag")

    @jax.jit
    def both(q, k, v, params):
        placed = (placement.layout.apply(x, 1) for x in (q, k, v))
        found = placement.layout.restore(scheme.attend(*placed, params=params, placement=placement), 1)
        return found, scheme.attend(q, k, v, params=params)

    chex.assert_trees_all_close(*both(q, k, v, params), atol=1e-5)


def ring_on_one_axis(kind: str, shards: int) -> tuple:
    """A ring along the only axis of a mesh."""
    devices = jax.devices()[:shards]
    mesh = jax.make_mesh((shards,), ("context",), axis_types=(AxisType.Auto,), devices=devices)
    return Placement((), "context", None, "ring", Layout(kind, shards)), mesh


@pytest.mark.parametrize(
    ("kind", "shards", "length", "options"),
    [
        ("contiguous", 4, 32, {}),
        # Piece by piece.
        ("zigzag", 4, 32, {"bias": T5().bind(T5().init(jax.random.key(0), HEADS), num_heads=HEADS)}),
        # Both pieces at once, by tiles of 512.
        ("zigzag", 2, 4 * 512, {"implementation": "blockwise"}),
        pytest.param("zigzag", 4, 8 * 512, {"implementation": "blockwise"}, marks=pytest.mark.wide),
    ],
    ids=["contiguous", "pieces", "tiles", "tiles of four shards"],
)
def test_keys_that_the_mask_hides_are_never_read(kind, shards, length, options):
    """Values of the second half are NaN: if a query of the first half used them, NaN times 0 would give NaN."""
    q, k, v = projections(1, length)
    placement, mesh = ring_on_one_axis(kind, shards)
    v[:, length // 2 :] = np.nan
    found = spread_attention(placement, mesh, q, k, v, mask=masks.Causal(), **options)
    assert np.isfinite(found[:, : length // 2]).all()


def test_decay_in_a_zigzag_ring():
    """The two pieces of a device are far apart: decay over that distance would underflow to zero."""
    q, k, v = projections(1, 512)
    rates = np.geomspace(0.02, 0.4, SIZE)
    behind = np.maximum(np.arange(512)[:, None] - np.arange(512), 0)[..., None]
    keys = np.repeat(np.asarray(k, np.float64), HEADS // KV_HEADS, axis=2)
    logits = np.einsum("bihc,bjhc,ijc->bhij", np.asarray(q, np.float64), keys, np.exp(-rates * behind)) / SIZE**0.5
    weights = np.exp(np.where(np.tri(512, dtype=bool), logits, -np.inf))
    values = np.repeat(np.asarray(v, np.float64), HEADS // KV_HEADS, axis=2)
    wanted = np.einsum("bhij,bjhc->bihc", weights / weights.sum(-1, keepdims=True), values)
    found = spread_attention(*ring_on_one_axis("zigzag", 4), q, k, v, mask=CAUSAL, decay=rates.astype(np.float32))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_in_a_scan_of_layers_that_are_recomputed():
    q, k, v = projections(2, 16)
    placement, mesh = ring_on_one_axis("zigzag", 2)
    slopes = np.float32(np.arange(1, 3)[:, None] * np.ones(HEADS) / 8)

    def layers(attend):
        def layer(x, slopes):
            return x + attend(slopes, x), None

        return lambda q, slopes: jax.lax.scan(jax.checkpoint(layer), q, slopes)[0]

    def bias(slopes):
        return {"bias": ALiBi(learned=True).bind({"slopes": slopes}, num_heads=HEADS), "mask": masks.Causal()}

    def inside(slopes, projected, _):
        return context_attention(*projected, placement=placement, **bias(slopes))

    def sharded(slopes, x):
        return attend_on_mesh(inside, placement, slopes, [x, k_placed, v_placed], {})

    k_placed, v_placed = (placement.layout.apply(x, 1) for x in (k, v))
    plain = layers(lambda slopes, x: pj.attention(x, k, v, **bias(slopes)))
    want = jax.jit(jax.grad(lambda *given: jnp.sin(plain(*given)).sum(), argnums=(0, 1)))(q, slopes)
    with jax.set_mesh(mesh):
        run = layers(sharded)
        grad = jax.jit(jax.grad(lambda *given: jnp.sin(run(*given)).sum(), argnums=(0, 1)))
        d_q, d_slopes = jax.device_get(grad(placement.layout.apply(q, 1), slopes))
    chex.assert_trees_all_close((placement.layout.restore(d_q, 1), d_slopes), jax.device_get(want), atol=2e-5)


def compiled(placement: Placement, shards: int, length: int, mask=CAUSAL, **options):
    """The program of a loss' gradients over ``shards`` devices."""
    mesh = jax.make_mesh((shards,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:shards])

    def loss(projected):
        def inside(_, projected, rows):
            return context_attention(*projected, placement=placement, mask=mask, **options)

        return jnp.square(attend_on_mesh(inside, placement, (), projected, {})).sum()

    spec = jax.sharding.NamedSharding(mesh, jax.P(None, "context"))
    shapes = [(1, length, HEADS, SIZE), *[(1, length, KV_HEADS, SIZE)] * 2]
    with jax.set_mesh(mesh):
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=spec) for shape in shapes]
        return jax.jit(jax.grad(loss)).lower(arrays).compile()


def test_the_memory_of_a_ring_does_not_grow_with_its_shards():
    """With 64 tokens per device. The memory of all-gather does grow."""

    def temp(strategy, shards):
        placement = Placement(context="context", strategy=strategy)
        program = compiled(placement, shards, 64 * shards, implementation="blockwise")
        return program.memory_analysis().temp_size_in_bytes

    ring, gather = ([temp(strategy, shards) for shards in (2, 8)] for strategy in ("ring", "all-gather"))
    assert ring[1] <= ring[0] * 1.05
    assert gather[1] > 2 * gather[0]


@pytest.mark.parametrize(
    ("strategy", "sends", "never"),
    [
        ("ring", "collective-permute", "all-gather|all-to-all"),
        ("ulysses", "all-to-all", "all-gather|collective-permute"),
        ("all-gather", "all-gather", "all-to-all|collective-permute"),
    ],
)
def test_what_is_sent(strategy, sends, never):
    text = compiled(Placement(context="context", strategy=strategy), 4, 64).as_text()
    assert re.search(sends, text)
    assert not re.search(never, text)


@pytest.mark.parametrize(("batch", "sends"), [(2**12, "all_gather"), (2**14, "collective_permute")])
def test_every_row_counts_in_the_memory_of_a_gather(batch, sends):
    """Keys and values are 128 bytes a token, 1 GiB for 2^12 rows of 2,048; a device receives seven eighths of them."""
    mesh = jax.make_mesh((8,), ("context",), axis_types=(AxisType.Auto,))
    placement = Placement(context="context")

    def attend(*projected):
        def inside(_, projected, rows):
            return context_attention(*projected, placement=placement, mask=CAUSAL, implementation="blockwise")

        return attend_on_mesh(inside, placement, (), projected, {})

    shapes = [jax.ShapeDtypeStruct((batch, 2048, heads, SIZE), jnp.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    with jax.set_mesh(mesh):
        text = jax.jit(attend).lower(*shapes).as_text()
    assert set(re.findall("all_gather|collective_permute|all_to_all", text)) == {sends}


def test_positions_of_a_reordered_row_count_from_its_start():
    order = Layout("zigzag", 4)
    found = Placement(layout=order).local(Range(3, 16), 16)
    np.testing.assert_array_equal(found, 3 + np.asarray(order.apply(np.arange(16), 0)))


def test_runs_that_are_joined_are_taken_at_once():
    line = Line("context", 4, 1, Layout("zigzag", 4), 64)
    assert (line.chunks, line.piece) == (2, 8)
    joined = dataclasses.replace(line, split=False)
    assert (joined.chunks, joined.piece) == (1, 16)


def test_neighbours_exchange_only_the_edge_of_a_chunk():
    """Four of 64 tokens: no more keys or values are sent, forward or backward."""
    text = compiled(
        Placement(context="context", strategy="neighbour"), 4, 256, mask=masks.Causal() & masks.Window(5)
    ).as_text()
    sent = re.findall(r"= f32\[([\d,]+)\]\S* collective-permute\(", text)
    assert len(sent) == 4
    assert {np.prod([int(n) for n in shape.split(",")]) for shape in sent} == {4 * KV_HEADS * SIZE}
    assert not re.search("all-gather|all-to-all", text)


def test_bfloat16_parts_are_merged_in_float32():
    """The error against float64 is at most 1.5 times that of the whole row in bfloat16."""
    q, k, v = projections(2, 64, jnp.bfloat16)
    r = np.arange(64)[:, None] - np.arange(64)
    want = oracles.attention(q, k, v, allowed=r >= 0)[0]
    whole = np.asarray(jax.jit(partial(pj.attention, mask=masks.Causal()))(q, k, v), np.float64)
    placement = spread.placement("2x4", "ring", "contiguous")
    found = spread_attention(placement, spread.device_mesh("2x4"), q, k, v, mask=masks.Causal()).astype(np.float64)
    assert np.abs(found - want).max() <= 1.5 * np.abs(whole - want).max()


@pytest.mark.parametrize(
    "order", [range(12), [6, 7, 8, 0, 1, 2, 9, 10, 11, 3, 4, 5], [1, 2, 3, 0, 5, 6, 7, 4, 8, 9, 10, 11]]
)
@pytest.mark.parametrize("axis", [1, -2])
def test_tokens_are_taken_by_runs(order, axis):
    x = np.random.default_rng(0).normal(size=(2, 12, 3))
    np.testing.assert_array_equal(taken(jnp.asarray(x), np.asarray(order), axis), np.take(x, order, axis).astype("f4"))


@pytest.mark.parametrize(
    ("order", "run"), [([6, 7, 8, 0, 1, 2, 9, 10, 11, 3, 4, 5], 3), ([4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11], 4)]
)
def test_the_runs_that_are_taken_are_as_long_as_they_can_be(order, run):
    program = jax.make_jaxpr(partial(taken, order=np.asarray(order), axis=1))(np.zeros((2, 12, 3)))
    assert f"[2,{12 // run},{run},3]" in str(program)
