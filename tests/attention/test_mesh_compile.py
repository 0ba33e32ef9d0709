"""Attention split over a mesh by sharding types or a ``partition``, through the TPU compiler: ``pytest -m compile``.

Each program is compiled in a separate process, which runs this file.
"""

import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.compiled import compiled, in_process
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import posjax as pj

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the compiler, is not installed"),
]

ROWS, TOKENS, HEADS, SIZE = 4, 4096, 8, 128
SPEC = P("data", None, "tensor")


def compile_here(kind: str, kv_heads: int, through: str) -> dict:
    """The compiled program of attention's gradients on a v5e:2x4 mesh whose axes have one type."""
    devices = topologies.get_topology_desc(topology_name="v5e:2x4", platform="tpu").devices
    mesh = Mesh(np.array(devices).reshape(4, 2), ("data", "tensor"), axis_types=(AxisType[kind],) * 2)
    of_keys = SPEC if kv_heads % 2 == 0 else P("data")

    def array(heads, spec):
        shape = (ROWS, TOKENS, heads, SIZE)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    partition = {"partition": SPEC} if kind == "Auto" else {}

    def loss(q, k, v):
        if through == "attention":
            out = pj.attention(q, k, v, bias=pj.bias.ALiBi(), mask=pj.masks.Causal(), **partition)
        else:
            out = pj.scheme(through).attend(q, k, v, **partition)
        return jnp.square(out.astype(jnp.float32)).sum()

    arguments = array(HEADS, SPEC), array(kv_heads, of_keys), array(kv_heads, of_keys)
    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*arguments)
    return {"text": traced.lower(lowering_platforms=("tpu",)).compile().as_text()}


@pytest.mark.parametrize(
    ("kind", "kv_heads", "through"),
    [("Explicit", 2, "attention"), ("Auto", 2, "attention"), ("Explicit", 1, "attention"), ("Auto", 2, "rope")],
)
def test_both_kernels_run_and_nothing_is_gathered(kind, kv_heads, through):
    text = compiled(__file__, kind, kv_heads, through)["text"]
    for kernel in ("forward", "backward"):
        assert len(re.findall(rf"posjax_attention_{kernel}\S* = .*tpu_custom_call", text)) == 1
    assert not re.search(r" all-gather| all-to-all", text)


if __name__ == "__main__":
    in_process(compile_here)
