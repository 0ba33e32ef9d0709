"""User-defined biases and masks: which ones work as they are, and what the errors say about the others."""

import dataclasses
from functools import partial
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from attention.own_methods import EachHead, Fading, Rows, SameGroup, Strided, Weighted, static
from attention.tiles import in_tiles
from jax.sharding import AxisType

import posjax as pj
from posjax.attention.call import Call
from posjax.attention.sharded import Placement, attend_on_mesh
from posjax.layout import Layout
from posjax.masks import Causal, Segments
from posjax.positions import Range

TOKENS, HEADS, SIZE = 40, 4, 8
register = jax.tree_util.register_dataclass
frozen = dataclasses.dataclass(frozen=True)


def qkv(tokens=TOKENS, batch=2, heads=HEADS):
    return np.random.default_rng(0).normal(size=(3, batch, tokens, heads, SIZE)).astype(np.float32)


def rows(heads=HEADS):
    return np.random.default_rng(1).normal(size=(heads, HEADS)).astype(np.float32)


@partial(jax.jit, static_argnames="implementation")
def attend(q, k, v, **options):
    """``attention`` under ``jit``."""
    return pj.attention(q, k, v, **options)


@jax.jit
def tiled(bias, mask):
    """``blockwise`` in tiles that do not divide the rows evenly."""
    q, k, v = (np.moveaxis(x, 2, 1) for x in qkv())
    places = Range(0, TOKENS), Range(0, TOKENS)
    call = Call(q[:, :, None], k, v, bias, mask, *places, scale=SIZE**-0.5)
    return jnp.moveaxis(in_tiles(call, 16, 8).out[:, :, 0], 1, 2)


@jax.jit
def whole(bias, mask):
    return pj.attention(*qkv(), bias=bias, mask=mask, implementation="dense")


def learned(attend, mask):
    """The output, and the gradient of a loss for the array of a bias."""

    def loss(rows):
        out = attend(Rows(rows), mask)
        return jnp.sin(out).sum(), out

    (_, out), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(rows())
    return out, gradient


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(SameGroup(jnp.arange(TOKENS) % 3), marks=pytest.mark.wide),
        EachHead((1, 2, 3, 4)),
        Strided() & Segments(np.repeat([[0, 1, -1], [0, 0, 0]], [15, 15, 10], axis=1)),
    ],
    ids=["an array", "a pattern for each head", "beside rows that differ"],
)
def test_a_mask_with_nothing_but_pairs_and_a_bias_with_nothing_but_values(mask):
    """In one tile and in many, against NumPy in float64; gradients of the bias' array in tiles against one tile."""
    mask, at = Causal() & mask, np.arange(TOKENS)
    values = rows()[:, np.minimum(abs(at[:, None] - at), HEADS - 1)]
    allowed = pj.masks.materialise(mask, Range(0, TOKENS), Range(0, TOKENS))
    want, _ = oracles.attention(*qkv(), bias=values, allowed=allowed)
    (dense, d_dense), (tiles, d_tiles) = learned(whole, mask), learned(tiled, mask)
    np.testing.assert_allclose(dense, want, atol=1e-5)
    np.testing.assert_allclose(tiles, want, atol=1e-5)
    assert np.abs(np.asarray(d_dense)).max() > 0.1
    np.testing.assert_allclose(d_tiles, d_dense, atol=1e-5)


WEIGHTS = np.random.default_rng(2).normal(size=(2, 2, HEADS, TOKENS)).astype(np.float32)


def of_weights(attend):
    """The output and the gradients of ``Weighted`` arrays."""

    def loss(asks, weights):
        out = attend(Weighted(asks, weights))
        return jnp.sin(out).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(*WEIGHTS)
    return out, gradients


def test_a_bias_that_names_its_axes_is_cut_and_padded_with_its_tokens():
    """40 tokens in tiles of 16 and of 8, against NumPy in float64, and gradients in tiles against one tile."""
    values = WEIGHTS[0][..., :, None] * WEIGHTS[1][..., None, :]
    want, _ = oracles.attention(*qkv(), bias=values, allowed=np.tril(np.ones((TOKENS, TOKENS), bool)))
    found, gradients = of_weights(lambda bias: tiled(bias, Causal()))
    dense, d_dense = of_weights(lambda bias: whole(bias, Causal()))
    np.testing.assert_allclose(found, want, atol=1e-5)
    np.testing.assert_allclose(dense, want, atol=1e-5)
    chex.assert_trees_all_close(gradients, d_dense, atol=1e-5)
    assert min(np.abs(np.asarray(d)).max() for d in d_dense) > 0.1


