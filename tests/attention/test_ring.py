"""Ring attention: gradients of log-sum-exps, heads side by side, and second derivatives."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import posjax as pj
from posjax.attention.api import BACKENDS
from posjax.attention.backends import Backend
from posjax.attention.dense import dense, dense_gradients
from posjax.attention.operands import LANES, Operands
from posjax.attention.sharded import Placement, context_attention
from posjax.attention.sharded.ring import _any_pair, _differentiable, _outputs, _Side, _sides
from posjax.layout import Layout
from posjax.masks import Causal, Segments

ROWS, LENGTH, SIZE, SHARDS = 1, 32, 8, 4


def d_lse_as_d_q(x, per_query):
    """The gradients of ``dense``, but that of the queries holds the gradient of their log-sum-exps."""
    return dataclasses.replace(dense_gradients(x, per_query), q=jnp.broadcast_to(per_query.d_lse[..., None], x.q.shape))


@pytest.mark.parametrize("heads", [2, 3], ids=["both ways", "one way"])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_the_gradient_of_a_log_sum_exp_is_counted_once(monkeypatch, kind, heads):
    """Only the part with the device's own keys counts it, for any number of parts and pieces."""
    monkeypatch.setitem(BACKENDS, "dense", Backend(dense, d_lse_as_d_q))
    mesh = jax.make_mesh((SHARDS,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:SHARDS])
    placement = Placement((), "context", None, "ring", Layout(kind, SHARDS))
    q, k, v = np.random.default_rng(0).standard_normal((3, ROWS, LENGTH, heads, SIZE)).astype(np.float32)

    def lse(q, k, v):
        options = {"mask": Causal(), "scale": 0.5, "implementation": "dense", "return_residuals": True}
        return context_attention(q, k, v, placement=placement, **options)[1]

    tokens = P(None, "context")
    sharded = jax.shard_map(lse, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens)
    got = jax.jit(jax.grad(lambda q: sharded(q, k, v).sum()))(q)
    np.testing.assert_allclose(got, np.full_like(q, 0.5), rtol=1e-6)


def ring_attention(kind):
    """Ring attention of queries, keys and values that are in the order of their tokens."""
    mesh = jax.make_mesh((SHARDS,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:SHARDS])
    placement = Placement((), "context", None, "ring", Layout(kind, SHARDS))

    def attend(q, k, v, **options):
        tokens = P(None, "context")
        part = jax.shard_map(
            lambda *operands: context_attention(*operands, placement=placement, **options),
            mesh=mesh,
            in_specs=(tokens,) * 3,
            out_specs=tokens,
        )
        return placement.layout.restore(part(*(placement.layout.apply(x, 1) for x in (q, k, v))), 1)

    return attend


@pytest.mark.parametrize("mask", [Causal(), None], ids=["causal", "all"])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_heads_that_are_stored_and_sent_side_by_side(kind, mask):
    """Heads that fill whole lanes keep their order: values and gradients are those of one device."""
    drawn = np.random.default_rng(0).standard_normal
    q, k, v, weights = (drawn((2, LENGTH, heads, LANES)).astype(np.float32) for heads in (8, 4, 4, 8))
    options = {"mask": mask, "implementation": "dense"}

    def loss(attend, q, k, v, weights):
        out = attend(q, k, v, **options)
        return (out * weights).sum(), out

    got, wanted = (
        jax.jit(jax.grad(partial(loss, how), (0, 1, 2), has_aux=True))(q, k, v, weights)
        for how in (ring_attention(kind), pj.attention)
    )
    chex.assert_trees_all_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_forward_over_reverse_is_that_of_one_device(kind):
    inputs = tuple(np.random.default_rng(0).standard_normal((3, ROWS, LENGTH, 2, SIZE)).astype(np.float32))

    def product(attend):
        """The Hessian times a direction."""
        options = {"mask": Causal(), "implementation": "blockwise"}
        gradient = jax.grad(lambda inputs: jnp.square(attend(*inputs, **options)).sum())
        return jax.jit(lambda inputs: jax.jvp(gradient, (inputs,), (jax.tree.map(jnp.cos, inputs),))[1])(inputs)

    chex.assert_trees_all_close(product(ring_attention(kind)), product(pj.attention), rtol=1e-4, atol=1e-4)


def test_what_belongs_to_keys_is_sent_and_heads_that_fill_the_lanes_are_packed():
    """Integers of keys, positions and segments, are gathered; what has no tokens, as slopes, stays."""
    shapes = {"q": (1, 2, 3, 8, 128), "k": (1, 2, 8, 128), "v": (1, 128, 8, 64)}
    q, k, v = (np.zeros(shape, np.float32) for shape in shapes.values())
    ids = np.zeros((1, 8), np.int32)
    x = Operands(q, k, v, None, Segments(ids, ids), np.arange(8), np.arange(8))
    found = dict(zip(("q", "k", "v", "q_ids", "k_ids", "q_positions", "k_positions"), _sides(x), strict=True))
    features = {"q": _Side(False, -2, (2, 3)), "k": _Side(True, -2, (2,)), "v": _Side(True, -2)}
    of_tokens = {f"{side}_{name}": (side == "k") for name in ("ids", "positions") for side in "qk"}
    assert found == features | {name: _Side(of_k, -1, None, of_k) for name, of_k in of_tokens.items()}
    assert [name for name, side in found.items() if side.is_sent] == ["k", "v"]
    assert _sides({"slopes": np.zeros(3)}) == [_Side()]
    assert _outputs(x).heads is None
    wide = dataclasses.replace(x, v=np.zeros((1, 2, 8, 256)))
    assert _outputs(wide) == _Side(False, -2, (2, 3))


@pytest.mark.parametrize("put", [np.asarray, jnp.asarray])
@pytest.mark.parametrize(("second", "shows"), [(7, False), (0, True)])
def test_a_piece_is_computed_if_any_row_sees_a_key_in_it(put, second, shows):
    """The first row sees none: its queries are in document 0, its keys in 7."""
    q, k = np.zeros((2, 1, 1, 4, 8)), np.zeros((2, 1, 4, 8))
    keys = np.repeat(np.array([[7], [second]], np.int32), 4, axis=1)
    x = Operands(q, k, k, None, Segments(put(np.zeros((2, 4), np.int32)), put(keys)), np.arange(4), np.arange(4))
    found = _any_pair(x)
    assert isinstance(found, bool) == (put is np.asarray)
    assert bool(found) == shows
    assert _any_pair(dataclasses.replace(x, mask=None)) is True


def test_gradients_are_computed_for_wanted_leaves_of_a_floating_dtype():
    leaves = {"q": np.zeros(1, np.float32), "ids": np.zeros(1, np.int32), "v": jnp.zeros(1, jnp.bfloat16)}
    for q, ids, v in np.ndindex(2, 2, 2):
        assert _differentiable(leaves, [bool(ids), bool(q), bool(v)]) == (False, bool(q), bool(v))
