"""Gradients of a part of the keys, given output and log-sum-exp of the whole row: summed up, they are the row's."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from posjax.attention.blockwise import blockwise
from posjax.attention.dense import dense
from posjax.attention.operands import Operands
from posjax.attention.tiles import Blocks
from posjax.attention.tpu import entry
from posjax.attention.tpu.blocks import TARGETS
from posjax.bias import ALiBi
from posjax.masks import Causal, Segments
from posjax.positions import Range

TOKENS, SIZE, KV_HEADS, GROUP = 200, 64, 1, 2
HALF = TOKENS // 2


def values() -> dict:
    """Queries, keys, values, slopes and cotangents."""
    rng = np.random.default_rng(0)
    shapes = {
        "q": (1, KV_HEADS, GROUP, TOKENS, SIZE),
        "k": (1, KV_HEADS, TOKENS, SIZE),
        "v": (1, KV_HEADS, TOKENS, SIZE),
        "d_out": (1, KV_HEADS, GROUP, TOKENS, SIZE),
        "d_lse": (1, KV_HEADS, GROUP, TOKENS),
    }
    made = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    made["q"] *= SIZE**-0.5
    return made | {"slopes": np.array([0.5, 0.01], np.float32)}


# Two documents and padding, whose rows see nothing.
IDS = np.where(np.arange(TOKENS) > 190, -1, np.arange(TOKENS) // 110).astype(np.int32)[None]


def operands(floats, ids, start) -> Operands:
    """All queries over the keys from ``start`` on, whose documents are ``ids``."""
    return Operands(
        floats["q"],
        floats["k"],
        floats["v"],
        bias=ALiBi(learned=True).bind({"slopes": floats["slopes"]}, num_heads=KV_HEADS * GROUP),
        mask=Causal() & Segments(IDS, ids),
        q_positions=Range(0, TOKENS),
        kv_positions=Range(start, ids.shape[1]),
    )


def on_tpu(x: Operands, given=None):
    """The kernel, whose queries hold ``log2 e`` too."""
    x = dataclasses.replace(x, q=x.q * entry.LOG2E)
    blocks = (Blocks(128, 128, 128),) * 2
    return entry.tpu(x, blocks, False, TARGETS["TPU v5 lite"], pltpu.InterpretParams(uninitialized_memory="nan"), given)


BACKENDS = {"dense": dense, "blockwise": partial(blockwise, blocks=Blocks(64, 96)), "tpu": on_tpu}


def gradients(backend, made, ids, start, given=None):
    """What the keys from ``start`` on give, of all inputs."""
    extra = {} if given is None else {"given": given}
    floats = {name: made[name] for name in ("q", "k", "v", "slopes")}
    result, transpose = jax.vjp(lambda floats: backend(operands(floats, ids, start), **extra), floats)
    d_lse = jnp.where(jnp.isneginf(result[1]), 0, made["d_lse"])
    return result, transpose((made["d_out"], d_lse))[0]


@pytest.fixture(scope="module")
def whole():
    """Output and log-sum-exp of whole rows, and all their gradients."""
    return jax.device_get(jax.jit(partial(gradients, dense))(values(), IDS, 0))


@pytest.mark.parametrize("name", BACKENDS)
def test_gradients_of_parts_add_up_to_those_of_whole_rows(name, whole):
    """Each half of the keys has the queries' and slopes' gradients in part, and its own keys' and values' whole."""
    rows, want = whole
    made, run = values(), jax.jit(partial(gradients, BACKENDS[name]))
    parts = []
    for start in (0, HALF):
        keys = slice(start, start + HALF)
        part = made | {name: made[name][:, :, keys] for name in ("k", "v")}
        result, found = jax.device_get(run(part, IDS[:, keys], start, rows))
        parts.append(found)
        for got, given in zip(result, rows, strict=True):
            np.testing.assert_allclose(got, given, rtol=1e-6)
    total = {key: parts[0][key] + parts[1][key] for key in ("q", "slopes")}
    total |= {key: np.concatenate([part[key] for part in parts], axis=2) for key in ("k", "v")}
    for key in want:
        size = np.abs(want[key]).max()
        np.testing.assert_allclose(total[key], want[key], atol=1e-5 * size, err_msg=key)
