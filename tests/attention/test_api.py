"""The steps of one call: what fits together, the factors of its queries, the bias of its heads, and sinks."""

import re
from types import SimpleNamespace

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from posjax import masks
from posjax.attention import api
from posjax.attention.operands import Operands
from posjax.attention.rows import Rows
from posjax.bias import ALiBi, LinearBias
from posjax.positions import Range
from posjax.remap import Branch

Q, K = np.zeros((2, 3, 4, 8), np.float32), np.zeros((2, 5, 2, 8), np.float32)
V = K[..., :6]


def refused(message: str):
    return pytest.raises(ValueError, match=f"^{re.escape(message)}")


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        (Q[0], K, V, "q must have 4 axes"),
        (Q, K.astype(int), V, "k must be of a floating dtype"),
        (Q, K, V[:, :, :0], "v must hold at least one head"),
        (Q[:1], K, V, "k must have the batch of q, 1, found shape (2, 5, 2, 8)"),
        (Q, K, V[:1], "v must have the batch, length and heads of k, (2, 5, 2), found (1, 5, 2, 6)"),
        (Q, K, V[:, :4], "v must have the batch, length and heads of k, (2, 5, 2), found (2, 4, 2, 6)"),
        (Q, K, V[:, :, :1], "v must have the batch, length and heads of k, (2, 5, 2), found (2, 5, 1, 6)"),
        (Q[..., :7], K, V, "k must have the head size of q, 7, found shape (2, 5, 2, 8)"),
        (Q[:, :, :3], K, V, "the heads of q must be a multiple of those of k, found 3 and 2"),
    ],
)
def test_queries_keys_and_values_must_fit_together(q, k, v, message):
    api.check_shapes(Q, K, V)
    with refused(message):
        api.check_shapes(q, k, v)


def operands_of(q=Q, k=K, **slots) -> Operands:
    positions = Range(0, q.shape[1]), Range(0, k.shape[1])
    given = {"bias": None, "mask": None, "remap": (), "decay": None, "softcap": None, "positions": positions}
    return api.operands(q, k, k, **(given | slots))


def test_the_operands_hold_heads_before_tokens():
    q, k = (np.arange(x.size, dtype=np.float32).reshape(x.shape) for x in (Q, K))
    far = Branch(q + 1, k + 1, masks.Beyond(2))
    x = operands_of(q, k, remap=(far,), softcap=3.0)
    chex.assert_trees_all_equal((x.k, x.v, x.softcap), (k.swapaxes(1, 2), k.swapaxes(1, 2), 3.0))
    chex.assert_trees_all_equal((x.remap[0].q, x.remap[0].k), (x.q + 1, x.k + 1))
    for head in range(4):
        np.testing.assert_array_equal(x.q[:, head // 2, head % 2], q[:, :, head])
    assert (x.q_positions, x.kv_positions) == (Range(0, 3), Range(0, 5))
    np.testing.assert_array_equal(operands_of(decay=np.ones(8)).decay, np.ones(8))


FAR = masks.Beyond(2)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ({"remap": (Branch(Q, K, FAR), Branch(Q[:, :2], K, FAR))}, "remap: queries and keys must have the shapes of q"),
        ({"remap": (Branch(Q, K[:, :2], FAR),)}, "remap: queries and keys must have the shapes of q and k"),
        ({"decay": [0.5] * 8}, "decay must be an array"),
        ({"decay": np.ones(7)}, "decay must have shape (8,), one rate per feature, found (7,)"),
        ({"decay": np.ones(8), "remap": (Branch(Q, K, FAR),)}, "decay: the decay of xPos reads true distances"),
    ],
)
def test_remapped_pairs_and_decays_must_fit(slots, message):
    with refused(message):
        operands_of(**slots)


def test_positions_of_the_queries_are_needed_where_they_differ_in_number_from_the_keys_and_matter():
    api.check_aligned(Q, K, Range(0, 3), True)
    api.check_aligned(Q, Q, None, True)
    api.check_aligned(Q, K, None, False)
    for q, k, hint in (
        (Q, K, "for queries that are the last of all tokens write q_positions=Range(5 - 3, 3)"),
        (K, Q, "for queries that start at 0 write q_positions=Range(0, 5)"),
    ):
        with pytest.raises(ValueError, match=re.escape(hint)):
            api.check_aligned(q, k, None, True)


@pytest.mark.parametrize(
    ("bias", "mask", "remap", "decay", "reads"),
    [
        (None, None, (), None, False),
        (None, masks.ArrayMask(np.ones((1, 1, 3, 5), bool)), (), None, False),
        (None, masks.Causal(), (), None, True),
        (LinearBias(np.ones(4)), masks.ArrayMask(np.ones((1, 1, 3, 5), bool)), (), None, True),
        (None, None, (Branch(Q, K, FAR),), None, True),
        (None, None, (), np.ones(8), True),
    ],
)
def test_what_reads_positions(bias, mask, remap, decay, reads):
    assert api.reads_positions(bias, mask, remap, decay) == reads


