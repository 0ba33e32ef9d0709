"""Sharded attention through the TPU compiler, without a TPU: ``pytest -m compile``.

Each program is compiled in a separate process, which runs this file.
"""

import importlib.util
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.compiled import compiled, in_process
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

LOCAL, HEADS, KV_HEADS, SIZE = 4096, 8, 2, 128


def gradients(mesh: Mesh, strategy: str, kind: str, bias: str, rows: int = 1, num_heads: int = 0):
    """The gradients of a loss, and abstract arguments, of which every device has ``LOCAL`` tokens of each of its rows.

    ``num_heads``: of queries and of keys, if not ``HEADS`` and ``KV_HEADS``.
    """
    heads, kv_heads = num_heads or HEADS, num_heads or KV_HEADS
    rows, shards = rows * mesh.shape["batch"], mesh.shape["context"]
    placement = Placement(("batch",), "context", None, strategy, Layout(kind, shards), 2)
    scheme = pj.Scheme(features=pj.rotary.Rotary(), bias={"alibi": pj.bias.ALiBi(), "t5": pj.bias.T5()}[bias])
    on = partial(NamedSharding, mesh)
    array = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16, sharding=on(P("batch", "context")))
    projected = [array((rows, LOCAL * shards, heads, SIZE)) for heads in (heads, kv_heads, kv_heads)]
    params = jax.eval_shape(lambda: scheme.init_shared(jax.random.key(0), heads, SIZE))
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on(P())), params)

    def loss(params, projected):
        def inside(params, projected, _):
            return scheme.attend(*projected, params=params, placement=placement)

        return jnp.square(attend_on_mesh(inside, placement, params, projected, {}).astype(jnp.float32)).sum()

    return jax.grad(loss, argnums=(0, 1)), (params, projected)


def compile_here(topology: str, shards: int, *options: str | int) -> dict:
    """The text and the temporary memory of the program, compiled for a whole slice."""
    devices = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    mesh = Mesh(np.array(devices).reshape(-1, shards), ("batch", "context"), axis_types=(AxisType.Auto,) * 2)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        function, arguments = gradients(mesh, *options)
        program = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()
    return {"text": program.as_text(), "temp": program.memory_analysis().temp_size_in_bytes}


def bodies(text: str) -> list[list[str]]:
    """The instructions of every computation, in the order in which they are scheduled."""
    assert "is_scheduled=true" in text
    return [part.splitlines() for part in re.split(r"\n\n", text)]


def overlapped_transfers(body: list[str]) -> int:
    """The most transfers that run while attention is computed: in the kernel, a branch, or the loop over pieces."""
    found, under_way = 0, set()
    for line in body:
        if started := re.search(r"(%\S+) = .* collective-permute-start\(", line):
            under_way.add(started[1])
        if ended := re.search(r" collective-permute-done\((?:.* )?(%[^\s)]+)\)", line):
            under_way.discard(ended[1])
        if re.search(r" (conditional|while)\(|tpu_custom_call", line):
            found = max(found, len(under_way))
    return found


@pytest.mark.parametrize(("topology", "shards"), [("v5e:2x4", 4), ("v5p:2x2x2", 8)])
@pytest.mark.parametrize(("kind", "bias"), [("zigzag", "alibi"), ("zigzag", "t5"), ("contiguous", "t5")])
def test_a_ring_runs_the_kernel_while_the_next_keys_travel(topology, shards, kind, bias):
    """Forward: keys and values of both halves of the heads. Backward: sums of their gradients too."""
    found = compiled(__file__, topology, shards, "ring", kind, bias)
    for kernel in ("forward", "backward"):
        calls = re.findall(rf"posjax_attention_{kernel}\S* = .*tpu_custom_call", found["text"])
        assert len(calls) == 4, "either half, in the loop and behind it"
    assert not re.search(r" all-gather| all-to-all", found["text"])
    loops = sorted(
        overlapped_transfers(body) for body in bodies(found["text"]) if any("-permute-start(" in line for line in body)
    )
    assert sum(count >= 4 for count in loops) >= 2


def test_a_ring_does_not_change_the_layout_of_its_sums():
    """There are so many heads that the compiler would otherwise change the layout at every step, and back.

    It may change the layout of the sum of dQ, in both branches of the last step of each half.
    """
    rows, heads = 2, 32
    found = compiled(__file__, "v5p:2x2x2", 8, "ring", "zigzag", "alibi", rows, heads)
    steps = [line for body in bodies(found["text"]) if not any("ENTRY" in line for line in body) for line in body]
    assert any("tpu_custom_call" in line for line in steps)
    assert layout_changes(steps, rows * LOCAL * SIZE * heads // 2) <= 4


def layout_changes(lines: list[str], least: int) -> int:
    """How many copies and transposes change the memory layout of at least ``least`` float32 numbers."""
    stored = r"(\S+) = f32\[([\d,]+)\]\{([\d,]+)\S* (copy|transpose)?\(?(%[^\s,)]+)?"
    found = [match for line in lines if (match := re.search(stored, line))]
    axes = {name: _axes(shape, order) for name, shape, order, *_ in map(re.Match.groups, found)}
    moves = [m.groups() for m in found if m[4] and np.prod([*map(int, m[2].split(","))]) >= least]
    return sum(kind == "transpose" or axes[name] != axes[operand] for name, _, _, kind, operand in moves)


def _axes(shape: str, order: str) -> list[str]:
    """The axes from the innermost, without axes of one element, whose place does not matter."""
    return [axis for axis in order.split(",") if shape.split(",")[int(axis)] != "1"]


@pytest.mark.parametrize(
    ("strategy", "sends"), [("ulysses", "all-to-all"), ("all-gather", "all-gather"), ("ring-ulysses", "all-to-all")]
)
def test_other_strategies_run_the_kernel(strategy, sends):
    found = compiled(__file__, "v5e:2x4", 4, strategy, "zigzag", "alibi")
    assert "tpu_custom_call" in found["text"]
    assert sends in found["text"]


if __name__ == "__main__":
    in_process(compile_here)
