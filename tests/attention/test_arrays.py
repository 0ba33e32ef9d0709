"""Plain arrays as masks and biases: alone, composed with typed masks, in schemes, modules, meshes and backends."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import meshes
import numpy as np
import oracles
import pytest
from attention.tiles import of_tiles
from refusals import refused

import posjax as pj
from posjax.attention import attention
from posjax.attention.platform import BACKENDS
from posjax.attention.sharded import Placement, attend_on_mesh
from posjax.masks import Causal, FirstTokens, Segments, Window, as_mask, materialise
from posjax.positions import Range
from posjax.remap import Branch

ROWS, TOKENS, HEADS, SIZE = 2, 20, 4, 8
ROW, COLUMN = np.mgrid[:TOKENS, :TOKENS]
LOWER, NEAR = ROW >= COLUMN, abs(ROW - COLUMN) < 4
IDS = np.repeat([[0, 1, -1], [0, 0, 2]], [7, 8, 5], axis=1).astype(np.int32)
SAME = ((IDS[:, :, None] == IDS[:, None]) & (IDS[:, :, None] >= 0))[:, None]


def random_mask(*shape, seed=0, share=0.6) -> np.ndarray:
    """A random boolean array."""
    return np.random.default_rng(seed).random(shape) < share


def random_bias(*shape) -> np.ndarray:
    """A random bias."""
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


@pytest.fixture(scope="module")
def qkv() -> tuple:
    draw = np.random.default_rng(0)
    return tuple(draw.normal(size=(ROWS, TOKENS, heads, SIZE)).astype(np.float32) for heads in (HEADS, 2, 2))


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles whose sizes do not divide the number of tokens."""
    monkeypatch.setitem(BACKENDS, "blockwise", of_tiles(8, 6))


OF_ROWS, OF_HEADS, OF_QUERIES = (
    random_mask(ROWS, 1, 1, TOKENS),
    random_mask(HEADS, TOKENS, TOKENS),
    random_mask(ROWS, 1, TOKENS, 1),
)
OF_PAIRS, ALL = random_mask(TOKENS, TOKENS), random_mask(ROWS, HEADS, TOKENS, TOKENS)
CASES = {
    "[q, k]": (random_bias(TOKENS, TOKENS), lambda: OF_PAIRS, OF_PAIRS),
    "[heads, q, k]": (random_bias(HEADS, TOKENS, TOKENS), lambda: Causal() & jnp.asarray(OF_ROWS), LOWER & OF_ROWS),
    "[batch, 1, 1, k]": (random_bias(ROWS, 1, 1, TOKENS), lambda: jnp.asarray(OF_HEADS) | Window(4), OF_HEADS | NEAR),
    "[q, 1]": (random_bias(TOKENS, 1), lambda: ~(OF_HEADS & Segments(IDS)), ~(OF_HEADS & SAME)),
    "[batch, heads, q, k]": (
        random_bias(ROWS, HEADS, TOKENS, TOKENS),
        lambda: (~Window(4) & OF_QUERIES) | (FirstTokens(2) & ALL),
        (~NEAR & OF_QUERIES) | ((COLUMN < 2) & ALL),
    ),
    "bfloat16": (random_bias(HEADS, 1, 1).astype(jnp.bfloat16), lambda: ~as_mask(ALL), ~ALL),
}


