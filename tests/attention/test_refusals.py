"""Calls of attention that are refused: the message names the argument."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.own_methods import EachHead, Rows, SameGroup, Strided, Weighted, static
from refusals import refused

import posjax as pj
from posjax.attention import attention, coca_attention
from posjax.attention.cache import Cache
from posjax.attention.sharded import Placement
from posjax.bias import T5, ALiBi, CoPE, FoX
from posjax.masks import Beyond, Causal, Dilated, FirstTokens, Segments, Window
from posjax.positions import Range
from posjax.remap import Branch

Q, K, V = (np.zeros((2, 5, heads, size), np.float32) for heads, size in ((4, 8), (2, 8), (2, 6)))
FEWER, IDS = Q[:, :3], np.zeros((2, 3), np.int32)
PAIRS = np.tri(5, dtype=bool)
ONE_DEVICE = Placement()


def call(q=Q, k=K, v=V, **options):
    """A call that is traced, not run."""
    return lambda: jax.eval_shape(lambda *x: pj.attention(*x, **options), q, k, v)


def shaped(*shape):
    """A mask of this shape."""
    return np.ones(shape, bool)


def places(queries, keys, of_queries=5, of_keys=5):
    return {"q_positions": Range(queries, of_queries), "kv_positions": Range(keys, of_keys)}


def coca(t=2, v=2, size=8):
    table = pj.rotary_table(Range(0, 5), pj.rotary.inverse_frequencies(size))
    return lambda: coca_attention(Q, K[:, :, [0] * t, :4], V[:, :, [0] * v], table=table)


def cope(size=8, **options):
    return call(bias=CoPE(4).bind({"table": np.zeros((4, size), np.float32)}, num_heads=4), **options)


def second_derivative():
    def gradient(q):
        return jax.grad(lambda q: pj.attention(q, K, V, implementation="blockwise").sum())(q)

    return jax.grad(lambda q: gradient(q).sum())(jnp.asarray(Q))


def write_two_tokens_in_a_cache_for_one():
    places, new = jnp.zeros((2, 2), jnp.int32), K[:, :2]
    Cache(K, V, places, places, None, None, None, 1).write(new, new, places, places, places == 0)


BRANCH = Branch(Q, K, Beyond(2))
REFUSED = [
    # Shapes and dtypes.
    ("q", call(Q[0])),
    ("q", call(Q[:, :, :3])),
    ("k", call(Q[:1])),
    ("k", call(Q[..., :7])),
    ("k", call(k=K[:, :0], v=V[:, :0])),
    ("k", call(k=K.astype(int))),
    ("v", call(v=V[:1])),
    ("v", call(v=V[:, :, :1])),
    ("v", coca(2, 1)),
    ("table", coca(size=4)),
    # Masks.
    ("mask", call(mask=True)),
    ("mask", call(mask=PAIRS * 1.0)),
    ("mask", call(FEWER, mask=PAIRS.tolist())),
    ("Causal", call(mask=Causal)),
    ("mask", call(mask=PAIRS[:4])),
    ("mask", call(mask=shaped(3, 1, 1, 5))),
    ("mask", call(mask=shaped(3, 5, 5))),
    ("q_ids", call(mask=Segments(np.zeros((2, 9), np.int32)))),
    ("q_ids", call(mask=Segments(np.zeros((2, 5))))),
    # Biases.
    ("bias", call(bias=3.0)),
    ("ALiBi", call(bias=ALiBi)),
    ("bias", call(bias=PAIRS)),
    ("bias", call(bias=np.zeros((4, 5), np.float32))),
    ("bias", call(bias=np.zeros((3, 5, 5), np.float32))),
    ("bias", call(bias=np.zeros((1, 1, 4, 5, 5), np.float32))),
    ("bias", call(bias=ALiBi().bind(num_heads=2), mask=Causal())),
    ("params", call(bias=T5())),
    ("table", cope(7)),
    ("bias", cope(remap=BRANCH)),
    # Numbers.
    ("softcap", call(softcap="30")),
    ("softcap", call(softcap=jnp.float32(-3))),
    ("softcap", call(softcap=jnp.float32(jnp.inf))),
    ("softcap", call(softcap=jnp.ones(4))),
    ("scale", call(scale=np.ones(3))),
    ("scale", call(scale=True)),
    ("scale", call(scale=float("nan"))),
    ("sinks", call(sinks=np.zeros(2, np.float32))),
    ("sinks", call(sinks=[0.0] * 4)),
    ("decay", call(decay=[0.5] * 8)),
    ("decay", call(decay=np.ones(7))),
    ("decay", call(decay=np.array([0.5] * 7 + [-0.25]))),
    ("decay", call(decay=np.full(8, np.inf))),
    ("decay", call(decay=np.ones(8), remap=BRANCH)),
    ("remap", call(remap=Branch(Q, K[:, :2], Beyond(2)))),
    # Positions.
    ("q_positions", call(q_positions=np.arange(7))),
    ("q_positions", call(q_positions=np.zeros(5))),
    ("q_positions", call(Q[:, :1], q_positions=np.array([3, 5]))),
    ("kv_positions", call(kv_positions=Range(0, 4))),
    # Backends and derivatives.
    ("blockwise", call(implementation="blokwise")),
    ("tpu", lambda: pj.attention(Q, K, V, implementation="tpu")),
    ("size", call(mask=Causal() & Window(jnp.int32(3)), implementation="tpu")),
    ("softcap", call(softcap=jnp.float32(2), implementation="tpu")),
    ("size", call(*(jnp.zeros((2, 5, 2, 8), jnp.bfloat16),) * 3, mask=Window(jnp.int32(3)), implementation="cudnn")),
    ("size", lambda: pj.Scheme(mask=Window(jnp.int32(3)))),
    ("implementation", second_derivative),
    ("tokens", write_two_tokens_in_a_cache_for_one),
]
NEEDS_POSITIONS = [
    {"mask": Causal()},
    {"mask": ~Window(3)},
    {"bias": ALiBi(symmetric=True)},
    {"remap": Branch(FEWER, K, Beyond(2))},
    {"decay": np.full(8, 0.01)},
    {"mask": Causal(), "kv_positions": Range(0, 5)},
]
REFUSED += [("q_positions", call(FEWER, **options)) for options in NEEDS_POSITIONS]
REFUSED += [
    ("q_positions", lambda: attention(FEWER, K, V, mask=Causal(), placement=ONE_DEVICE)),
]


register = jax.tree_util.register_dataclass
frozen = dataclasses.dataclass(frozen=True)


def of_values(function, **options):
    """A call with a user's bias of these values."""

    @register
    @frozen
    class Mine(pj.bias.Bias):
        array: jax.Array

        def values(self, q_positions, kv_positions):
            return function(self.array, q_positions, kv_positions)

    return call(bias=Mine(jnp.ones((4, 5, 5))), **options)