def test_the_factor_of_the_queries_is_a_number_or_has_the_layout_of_their_heads():
    assert api.grouped_scale(None, Q, 2) == 8**-0.5
    found = api.grouped_scale(np.float32(2), Q, 2)
    assert (type(found), found) == (float, 2.0)
    assert api.grouped_scale(jnp.float32(3), Q, 2).shape == ()
    scale = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for given in (scale, scale[0], scale[:, :1], scale[0, 0]):
        found, whole = api.grouped_scale(jnp.asarray(given), Q, 2), np.broadcast_to(given, (2, 3, 4))
        chex.assert_shape(found, (2, 2, 2, 3, 1))
        for head in range(4):
            np.testing.assert_array_equal(found[:, head // 2, head % 2, :, 0], whole[:, :, head])
    chex.assert_type(api.grouped_scale(jnp.ones(4, jnp.bfloat16), Q, 2), jnp.float32)
    for wrong in (scale[..., :2], np.ones((1, 2, 3, 4)), np.ones((2, 3, 1, 1))):
        with refused("scale must broadcast to [batch, queries, heads] = (2, 3, 4), found"):
            api.grouped_scale(jnp.asarray(wrong), Q, 2)


class Bound:
    """A spec that binds to something other than a bias."""

    def bind(self, num_heads):
        return num_heads


def test_a_bias_is_bound_for_the_heads_of_the_call():
    assert api.bind_bias(None, 4) is None
    chex.assert_shape(api.bind_bias(np.zeros((3, 5), np.float32), 4).array, (1, 1, 3, 5))
    chex.assert_shape(api.bind_bias(ALiBi(), 4).slopes, (4,))
    chex.assert_type(api.bind_bias(LinearBias(jnp.ones(4, jnp.bfloat16)), 4).slopes, jnp.float32)
    api.bind_bias(np.zeros((1, 4, 3, 5), np.float32), 4)
    for bias, message in (
        (ALiBi, "bias must be a posjax bias, the spec of one, or an array, found the class ALiBi: write ALiBi(...)"),
        ("alibi", "bias must be a posjax bias, the spec of one, or an array, found str"),
        (Bound(), "bias: Bound.bind must return a Bias, found int"),
        (LinearBias(np.ones(3)), "bias is bound for 3 heads, but q has 4"),
    ):
        with refused(message):
            api.bind_bias(bias, 4)


def test_a_sink_takes_its_share_of_the_weights():
    rng = np.random.default_rng(0)
    logits, values, sinks = (rng.normal(size=shape).astype(np.float32) for shape in ((1, 2, 2, 3, 5), (5, 6), 4))
    logits[0, 0, 0, 1] = -np.inf
    lse = np.logaddexp.reduce(logits, axis=-1)
    weights = np.exp(logits - np.where(np.isneginf(lse), 0, lse)[..., None])
    sink = sinks.reshape(2, 2, 1)
    rows = Rows(jnp.asarray(weights @ values), jnp.asarray(lse), jnp.zeros_like(lse))
    out, found = api.finished(rows, jnp.asarray(sinks), True)
    with_sink = np.logaddexp(lse, sink)
    wanted = np.exp(logits - with_sink[..., None]) @ values
    for head in range(4):
        np.testing.assert_allclose(out[:, :, head], wanted[:, head // 2, head % 2], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found[:, :, head], with_sink[:, head // 2, head % 2], rtol=1e-5)
    chex.assert_shape(api.finished(Rows(jnp.zeros((1, 2, 2, 3, 6))), None, False), (1, 3, 4, 6))


@pytest.mark.parametrize(
    ("sizes", "keys", "small"),
    [
        ((1, 1, 1, 1), api._LONGEST_DENSE, True),
        ((1, 1, 1, 1), api._LONGEST_DENSE + 1, False),
        ((1, 1, 1, 3), api._LONGEST_DENSE // 2, False),
        ((2, 3, 5, 4), api.TILE_ELEMENTS // 120, True),
        ((2, 3, 5, 4), api.TILE_ELEMENTS // 120 + 1, False),
        (("batch", 1, 1, 1), 1, False),
    ],
)
def test_a_call_is_small_if_its_logits_fit_in_a_tile(sizes, keys, small):
    """Of one head, and of all of them; a head may have any size."""
    q, k = (SimpleNamespace(shape=shape) for shape in ((*sizes, 128), (*sizes[:2], keys, 128)))
    assert api._is_small(SimpleNamespace(q=q, k=k)) == small
