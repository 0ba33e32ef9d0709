"""GPUs by name and number, ``h100:8``, and the compiler's description of one."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from posjax._checks import check
from train.plan.pods import Pod, pod_of
from train.runtime.chips import GPUS, Card, Links

IN_A_NODE = 8
"""GPUs that NVLink joins."""


GPU_LATENCY = 1e-5
"""Seconds that a collective takes whatever its size; assumed."""


@dataclass(frozen=True)
class Nodes:
    """Some GPUs of one kind, in nodes of up to eight. It has what a plan reads of a `Pod`."""

    generation: str
    devices: int
    slices: int = 1  # as of a pod; nodes are no slices
    platform: ClassVar[str] = "cuda"

    @property
    def gpu(self) -> Card:
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
    def slice_name(self) -> str:
        """That of all of them: nodes are no slices."""
        return self.name

    @property
    def links(self) -> Links:
        """NVLink and the network as links of a row of chips, for rough counts."""
        return Links(self.gpu.memory / 2**30, self.gpu.nvlink / 2, self.gpu.network, dimensions=1)

    @property
    def hbm_bytes(self) -> float:
        """The memory of one GPU that jax takes, in bytes."""
        return self.gpu.memory * memory_fraction()

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


FRACTION = "XLA_CLIENT_MEM_FRACTION"
"""The variable with the share of a GPU's memory that jax takes."""


def memory_fraction() -> float:
    """The share of a GPU's memory that jax takes. Raises ValueError for a variable that is no share."""
    given = os.environ.get(FRACTION) or "0.75"
    found = re.fullmatch(r"0?\.\d*[1-9]\d*|1(\.0*)?", given)
    check(found is not None, f"{FRACTION} must be a share, as in 0.92, found {given!r}")
    return float(given)


def machine_of(name: str, slices: int = 1) -> Pod | Nodes:
    """The pod or the GPUs of a name of the command line. Raises ValueError for an invalid one."""
    return _nodes_of(name, slices) if name.partition(":")[0] in GPUS else pod_of(name, slices)


def _nodes_of(name: str, slices: int) -> Nodes:
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
    memory_fraction()  # so that a wrong one is refused before anything is compiled
    return Nodes(name.partition(":")[0], count)