def of_pairs(function):
    """A user's mask of these pairs."""

    @register
    @frozen
    class Mine(pj.masks.Mask):
        def pairs(self, i, j):
            return function(i, j)

    return Mine()


@register
@frozen
class Misnamed(Rows):
    axes: ClassVar = {"rows": ("head", None), "columns": (None,)}


@register
@frozen
class Longer(pj.bias.LinearBias):
    """Adds an array to a class that names only the axes of its own arrays."""

    by_distance = False
    rates: jax.Array | None = None


@frozen
class Unregistered(pj.masks.Mask):
    def pairs(self, i, j):
        return j <= i


class NoBias(pj.bias.BiasSpec):
    def bind(self, params=None, *, num_heads):
        return jnp.zeros((num_heads, 1, 1))


@register
@dataclasses.dataclass
class Changeable(pj.masks.Mask):
    size: int = static(default=3)

    def pairs(self, i, j):
        return i - j < self.size


@register
@frozen
class Wider(pj.masks.Window):
    def pairs(self, i, j):
        return i - j < 2 * self.size


@register
@frozen
class Steeper(pj.bias.LinearBias):
    def values(self, q_positions, kv_positions):
        return 2 * super().values(q_positions, kv_positions)


def difference(i, j):
    return (i[..., :, None] - j[..., None, :]).astype(jnp.float32)


def reads_a_traced_number():
    return jax.eval_shape(lambda n: call(mask=of_pairs(lambda i, j: i - j < n))(), 3)


