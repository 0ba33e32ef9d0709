"""The TPU kernel of CoCA's features, interpreted, against NumPy in float64; where it is used, and its derivatives."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from launches import launches

import posjax as pj
from posjax import coca
from posjax.coca import planes, tpu
from posjax.rotary import RotaryTable

ROWS, TOKENS, HEADS = 2, 256, 4
INTERPRET = pltpu.InterpretParams(uninitialized_memory="nan")
FORMULAS = planes.QUERY | {"key": planes.key}
ONE = ("tied", "key")
"""Features whose planes have one component."""
CASES = [(name, pairing) for name in FORMULAS for pairing in ((None,) if name in ONE else ("half", "interleaved"))]
SIZES = [(128, np.float32, 2e-6), (128, jnp.bfloat16, 2**-8), (256, jnp.bfloat16, 2**-8)]
cases = pytest.mark.parametrize(("name", "pairing"), CASES)
sizes = pytest.mark.parametrize(("size", "dtype", "tolerance"), SIZES)


def values(name: str, dtype=np.float32, size: int = 128):
    """Components, angles of both rows, and a cotangent of the features."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, TOKENS, HEADS, size // 2 if name in ONE else size)).astype(dtype)
    angles = rng.uniform(-3, 3, (ROWS, TOKENS, size // 2))
    return x, angles, rng.standard_normal((ROWS, TOKENS, HEADS, size)).astype(dtype)


def of_angles(angles):
    return np.cos(angles, dtype=np.float32), np.sin(angles, dtype=np.float32)


def components(x, size: int, pairing: str | None):
    """Components ``[2 or 1, ..., planes]`` in float64."""
    x = np.asarray(x, np.float64).reshape(
        *x.shape[:-1], *((size // 2, -1) if pairing == "interleaved" else (-1, size // 2))
    )
    return np.moveaxis(x, -1 if pairing == "interleaved" else -2, 0)


def wanted(name: str, parts, angles):
    """Both features of every plane in float64, computed with complex numbers ``z = x + iy``."""
    turn = np.exp(1j * angles)[:, :, None]
    if name == "key":
        found = np.maximum(parts[0], 0) * turn
    elif name == "tied":
        found = 2 * parts[0] ** 2 * turn
    else:
        z = parts[0] + 1j * parts[1]
        u, w = (z * np.exp(-0.25j * np.pi)).real, (z * np.exp(-0.25j * np.pi)).imag
        relative, absolute = (u * u + 1j * u * w) * turn, (w * w + 1j * u * w) * turn.conj()
        found = {"strict": abs(z) ** 2 * turn, "relative": relative, "slack": relative + absolute}[name]
    return np.stack([found.real, found.imag])


def wanted_gradient(name: str, parts, angles, cotangent):
    """By central differences. Planes are independent, so one step moves all of them; ``[2 or 1, ..., planes]``."""
    step = 1e-6
    moves = [step * (np.arange(len(parts)) == n).reshape(-1, 1, 1, 1, 1) for n in range(len(parts))]
    slopes = [wanted(name, parts + move, angles) - wanted(name, parts - move, angles) for move in moves]
    return np.stack([(slope / (2 * step) * cotangent).sum(0) for slope in slopes])


@cases
@sizes
def test_the_kernel_makes_the_features(name, pairing, size, dtype, tolerance):
    x, angles, _ = values(name, dtype, size)
    run = partial(tpu.features, formula=FORMULAS[name], pairing=pairing, interpret=INTERPRET)
    got = np.asarray(jax.jit(run)(x, *of_angles(angles)))
    chex.assert_shape(got, (ROWS, TOKENS, HEADS, size))
    assert got.dtype == dtype
    first, second = wanted(name, components(x, size, pairing), angles)
    want = np.concatenate([first, second], -1)
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=tolerance, atol=tolerance * abs(want).max() / 8)


@cases
@sizes
def test_the_kernel_carries_cotangents_back(name, pairing, size, dtype, tolerance):
    x, angles, cotangent = values(name, dtype, size)
    run = partial(tpu.gradient, formula=FORMULAS[name], pairing=pairing, interpret=INTERPRET)
    got = np.asarray(jax.jit(run)(x, *of_angles(angles), cotangent))
    chex.assert_shape(got, x.shape)
    assert got.dtype == dtype
    parts, by_feature = components(x, size, pairing), components(cotangent, size, "half")
    want = wanted_gradient(name, parts, angles, by_feature)
    got = components(got, size, pairing)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * abs(want).max() / 8)


@pytest.mark.parametrize(
    ("x", "grid", "tokens", "columns"),
    [((2, 1024, 16, 128, jnp.bfloat16), (2, 2, 2), 512, 1024), ((1, 640, 3, 256, jnp.float32), (1, 5, 3), 128, 256),
     ((1, 384, 6, 128, jnp.bfloat16), (1, 1, 1), 384, 768), ((1, 128, 2, 1024, jnp.float32), (1, 1, 2), 128, 1024)],
)  # fmt: skip
def test_blocks_have_up_to_512_tokens_and_2048_bytes_of_heads(x, grid, tokens, columns):
    """As few programs as possible, in blocks that divide the tokens and the heads; one head may be wider."""
    *sizes, dtype = x
    (_, length, _, size), x = sizes, jax.ShapeDtypeStruct(sizes, dtype)
    cos = jax.ShapeDtypeStruct((length, size // 2), jnp.float32)
    found = launches(partial(tpu.features, formula=planes.QUERY["strict"], pairing="half"), x, cos, cos)
    launch = found["posjax_coca"]
    assert launch.grid == grid
    assert launch.blocks == [(tokens, size)] * 2 + [(size, 2 * size)] + [(tokens, columns)] * 2


def test_blocks_of_narrow_keys_are_as_wide_as_their_features():
    t, cos = (jax.ShapeDtypeStruct(*of) for of in (((1, 512, 16, 64), jnp.bfloat16), ((512, 64), jnp.float32)))
    launch = launches(partial(tpu.features, formula=planes.key, pairing=None), t, cos, cos)["posjax_coca"]
    assert launch.grid == (1, 1, 2)
    assert launch.blocks[-2:] == [(512, 8 * 64), (512, 8 * 128)]


@pytest.mark.parametrize("sizes", [(0, 256, 4, 128), (2, 0, 4, 128), (2, 256, 0, 128)])
def test_empty_arrays_have_no_kernel(sizes):
    cos = jnp.zeros((sizes[1], 64))
    assert not tpu.supports(jnp.zeros(sizes), cos)
    assert tpu.supports(jnp.zeros([size or 256 for size in sizes]), cos)


@pytest.mark.parametrize(("dtype", "precision"), [(np.float32, jax.lax.Precision.HIGHEST), (jnp.bfloat16, None)])
def test_float32_is_copied_at_the_highest_precision(dtype, precision):
    """At the default one a TPU would round the components to bfloat16."""
    program = jax.make_jaxpr(tpu._product)(np.zeros((8, 4), dtype), np.zeros((4, 4), dtype))
    assert program.eqns[0].params["precision"] == (precision and (precision, precision))
    assert program.out_avals[0].dtype == np.float32


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rows_share_a_table(pairing):
    x, angles, cotangent = values("slack")
    both = [
        partial(f, formula=planes.slack, pairing=pairing, interpret=INTERPRET) for f in (tpu.features, tpu.gradient)
    ]
    got = jax.jit(lambda *table: (both[0](x, *table), both[1](x, *table, cotangent)))(*of_angles(angles[0]))
    parts, by_feature = components(x, 128, pairing), components(cotangent, 128, "half")
    np.testing.assert_allclose(components(got[0], 128, "half"), wanted("slack", parts, angles[:1]), atol=1e-5)
    want = wanted_gradient("slack", parts, angles[:1], by_feature)
    np.testing.assert_allclose(components(got[1], 128, pairing), want, atol=1e-5)


def table(angles) -> RotaryTable:
    return RotaryTable(jnp.cos(angles), jnp.sin(angles))


def kernels(function, *arguments, platform: str = "tpu") -> list[bool]:
    """Whether the program has the kernel of features, and that of gradients."""
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    return ["posjax_coca\\22" in text or 'posjax_coca"' in text, "posjax_coca_gradient" in text]


def shape(*sizes: int, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def at_positions_from_0(function, x, width: int, **options):
    """Features at positions 0, 1, 2, ... of heads that are ``width`` wide."""
    return function(x, pj.rotary_table(np.arange(x.shape[1]), pj.rotary.inverse_frequencies(width)), **options)


def loss(function, x):
    return jnp.square(function(x).astype(jnp.float32)).sum()


@pytest.mark.parametrize(
    ("x", "taken"),
    [(shape(2, 256, 3, 128), True), (shape(2, 256, 3, 256, dtype=jnp.float32), True), (shape(2, 256, 3, 64), False),
     (shape(2, 200, 3, 128), False), (shape(2, 256, 3, 128, dtype=jnp.float16), False)],
)  # fmt: skip
@pytest.mark.parametrize("variant", ["strict", "slack", "relative"])
def test_queries_use_the_kernel_where_heads_fill_lanes_and_tokens_fill_blocks(x, taken, variant):
    run = partial(at_positions_from_0, coca.query_feature, width=x.shape[-1], variant=variant)
    assert kernels(run, x) == [taken, False]
    assert kernels(jax.grad(partial(loss, run)), x) == [taken, taken]
    assert kernels(jax.grad(partial(loss, run)), x, platform="cpu") == [False, False]


@pytest.mark.parametrize(
    ("t", "taken"),
    [(shape(2, 256, 2, 64), True), (shape(2, 256, 3, 128), True), (shape(2, 256, 3, 64), False),
     (shape(2, 256, 2, 32), False), (shape(2, 1, 2, 64), False)],
)  # fmt: skip
def test_keys_use_the_kernel_where_several_heads_fill_lanes(t, taken):
    run = partial(at_positions_from_0, coca.key_feature, width=2 * t.shape[-1])
    tied = partial(at_positions_from_0, coca.query_feature, width=2 * t.shape[-1], variant="tied")
    for function in (run, tied):
        assert kernels(function, t) == [taken, False]
        assert kernels(jax.grad(partial(loss, function)), t) == [taken, taken]


def test_an_automatic_mesh_does_not_use_the_kernel_and_a_shard_map_does():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((8, 256, 3, 128), jnp.float32, sharding=rows)
    gradient = jax.grad(partial(loss, partial(at_positions_from_0, coca.query_feature, width=128, variant="strict")))
    with jax.set_mesh(mesh):
        assert kernels(gradient, x) == [False, False]
        assert kernels(jax.shard_map(gradient, in_specs=rows.spec, out_specs=rows.spec), x) == [True, True]


def test_shared_queries_with_a_split_table_do_not_use_the_kernel():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x, angles = shape(1, 128, 2, 128, dtype=jnp.float32), shape(8, 128, 64, dtype=jnp.float32)

    def run(x, angles):
        return coca.query_feature(x, table(angles), variant="strict")

    rows = PartitionSpec("data")
    with jax.set_mesh(mesh):
        assert kernels(jax.shard_map(run, in_specs=(PartitionSpec(), rows), out_specs=rows), x, angles) == [
            False,
            False,
        ]


@pytest.fixture(params=["xla", "kernels"])
def by_operation(request, monkeypatch):
    """The operation that makes features: as on other platforms, and as on TPUs with the kernels interpreted."""
    if request.param == "kernels":
        for kernel in ("features", "gradient"):
            monkeypatch.setattr(tpu, kernel, partial(getattr(tpu, kernel), interpret=True))
        for kind in (planes._Feature, planes._Cotangent):
            monkeypatch.setattr(kind, "on", lambda self, platform, *arrays, on=kind.on: on(self, "tpu", *arrays))
    formulas = {name: partial(formula) for name, formula in FORMULAS.items()}  # new objects have no cached programs

    def run(name, pairing, x, angles):
        return planes.feature(formulas[name], pairing, *table(angles), x)

    return run


def by_formula(name, pairing, x, angles):
    """The same features in plain JAX."""
    parts = (x,) if pairing is None else planes.split(x, pairing)
    return jnp.concatenate(FORMULAS[name](*parts, *(part[:, :, None] for part in table(angles))), -1)


def derivatives(f, x, angles, tangent):
    """Derivatives of first and second order, in all combinations of modes, mapped, and rematerialised in a loop."""
    gradient = jax.grad(f, (0, 1))

    def in_loop(x, angles):
        return jax.lax.scan(lambda total, _: (total + jax.checkpoint(f)(x, angles), None), 0.0, length=2)[0]

    def along(x, angles):
        return jax.jvp(f, (x, angles), tangent)[1]

    return {
        "gradients": gradient(x, angles),
        "of components alone": jax.grad(f)(x, angles),
        "jvp": along(x, angles),
        "linearize": jax.linearize(f, x, angles)[1](*tangent),
        "mapped": jax.vmap(gradient, (None, 0))(x, jnp.stack([angles, 0.5 * angles])),
        "both mapped": jax.vmap(gradient)(jnp.stack([x, -x]), jnp.stack([angles, 0.5 * angles])),
        "forward over reverse": jax.jvp(gradient, (x, angles), tangent)[1],
        "reverse over forward": jax.grad(along, (0, 1))(x, angles),
        "reverse over reverse": jax.grad(lambda *a: sum(map(jnp.vdot, gradient(*a), tangent)), (0, 1))(x, angles),
        "in a loop": jax.grad(in_loop, (0, 1))(x, angles),
    }


@pytest.mark.parametrize(
    ("name", "pairing"),
    [("strict", "half"), ("slack", "interleaved"), ("relative", "half"), ("tied", None), ("key", None)],
)
def test_derivatives_are_those_of_the_formula(name, pairing, by_operation):
    x, angles, weights = (jnp.asarray(a[:, :128, :2], jnp.float32) for a in values(name))
    angles = jnp.asarray(values(name)[1][:, :128], jnp.float32)

    def total(function, x, angles):
        return (jnp.sin(function(name, pairing, x, angles)) * weights).sum()

    tangent = jnp.cos(3 * x), jnp.sin(angles)
    got, want = (
        jax.jit(partial(derivatives, partial(total, function)))(x, angles, tangent)
        for function in (by_operation, by_formula)
    )
    for kind, found in want.items():
        scale = max(jnp.abs(leaf).max() for leaf in jax.tree.leaves(found))
        chex.assert_trees_all_close(got[kind], found, rtol=1e-4, atol=2e-6 * float(scale), custom_message=kind)


def test_the_gradient_of_queries_has_a_transpose(by_operation):
    """The gradient is linear in the cotangent; here it is differentiated by the cotangent, with constant queries."""
    x, angles, cotangent = (jnp.asarray(a, jnp.float32)[:, :128] for a in values("relative"))

    def transpose(function, direction):
        back = jax.vjp(lambda x: function("relative", "half", x, angles), x)[1]
        return jax.grad(lambda g: jnp.vdot(back(g)[0], direction))(cotangent)

    got, want = (jax.jit(partial(transpose, function))(jnp.cos(3 * x)) for function in (by_operation, by_formula))
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-5)


def gradient_of_slack(function, x, angles):
    return jax.grad(lambda *a: jnp.sin(function("slack", "half", *a)).sum(), (0, 1))(x, angles)


def test_gradients_are_the_same_eager_and_by_pmap(by_operation):
    x, angles = (jnp.asarray(a, jnp.float32)[:, :128] for a in values("slack")[:2])
    want = jax.jit(partial(gradient_of_slack, by_formula))(x, angles[:1])
    ours, devices = partial(gradient_of_slack, by_operation), jax.devices()[:ROWS]
    by_pmap = jax.pmap(ours, in_axes=(0, None), devices=devices)(x[:, None], angles[:1])
    for found in (ours(x, angles[:1]), (by_pmap[0][:, 0], by_pmap[1].sum(0))):
        chex.assert_trees_all_close(found, want, rtol=1e-4, atol=1e-4)


def test_gradients_are_the_same_in_a_checked_shard_map():
    """With a table that all devices share. Without kernels, whose interpreter does not support a checked shard_map."""
    x, angles = (jnp.asarray(a, jnp.float32)[:, :128] for a in values("slack")[:2])
    mesh = jax.make_mesh((ROWS,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ROWS])
    specs = PartitionSpec("data"), PartitionSpec()

    def ours(x, angles):
        return gradient_of_slack(
            lambda name, pairing, x, a: planes.feature(planes.slack, pairing, *table(a), x), x, angles
        )

    split = jax.shard_map(ours, mesh=mesh, in_specs=specs, out_specs=specs)
    found, want = jax.jit(lambda *a: (split(*a), gradient_of_slack(by_formula, *a)))(x, angles[:1])
    chex.assert_trees_all_close(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("variant", "pairing"), [case for case in CASES if case[0] != "key"])
def test_features_of_queries_and_of_fewer_key_heads(variant, pairing, by_operation):
    q, angles, _ = values(variant)
    t = values("key")[0][:, :, :2]
    find = partial(coca.features, variant=variant, pairing=pairing or "half")
    found = jax.jit(lambda q, t, angles: find(q, t, table(angles)))(q, t, jnp.asarray(angles, jnp.float32))
    for got, name, x, own in zip(found, (variant, "key"), (q, t), (pairing, None), strict=True):
        want = wanted(name, components(x, 128, own), angles)
        np.testing.assert_allclose(components(got, 128, "half"), want, rtol=2e-6, atol=1e-5)