def with_gradients(mask, implementation, q, k, v, bias) -> tuple:
    """Output, log-sum-exp, and gradients through both: a bias that is constant along a row changes only the second."""

    def attend(*values):
        options = {"mask": mask(), "implementation": implementation, "return_residuals": True}
        out, lse = pj.attention(*values[:3], bias=values[3], **options)
        return out, jnp.where(jnp.isneginf(lse), 0, lse)

    found, transpose = jax.vjp(attend, q, k, v, bias)
    return found, transpose(jax.tree.map(jnp.cos, found))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.wide) if name in ("[q, k]", "[batch, 1, 1, k]") else name for name in CASES],
)
def test_arrays_that_broadcast(name, qkv):
    """The bias has the shape in the name, the mask another one; forward against NumPy, gradients against one tile."""
    bias, mask, allowed = CASES[name]
    wide = np.asarray(bias, np.float32)
    want, lse = oracles.attention(*qkv, bias=wide.reshape((1,) * (4 - bias.ndim) + bias.shape), allowed=allowed)
    found = {}
    for backend in BACKENDS:
        got, found[backend] = jax.jit(partial(with_gradients, mask, backend))(*qkv, bias)
        np.testing.assert_allclose(got[0], want, atol=2e-6)
        np.testing.assert_allclose(got[1], np.where(np.isneginf(lse), 0, lse), atol=2e-6)
        chex.assert_trees_all_equal_shapes_and_dtypes(found[backend], (*qkv, bias))
        assert np.abs(np.asarray(found[backend][3], np.float32)).max() > 0.01
    chex.assert_trees_all_close(
        found["blockwise"], found["dense"], atol=2e-5, rtol=0.01 if name == "bfloat16" else 2e-5
    )


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_arrays_compose_from_both_sides(make):
    array, positions = make(OF_PAIRS), Range(0, TOKENS)
    for mask, want in (
        (array & Causal(), OF_PAIRS & LOWER),
        (Causal() & array, OF_PAIRS & LOWER),
        (array | Window(4), OF_PAIRS | NEAR),
        (Window(4) | array, OF_PAIRS | NEAR),
        (~as_mask(array), ~OF_PAIRS),
        (~(array | ~Causal()), ~OF_PAIRS & LOWER),
    ):
        chex.assert_shape(got := materialise(mask, positions, positions), (1, 1, TOKENS, TOKENS))
        np.testing.assert_array_equal(got[0, 0], want)


def test_traced_arrays_compose_and_vmap(qkv):
    """One mask for each of several calls, composed inside of ``jit`` and ``vmap``."""
    many = random_mask(3, TOKENS, TOKENS)
    got = jax.jit(jax.vmap(lambda array: pj.attention(*qkv, mask=array & Causal())))(many)
    for found, array in zip(got, many, strict=True):
        np.testing.assert_allclose(found, oracles.attention(*qkv, allowed=LOWER & array)[0], atol=1e-6)


@pytest.mark.parametrize(("kind", "causal"), [("explicit", True), ("auto", False), ("mixed", True)])
def test_schemes_over_meshes_take_arrays(kind, causal):
    """There are as many queries as rows, but they must not be confused. Heads are split, and a mask differs by head."""
    x = np.random.default_rng(0).normal(size=(8, 8, HEADS, SIZE)).astype(np.float32)
    mesh, scheme = meshes.mesh(kind), pj.Scheme()

    @partial(jax.jit, static_argnames="placement")
    def attend(x, mask, **options):
        return scheme.attend(x, x, x, mask=mask, causal=causal, **options)

    for shape in ((8, 8), (HEADS, 8, 8), (8, 1, 1, 8)):
        mask = random_mask(*shape)
        with jax.set_mesh(mesh):
            got = attend(meshes.put(mesh, x), mask, **meshes.partition(kind))
        want, _ = oracles.attention(x, x, x, allowed=mask & np.tri(8, dtype=bool) if causal else mask)
        np.testing.assert_allclose(jax.device_get(got), want, atol=1e-6)


def test_arrays_over_pairs_are_refused_where_devices_share_a_row():
    """Before anything compiles: as part of a mask, of remapped pairs, and as a bias."""
    placement, x = Placement(context="tensor"), jnp.zeros((ROWS, TOKENS, HEADS, SIZE))

    def call(**options):
        def inside(_, qkv, rest):
            return attention(*qkv, **rest, placement=placement)

        return lambda: attend_on_mesh(inside, placement, None, [x] * 3, options)

    with jax.set_mesh(meshes.mesh("auto")):
        refused("mask", call(mask=~(Segments(IDS) & OF_PAIRS)))
        refused("mask", call(remap=Branch(x, x, as_mask(OF_PAIRS))))
        refused("bias", call(bias=random_bias(TOKENS, TOKENS), mask=Causal()))


def test_the_gradient_of_a_bias_is_the_only_array_of_its_size():
    """Besides inputs and outputs, a bias of 32 MiB needs only the memory of tiles."""
    x, bias = jnp.zeros((1, 2048, 2, SIZE)), jnp.zeros((1, 2, 2048, 2048))

    def loss(x, bias):
        return pj.attention(x, x, x, bias=bias, mask=Causal(), implementation="blockwise").sum()

    memory = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, bias).compile().memory_analysis()
    assert memory.output_size_in_bytes < bias.nbytes + 2 * x.nbytes
    assert memory.temp_size_in_bytes < bias.nbytes / 2
