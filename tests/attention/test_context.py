"""Placements: what they refuse and choose, what their programs send and store, and attention against NumPy."""

import math
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
from refusals import refused

import posjax as pj
from posjax import masks
from posjax.attention import attention
from posjax.attention.placement import bytes_exchanged, bytes_gathered
from posjax.attention.sharded import Placement, Sizes, attend_on_mesh, choose
from posjax.bias import T5, ALiBi
from posjax.layout import Layout
from posjax.positions import Range

MESH = {"batch": 2, "context": 4, "heads": 2}


def over(strategy="auto", kind="contiguous", **options) -> Placement:
    return Placement(("batch",), "context", "heads", strategy, Layout(kind, 4), **options)


def fits(where: Placement, scheme=None, batch=4, length=64, heads=8, kv_heads=4):
    where.check(MESH, batch=batch, length=length, heads=heads, kv_heads=kv_heads, scheme=scheme)


def window(size) -> pj.Scheme:
    return pj.Scheme(mask=masks.Window(size))


COPE = pj.Scheme(bias=pj.bias.CoPE())
REFUSALS = [
    ("batch", lambda: fits(over(), batch=3)),
    ("heads", lambda: fits(over(), heads=9)),
    ("length", lambda: fits(over(), length=66)),
    ("length", lambda: fits(over(kind="zigzag"), length=68)),
    ("layout", lambda: fits(Placement(context="context", layout=Layout("zigzag", 2)))),
    ("placement", lambda: fits(Placement(context="line"))),
    ("strategy", lambda: fits(over("ulysses"), heads=4)),
    ("ulysses", lambda: fits(over("ring-ulysses"))),
    ("ulysses", lambda: fits(over("ring-ulysses", ulysses=3))),
    ("ulysses", lambda: fits(over("ring-ulysses", ulysses=4))),
    ("strategy", lambda: fits(over("neighbour"), window(18))),
    ("strategy", lambda: fits(over("neighbour"), pj.Scheme())),
    ("strategy", lambda: fits(over("neighbour"), COPE)),
    ("strategy", lambda: fits(over("ring"), COPE)),
    ("strategy", lambda: fits(over(("neighbour", "ulysses")), pj.Scheme(), heads=4)),
    ("placement", lambda: fits(over(), pj.Scheme(linear=pj.linear.Elu()))),
    ("strategy", lambda: Placement(strategy="ulises")),
    ("strategy", lambda: Placement(strategy=("neighbour", "rings"))),
    ("strategy", lambda: Placement(strategy=())),
    ("strategy", lambda: Placement(strategy=("neighbour", "auto"))),
    ("placement", lambda: Placement(("x",), "x")),
]


@pytest.mark.parametrize(("name", "call"), REFUSALS)
def test_what_cannot_be_split_is_refused(name, call):
    refused(name, call)


def test_a_refusal_says_what_would_work():
    with pytest.raises(ValueError, match="use 'ring-ulysses' with ulysses=2"):
        fits(over("ulysses"), heads=4)


def test_what_fits_passes():
    """One strategy of several is enough. A length of any size fits if the sequence is not split."""
    for strategy in ("auto", "ring", "all-gather", "ulysses"):
        fits(over(strategy, "zigzag"))
    for group in (2, 4):
        sizes = {"batch": 3, "length": 16, "heads": 8, "kv_heads": 4}
        Placement(context="context", strategy="ring-ulysses", ulysses=group).check({"context": 8}, **sizes)
    for scheme in (None, pj.Scheme(), window(17), window(18)):
        fits(over(("ulysses", "neighbour", "ring")), scheme, heads=4)
    fits(over("neighbour"), window(17))
    fits(over(("ulysses", "neighbour")), heads=4)  # a window that is not known may fit
    fits(Placement(heads="heads"), length=5)


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
    """``attention`` over a mesh; inputs and outputs are in the order of the tokens."""
    layout = placement.layout
    take = partial(layout.apply, axis=1)

    def inside(_, projected, rows):
        return attention(*projected, placement=placement, **options, **rows)

    with jax.set_mesh(mesh):
        call = jax.jit(partial(attend_on_mesh, inside, placement))
        out = call((), [take(q), take(k), take(v)], jax.tree.map(layout.apply, rows or {}))
    return jax.tree.map(lambda a: np.asarray(layout.restore(jax.device_get(a), 1)), out)


def test_gradients_of_some_arguments_of_a_ring():
    """The soft cap and the scale are arrays that are not learned."""
    q, k, v = projections(2, 16)
    options = {"softcap": jnp.float32(3.0), "scale": jnp.full(HEADS, 0.3), "mask": CAUSAL}
    placement = spread.placement("2x4", "ring", "contiguous")

    def inside(options, projected, _):
        return attention(*projected, placement=placement, **options)

    def loss(q):
        return jnp.square(attend_on_mesh(inside, placement, options, [q, k, v], {})).sum()

    with jax.set_mesh(spread.device_mesh("2x4")):
        gradient = jax.device_get(jax.jit(jax.grad(loss))(q))
    want = jax.grad(lambda q: jnp.square(attention(q, k, v, **options)).sum())(q)
    np.testing.assert_allclose(gradient, want, atol=1e-5)