@register
@frozen
class Holder(pj.bias.Bias):
    """Holds another bias, which names its own axes, and a static field."""

    inner: Weighted
    label: str = static(default="")

    def values(self, q_positions, kv_positions):
        return 2 * self.inner.values(q_positions, kv_positions)


def test_nested_biases_and_static_fields_need_no_axes():
    values = WEIGHTS[0][..., :, None] * WEIGHTS[1][..., None, :]
    want, _ = oracles.attention(*qkv(), bias=2 * values)
    np.testing.assert_allclose(tiled(Holder(Weighted(*WEIGHTS), label="mine"), None), want, atol=1e-5)


@register
@frozen
class Several(pj.bias.Bias):
    """A field of several arrays, all of which have these axes."""

    weights: tuple

    axes: ClassVar = {"weights": ("heads", "keys")}

    def values(self, q_positions, kv_positions):
        return sum(self.weights)[:, None]


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_padding_of_rows_does_not_reach_arrays_without_an_axis_of_rows(implementation):
    """There are as many rows as heads, and padding that differs between the rows."""
    shown = np.arange(TOKENS) < np.array([30, 35, 38, TOKENS])[:, None]
    weights = np.random.default_rng(3).normal(size=(2, HEADS, TOKENS)).astype(np.float32)
    projected, mask = qkv(batch=HEADS), pj.masks.padding(jnp.asarray(shown))
    found = pj.attention(*projected, bias=Several(tuple(weights)), mask=mask, implementation=implementation)
    allowed = (shown[:, :, None] & shown[:, None])[:, None]
    want, _ = oracles.attention(*projected, bias=weights.sum(0)[:, None], allowed=allowed)
    np.testing.assert_allclose(found, want, atol=1e-5)


@pytest.mark.parametrize("strategy", ["ring", pytest.param("ulysses", marks=pytest.mark.wide)])
def test_a_bias_that_names_its_axes_is_split_with_its_tokens(strategy):
    """Rows, tokens and heads over two devices each, in zigzag order."""
    q, k, v = qkv()
    mesh = jax.make_mesh((2, 2, 2), ("rows", "tokens", "heads"), axis_types=(AxisType.Auto,) * 3)
    layout = Layout("zigzag", 2)
    placement = Placement(("rows",), "tokens", "heads", strategy, layout)

    def over_mesh(bias):
        def inside(_, projected, per_row):
            return pj.attention(*projected, placement=placement, mask=Causal(), implementation="blockwise", **per_row)

        placed = Weighted(*(layout.apply(x, 2) for x in (bias.asks, bias.weights)))
        out = attend_on_mesh(inside, placement, (), [layout.apply(x, 1) for x in (q, k, v)], {"bias": placed})
        return layout.restore(out, 1)

    with jax.set_mesh(mesh):
        found = jax.device_get(of_weights(over_mesh))
    chex.assert_trees_all_close(found, jax.device_get(of_weights(lambda bias: whole(bias, Causal()))), atol=1e-5)


@register
@frozen
class Alike(pj.bias.Bias):
    """Has no axis of heads."""

    rate: jax.Array

    def values(self, q_positions, kv_positions):
        return -self.rate * jnp.abs(pj.bias.distance(q_positions, kv_positions))


DISTANCE = np.abs(np.arange(TOKENS)[:, None] - np.arange(TOKENS))
ONE_HEAD = rows(1)
SERVED = {
    "no axis of heads": (Alike(jnp.float32(0.5)), -0.5 * DISTANCE),
    "one head": (Rows(jnp.asarray(ONE_HEAD)), ONE_HEAD[:, np.minimum(DISTANCE, HEADS - 1)]),
    "arrays of NumPy": (Rows(rows()), rows()[:, np.minimum(DISTANCE, HEADS - 1)]),
}


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_values_for_any_number_of_heads(name, implementation):
    """Also for positions that differ between rows, which bring an axis of rows before that of heads."""
    bias, values = SERVED[name]
    want, _ = oracles.attention(*qkv(), bias=np.broadcast_to(values, (HEADS, TOKENS, TOKENS)), allowed=DISTANCE >= 0)
    apart = np.arange(TOKENS) + np.array([[0], [7]])
    for places in ({}, {"q_positions": apart, "kv_positions": apart}):
        np.testing.assert_allclose(attend(*qkv(), bias=bias, implementation=implementation, **places), want, atol=1e-5)


def test_a_bias_may_multiply_the_scores():
    bias = Fading(jnp.full((HEADS, 1), 2.0))
    want, _ = oracles.attention(*qkv(), scale=2 * SIZE**-0.5)
    np.testing.assert_allclose(whole(bias, None), want, atol=1e-5)
    np.testing.assert_allclose(tiled(bias, None), want, atol=1e-5)
