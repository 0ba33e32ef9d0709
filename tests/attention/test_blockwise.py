"""How blockwise attention cuts its work: sizes of tiles, and rows of a batch that share them."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.attention import attention
from posjax.bias import LinearBias
from posjax.masks import Causal, Segments
from posjax.positions import Range


def tile(rows, queries, keys, heads, kv_heads, size=2, packed=False) -> tuple:
    """Rows, queries and keys of the only tile of logits in the program."""
    shapes = (rows, queries, heads, size), (rows, keys, kv_heads, size), (rows, keys, kv_heads, 1)
    values = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    mask = Segments(np.zeros((rows, queries), np.int32)) if packed else None
    program = jax.jit(lambda *x: attention(*x, mask=mask, implementation="blockwise")).lower(*values).as_text()
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