def test_a_ring_against_numpy():
    """ALiBi, a soft cap, sinks and packed rows, one logit at a time in float64."""
    rows, length = 4, 16
    q, k, v = projections(rows, length)
    ids = np.sort(np.random.default_rng(1).integers(-1, 3, (rows, length)), axis=-1)[:, ::-1].astype(np.int32)
    sinks = np.array([0.3, -1.0, 0.0, 2.0], np.float32)
    r = np.arange(length)[:, None] - np.arange(length)
    allowed = (r >= 0) & (ids[:, None, :, None] == ids[:, None, None]) & (ids >= 0)[:, None, None]
    bias = -(2.0 ** -(2 * np.arange(1, HEADS + 1)))[:, None, None] * r
    want = oracles.attention(q, k, v, bias=bias, allowed=allowed, sinks=sinks, softcap=2.0)

    placement = spread.placement("2x4", "ring", "zigzag")

    def inside(sinks, projected, rows):
        mask = CAUSAL & masks.Segments(rows["ids"])
        options = {"bias": ALiBi(), "mask": mask, "sinks": sinks, "softcap": 2.0, "return_residuals": True}
        return attention(*projected, placement=placement, **options)

    with jax.set_mesh(spread.device_mesh("2x4")):
        placed = [placement.layout.apply(x, 1) for x in (q, k, v)]
        attend = jax.jit(partial(attend_on_mesh, inside, placement))
        found = attend(sinks, placed, {"ids": placement.layout.apply(ids)})
    for got, wanted in zip(found, want, strict=True):
        np.testing.assert_allclose(placement.layout.restore(np.asarray(got), 1), wanted, atol=2e-6)


@pytest.mark.parametrize(
    "places", [Range(1000, 16), pytest.param(np.arange(16) ** 2, marks=pytest.mark.wide)], ids=["range", "array"]
)
def test_positions_of_the_whole_row_are_cut(places):
    """A range, or an array in the order of the layout."""
    q, k, v = projections(2, 16)
    fire = pj.bias.FIRE(4)
    options = {"bias": fire.bind(jax.jit(fire.init, static_argnums=1)(jax.random.key(0), HEADS), num_heads=HEADS)}
    options["mask"] = CAUSAL
    want = jax.jit(partial(pj.attention, **options, q_positions=places, kv_positions=places))(q, k, v)
    placement, mesh = spread.placement("2x4", "ring", "zigzag"), spread.device_mesh("2x4")
    placed = places if isinstance(places, Range) else placement.layout.apply(places, 0)
    found = spread_attention(placement, mesh, q, k, v, q_positions=placed, kv_positions=placed, **options)
    chex.assert_trees_all_close(found, np.asarray(want), atol=1e-5)


