"""The TPU kernel of rotation, interpreted, against NumPy in float64; when it is used, and its derivatives."""

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


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize(
    ("size", "width", "dtype", "tolerance"),
    [(128, 128, np.float32, 2e-6), (128, 64, jnp.bfloat16, 2**-8), (256, 256, jnp.bfloat16, 2**-8)],
)
def test_the_kernel_rotates_by_the_angles(pairing, size, width, dtype, tolerance):
    x, angles = values(dtype, size)
    angles = angles[..., : width // 2]
    run = partial(tpu.rotated, pairing=pairing, interpret=INTERPRET)
    got = np.asarray(jax.jit(run)(x, np.cos(angles, dtype=np.float32), np.sin(angles, dtype=np.float32)))
    chex.assert_shape(got, x.shape)
    assert got.dtype == dtype
    want = turned(x.astype(np.float32), angles, pairing)
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(got[..., width:], x[..., width:])


@pytest.mark.parametrize(
    ("x", "grid", "tokens", "columns"),
    [((2, 1024, 16, 128), (2, 2, 2), 512, 1024), ((1, 640, 3, 256), (1, 5, 1), 128, 768),
     ((1, 384, 5, 256), (1, 1, 5), 384, 256), ((1, 128, 2, 2048), (1, 1, 2), 128, 2048)],
)  # fmt: skip
def test_blocks_have_up_to_512_tokens_and_1024_columns(x, grid, tokens, columns):
    """As few programs as possible, in blocks that divide the tokens and the heads; one head may be wider."""
    shapes = (x, jnp.bfloat16), *(((x[1], x[3] // 2), jnp.float32),) * 2
    launch = launches(partial(tpu.rotated, pairing="half"), *(jax.ShapeDtypeStruct(*of) for of in shapes))
    found = launch["posjax_rotation"]
    assert found.grid == grid
    features, table, partners = (tokens, columns), (tokens, x[3]), (x[3], x[3])
    assert found.blocks == [features, table, table, partners, features]


def test_rows_share_a_table():
    x, angles = values()
    run = partial(tpu.rotated, pairing="half", interpret=INTERPRET)
    got = np.asarray(jax.jit(run)(x, np.cos(angles[0], dtype=np.float32), np.sin(angles[0], dtype=np.float32)))
    np.testing.assert_allclose(got, turned(x, angles[:1], "half"), rtol=2e-6, atol=2e-6)


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


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_derivatives_are_those_of_the_formula(pairing):
    """For features and for learned angles that rotate a part of them: first and second order, and under vmap."""
    x, angles = values()
    x, angles, weights = x[:, :128], angles[:, :128, :32], np.cos(np.arange(SIZE))

    def by_formula(x, angles):
        cos, sin = (part[:, :, None] for part in (jnp.cos(angles), jnp.sin(angles)))
        rotary = x[..., :64]
        a, b = (rotary[..., :32], rotary[..., 32:]) if pairing == "half" else (rotary[..., 0::2], rotary[..., 1::2])
        both = a * cos - b * sin, a * sin + b * cos
        joined = jnp.concatenate(both, -1) if pairing == "half" else jnp.stack(both, -1).reshape(rotary.shape)
        return jnp.concatenate([joined, x[..., 64:]], -1)

    def loss(rotate, x, angles):
        return (jnp.sin(rotate(x, angles)) * weights).sum()

    ours = partial(loss, lambda x, angles: apply_rotary(x, table(angles), pairing=pairing))
    plain = partial(loss, by_formula)

    def gradients(f, x, angles):
        return jax.grad(f, (0, 1))(x, angles)

    def mapped(f, x, angles):
        return jax.vmap(jax.grad(f, (0, 1)), (None, 0))(x, jnp.stack([angles, 0.5 * angles]))

    def forward_over_reverse(f, x, angles):
        return jax.jvp(jax.grad(f, (0, 1)), (x, angles), (jnp.cos(x), jnp.sin(angles)))[1]

    for derivative in (gradients, mapped, forward_over_reverse):
        got, want = (jax.jit(partial(derivative, f))(x, angles) for f in (ours, plain))
        chex.assert_trees_all_close(got, want, atol=2e-4, rtol=1e-4)
