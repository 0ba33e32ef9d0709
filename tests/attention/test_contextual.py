"""CoPE, dense and tile by tile, against an oracle that computes one logit at a time in float64."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax import masks
from posjax.attention.call import Call
from posjax.attention.contextual import blockwise_contextual, dense_contextual
from posjax.bias import ContextualBias
from posjax.positions import Range

BATCH, KV_HEADS, GROUP, LENGTH, SIZE, ROWS = 2, 2, 2, 11, 4, 5
SCALE = 0.5
BEHIND = masks.Causal()


def arrays():
    draw = np.random.default_rng(0)
    q = draw.normal(size=(BATCH, KV_HEADS, GROUP, LENGTH, SIZE)).astype(np.float32)
    k = draw.normal(size=(BATCH, KV_HEADS, LENGTH, SIZE)).astype(np.float32)
    v = draw.normal(size=(BATCH, KV_HEADS, LENGTH, 3)).astype(np.float32)
    return q, k, v, draw.normal(size=(ROWS, SIZE)).astype(np.float32)


def run(function, q, k, v, table, *, mask=BEHIND, softcap=None, **options):
    positions = Range(0, q.shape[3]), Range(0, k.shape[2])
    call = Call(q, k, v, ContextualBias(table), mask, *positions, softcap=softcap, scale=SCALE)
    return function(call, **options)[:2]


def oracle(q, k, v, table, allowed, softcap=None):
    """The definition, one query of one head at a time; ``allowed`` is ``[batch, queries, keys]``."""
    q, k, v, table = (np.asarray(x, np.float64) for x in (q, k, v, table))
    out, lse = np.zeros((*q.shape[:4], v.shape[-1])), np.full(q.shape[:4], -np.inf)
    for b, h, g, i in np.ndindex(*q.shape[:4]):
        seen = np.flatnonzero(allowed[b, i])
        if not seen.size:
            continue
        z = SCALE * k[b, h, seen] @ q[b, h, g, i]
        count = np.cumsum((1 / (1 + np.exp(-z)))[::-1])[::-1]
        z = z + np.interp(count, np.arange(len(table)), table @ q[b, h, g, i])
        z = z if softcap is None else softcap * np.tanh(z / softcap)
        weights = np.exp(z - z.max())
        out[b, h, g, i] = weights / weights.sum() @ v[b, h, seen]
        lse[b, h, g, i] = z.max() + np.log(weights.sum())
    return out, lse


CAUSAL = np.tril(np.ones((BATCH, LENGTH, LENGTH), bool))
IDS = np.asarray([[0] * 4 + [1] * 5 + [-1] * 2, [-1] * 3 + [2] * 8], np.int32)
SAME = (IDS[:, :, None] == IDS[:, None]) & (IDS[:, :, None] >= 0)
NEAR = np.tri(LENGTH, k=-3) == 0
CASES = {
    "window": (BEHIND & masks.Window(3), CAUSAL & NEAR, {"softcap": 2.0}),
    "packed": (BEHIND & masks.Segments(IDS), CAUSAL & SAME, {}),
}


@pytest.mark.parametrize(
    ("function", "case"),
    [
        (dense_contextual, "window"),
        (blockwise_contextual, "window"),
        (blockwise_contextual, "packed"),
    ],
)
def test_equals_the_definition(function, case):
    mask, allowed, options = CASES[case]
    inputs = arrays()
    block = {"block": 4} if function is blockwise_contextual else {}
    got = jax.jit(lambda *x: run(function, *x, mask=mask, **options, **block))(*inputs)
    chex.assert_shape(got, ((BATCH, KV_HEADS, GROUP, LENGTH, 3), (BATCH, KV_HEADS, GROUP, LENGTH)))
    chex.assert_trees_all_close(got, tuple(map(np.float32, oracle(*inputs, allowed, **options))), atol=2e-5)


def test_gradients_of_the_definition():
    """Along a random direction of all inputs, by central differences of the float64 oracle.

    The gradient reaches the log-sum-exp too. Rows that see nothing have gradients of zero.
    """
    mask, allowed, _ = CASES["packed"]
    inputs = arrays()
    rng = np.random.default_rng(0)
    directions = [rng.normal(size=x.shape) for x in inputs]
    weights = rng.normal(size=(BATCH, KV_HEADS, GROUP, LENGTH, 3))
    blind = np.broadcast_to(~allowed.any(-1)[:, None, None], weights.shape[:-1])

    def loss(results, np=np):
        out, lse = results
        return (out * weights).sum() + np.cos(np.where(blind, 0, lse)).sum()

    grads = jax.jit(jax.grad(lambda x: loss(run(blockwise_contextual, *x, mask=mask, block=4), jnp)))(inputs)
    slope = sum((np.asarray(g, np.float64) * d).sum() for g, d in zip(grads, directions, strict=True))
    ahead, behind = (
        loss(oracle(*(np.asarray(x, np.float64) + step * d for x, d in zip(inputs, directions, strict=True)), allowed))
        for step in (1e-6, -1e-6)
    )
    np.testing.assert_allclose(slope, (ahead - behind) / 2e-6, rtol=1e-4)
    assert not np.asarray(grads[0])[blind].any()


@pytest.mark.parity
def test_the_formula_of_x_transformers_and_of_the_paper_s_listing():
    """Gates of masked scores, a flipped cumulative sum, and the mean of the levels below and above."""
    torch = pytest.importorskip("torch")
    inputs = arrays()
    q, k, _, table = (torch.tensor(np.asarray(x)) for x in inputs)
    z = torch.einsum("bhgid,bhjd->bhgij", q, k) * SCALE
    z = z.masked_fill(~torch.tensor(CAUSAL[:, None, None]), -torch.finfo(z.dtype).max)
    count = z.sigmoid().flip(-1).cumsum(-1).flip(-1).clamp(max=ROWS - 1)
    levels = torch.einsum("bhgid,pd->bhgip", q, table)
    above, below = (levels.gather(-1, count_.long()) for count_ in (count.ceil(), count.floor()))
    part = count - count.floor()
    want = (z + above * part + below * (1 - part)).logsumexp(-1)
    np.testing.assert_allclose(jax.jit(lambda *x: run(dense_contextual, *x)[1])(*inputs), want, atol=1e-5)


def test_memory_of_the_gradient_is_linear():
    """Temporary memory of the compiled gradient at 1024 and at 2048 tokens, of one head and one row."""

    def temporary(length):
        shapes = [(1, 1, 1, length, 8), (1, 1, length, 8), (1, 1, length, 8), (8, 8)]
        loss = jax.grad(lambda *x: run(blockwise_contextual, *x, block=32)[0].sum(), argnums=(0, 1, 2, 3))
        compiled = jax.jit(loss).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(2048) < 2 * temporary(1024)
