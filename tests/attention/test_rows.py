"""Log-sum-exps that one float32 cannot hold: additive masks, large logits, sinks; and queries that see nothing.

The oracle is softmax in float64 over the logits that float32 gives. Under a mask of -1e9 these are -1e9 for every key,
so a query whose keys all have it takes the mean of their values, as in transformers.
"""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.test_parts import on_tpu
from attention.tiles import in_tiles

import posjax as pj
from posjax.attention.api import result_of
from posjax.attention.call import Call
from posjax.attention.platform import BACKENDS as EVERYWHERE
from posjax.attention.platform import computed, everywhere
from posjax.attention.sharded import Placement
from posjax.bias import T5
from posjax.masks import Causal, Segments
from posjax.positions import Range

TOKENS, SIZE = 200, 8
NEAR = 4
"""T5's table has a row for every distance below this, then logarithmic ones."""
SPEC = T5(num_buckets=2 * NEAR, max_distance=4 * TOKENS)
LOWEST = float(np.finfo(np.float32).min)


def inputs(tokens: int = TOKENS) -> dict[str, np.ndarray]:
    """Small whole numbers, whose products float32 adds up exactly in any order."""
    draw = np.random.default_rng(0)
    q, k, v, d_out = (draw.integers(-2, 3, (1, tokens, 1, SIZE)).astype(np.float32) for _ in range(4))
    return {"q": q, "k": k, "v": v, "d_out": d_out, "d_lse": draw.normal(size=(1, tokens, 1)).astype(np.float32)}


def oracle(made: dict, bias: np.ndarray, seen: np.ndarray) -> tuple:
    """Output, log-sum-exp, and the gradients of q, k, v and of the bias of every pair, ``[queries, keys]``."""
    q, k, v, d_out = (made[name][0, :, 0].astype(np.float64) for name in ("q", "k", "v", "d_out"))
    z = np.where(seen, np.float32(q @ k.T) + bias.astype(np.float32), -np.inf).astype(np.float64)
    highest = z.max(-1, keepdims=True)
    weights = np.exp(z - highest)
    total = weights.sum(-1, keepdims=True)
    weights /= total
    out = weights @ v
    d_z = weights * (d_out @ v.T - (d_out * out).sum(-1, keepdims=True) + made["d_lse"][0])
    return out, (highest + np.log(total))[:, 0], (d_z @ k, d_z.T @ q, weights.T @ d_out, d_z)


def gradients(run):
    """A function of inputs and a bias: output, log-sum-exp, and the gradients of q, k, v and the bias."""

    @jax.jit
    def whole(made, bias):
        results, transpose = jax.vjp(run, made["q"], made["k"], made["v"], bias)
        return results, transpose((made["d_out"], made["d_lse"]))

    def on_one_head(made, bias):
        (out, lse), found = jax.device_get(whole(made, bias))
        return out[0, :, 0], lse[0, :, 0], (*(each[0, :, 0] for each in found[:3]), found[3])

    return on_one_head


def close(got: tuple, want: tuple) -> None:
    (out, lse, of_inputs), (want_out, want_lse, want_inputs) = got, want
    # The kernels for TPUs have logits in base 2, where the lowest float32 is that times ln 2.
    least = LOWEST * np.log(2)
    np.testing.assert_allclose(np.maximum(lse, least), np.maximum(want_lse, least), rtol=2e-6, atol=2e-5)
    for one, other in zip((out, *of_inputs), (want_out, *want_inputs), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5 * np.abs(other).max())


def on_call(backend):
    """A backend as a function of q, k, v and T5's table, causal."""

    def run(q, k, v, table):
        places = Range(0, TOKENS), Range(0, TOKENS)
        bias = SPEC.bind({"table": table}, num_heads=1)
        q, k, v = (jnp.moveaxis(x, 1, 2) for x in (q, k, v))
        return result_of(backend(Call(q[:, :, None], k, v, bias, Causal(), *places)), None, True)

    return run


def ring(q, k, v, table):
    """Four devices in a ring."""
    mesh = jax.make_mesh((4,), ("context",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])

    def run(q, k, v, table):
        bias = SPEC.bind({"table": table}, num_heads=1)
        options = {"bias": bias, "mask": Causal(), "scale": 1.0, "return_residuals": True}
        return pj.attention(q, k, v, placement=Placement(context="context", strategy="ring"), **options)

    tokens = jax.sharding.PartitionSpec(None, "context")
    specs = (tokens, tokens, tokens, jax.sharding.PartitionSpec())
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=tokens)(q, k, v, table)


BACKENDS = {
    "dense": on_call(EVERYWHERE["dense"].forward),
    "blockwise": on_call(lambda call: in_tiles(call, 64, 96)),
    "tpu": on_call(partial(computed, everywhere(on_tpu("TPU v5 lite", False)))),
    "tpu with a bound": on_call(partial(computed, everywhere(on_tpu("TPU v6 lite", True)))),
    "ring": ring,
}


