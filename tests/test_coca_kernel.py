"""The TPU kernel of CoCA's features, interpreted, against NumPy in float64; where it is used, and its derivatives."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import posjax as pj
from posjax import coca
from posjax.coca import planes, tpu
from posjax.rotary import RotaryTable

ROWS, TOKENS, HEADS = 2, 256, 4
INTERPRET = pltpu.InterpretParams(uninitialized_memory="nan")
FORMULAS = planes.QUERY | {"key": planes.key}
ONE = ("tied", "key")
"""Features whose planes have one component."""


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


@pytest.mark.parametrize(
    ("name", "pairing", "size", "dtype"),
    [
        ("strict", "half", 128, np.float32),
        ("strict", "interleaved", 256, jnp.bfloat16),
        ("relative", "half", 256, jnp.bfloat16),
        ("relative", "interleaved", 128, np.float32),
        ("slack", "half", 128, jnp.bfloat16),
        ("slack", "interleaved", 128, np.float32),
        ("tied", None, 128, np.float32),
        ("tied", None, 256, jnp.bfloat16),
        ("key", None, 128, jnp.bfloat16),
        ("key", None, 256, np.float32),
    ],
)
def test_the_kernels_make_the_features_and_carry_cotangents_back(name, pairing, size, dtype):
    """In float32 both rows share a table."""
    tolerance = 2e-6 if dtype == np.float32 else 2**-8
    x, angles, cotangent = values(name, dtype, size)
    angles, tables = (angles[:1], of_angles(angles[0])) if dtype == np.float32 else (angles, of_angles(angles))
    options = {"formula": FORMULAS[name], "pairing": pairing, "interpret": INTERPRET}

    @jax.jit
    def run(x, cotangent, *tables):
        return tpu.features(x, *tables, **options), tpu.gradient(x, *tables, cotangent, **options)

    found, back = map(np.asarray, run(x, cotangent, *tables))
    assert (found.shape, back.shape) == ((ROWS, TOKENS, HEADS, size), x.shape)
    assert found.dtype == back.dtype == dtype
    parts = components(x, size, pairing)
    want = wanted(name, parts, angles)
    close(components(found, size, "half"), want, tolerance)
    want = wanted_gradient(name, parts, angles, components(cotangent, size, "half"))
    close(components(back, size, pairing), want, tolerance)


def close(got, want, tolerance: float) -> None:
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * abs(want).max() / 8)


def test_float32_is_copied_at_the_highest_precision():
    """At the default one a TPU would round the components to bfloat16."""
    x, angles, cotangent = values("slack")
    for run, arrays in ((tpu.features, ()), (tpu.gradient, (cotangent,))):
        program = jax.make_jaxpr(partial(run, formula=planes.slack, pairing="half"))(x, *of_angles(angles), *arrays)
        products = str(program).split("dot_general[")[1:]
        assert products
        assert all("HIGHEST" in product.split("preferred_element_type")[0] for product in products)


def test_what_runs_on_tpus_computes_what_runs_elsewhere():
    """Both implementations of features and of their cotangents. A program for TPUs cannot run here."""
    x, angles, cotangent = values("slack")
    feature = planes._Feature(planes.slack, "interleaved")
    with pltpu.force_tpu_interpret_mode(INTERPRET):
        for function, more in ((feature, ()), (planes._Cotangent(feature), (cotangent,))):
            arrays = [jnp.asarray(array) for array in (*of_angles(angles), x, *more)]
            on_tpu, elsewhere = (jax.jit(partial(function.on, name)) for name in ("tpu", "cpu"))
            chex.assert_trees_all_close(on_tpu(*arrays), elsewhere(*arrays), rtol=1e-5, atol=1e-5)


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
    ("x", "variant", "taken"),
    [(shape(2, 256, 3, 128), "strict", True), (shape(2, 256, 3, 256, dtype=jnp.float32), "slack", True),
     (shape(2, 256, 3, 64), "strict", False), (shape(2, 200, 3, 128), "slack", False),
     (shape(2, 256, 3, 128, dtype=jnp.float16), "relative", False), (shape(0, 256, 3, 128), "strict", False),
     (shape(2, 256, 2, 64), "tied", True), (shape(2, 256, 3, 64), "tied", False)],
)  # fmt: skip
def test_queries_use_the_kernel_where_heads_fill_lanes_and_tokens_fill_blocks(x, variant, taken):
    width = x.shape[-1] * (2 if variant == "tied" else 1)
    run = partial(at_positions_from_0, coca.query_feature, width=width, variant=variant)
    assert kernels(run, x) == [taken, False]
    assert kernels(jax.grad(partial(loss, run)), x) == [taken, taken]
    assert kernels(jax.grad(partial(loss, run)), x, platform="cpu") == [False, False]


@pytest.mark.parametrize(
    ("t", "taken"),
    [(shape(2, 256, 2, 64), True), (shape(2, 256, 3, 128), True), (shape(2, 256, 3, 64), False),
     (shape(2, 1, 2, 64), False)],
)  # fmt: skip
def test_keys_use_the_kernel_where_several_heads_fill_lanes(t, taken):
    run = partial(at_positions_from_0, coca.key_feature, width=2 * t.shape[-1])
    assert kernels(jax.grad(partial(loss, run)), t) == [taken, taken]


def test_an_automatic_mesh_does_not_use_the_kernel_and_a_shard_map_does():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((8, 256, 3, 128), jnp.float32, sharding=rows)

    def with_angles(x, angles):
        return coca.query_feature(x, table(angles), variant="strict")

    gradient = jax.grad(partial(loss, partial(at_positions_from_0, coca.query_feature, width=128, variant="strict")))
    with jax.set_mesh(mesh):
        assert kernels(gradient, x) == [False, False]
        assert kernels(jax.shard_map(gradient, in_specs=rows.spec, out_specs=rows.spec), x) == [True, True]
        # Queries that all devices share, with a table that is split.
        run = jax.shard_map(with_angles, in_specs=(PartitionSpec(), rows.spec), out_specs=rows.spec)
        shared = shape(1, 128, 2, 128, dtype=jnp.float32), shape(8, 128, 64, dtype=jnp.float32)
        assert kernels(run, *shared) == [False, False]


def by_operation(name, pairing, x, angles):
    """The operation that makes features."""
    return planes.feature(FORMULAS[name], pairing, *table(angles), x)


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
        "linearize": jax.linearize(f, x, angles)[1](*tangent),
        "mapped": jax.vmap(gradient, (None, 0))(x, jnp.stack([angles, 0.5 * angles])),
        "both mapped": jax.vmap(gradient)(jnp.stack([x, -x]), jnp.stack([angles, 0.5 * angles])),
        "forward over reverse": jax.jvp(gradient, (x, angles), tangent)[1],
        "reverse over forward": jax.grad(along, (0, 1))(x, angles),
        "reverse over reverse": jax.grad(lambda *a: sum(map(jnp.vdot, gradient(*a), tangent)), (0, 1))(x, angles),
        "in a loop": jax.grad(in_loop, (0, 1))(x, angles),
    }


@pytest.mark.parametrize(("name", "pairing"), [("relative", "half"), ("slack", "interleaved"), ("key", None)])
def test_derivatives_are_those_of_the_formula(name, pairing):
    x, angles, weights = (jnp.asarray(a[:, :128], jnp.float32) for a in values(name))

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


def test_gradients_are_the_same_eager_by_pmap_and_in_a_checked_shard_map():
    """With a table that all devices share."""
    x, angles = (jnp.asarray(a[:, :128], jnp.float32) for a in values("slack")[:2])
    angles, devices = angles[:1], jax.devices()[:ROWS]

    def gradient(function, x, angles):
        return jax.grad(lambda *a: jnp.sin(function("slack", "half", *a)).sum(), (0, 1))(x, angles)

    want, ours = jax.jit(partial(gradient, by_formula))(x, angles), partial(gradient, by_operation)
    by_pmap = jax.pmap(ours, in_axes=(0, None), devices=devices)(x[:, None], angles)
    mesh = jax.make_mesh((ROWS,), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    specs = PartitionSpec("data"), PartitionSpec()
    split = jax.jit(jax.shard_map(ours, mesh=mesh, in_specs=specs, out_specs=specs))(x, angles)
    for found in (ours(x, angles), (by_pmap[0][:, 0], by_pmap[1].sum(0)), split):
        chex.assert_trees_all_close(jax.device_get(found), want, rtol=1e-4, atol=1e-4)