def on_a_tpu(**slots):
    return call(**slots, implementation="tpu")


APART = np.arange(5) + np.array([[0], [7]])
REFUSED += [
    # Biases and masks of users.
    ("Mine.values", of_values(lambda a, i, j: a)),
    ("Mine.values", of_values(lambda a, i, j: difference(j, i))),
    ("Mine.values", of_values(lambda a, i, j: i[:, None] - j)),
    ("Mine.values", of_values(lambda a, i, j: a[:, 0] * difference(i, j))),
    ("Mine.values", of_values(lambda a, i, j: (i[:, None] - j) * 1.0, q_positions=APART, kv_positions=APART)),
    ("bias", of_values(lambda a, i, j: jnp.ones((3, 1, 1)) * difference(i, j))),
    ("Misnamed.axes", call(bias=Misnamed(jnp.ones((4, 4))))),
    ("Longer", call(bias=Longer(jnp.ones(4)), mask=Causal())),
    ("asks", call(bias=Weighted(*jnp.ones((2, 2, 4, 9))))),
    ("NoBias.bind", call(bias=NoBias())),
    ("Steeper", call(bias=Steeper(jnp.ones(4)), mask=Causal())),
    ("Unregistered", call(mask=Causal() & Unregistered())),
    ("Changeable", lambda: pj.Scheme(mask=Changeable())),
    ("Mine.allowed", call(mask=Causal() & of_pairs(lambda i, j: i - j))),
    ("Mine.allowed", call(mask=of_pairs(lambda i, j: (i >= j)[None]))),
    ("Mine.allowed", reads_a_traced_number),
    ("Wider", call(mask=Wider(3))),
    # What the kernel for TPUs does not support.
    ("SameGroup", on_a_tpu(mask=SameGroup(jnp.arange(5)))),
    ("heads", on_a_tpu(mask=Causal() & EachHead((1, 2, 3, 4)))),
    ("where", on_a_tpu(mask=of_pairs(lambda i, j: jnp.where(i < 5, j < 2, j <= i)))),
    ("ArrayBias", on_a_tpu(bias=np.zeros((5, 5), np.float32))),
]


@pytest.mark.parametrize(("name", "call"), REFUSED)
def test_bad_arguments_are_named(name, call):
    refused(name, call)


def test_an_error_about_positions_shows_those_of_the_last_tokens_or_of_the_first():
    for q, kv, written in ((FEWER, K, "Range(5 - 3, 3)"), (Q, K[:, :3], "Range(0, 5)")):
        with pytest.raises(ValueError, match="q_positions=") as caught:
            call(q, kv, kv, mask=Causal())()
        assert f"q_positions={written}" in str(caught.value)


def test_a_mask_of_the_user_runs_in_the_kernel_if_it_reads_only_two_positions():
    run = jax.jit(lambda *x: pj.attention(*x, mask=Causal() & Strided(), implementation="tpu"))
    assert "posjax_attention_forward" in run.trace(Q, K, V).lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize(
    ("mask", "positions", "key"),
    [
        (None, {}, 1),
        (None, places(3, 0), 4),
        (None, places(0, 6), 6),
        (Causal(), {}, None),
        (~Causal(), {}, 1),
        (Causal() | FirstTokens(4), places(0, 2), 2),
        (Dilated(4, (2, 3, 1, 1)), {}, 1),
        (Segments(np.zeros((2, 5), np.int32)), {}, None),
        (None, {"q_positions": np.arange(5)}, None),
        (None, {"kv_positions": np.arange(5)}, None),
        (None, {"q_positions": Range(jnp.int32(0), 5)}, None),
    ],
)
def test_a_bias_that_grows_ahead_is_refused_if_the_first_query_is_known_to_see_a_key_ahead(mask, positions, key):
    call(bias=ALiBi(symmetric=True), mask=mask, **positions)()
    run = call(bias=ALiBi(), mask=mask, **positions)
    if key is None:
        run()
        return
    with pytest.raises(ValueError, match=f"^bias: .* sees the key at position {key};"):
        run()
    gates = np.zeros((2, 4, 5), np.float32)
    refused("bias", call(bias=FoX().bind(num_heads=4, q_gates=gates, kv_gates=gates), mask=mask, **positions))
