"""Attention over meshes with Explicit, Auto and mixed axes gives the results of one device."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from refusals import refused

import posjax as pj
from posjax import masks
from posjax.attention.sharded import Placement
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


# Calls whose arrays have rows, heads, both or neither.
COVERING = [
    ("t5, packed", "explicit", "blockwise"),
    ("array bias", "explicit", "blockwise"),
    ("remap", "explicit", "blockwise"),
    ("dilated heads", "explicit", "dense"),
    ("decay", "explicit", "blockwise"),
    ("sinks, cap, scale", "auto", "blockwise"),
    ("array of rows", "mixed", "dense"),
]
MORE = [
    *((name, "explicit", ("blockwise", "dense")[n % 2]) for n, name in enumerate(CALLS)),
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
    """``jax.make_mesh`` makes Explicit axes; jitted or not."""
    x = np.random.default_rng(0).normal(size=(4, 520, 2, 8)).astype(np.float32)
    attend = partial(pj.attention, mask=CAUSAL, bias=pj.bias.ALiBi())
    wanted, mesh = jax.jit(attend)(x, x, x), meshes.mesh("explicit")
    placed = meshes.put(mesh, x)
    for function in (attend, jax.jit(attend)):
        meshes.same(function(placed, placed, placed), wanted)


@pytest.mark.parametrize(
    ("kind", "heads", "kv_heads", "axis"),
    [
        ("explicit", 8, 2, ("data", "tensor")),
        pytest.param("auto", 4, 1, "tensor", marks=pytest.mark.wide),
        pytest.param("explicit", 12, 6, "data", marks=pytest.mark.wide),
    ],
)
def test_key_heads_that_the_axis_does_not_divide(kind, heads, kv_heads, axis):
    spec = P(None, None, axis)
    run = meshes.gradients(partial(call, "alibi", implementation="blockwise", **meshes.partition(kind, spec)))
    meshes.same(run(spread(kind, inputs(heads, kv_heads), spec)), alone("alibi", heads, kv_heads))


def test_arrays_on_no_mesh_combine_with_arrays_on_a_mesh_in_use():
    x, mesh = inputs(), meshes.mesh("explicit")

    @jax.jit
    def attend(q):
        return pj.attention(q, x["k"], x["v"], mask=CAUSAL & masks.Segments(jnp.asarray(IDS)))

    with jax.set_mesh(mesh):
        found = jax.device_get(attend(meshes.put(mesh, x["q"])))
    meshes.same(found, attend(x["q"]))


def test_vmap_over_an_axis():
    x = inputs()
    three = [np.stack([x[name]] * 2) for name in "qkv"]
    placed = [meshes.put(meshes.mesh("explicit"), value, P(None, *meshes.SPEC)) for value in three]
    attend = jax.jit(jax.vmap(partial(pj.attention, mask=CAUSAL, implementation="blockwise")))
    meshes.same(attend(*placed), attend(*three))


def test_vmap_over_rows_that_are_split():
    """A model written for one row, as in Equinox: ``vmap`` takes the axis of the rows out of the mesh."""
    options = {"bias": inputs()["per_head"], "mask": CAUSAL, "implementation": "dense"}

    @jax.vmap
    def attend(q, k, v):
        return pj.attention(q[None], k[None], v[None], **options)[0]

    def run(x):
        return attend(x["q"], x["k"], x["v"]), jnp.zeros(())

    def whole(x):
        return pj.attention(x["q"], x["k"], x["v"], **options), jnp.zeros(())

    x = {name: inputs()[name] for name in "qkv"}
    meshes.same(meshes.gradients(run)(spread("explicit", x)), meshes.gradients(whole)(x))


SIZED = {
    "Window": masks.Window,
    "Chunked": masks.Chunked,
    "ChunksApart": lambda size: masks.ChunksApart(size, 0, 1),
    "heads": lambda size: masks.Dilated(size, (1, 1, 2, 3)),
    "composed": lambda size: CAUSAL & (masks.Band(size) | ~masks.FirstTokens(9)),
}


@pytest.mark.parametrize("kind", ["explicit", pytest.param("auto", marks=pytest.mark.wide)])
def test_sizes_that_are_arrays(kind):
    """The output of attention for every mask of a size, an array or a Python int."""

    def sized(size, x, **options) -> dict:
        return {name: pj.attention(x["q"], x["k"], x["v"], mask=mask(size), **options) for name, mask in SIZED.items()}

    x = {name: inputs()[name] for name in "qkv"}
    found = jax.jit(partial(sized, **meshes.partition(kind)))(np.int32(5), spread(kind, x))
    meshes.same(found, jax.jit(partial(sized, 5, implementation="dense"))(x))


def test_an_array_bias_whose_queries_are_split():
    """Every device reads a whole array over pairs, so it is gathered."""
    x, mesh = inputs(), meshes.mesh("explicit")
    placed = [meshes.put(mesh, x[name]) for name in "qkv"]
    bias = meshes.put(mesh, np.repeat(x["per_head"], ROWS, axis=0), P(None, None, "data"))
    attend = jax.jit(lambda q, k, v, bias: pj.attention(q, k, v, bias=bias))
    meshes.same(attend(*placed, bias), attend(*(x[name] for name in "qkv"), x["per_head"]))


def test_inside_a_shard_map_over_some_axes():
    """The rows are split by a ``shard_map``; the heads are left to their types."""
    x, mesh = inputs(), meshes.mesh("explicit")
    placed = [meshes.put(mesh, x[name]) for name in "qkv"]
    attend = partial(pj.attention, mask=CAUSAL, implementation="blockwise")
    rows = P("data")
    found = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=rows, out_specs=rows, axis_names={"data"}))(*placed)
    meshes.same(found, jax.jit(attend)(*(x[name] for name in "qkv")))


def on_a_mesh(kind: str, spec=meshes.SPEC, **options):
    """Attention over a mesh whose arrays or whose partition have this spec."""
    of_arrays = spec if kind == "explicit" else meshes.SPEC
    q, k, v = (meshes.put(meshes.mesh(kind), inputs()[name], of_arrays) for name in "qkv")
    return pj.attention(q, k, v, **meshes.partition(kind, spec), **options)


REFUSALS = [
    # A shape that fits the rows or heads of one device may not fit the whole call.
    ("sinks", lambda: on_a_mesh("explicit", sinks=np.ones(2, np.float32))),
    ("q", lambda: on_a_mesh("explicit", mask=masks.Dilated(4, (1, 2)))),
    ("q_ids", lambda: on_a_mesh("explicit", mask=masks.Segments(IDS[:1]))),
    ("q", lambda: on_a_mesh("explicit", mask=SHOWN[:, :2])),
    ("q", lambda: pj.Scheme(mask=masks.Dilated(4, (1, 2))).attend(*placed_qkv())),
    ("q", lambda: on_a_mesh("explicit", P(None, "data"))),
    ("q", lambda: on_a_mesh("explicit", P(None, None, None, "data"))),
    ("placement", lambda: on_a_mesh("auto", P(None, "data"))),
    ("placement", lambda: on_a_mesh("auto", P("rows"))),
    ("placement", lambda: on_a_mesh("auto", P(None, None, None, None, "data"))),
    ("placement", lambda: on_a_mesh("auto", "data")),
    ("heads", lambda: on_a_mesh("auto", P(None, None, ("data", "tensor")))),
    ("batch", lambda: on_a_mesh("auto", P(("data", "tensor")))),
    ("placement", lambda: pj.attention(*(inputs()[name] for name in "qkv"), placement=meshes.SPEC)),
    ("placement", lambda: pj.attention(*(inputs()[name] for name in "qkv"), placement="data")),
]


def placed_qkv():
    return [spread("explicit", inputs())[name] for name in "qkv"]


@pytest.mark.parametrize(("name", "refusal"), REFUSALS)
def test_what_cannot_be_split_is_refused(name, refusal):
    refused(name, refusal)


def test_a_placement_outside_shard_map_is_refused():
    """It would be ignored: nothing has split the arrays."""
    q, k, v = (inputs()[name] for name in "qkv")
    placement = Placement(batch=("data",))
    with jax.set_mesh(meshes.mesh("auto")):
        for call in (pj.attention, pj.Scheme().attend):
            refused("placement", lambda call=call: call(q, k, v, placement=placement))


def test_a_split_sequence_is_refused_with_what_would_work():
    with pytest.raises(ValueError, match=r"Placement\(context=\.\.\.\)"):
        on_a_mesh("explicit", P(None, "data"))


def test_a_partition_may_name_the_mesh_of_the_arrays():
    q, k, v = (inputs()[name] for name in "qkv")
    sharding = NamedSharding(meshes.mesh("auto"), meshes.SPEC)
    other = [meshes.put(meshes.mesh("auto", (2, 4)), x) for x in (q, k, v)]
    refused("placement", lambda: pj.attention(*other, placement=sharding))
    meshes.same(jax.jit(partial(pj.attention, placement=sharding))(q, k, v), jax.jit(pj.attention)(q, k, v))
