"""Compiles the GPU kernels of a call for an H100, without one, and prints what the assembler says of each kernel.

Usage: ``python -m attention.h100 FORM SIZE``, a form of ``train.lab.gpu.jobs``, with jax's CUDA wheels and
NVIDIA's assembler installed. It prints one JSON object a kernel: its registers, bytes of spilled registers, bytes of
shared memory, and warnings.
"""

import glob
import json
import os
import re
import sys
import tempfile
from pathlib import Path

DUMP = tempfile.mkdtemp(prefix="posjax-h100-")
# Read when jax is imported.
os.environ.update(JAX_PLATFORMS="cpu", MOSAIC_GPU_DUMP_TO=DUMP, MOSAIC_GPU_DUMP_PTXAS="1")

import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from train.lab.gpu.calls import arguments, gradients  # noqa: E402
from train.lab.gpu.jobs import Shape  # noqa: E402

NAME = "NVIDIA H100 80GB HBM3"
# What the compiler must know of the device (from NVIDIA's tuning guide for Hopper and the data sheet of the H100 SXM).
H100 = f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation" device_address_bits: 64 name: "{NAME}"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{NAME}"
"""


def compiled(form: str, size: int) -> None:
    """Compiles a call with grouped heads, and its gradients."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("all",))
    whole = NamedSharding(mesh, PartitionSpec())
    call = Shape(form, 4096, size, heads=16, kv_heads=4)
    shapes = jax.eval_shape(lambda: arguments(call))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), shapes)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jax.jit(gradients(call)).lower(*shapes).compile()


def reports() -> list[dict]:
    """What the assembler said of every kernel, in the order in which they were compiled."""
    found = []
    for path in sorted(map(Path, glob.glob(f"{DUMP}/*.ptxas")), key=os.path.getmtime):
        text = path.read_text()
        spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", text)
        shared = re.search(r"smem_scratch_bytes=(\d+)", path.with_suffix(".resources.txt").read_text())
        found.append(
            {
                "kernel": path.stem.removeprefix("posjax_attention_"),
                "registers": int(re.search(r"Used (\d+) registers", text)[1]),
                "spilled": sum(map(int, spilled)),
                "shared": int(shared[1]),
                "warnings": re.findall(r"\(C\d+\)[^\n]*", text),
            }
        )
    return found


if __name__ == "__main__":
    compiled(sys.argv[1], int(sys.argv[2]))
    for report in reports():
        print(json.dumps(report))
