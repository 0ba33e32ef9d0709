"""Attention split over a mesh, through the TPU compiler without a TPU: ``pytest -m compile``.

Each program is compiled in a separate process, which runs this file.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import posjax as pj
from posjax.attention.sharded import Placement, attend_on_mesh
from posjax.layout import Layout

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the compiler, is not installed"),
]

ROOT, LOCAL, HEADS, SIZE = Path(__file__).parents[2], 4096, 8, 128


def compiled(*arguments) -> str:
    """The program that another process compiles from these arguments of ``program``."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, __file__, json.dumps(arguments)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def by_types(mesh: Mesh, kv_heads: int, scheme: str):
    """A loss of attention whose rows and heads are split by the types of arrays or by a partition."""
    explicit = mesh.axis_types[0] == AxisType.Explicit
    spec = P("data", None, "line")
    specs = [spec] + [spec if kv_heads % 2 == 0 else P("data")] * 2

    def loss(q, k, v):
        out = pj.scheme(scheme).attend(q, k, v, **({} if explicit else {"placement": spec}))
        return jnp.square(out.astype(jnp.float32)).sum()

    return loss, specs, (4, LOCAL)


def by_placement(mesh: Mesh, strategy: str, kind: str, bias: str):
    """A loss of attention whose sequences are split along "line"."""
    shards = mesh.shape["line"]
    placement = Placement(("data",), "line", None, strategy, Layout(kind, shards), 2)
    scheme = pj.Scheme(features=pj.rotary.Rotary(), bias={"alibi": pj.bias.ALiBi(), "t5": pj.bias.T5()}[bias])
    params = jax.eval_shape(lambda: scheme.init_shared(jax.random.key(0), HEADS, SIZE))
    params = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), params)

    def loss(*projected):
        def inside(params, projected, _):
            return scheme.attend(*projected, params=params, placement=placement)

        return jnp.square(attend_on_mesh(inside, placement, params, projected, {}).astype(jnp.float32)).sum()

    return loss, [P("data", "line")] * 3, (mesh.shape["data"], LOCAL * shards)


def program(topology: str, line: int, axes: str, kv_heads: int, make: str, *options) -> str:
    """The text of the gradients' program, compiled for a whole slice whose axes have one type."""
    devices = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    mesh = Mesh(np.array(devices).reshape(-1, line), ("data", "line"), axis_types=(AxisType[axes],) * 2)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        loss, specs, shape = {"types": by_types, "placement": by_placement}[make](mesh, *options)
        arrays = [
            jax.ShapeDtypeStruct((*shape, heads, SIZE), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
            for heads, spec in zip((HEADS, kv_heads, kv_heads), specs, strict=True)
        ]
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*arrays)
        return traced.lower(lowering_platforms=("tpu",)).compile().as_text()


def kernels(text: str) -> list[int]:
    """The calls of the forward and of the backward kernel."""
    return [
        len(re.findall(rf"posjax_attention_{name}\S* = .*tpu_custom_call", text)) for name in ("forward", "backward")
    ]


@pytest.mark.parametrize(
    ("axes", "kv_heads", "scheme"),
    [("Explicit", 2, "alibi"), ("Auto", 2, "alibi"), ("Explicit", 1, "alibi"), ("Auto", 2, "rope")],
)
def test_both_kernels_run_and_nothing_is_gathered(axes, kv_heads, scheme):
    text = compiled("v5e:2x4", 2, axes, kv_heads, "types", kv_heads, scheme)
    assert kernels(text) == [1, 1]
    assert not re.search(r" all-gather| all-to-all", text)


def transfers_under_way(text: str) -> list[int]:
    """For each computation that starts transfers, the most that run while attention is computed."""
    assert "is_scheduled=true" in text
    found = []
    for body in text.split("\n\n"):
        most, under_way = 0, set()
        for line in body.splitlines():
            if started := re.search(r"(%\S+) = .* collective-permute-start\(", line):
                under_way.add(started[1])
            if ended := re.search(r" collective-permute-done\((?:.* )?(%[^\s)]+)\)", line):
                under_way.discard(ended[1])
            if re.search(r" (conditional|while)\(|tpu_custom_call", line):
                most = max(most, len(under_way))
        if "-permute-start(" in body:
            found.append(most)
    return found


@pytest.mark.parametrize(("topology", "shards"), [("v5e:2x4", 4), ("v5p:2x2x2", 8)])
@pytest.mark.parametrize(("kind", "bias"), [("zigzag", "alibi"), ("contiguous", "t5")])
def test_a_ring_runs_the_kernel_while_the_next_keys_travel(topology, shards, kind, bias):
    """Either half of the heads, in the loop and behind it; keys, values and, backward, their gradients travel."""
    text = compiled(topology, shards, "Auto", 2, "placement", "ring", kind, bias)
    assert kernels(text) == [4, 4]
    assert not re.search(r" all-gather| all-to-all", text)
    assert sum(count >= 4 for count in transfers_under_way(text)) >= 2


@pytest.mark.parametrize(
    ("strategy", "sends"), [("ulysses", "all-to-all"), ("all-gather", "all-gather"), ("ring-ulysses", "all-to-all")]
)
def test_other_strategies_run_the_kernel(strategy, sends):
    text = compiled("v5e:2x4", 4, "Auto", 2, "placement", strategy, "zigzag", "alibi")
    assert "tpu_custom_call" in text
    assert sends in text


if __name__ == "__main__":
    print(program(*json.loads(sys.argv[1])))
