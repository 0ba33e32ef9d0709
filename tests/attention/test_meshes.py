"""Attention over meshes with Explicit, Auto and mixed axes gives the results of one device."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import posjax as pj
from posjax import masks
from posjax.remap import Branch

ROWS, TOKENS, HEADS, SIZE = 4, 24, 4, 8


@cache
def inputs(heads=HEADS, kv_heads=2, keys=TOKENS) -> dict:
    """Queries, keys, values, and the further arrays that some calls need, in NumPy."""
    draw = np.random.default_rng(1)

    def normal(*shape):
        return draw.normal(size=shape).astype(np.float32)

    return {
        "q": normal(ROWS, TOKENS, heads, SIZE),
        "k": normal(ROWS, keys, kv_heads, SIZE),
        "v": normal(ROWS, keys, kv_heads, SIZE),
        "remapped_q": normal(ROWS, TOKENS, heads, SIZE),
        "remapped_k": normal(ROWS, keys, kv_heads, SIZE),
        "table": normal(8, heads),
        "slopes": normal(heads),
        "per_head": normal(1, heads, TOKENS, keys),
        "per_row": normal(ROWS, 1, 1, keys),
        "scale": normal(ROWS, TOKENS, heads),
        "head_scale": normal(heads),
        "gates": -np.abs(normal(ROWS, heads, TOKENS)).cumsum(-1),
    }


IDS = np.sort(np.random.default_rng(1).integers(-1, 3, (ROWS, TOKENS)), axis=-1).astype(np.int32)
PLACES = np.arange(TOKENS, dtype=np.int32) + np.arange(ROWS, dtype=np.int32)[:, None]
SHOWN = np.random.default_rng(2).random((ROWS, HEADS, TOKENS, TOKENS)) < 0.7
CAUSAL = masks.Causal()
CALLS = {
    "plain": lambda x: {},
    "alibi": lambda x: {"bias": pj.bias.LinearBias(x["slopes"]), "mask": CAUSAL},
    "t5, packed": lambda x: {
        "bias": pj.bias.BucketBias(x["table"], 12, False),
        "mask": CAUSAL & masks.Segments(IDS),
        "q_positions": PLACES,
        "kv_positions": PLACES,
    },
    "forget": lambda x: {"bias": pj.bias.ForgetBias(x["gates"], x["gates"]), "mask": CAUSAL},
    "array bias": lambda x: {"bias": x["per_head"], "mask": SHOWN},
    "array of rows": lambda x: {"bias": x["per_row"], "mask": SHOWN[:, :1] & masks.Window(9)},
    "remap": lambda x: {"remap": Branch(x["remapped_q"], x["remapped_k"], masks.Beyond(5)), "mask": CAUSAL},
    "sinks, cap, scale": lambda x: {"sinks": x["slopes"], "softcap": 2.0, "scale": x["scale"], "mask": CAUSAL},
    "scale of heads": lambda x: {"scale": x["head_scale"], "mask": ~masks.Window(3)},
    "dilated heads": lambda x: {"mask": masks.Dilated(4, (1, 1, 2, 3)) & CAUSAL},
    "decay": lambda x: {"decay": np.full(SIZE, 0.01, np.float32), "mask": CAUSAL},
    "offset": lambda x: {
        "mask": CAUSAL,
        "q_positions": pj.positions.Range(np.int32(3), TOKENS),
        "bias": pj.bias.ALiBi(),
    },
}


def call(name, x, **options):
    return pj.attention(x["q"], x["k"], x["v"], return_residuals=True, **CALLS[name](x), **options)


@cache
def alone(name, heads=HEADS, kv_heads=2):
    return jax.device_get(meshes.gradients(partial(call, name, implementation="dense"))(inputs(heads, kv_heads)))


def spread(kind, made, spec=meshes.SPEC):
    """The inputs on a mesh: arrays with rows or heads are split, the others are replicated."""
    mesh = meshes.mesh(kind)
    specs = {
        "table": P(),
        "head_scale": P(),
        "slopes": P(),
        "per_head": P(None, spec[2]),
        "per_row": P(spec[0]),
        "gates": P(spec[0], spec[2]),
    }
    return {name: meshes.put(mesh, value, specs.get(name, spec)) for name, value in made.items()}


# Every call on Explicit axes; on Auto axes, calls whose arrays have rows, heads, both or neither.
COVERING = [
    *((name, "explicit", ("blockwise", "dense")[n % 2]) for n, name in enumerate(CALLS)),
    ("array bias", "auto", "dense"),
    ("sinks, cap, scale", "auto", "blockwise"),
    ("scale of heads", "auto", "dense"),
    ("dilated heads", "auto", "blockwise"),
    ("t5, packed", "mixed", "dense"),
    ("array bias", "mixed", "dense"),
]
MORE = [
    ("t5, packed", "mixed", "blockwise"),
    *((name, "auto", ("dense", "blockwise")[n % 2]) for n, name in enumerate(CALLS)),
]


@pytest.mark.parametrize(
    ("name", "kind", "implementation"),
    COVERING + [pytest.param(*case, marks=pytest.mark.wide) for case in MORE if case not in COVERING],
)
def test_every_mesh_gives_what_one_device_gives(name, kind, implementation):
    run = meshes.gradients(partial(call, name, implementation=implementation, **meshes.partition(kind)))
    found = run(spread(kind, inputs()))
    meshes.same(found, alone(name))
    assert P(*found[1][0].sharding.spec[:3]) == meshes.SPEC


def test_the_default_on_a_default_mesh_above_a_tile():
    """``jax.make_mesh`` makes Explicit axes; jitted or not, with the mesh in use or not."""
    x = np.random.default_rng(0).normal(size=(4, 520, 2, 8)).astype(np.float32)
    attend = partial(pj.attention, mask=CAUSAL, bias=pj.bias.ALiBi())
    wanted, mesh = jax.jit(attend)(x, x, x), meshes.mesh("explicit")
    placed = meshes.put(mesh, x)
    for function in (attend, jax.jit(attend)):
        meshes.same(function(placed, placed, placed), wanted)
    with jax.set_mesh(mesh):
        meshes.same(jax.jit(attend)(placed, placed, placed), wanted)


@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads", "axis"),
    [
        ("explicit", 8, 2, ("data", "tensor")),
        ("explicit", 12, 6, "data"),
        ("auto", 4, 1, "tensor"),
        pytest.param("explicit", 4, 1, "tensor", marks=pytest.mark.wide),
        pytest.param("auto", 8, 2, ("data", "tensor"), marks=pytest.mark.wide),
        pytest.param("auto", 12, 6, "data", marks=pytest.mark.wide),
    ],
)
def test_key_heads_that_the_axis_does_not_divide(kind, heads, kv_heads, axis):
    spec = P(None, None, axis)
    run = meshes.gradients(partial(call, "alibi", implementation="blockwise", **meshes.partition(kind, spec)))
    meshes.same(run(spread(kind, inputs(heads, kv_heads), spec)), alone("alibi", heads, kv_heads))


def test_arrays_on_no_mesh_combine_with_arrays_on_a_mesh():
    x, mesh = inputs(), meshes.mesh("explicit")

    @jax.jit
    def attend(q):
        return pj.attention(q, x["k"], x["v"], mask=CAUSAL & masks.Segments(jnp.asarray(IDS)))

    meshes.same(attend(meshes.put(mesh, x["q"])), attend(x["q"]))


def test_vmap_over_an_axis():
    x = inputs()
    three = [np.stack([x[name]] * 2) for name in "qkv"]
    placed = [meshes.put(meshes.mesh("explicit"), value, P(None, *meshes.SPEC)) for value in three]
    attend = jax.jit(jax.vmap(partial(pj.attention, mask=CAUSAL, implementation="blockwise")))
    meshes.same(attend(*placed), attend(*three))


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("alibi", "blockwise"),
        ("array bias", "dense"),
        pytest.param("array bias", "blockwise", marks=pytest.mark.wide),
    ],
)
def test_vmap_over_rows_that_are_split(name, implementation):
    """A model written for one row, as in Equinox: ``vmap`` takes the axis of the rows out of the mesh."""
    options = {"alibi": {"bias": pj.bias.ALiBi()}, "array bias": {"bias": inputs()["per_head"]}}[name]

    @jax.vmap
    def attend(q, k, v):
        return pj.attention(q[None], k[None], v[None], mask=CAUSAL, implementation=implementation, **options)[0]

    def run(x):
        return attend(x["q"], x["k"], x["v"]), jnp.zeros(())

    def whole(x):
        return pj.attention(x["q"], x["k"], x["v"], mask=CAUSAL, implementation="dense", **options), jnp.zeros(())

    x = {name: inputs()[name] for name in "qkv"}
    wanted, placed = meshes.gradients(whole)(x), spread("explicit", x)
    meshes.same(meshes.gradients(run)(placed), wanted)
    with jax.set_mesh(meshes.mesh("explicit")):
        meshes.same(meshes.gradients(run)(placed), wanted)


SIZED = {
    "Window": masks.Window,
    "Band": masks.Band,
    "FirstTokens": masks.FirstTokens,
    "Prefix": masks.Prefix,
    "GlobalFirst": masks.GlobalFirst,
    "Chunked": masks.Chunked,
    "Beyond": masks.Beyond,
    "ChunksApart": lambda size: masks.ChunksApart(size, 0, 1),
    "Dilated": lambda size: masks.Dilated(size, 2),
    "heads": lambda size: masks.Dilated(size, (1, 1, 2, 3)),
    "composed": lambda size: CAUSAL & (masks.Window(size) | ~masks.FirstTokens(9)),
}


def sized(size, x, **options) -> dict:
    """The output of attention for every mask of that size."""
    return {name: pj.attention(x["q"], x["k"], x["v"], mask=mask(size), **options) for name, mask in SIZED.items()}


@pytest.fixture(scope="module")
def known_size_outputs():
    """The outputs for a size that is a Python int, on one device."""
    return jax.jit(partial(sized, 5, implementation="dense"))({name: inputs()[name] for name in "qkv"})


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_sizes_that_are_arrays(kind, known_size_outputs):
    x = spread(kind, {name: inputs()[name] for name in "qkv"})
    found = jax.jit(partial(sized, **meshes.partition(kind)))(np.int32(5), x)
    meshes.same(found, known_size_outputs)


def test_an_array_bias_whose_queries_are_split():
    """Every device reads a whole array over pairs, so it is gathered."""
    x, mesh = inputs(), meshes.mesh("explicit")
    placed = [meshes.put(mesh, x[name]) for name in "qkv"]
    bias = meshes.put(mesh, np.repeat(x["per_head"], ROWS, axis=0), P(None, None, "data"))
    attend = jax.jit(lambda q, k, v, bias: pj.attention(q, k, v, bias=bias))
    meshes.same(attend(*placed, bias), attend(*(x[name] for name in "qkv"), x["per_head"]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sinks": np.ones(2, np.float32)}, "sinks must have shape (4,)"),
        ({"mask": masks.Dilated(4, (1, 2))}, "one pattern for each of 2 heads, but q has 4"),
        ({"mask": masks.Segments(IDS[:1])}, "Segments q_ids must have shape (4, 24)"),
        ({"mask": SHOWN[:, :2]}, "one pattern for each of 2 heads, but q has 4"),
    ],
)
def test_a_mesh_makes_the_checks_of_one_device(options, words):
    """A shape that fits the rows or heads of one device may not fit the whole call."""
    for x in (inputs(), spread("explicit", inputs())):
        with pytest.raises(ValueError, match=re.escape(words)):
            pj.attention(x["q"], x["k"], x["v"], **options)


def test_a_scheme_on_a_mesh_makes_the_same_checks():
    scheme = pj.Scheme(mask=masks.Dilated(4, (1, 2)))
    for x in (inputs(), spread("explicit", inputs())):
        with pytest.raises(ValueError, match="one pattern for each of 2 heads, but q has 4"):
            scheme.attend(x["q"], x["k"], x["v"])


def test_inside_a_shard_map_over_some_axes():
    """The rows are split by a ``shard_map``; the heads are left to their types."""
    x, mesh = inputs(), meshes.mesh("explicit")
    placed = [meshes.put(mesh, x[name]) for name in "qkv"]
    attend = partial(pj.attention, mask=CAUSAL, implementation="blockwise")
    rows = P("data")
    found = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=rows, out_specs=rows, axis_names={"data"}))(*placed)
    meshes.same(found, jax.jit(attend)(*(x[name] for name in "qkv")))


@pytest.mark.parametrize(
    ("kind", "spec", "words"),
    [
        ("explicit", P(None, "data"), "q: its sequence is split over mesh axis ('data',)"),
        ("explicit", P(None, None, None, "data"), "q: the size of its heads is split over mesh axis ('data',)"),
        ("auto", P(None, "data"), "partition: its sequence is split"),
        ("auto", P("rows"), "partition: the mesh has no axis ['rows']"),
        (
            "auto",
            P(None, None, ("data", "tensor")),
            "splits heads over 8 devices, which do not divide 4 query heads; an axis whose size divides 4 would work",
        ),
        (
            "auto",
            P(("data", "tensor")),
            "a batch of 4 rows cannot be split evenly over 8 devices along ('data', 'tensor')",
        ),
        ("auto", P(None, None, None, None, "data"), "partition must have at most the axes"),
        ("auto", "data", "partition must be a NamedSharding or PartitionSpec"),
    ],
)
def test_axes_that_cannot_be_split_are_refused(kind, spec, words):
    of_arrays = spec if kind == "explicit" else meshes.SPEC
    q, k, v = (meshes.put(meshes.mesh(kind), inputs()[name], of_arrays) for name in "qkv")
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        pj.attention(q, k, v, **meshes.partition(kind, spec))
    if "sequence" in words:
        assert "Placement(context=...)" in str(caught.value)


def test_a_partition_needs_a_mesh():
    q, k, v = (inputs()[name] for name in "qkv")
    with pytest.raises(ValueError, match="found no mesh; give a NamedSharding"):
        pj.attention(q, k, v, partition=meshes.SPEC)
    sharding = NamedSharding(meshes.mesh("auto"), meshes.SPEC)
    other = [meshes.put(meshes.mesh("auto", (2, 4)), x) for x in (q, k, v)]
    with pytest.raises(ValueError, match=r"partition: its mesh .*4.* is not that of the arrays"):
        pj.attention(*other, partition=sharding)
    meshes.same(jax.jit(partial(pj.attention, partition=sharding))(q, k, v), jax.jit(pj.attention)(q, k, v))
