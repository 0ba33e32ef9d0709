"""Projections to heads and back: few and many tokens, narrow heads and heads that fill TPU lanes."""

import jax
import numpy as np
import pytest

from posjax.nn.parameters import from_heads, to_heads

EMBED, HEADS = 12, 3


def values(*shape: int):
    return np.random.default_rng(sum(shape)).standard_normal(shape)


@pytest.mark.parametrize("size", [4, 128])
@pytest.mark.parametrize("tokens", [(2, 3), (3, 7), (40,)], ids=str)
def test_projections_are_products_over_features(tokens, size):
    x, into, out = values(*tokens, EMBED), values(EMBED, HEADS, size), values(HEADS, size, EMBED)
    with jax.enable_x64(True):
        heads = jax.jit(to_heads)(x, into)
        back = jax.jit(from_heads)(heads, out)
    np.testing.assert_allclose(heads, np.tensordot(x, into, 1), rtol=0, atol=1e-13)
    np.testing.assert_allclose(back, np.tensordot(np.tensordot(x, into, 1), out, 2), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("tokens", "size", "one"), [(EMBED - 1, 128, False), (EMBED, 128, True), (EMBED, 64, False)])
def test_many_tokens_and_heads_that_fill_lanes_use_one_matrix_product(tokens, size, one):
    """With few tokens, copying the weight to another layout takes longer than the product."""
    x, into, out = values(tokens, EMBED), values(EMBED, HEADS, size), values(HEADS, size, EMBED)
    for project, arguments in ((to_heads, (x, into)), (from_heads, (values(tokens, HEADS, size), out))):
        assert ("optimization_barrier" in jax.jit(project).lower(*arguments).as_text()) == one
