"""GPUs by name and number, ``h100:8``: their memory, rates and links, and the compiler's description of one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from posjax._checks import check

IN_A_NODE = 8
"""GPUs that NVLink joins."""


@dataclass(frozen=True)
class GPU:
    """One GPU of a node; published numbers, bandwidths in GB/s one way."""

    name: str
    kind: str  # JAX's name for it
    peak: float  # bfloat16 FLOP/s, without sparsity
    memory: int  # bytes
    bandwidth: float  # of its memory
    nvlink: float  # to the other GPUs of its node together
    network: float  # to other nodes, its share of the node's network cards
    cores: int  # multiprocessors
    gigahertz: float
    shared_memory: int  # bytes of one multiprocessor
    cache: int  # bytes of the second level


_ALL = (
    GPU("h100", "NVIDIA H100 80GB HBM3", 989.5e12, 84_942_979_072, 3352.0, 450, 50, 132, 1.98, 233_472, 52_428_800),
    GPU("h200", "NVIDIA H200", 989.5e12, 150_109_880_320, 4800.0, 450, 50, 132, 1.98, 233_472, 62_914_560),
)

GPUS = {gpu.name: gpu for gpu in _ALL}

GPU_LATENCY = 1e-5
"""Seconds that a collective takes whatever its size; assumed."""


@dataclass(frozen=True)
class Nodes:
    """Some GPUs of one kind, in nodes of up to eight."""

    generation: str
    devices: int
    slices: int = 1

    @property
    def gpu(self) -> GPU:
        """The data of one GPU."""
        return GPUS[self.generation]

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return -(-self.devices // IN_A_NODE)

    @property
    def chips(self) -> int:
        """The number of GPUs."""
        return self.devices

    @property
    def name(self) -> str:
        """``h100:32``, as on the command line."""
        return f"{self.generation}:{self.devices}"

    @property
    def topology(self) -> str:
        """How the compiler counts them: slices, nodes of a slice, and GPUs of a node."""
        return f"1x{self.nodes}x{self.devices // self.nodes}"

    @property
    def hbm_bytes(self) -> float:
        """Memory of one GPU, in bytes."""
        return float(self.gpu.memory)

    @property
    def peak_flops(self) -> float:
        """FLOP/s of one GPU in bfloat16."""
        return self.gpu.peak

    @cached_property
    def description(self) -> str:
        """One GPU as the compiler's text describes it."""
        gpu = self.gpu
        numbers = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 49_152,
            "shared_memory_per_core": gpu.shared_memory,
            "shared_memory_per_block_optin": gpu.shared_memory - 1024,
            "threads_per_core_limit": 2048,
            "core_count": gpu.cores,
            "fpus_per_core": 128,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65_535,
            "block_dim_limit_z": 65_535,
            "memory_bandwidth": int(gpu.bandwidth * 1e9),
            "l2_cache_size": gpu.cache,
            "clock_rate_ghz": gpu.gigahertz,
            "device_memory_size": gpu.memory,
            "registers_per_core_limit": 65_536,
            "registers_per_block_limit": 65_536,
            "thread_dim_limit_x": 1024,
            "thread_dim_limit_y": 1024,
            "thread_dim_limit_z": 64,
            "device_address_bits": 64,
        }
        lines = [f"{name}: {number}" for name, number in numbers.items()]
        lines += ["cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }"]
        lines += [f'device_vendor: "NVIDIA Corporation" name: "{gpu.kind}"']
        lines += [f'{part}_version: "13.0.0"' for part in ("driver", "runtime", "compile_time_toolkit")]
        return (
            f'gpu_device_info {{ {" ".join(lines)} dnn_version: "9.10.0" }} platform_name: "CUDA" '
            f'dnn_version_info {{ major: 9 minor: 10 patch: 0 }} device_description_str: "{gpu.kind}"'
        )


def is_gpus(name: str) -> bool:
    """Whether a name of the command line, such as ``h100:8``, is of GPUs."""
    return name.partition(":")[0] in GPUS


def nodes_of(name: str, slices: int = 1) -> Nodes:
    """The GPUs of that name. Raises ValueError for an invalid number of them, and for slices."""
    check(
        slices == 1,
        f"--slices: nodes of GPUs have no slices; give the number of GPUs, as in {name.partition(':')[0]}:32",
    )
    found = re.fullmatch(r"(\w+):(\d+)", name)
    count = int(found[2]) if found else 0
    check(
        count in (1, 2, 4) or (count > 0 and count % IN_A_NODE == 0),
        f"--topology: expected 1, 2, 4 or a multiple of {IN_A_NODE} GPUs, as in h100:8, found {name!r}",
    )
    return Nodes(name.partition(":")[0], count)
