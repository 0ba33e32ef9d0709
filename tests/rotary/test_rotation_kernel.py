"""The TPU kernel of rotation, interpreted, against NumPy in float64; when it is used, and its derivatives."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import posjax as pj
from posjax.rotary import RotaryTable, apply_rotary, tpu

ROWS, TOKENS, HEADS, SIZE = 2, 256, 3, 128
INTERPRET = pltpu.InterpretParams(uninitialized_memory="nan")


def values(dtype=np.float32, size: int = SIZE):
    """Features, and angles of both rows, of at most a quarter of a turn."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, TOKENS, HEADS, size)).astype(dtype)
    return x, rng.uniform(-1.5, 1.5, (ROWS, TOKENS, size // 2))


def turned(x, angles, pairing: str):
    """Rotates each pair ``(a, b)`` as the complex number ``a + ib`` times ``exp(i angle)``."""
    width = 2 * angles.shape[-1]
    pairs = x[..., :width].astype(np.float64)
    if pairing == "half":
        pairs = pairs.reshape(*x.shape[:-1], 2, -1).swapaxes(-1, -2)
    pairs = pairs.reshape(*x.shape[:-1], -1, 2)
    found = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)[:, :, None]
    parts = np.stack([found.real, found.imag], -2 if pairing == "half" else -1).reshape(*x.shape[:-1], width)
    return np.concatenate([parts, x[..., width:]], -1)


@pytest.mark.parametrize(
    ("pairing", "size", "width", "dtype", "tolerance"),
    [
        ("half", 128, 128, np.float32, 2e-6),
        ("interleaved", 128, 64, jnp.bfloat16, 2**-8),
        ("half", 256, 256, jnp.bfloat16, 2**-8),
        ("interleaved", 128, 128, np.float32, 2e-6),
        ("half", 128, 64, jnp.bfloat16, 2**-8),
    ],
)
def test_the_kernel_rotates_by_the_angles(pairing, size, width, dtype, tolerance):
    """In float32 both rows share a table."""
    x, angles = values(dtype, size)
    angles = angles[:1, :, : width // 2] if dtype == np.float32 else angles[..., : width // 2]
    cos, sin = np.cos(angles, dtype=np.float32), np.sin(angles, dtype=np.float32)
    tables = (cos[0], sin[0]) if dtype == np.float32 else (cos, sin)
    got = np.asarray(jax.jit(partial(tpu.rotated, pairing=pairing, interpret=INTERPRET))(x, *tables))
    chex.assert_shape(got, x.shape)
    assert got.dtype == dtype
    want = turned(x.astype(np.float32), angles, pairing)
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(got[..., width:], x[..., width:])


def test_float32_is_multiplied_at_the_highest_precision():
    """At the default one a TPU would round the features to bfloat16."""
    x, angles = values()
    program = jax.make_jaxpr(partial(tpu.rotated, pairing="half"))(x, np.float32(angles), np.float32(angles))
    products = str(program).split("dot_general[")[1:]
    assert products
    assert all("HIGHEST" in product.split("preferred_element_type")[0] for product in products)


def table(angles) -> RotaryTable:
    return RotaryTable(jnp.cos(angles), jnp.sin(angles))


def has_kernel(function, *arguments, platform: str = "tpu") -> bool:
    """Whether the lowered program contains the kernel."""
    return "posjax_rotation" in jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def shape(*sizes: int, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize(
    ("x", "taken"),
    [(shape(2, 256, 3, 128), True), (shape(2, 256, 3, 256, dtype=jnp.float32), True), (shape(2, 256, 3, 64), False),
     (shape(2, 200, 3, 128), False), (shape(2, 256, 3, 128, dtype=jnp.float16), False), (shape(256, 3, 128), False)],
)  # fmt: skip
def test_the_kernel_is_used_where_heads_fill_lanes_and_tokens_fill_blocks(x, taken):
    def run(x):
        return apply_rotary(x, pj.rotary_table(np.arange(x.shape[-3]), pj.rotary.inverse_frequencies(x.shape[-1])))

    assert has_kernel(run, x) == taken
    assert not has_kernel(run, x, platform="cpu")


def test_heads_with_angles_of_their_own_are_left_to_the_compiler():
    x, angles = shape(2, 256, 4, 128), shape(2, 256, 2, 64, dtype=jnp.float32)
    assert not has_kernel(lambda x, a: apply_rotary(x, table(a)), x, angles)


def test_the_kernel_is_used_in_a_shard_map_but_not_on_auto_axes():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((8, 256, 3, 128), jnp.float32, sharding=rows)

    def run(x):
        return apply_rotary(x, pj.rotary_table(np.arange(256), pj.rotary.inverse_frequencies(128)))

    with jax.set_mesh(mesh):
        assert not has_kernel(run, x)
        assert has_kernel(jax.shard_map(run, in_specs=rows.spec, out_specs=rows.spec), x)


def test_derivatives_are_those_of_complex_numbers():
    """For features and for learned angles that rotate a part of them: first and second order, and under vmap."""
    x, angles = values()
    x, angles, weights = x[:, :128], angles[:, :128, :32], np.cos(np.arange(SIZE))

    def by_formula(x, angles):
        turned = (x[..., :32] + 1j * x[..., 32:64]) * jnp.exp(1j * angles)[:, :, None]
        return jnp.concatenate([turned.real, turned.imag, x[..., 64:]], -1)

    def derivatives(rotate, x, angles):
        gradient = jax.grad(lambda x, angles: (jnp.sin(rotate(x, angles)) * weights).sum(), (0, 1))
        mapped = jax.vmap(gradient, (None, 0))(x, jnp.stack([angles, 0.5 * angles]))
        return gradient(x, angles), mapped, jax.jvp(gradient, (x, angles), (jnp.cos(x), jnp.sin(angles)))[1]

    x, angles = jnp.asarray(x), jnp.asarray(angles, jnp.float32)
    got = jax.jit(partial(derivatives, lambda x, angles: apply_rotary(x, table(angles), pairing="half")))(x, angles)
    want = jax.jit(partial(derivatives, by_formula))(x, angles)
    chex.assert_trees_all_close(got, want, atol=2e-4, rtol=1e-4)
