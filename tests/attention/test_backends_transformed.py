"""Every backend under vmap, shard_map and pmap, in parts, and from a traced start, in float64."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.grid import BATCH, T5_NEAR, Beyond, Case, call, called, inputs, loss, use_tiles
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from posjax.bias import ALiBi, Kerple
from posjax.masks import Causal
from posjax.positions import Range


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def test_under_vmap(monkeypatch):
    case = called("packed")
    use_tiles(monkeypatch, case)
    many = jax.tree.map(lambda x: np.stack([x, 0.5 * x]), inputs(case))
    got = jax.jit(jax.vmap(jax.grad(partial(loss, case, "blockwise"))))(many)
    dense = jax.jit(jax.grad(partial(loss, case, "dense")))
    want = [dense(jax.tree.map(lambda x, n=n: x[n], many)) for n in range(2)]
    chex.assert_trees_all_close(got, jax.tree.map(lambda *x: np.stack(x), *want), atol=1e-12, rtol=1e-10)


OF_ROWS = ("q", "k", "v", "q0", "k0")
"""Arrays with an axis of rows; the others are parameters."""


@pytest.mark.parametrize(
    ("slots", "backend"),
    [
        pytest.param({"bias": T5_NEAR, "sinks": True}, "dense", marks=pytest.mark.wide),
        ({"bias": Kerple(), "sinks": True}, "blockwise"),
        pytest.param({"decay": True}, "blockwise", marks=pytest.mark.wide),
        ({"remap": (Beyond(4),)}, "blockwise"),
    ],
)
def test_gradients_inside_shard_map_with_its_checks(slots, backend, monkeypatch):
    """Rows are split over two devices; both have the same parameters."""
    case = Case("sharded", mask=Causal(), **slots)
    use_tiles(monkeypatch, case)
    values = inputs(case)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    specs = {name: P("data") if name in OF_ROWS else P() for name in values}

    @partial(jax.shard_map, mesh=mesh, in_specs=(specs,), out_specs=P())
    def local(values):
        return jax.lax.psum(loss(case, backend, values), "data")

    got = jax.jit(jax.grad(local))(values)
    parts = [values | {name: values[name][n : n + 1] for name in OF_ROWS if name in values} for n in range(BATCH)]
    dense = jax.jit(jax.grad(partial(loss, case, "dense")))
    got, want = jax.device_get((got, [dense(part) for part in parts]))
    for name in values:
        joined = np.concatenate if name in OF_ROWS else sum
        whole = jax.tree.map(lambda *x, joined=joined: joined(x), *[w[name] for w in want])
        chex.assert_trees_all_close(got[name], whole, atol=1e-11, rtol=1e-10)


def test_a_traced_offset_is_one_program_for_all_steps():
    case = Case("decode", queries=1, keys=13, bias=ALiBi(), mask=Causal())
    values = inputs(case)

    @jax.jit
    def step(start):
        moved = dataclasses.replace(case, q_positions=Range(start, 1))
        return call(moved, values, "blockwise")[0]

    whole = dataclasses.replace(case, queries=13)
    q = np.broadcast_to(values["q"], (BATCH, 13, *values["q"].shape[2:]))
    want = jax.jit(lambda: call(whole, values | {"q": q}, "dense")[0])()
    for start in (0, 5, 12):
        chex.assert_trees_all_close(step(jnp.int32(start))[:, 0], want[:, start], atol=1e-12)
