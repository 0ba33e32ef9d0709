"""Gradients of a part of the keys, given output and log-sum-exp of the whole row: summed up, they are the row's."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from posjax.attention.blockwise import Blocks, blockwise
from posjax.attention.dense import dense
from posjax.attention.operands import Operands
from posjax.attention.tpu import entry
from posjax.attention.tpu.blocks import CHIPS
from posjax.attention.tpu.schedule import Blocks as TPUBlocks
from posjax.bias import ALiBi
from posjax.masks import Causal, Segments
from posjax.positions import Range

TOKENS, FIRST, SIZE, KV_HEADS, GROUP = 200, 128, 64, 1, 2


def values():
    """Queries, keys, values, slopes and cotangents."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = {
        "q": (1, KV_HEADS, GROUP, TOKENS, SIZE),
        "k": (1, KV_HEADS, TOKENS, SIZE),
        "v": (1, KV_HEADS, TOKENS, SIZE),
        "d_out": (1, KV_HEADS, GROUP, TOKENS, SIZE),
        "d_lse": (1, KV_HEADS, GROUP, TOKENS),
    }
    made = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}
    made["q"] = made["q"] * SIZE**-0.5
    return made | {"slopes": jnp.asarray([0.5, 0.01])}


def ids():
    """Two documents and padding, whose rows see nothing."""
    return jnp.asarray(np.where(np.arange(TOKENS) > 190, -1, np.arange(TOKENS) // 110), jnp.int32)[None]


def operands(made, start: int, stop: int) -> Operands:
    """All queries over the keys from ``start`` to before ``stop``."""
    return Operands(
        made["q"],
        made["k"][:, :, start:stop],
        made["v"][:, :, start:stop],
        bias=ALiBi(learned=True).bind({"slopes": made["slopes"]}, num_heads=KV_HEADS * GROUP),
        mask=Causal() & Segments(ids(), ids()[:, start:stop]),
        q_positions=Range(0, TOKENS),
        kv_positions=Range(start, stop - start),
    )


def on_tpu(x: Operands, given=None):
    """The kernel, whose queries hold ``log2 e`` too."""
    x = dataclasses.replace(x, q=x.q * entry.LOG2E)
    blocks = (TPUBlocks(128, 128, 128),) * 2
    return entry.tpu(x, blocks, False, CHIPS["TPU v5 lite"], pltpu.InterpretParams(uninitialized_memory="nan"), given)


BACKENDS = {"dense": dense, "blockwise": partial(blockwise, blocks=Blocks(64, 96)), "tpu": on_tpu}


def gradients(backend, start: int, stop: int, given=None):
    """What the keys from ``start`` on give, of all inputs."""
    made = values()
    floats = {name: made[name] for name in ("q", "k", "v", "slopes")}

    def run(floats):
        extra = {} if given is None else {"given": given}
        return backend(operands(made | floats, start, stop), **extra)

    result, transpose = jax.vjp(run, floats)
    d_lse = jnp.where(jnp.isneginf(result[1]), 0, made["d_lse"])
    return result, transpose((made["d_out"], d_lse))[0]


@pytest.mark.parametrize("name", BACKENDS)
def test_gradients_of_parts_add_up_to_those_of_whole_rows(name):
    whole, want = jax.jit(partial(gradients, dense, 0, TOKENS))()
    total = jax.tree.map(np.zeros_like, want)
    for start, stop in ((0, FIRST), (FIRST, TOKENS)):
        result, found = jax.jit(partial(gradients, BACKENDS[name], start, stop))(whole)
        total = jax.tree.map(np.add, total, found)
        for got, given in zip(result, whole, strict=True):
            np.testing.assert_allclose(got, given, rtol=1e-6)
    for key in want:
        size = np.abs(want[key]).max()
        np.testing.assert_allclose(total[key], want[key], atol=1e-5 * size, err_msg=key)