def test_a_range_of_one_device_is_refused():
    q, k, v = projections(2, 16)
    placement, mesh = spread.placement("2x4", "ring", "contiguous"), spread.device_mesh("2x4")
    refused("positions", lambda: spread_attention(placement, mesh, q, k, v, kv_positions=Range(0, 4)))


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
        pytest.param("contiguous", 4, 32, {}, marks=pytest.mark.wide),
        # Piece by piece.
        ("zigzag", 4, 32, {"bias": T5().bind(T5().init(jax.random.key(0), HEADS), num_heads=HEADS)}),
        # Both pieces at once, by tiles of 512.
        pytest.param("zigzag", 2, 4 * 512, {"implementation": "blockwise"}, marks=pytest.mark.wide),
    ],
    ids=["contiguous", "pieces", "tiles"],
)
def test_keys_that_the_mask_hides_are_never_read(kind, shards, length, options):
    """Values of the second half are NaN: if a query of the first half used them, NaN times 0 would give NaN."""
    q, k, v = projections(1, length)
    placement, mesh = ring_on_one_axis(kind, shards)
    v[:, length // 2 :] = np.nan
    found = spread_attention(placement, mesh, q, k, v, mask=CAUSAL, **options)
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


def attention_over(placement: Placement, mask, projected):
    def inside(_, projected, rows):
        return attention(*projected, placement=placement, mask=mask, implementation="blockwise")

    return attend_on_mesh(inside, placement, (), projected, {})


def lowered(placement: Placement, mask, shards: int, length: int, batch: int = 1):
    """The program of a loss' gradients over ``shards`` devices."""
    mesh = jax.make_mesh((shards,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:shards])
    spec = jax.sharding.NamedSharding(mesh, jax.P(None, "context"))
    shapes = [(batch, length, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    with jax.set_mesh(mesh):
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=spec) for shape in shapes]
        return jax.jit(jax.grad(lambda x: jnp.square(attention_over(placement, mask, x)).sum())).lower(arrays)


def test_the_memory_of_a_ring_does_not_grow_with_its_shards():
    """With 64 tokens per device."""

    def temporary(shards):
        program = lowered(Placement(context="context", strategy="ring"), CAUSAL, shards, 64 * shards).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporary(8) <= temporary(2) * 1.05


@pytest.mark.parametrize(
    ("strategy", "sizes", "mask", "sends"),
    [
        ("ring", (4, 64), CAUSAL, {"collective_permute"}),
        ("ulysses", (4, 64), CAUSAL, {"all_to_all"}),
        ("all-gather", (4, 64), CAUSAL, {"all_gather", "reduce_scatter"}),
        ("neighbour", (4, 256), CAUSAL & masks.Window(5), {"collective_permute"}),
        # Keys and values are 128 bytes a token, 1 GiB for 2^12 rows of 2,048: every row counts.
        ("auto", (8, 2048, 2**12), CAUSAL, {"all_gather", "reduce_scatter"}),
        ("auto", (8, 2048, 2**14), CAUSAL, {"collective_permute"}),
    ],
)
def test_what_is_sent(strategy, sizes, mask, sends):
    text = lowered(Placement(context="context", strategy=strategy), mask, *sizes).as_text()
    assert set(re.findall("all_gather|collective_permute|all_to_all|reduce_scatter", text)) == sends
    if strategy == "neighbour":
        # Four tokens of keys and of values, and the same for their gradients.
        sent = re.findall(r"collective_permute.*-> tensor<([\dx]+)xf32>", text)
        assert [math.prod(map(int, shape.split("x"))) for shape in sent] == [4 * KV_HEADS * SIZE] * 4


def test_bfloat16_parts_are_merged_in_float32():
    """The error against float64 is at most 1.5 times that of the whole row in bfloat16."""
    q, k, v = projections(2, 64, jnp.bfloat16)
    r = np.arange(64)[:, None] - np.arange(64)
    want = oracles.attention(q, k, v, allowed=r >= 0)[0]
    whole = np.asarray(jax.jit(partial(pj.attention, mask=CAUSAL))(q, k, v), np.float64)
    placement = spread.placement("2x4", "ring", "contiguous")
    found = spread_attention(placement, spread.device_mesh("2x4"), q, k, v, mask=CAUSAL).astype(np.float64)
    assert np.abs(found - want).max() <= 1.5 * np.abs(whole - want).max()


def in_a_ring(kind: str, shards: int, **options):
    """Ring attention of queries, keys and values that are in the order of their tokens."""
    placement, mesh = ring_on_one_axis(kind, shards)
    tokens = jax.P(None, "context")
    inside = partial(attention, placement=placement, **options)
    part = jax.shard_map(inside, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens)
    return lambda *qkv: placement.layout.restore(part(*(placement.layout.apply(x, 1) for x in qkv)), 1)


@pytest.mark.parametrize("kind", ["zigzag", pytest.param("contiguous", marks=pytest.mark.wide)])
def test_heads_that_are_stored_and_sent_side_by_side(kind):
    """Heads of 128 features fill whole lanes and keep their order: values and gradients are those of one device."""
    drawn = np.random.default_rng(0).standard_normal
    q, k, v, weights = (drawn((2, 32, heads, 128)).astype(np.float32) for heads in (8, 4, 4, 8))
    options = {"mask": CAUSAL, "implementation": "dense"}

    def loss(attend, q, k, v):
        out = attend(q, k, v)
        return (out * weights).sum(), out

    ways = in_a_ring(kind, 4, **options), partial(pj.attention, **options)
    got, wanted = (jax.jit(jax.grad(partial(loss, how), (0, 1, 2), has_aux=True))(q, k, v) for how in ways)
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["contiguous", pytest.param("zigzag", marks=pytest.mark.wide)])
def test_forward_over_reverse_is_that_of_one_device(kind):
    inputs = tuple(np.random.default_rng(0).standard_normal((3, 1, 32, 2, SIZE)).astype(np.float32))
    options = {"mask": CAUSAL, "implementation": "blockwise"}

    def product(attend):
        """The Hessian times a direction."""
        gradient = jax.grad(lambda inputs: jnp.square(attend(*inputs)).sum())
        return jax.jit(lambda inputs: jax.jvp(gradient, (inputs,), (jax.tree.map(jnp.cos, inputs),))[1])(inputs)

    found, wanted = product(in_a_ring(kind, 4, **options)), product(partial(pj.attention, **options))
    chex.assert_trees_all_close(found, wanted, rtol=1e-4, atol=1e-4)
