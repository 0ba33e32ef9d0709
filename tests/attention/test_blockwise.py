"""How blockwise attention cuts its work: sizes of tiles, and rows of a batch that share them."""

import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.kernels import Case, check_case
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from posjax.attention import attention
from posjax.attention.backend import JaxBackend
from posjax.attention.blockwise import TileLimits, blockwise, blockwise_gradients
from posjax.attention.placement import Placement
from posjax.attention.platform import GPU_LOOPS, Backends, computed
from posjax.bias import ALiBi, LinearBias
from posjax.masks import Causal, Segments
from posjax.positions import Range


def tile(rows, queries, keys, heads, kv_heads, size=2, packed=False, platform="cpu", implementation="blockwise"):
    """Rows, queries and keys of the only tile of logits in the program."""
    shapes = (rows, queries, heads, size), (rows, keys, kv_heads, size), (rows, keys, kv_heads, 1)
    values = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    mask = Segments(np.zeros((rows, queries), np.int32)) if packed else None
    traced = jax.jit(lambda *x: attention(*x, mask=mask, implementation=implementation)).trace(*values)
    program = traced.lower(lowering_platforms=(platform,)).as_text()
    heads = rf"{kv_heads}x{heads // kv_heads}"
    (found,) = set(re.findall(rf"stablehlo.exponential .*tensor<(\d+)x{heads}x(\d+)x(\d+)xf32>", program))
    return tuple(map(int, found))


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        # 8 tiles of 512 x 512 have 2^21 logits, 9 have more; 512 tiles of 64 x 64 have as many, and 64 is the least.
        ((2, 2048, 1024, 4, 2), (2, 512, 512)),
        ((3, 2048, 1024, 3, 3), (3, 256, 256)),
        ((8, 2048, 1024, 64, 8), (8, 64, 64)),
        ((16, 2048, 1024, 64, 8), (16, 64, 64)),
        # Few queries: 16 heads of one query and 2^17 keys have 2^21 logits. Two heads of keys of size 64 have room for
        # 2^14 keys in 2^21 numbers.
        ((1, 1, 2**18, 16, 2), (1, 1, 2**17)),
        ((1, 1, 2**18, 16, 2, 64), (1, 1, 2**14)),
        ((1, 100, 2**18, 1, 1), (1, 100, 2**14)),
        ((1, 3, 100, 1, 1), (1, 3, 100)),
        # Rows that differ share tiles of a quarter of a row: 16 rows of 8 heads of 128 x 128, or 2 of 4 of 512 x 512.
        ((32, 512, 512, 8, 8, 2, True), (16, 128, 128)),
        ((6, 2048, 2048, 4, 2, 2, True), (2, 512, 512)),
    ],
)
def test_a_tile_has_two_million_logits_at_most_down_to_64_tokens(shape, wanted):
    assert tile(*shape) == wanted
    assert tile(*shape, platform="tpu") == wanted


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        # 16 tiles of 1024 x 1024 have 2^24 logits; 4,096 tiles of 64 x 64 have as many.
        ((2, 4096, 2048, 8, 2), (2, 1024, 1024)),
        ((17, 4096, 2048, 1, 1), (17, 512, 512)),
        ((64, 2048, 1024, 64, 8), (64, 64, 64)),
        ((1, 1, 2**21, 16, 2), (1, 1, 2**20)),
        # Rows that differ: 128 rows of 8 heads of 128 x 128, or 4 of 4 of 1024 x 1024.
        ((256, 512, 512, 8, 8, 2, True), (128, 128, 128)),
        ((6, 4096, 4096, 4, 2, 2, True), (3, 1024, 1024)),
    ],
)
@pytest.mark.parametrize("implementation", ["blockwise", None])
def test_for_a_gpu_a_tile_has_sixteen_million_logits_at_most(shape, wanted, implementation):
    assert tile(*shape, platform="cuda", implementation=implementation) == wanted


def test_parts_of_a_split_sequence_have_tiles_for_a_gpu():
    """Two devices in a ring hold 4,096 tokens each."""
    devices = jax.make_mesh((2,), ("all",), axis_types=(AxisType.Auto,))
    attend = partial(attention, mask=Causal(), placement=Placement(context="all", strategy="ring"))
    split = jax.shard_map(attend, in_specs=P(None, "all"), out_specs=P(None, "all"), mesh=devices)
    traced = jax.jit(split).trace(*[jax.ShapeDtypeStruct((1, 8192, 1, 8), jnp.float32)] * 3)
    for platform, side in {"cuda": 1024, "cpu": 512}.items():
        program = traced.lower(lowering_platforms=(platform,)).as_text()
        found = re.findall(r"stablehlo.exponential .*tensor<1x1x1x(\d+)x(\d+)xf32>", program)
        assert set(found) == {(str(side), str(side))}


IDS = np.sort(np.random.default_rng(0).integers(0, 3, (2, 1100))).astype(np.int32)
FOR_A_GPU = {
    "two blocks of 1024": (GPU_LOOPS, Case("", ALiBi(learned=True), Causal(), queries=1100, keys=1100, size=8)),
    "rows that differ, apart": (
        JaxBackend(*(partial(each, limits=TileLimits(2**14, 128)) for each in (blockwise, blockwise_gradients))),
        Case("", ALiBi(learned=True), Causal() & Segments(IDS[:, ::5]), queries=220, keys=220),
    ),
}


@pytest.mark.parametrize("name", FOR_A_GPU)
def test_tiles_for_a_gpu_compute_the_same(name):
    backend, case = FOR_A_GPU[name]
    check_case(case, partial(computed, Backends(backend)))


@pytest.mark.parametrize("start", [pytest.param(0, marks=pytest.mark.wide), jnp.int32(5)], ids=["static", "array"])
def test_many_rows_that_differ_are_computed_a_few_at_a_time(start):
    """600 rows of two heads of 64 x 64 logits, of which 200 rows fit in a tile."""
    q = jax.random.normal(jax.random.key(0), (600, 64, 2, 2))
    mask = Causal() & Segments(np.sort(np.random.default_rng(0).integers(0, 4, (600, 64), np.int32)))
    places = {"q_positions": Range(start, 64), "kv_positions": Range(start, 64)}

    @jax.jit
    def both(*values):
        def total(implementation, q, k, v, slopes):
            bias = LinearBias(slopes)
            found = attention(q, k, v, mask=mask, bias=bias, implementation=implementation, **places)
            return jnp.square(found).sum() / 600

        return [jax.value_and_grad(total, argnums=(1, 2, 3, 4))(name, *values) for name in ("blockwise", "dense")]

    chex.assert_trees_all_close(*both(q, q + 1, q - 1, jnp.array([0.5, 0.1])), atol=2e-5, rtol=2e-5)