@pytest.mark.parametrize(
    "name",
    [
        "dense",
        "blockwise",
        "ring",
        *(pytest.param(name, marks=pytest.mark.wide) for name in ("tpu", "tpu with a bound")),
    ],
)
def test_rows_under_an_additive_mask_have_the_gradients_of_a_mean(name):
    """The mask is T5's table: all of it, or its entries of near keys, the only ones that the first queries see."""
    made, run = inputs(), gradients(BACKENDS[name])
    distance = np.arange(TOKENS)[:, None] - np.arange(TOKENS)
    identity = SPEC.bind({"table": np.arange(2.0 * NEAR)[:, None]}, num_heads=1)
    bucket = np.asarray(identity.values(np.arange(TOKENS), np.arange(TOKENS)))[0].astype(int)
    for fill, masked in ((-1e30, NEAR), (LOWEST, None)):
        table = np.linspace(-2, 2, 2 * NEAR, dtype=np.float32)[:, None]
        table[:masked] = fill
        out, lse, (*wanted, d_bias) = oracle(made, table[bucket, 0], distance >= 0)
        d_table = np.array([[d_bias[(bucket == n) & (distance >= 0)].sum()] for n in range(2 * NEAR)])
        close(run(made, jnp.asarray(table)), (out, lse, (*wanted, d_table)))


@pytest.mark.parametrize("implementation", ["blockwise", pytest.param("dense", marks=pytest.mark.wide)])
def test_additive_masks_and_large_logits_as_arrays(implementation):
    """Whole rows and parts of rows of two tiles along each axis, without a mask of their own."""
    tokens = 520
    made, whole, some = inputs(tokens), slice(tokens - 5, tokens), slice(5, 9)

    def run(q, k, v, bias):
        return pj.attention(q, k, v, bias=bias, scale=1.0, implementation=implementation, return_residuals=True)

    found = gradients(run)
    for fill in (-1e6, -1e30, LOWEST, 1e6, 1e30):
        bias = np.zeros((tokens, tokens), np.float32)
        bias[whole] = bias[some, 3:] = fill
        close(found(made, jnp.asarray(bias)), oracle(made, bias, np.True_))


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_a_sink_as_large_as_the_logits_takes_its_share(implementation):
    """Three keys and a sink of logit 1e6 each: every one has a quarter of the weight."""
    zeros, v = jnp.zeros((1, 3, 1, 4)), jnp.arange(12.0).reshape(1, 3, 1, 4)

    def total(sink, v):
        found = pj.attention(zeros, zeros, v, bias=jnp.full((3, 3), 1e6), sinks=sink, implementation=implementation)
        return found.sum()

    found, (d_sink, d_v) = jax.jit(jax.value_and_grad(total, (0, 1)))(jnp.array([1e6]), v)
    np.testing.assert_allclose(found, 3 * 66 / 4, rtol=1e-6)
    np.testing.assert_allclose(d_sink, [-3 * 66 / 4 / 4], rtol=1e-6)
    np.testing.assert_allclose(d_v, np.full(v.shape, 3 / 4), rtol=1e-6)


IDS = np.where(np.arange(TOKENS) < 150, np.arange(TOKENS) // 80, -1).astype(np.int32)[None]


@pytest.mark.parametrize(
    "implementation",
    ["blockwise", "cope", pytest.param("dense", marks=pytest.mark.wide), pytest.param("tpu", marks=pytest.mark.wide)],
)
def test_a_nan_in_the_gradient_of_padding_reaches_nothing(implementation):
    """As from ``o / norm(o)``, whose gradient at the output 0 of a padded query is NaN."""
    made, sinks = inputs(), np.zeros(1, np.float32)
    cope = pj.bias.CoPE(4).bind({"table": np.ones((4, SIZE), np.float32)}, num_heads=1)

    def run(q, k, v, sinks):
        options = {"mask": Causal() & Segments(IDS), "scale": 1.0, "sinks": sinks}
        if implementation == "cope":
            return pj.attention(q, k, v, bias=cope, **options)
        if implementation != "tpu":
            return pj.attention(q, k, v, implementation=implementation, **options)
        places = Range(0, TOKENS), Range(0, TOKENS)
        q, k, v = (jnp.moveaxis(x, 1, 2) for x in (q, k, v))
        call = Call(q[:, :, None], k, v, None, options["mask"], *places)
        return result_of(computed(everywhere(on_tpu("TPU v5 lite", False)), call), sinks, False)

    def found(d_out):
        return jax.vjp(lambda arrays: run(**arrays), {name: made[name] for name in "qkv"} | {"sinks": sinks})[1](d_out)[
            0
        ]

    poisoned = np.where((IDS < 0)[..., None, None], np.nan, made["d_out"])
    clean = np.where((IDS < 0)[..., None, None], 0, made["d_out"])
    both = jax.device_get(jax.jit(lambda *each: tuple(map(found, each)))(poisoned, clean))
    chex.assert_trees_all_equal(*both)
