"""Runs whose speed others have published, for comparison with predictions.

Shapes, chips, lengths and strategies are as published, and so are rows and flags if a recipe states them. Values that
were not published are guesses, listed in `guessed`. Recomputation is a guess too if this trainer cannot keep the same
tensors: MaxText offloads chosen ones, and here the least recomputation that fits is used.

MaxText has counted FLOPs in three ways; a log with the time of a step shows which one was used:

    6 N + 6 layers heads size length         a token, since July 2025: half of the pairs
    6 N + 12 layers heads size length        before: all pairs; most numbers for v6e
    6 (N + lookup) + 6 layers heads size length    in its first year: the lookup of the embedding too, half of the pairs

where N is the number of parameters that tokens are multiplied with. All runs are compared by the first count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from train.config import Config, parse
from train.model.build import Setup
from train.model.flops import maxtext_flops

_LLAMA_2_7B = {"num_layers": 32, "model_dim": 4096, "num_heads": 32, "mlp_dim": 11008, "vocab_size": 32000}
_LLAMA_2_70B = {
    "num_layers": 80,
    "model_dim": 8192,
    "num_heads": 64,
    "num_kv_heads": 8,
    "mlp_dim": 28672,
    "vocab_size": 32000,
}
_LLAMA_3_8B = {**_LLAMA_2_7B, "num_kv_heads": 8, "mlp_dim": 14336, "vocab_size": 128256}
_LLAMA_3_70B = {**_LLAMA_2_70B, "vocab_size": 128256}
_MAXTEXT_32B = {"num_layers": 32, "model_dim": 8192, "num_heads": 64, "mlp_dim": 28672, "vocab_size": 32000}
_LLAMA_3_405B = {**_LLAMA_3_70B, "num_layers": 126, "model_dim": 16384, "num_heads": 128, "mlp_dim": 53248}


@dataclass(frozen=True)
class Published:
    """One run."""

    name: str
    topology: str
    model: Mapping[str, Any]
    length: int
    rows: int  # of a step, over all chips
    teraflops: float  # per second and chip, as published
    mesh: Mapping[str, int]
    strategy: str = "auto"
    remat: str = "attention"
    guessed: str = "what is recomputed"
    slices: int = 1
    seconds: float | None = None  # of a step, as logged
    pairs: Literal["half", "all"] = "half"  # the share of attention's pairs that the published number counts
    counts_lookup: bool = False  # whether it counts the embedding as a product
    accumulate: int = 1
    flags: str = ""  # compiler flags of the recipe that the present compiler accepts

    @property
    def config(self) -> Config:
        """The config of the same run in this trainer."""
        fixed = {"tied_head": False, "compute_dtype": "bfloat16", "remat": self.remat}
        train = {"length": self.length, "batch_tokens": self.rows * self.length, "loss_chunks": 4}
        split = {
            "mesh": {"data": 1, **self.mesh},
            "context": {"strategy": self.strategy},
            "accumulate": self.accumulate,
        }
        return parse({"name": "published", "model": {**self.model, **fixed}, "train": {**train, **split}})

    @property
    def counted(self) -> float:
        """FLOPs of a step as the published number counts them,

        parameters + pairs (half, or all: twice that) + 6 x vocabulary x width x tokens, if the lookup is counted.
        """
        found, decoder = maxtext_flops(Setup(self.config)), Setup(self.config).decoder
        lookup = 6.0 * decoder.vocab_size * decoder.model_dim * self.config.train.batch_tokens
        return found.parameters + found.attention * (1 + (self.pairs == "all")) + lookup * self.counts_lookup

    @property
    def comparable(self) -> float:
        """TFLOP per second and chip, as MaxText counts now: published x half of the pairs, without lookup / counted."""
        return self.teraflops * maxtext_flops(Setup(self.config)).total / self.counted

    @property
    def count(self) -> str:
        """How its number is counted, and whether a logged step confirms this."""
        counted = f"{self.pairs} of the pairs" if self.pairs == "half" else "all pairs"
        lookup = ", lookup" if self.counts_lookup else ""
        return counted + lookup + ("" if self.seconds else ": not checked")


_FUSE_ALL_GATHERS = (
    "--xla_tpu_enable_async_collective_fusion=true --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true "
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true --xla_tpu_overlap_compute_collective_tc=true "
    "--xla_enable_async_all_gather=true"
)
_DATA_PARALLEL = (
    "--xla_tpu_enable_data_parallel_all_reduce_opt=true --xla_tpu_data_parallel_opt_different_sized_ops=true"
)
_OFFLOAD = (
    "--xla_tpu_enable_all_experimental_scheduler_features=true "
    "--xla_tpu_enable_scheduler_memory_pressure_tracking=true --xla_tpu_host_transfer_overlap_limit=24 "
    "--xla_tpu_aggressive_opt_barrier_removal=ENABLED --xla_lhs_prioritize_async_depth_over_stall=ENABLED "
    "--xla_tpu_enable_ag_backward_pipelining=true --xla_should_allow_loop_variant_parameter_in_chain=ENABLED "
    "--xla_should_add_loop_invariant_op_in_chain=ENABLED --xla_max_concurrent_host_send_recv=100 "
    "--xla_tpu_scheduler_percent_shared_memory_limit=100 --xla_latency_hiding_scheduler_rerun=2"
)
_VMEM = "--xla_tpu_scoped_vmem_limit_kib=98304"
_LAYOUT = (
    "--xla_tpu_use_minor_sharding_for_major_trivial_input=true "
    "--xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1 --xla_tpu_assign_all_reduce_scatter_layout=true"
)
_SPARSE_CORE_SUMS = (
    "--xla_tpu_enable_async_collective_fusion_fuse_all_reduce=false "
    "--xla_tpu_enable_sparse_core_collective_offload_all_reduce=true --xla_tpu_enable_all_reduce_offload_tracing=true "
    "--xla_tpu_use_tc_device_shape_on_sc=true --xla_sc_enable_instruction_fusion=false --xla_sc_disjoint_spmem=false "
    "--xla_sc_disable_megacore_partitioning=true"
)
_V5P_70B = (
    f"{_FUSE_ALL_GATHERS} {_DATA_PARALLEL} --xla_tpu_megacore_fusion_allow_ags=false "
    "--xla_enable_async_collective_permute=true --xla_tpu_enable_ag_backward_pipelining=true"
)
_V6E_70B = f"{_VMEM} {_LAYOUT} {_DATA_PARALLEL} {_FUSE_ALL_GATHERS} {_OFFLOAD}"
_7X_8K = (
    "--xla_tpu_scoped_vmem_limit_kib=61440 --xla_tpu_bf16_emission_mode=NATIVE_EMISSION "
    "--xla_tpu_enable_sparse_core_collective_offload_all_reduce=true "
    "--xla_tpu_use_single_sparse_core_for_all_gather_offload=true"
)
_7X_128K = (
    "--xla_tpu_scoped_vmem_limit_kib=65536 --xla_tpu_bf16_emission_mode=NATIVE_EMISSION "
    "--xla_tpu_enable_sparse_core_reduce_scatter_v2=true "
    "--xla_tpu_enable_sparse_core_collective_offload_all_gather=true "
    "--xla_tpu_enable_sparse_core_collective_offload_2d_all_gather=true "
    "--xla_tpu_enable_all_gather_offload_tracing=true --xla_tpu_use_tc_device_shape_on_sc=true "
    "--xla_sc_disable_megacore_partitioning=true --xla_tpu_enable_async_collective_fusion_fuse_all_gather=false "
    "--xla_enable_async_all_gather=true --xla_tpu_prefer_async_allgather_to_allreduce=true "
    "--xla_tpu_enable_sparse_core_collective_offload_all_reduce=true "
    "--xla_tpu_enable_sparse_core_collective_offload_reduce_scatter=true "
    "--xla_tpu_enable_sparse_core_collective_offload_3d_all_gather=true "
    "--xla_tpu_use_single_sparse_core_for_all_gather_offload=true"
)
"""Flags of recipes, without ``2a886c8_chip_config_name``, which the present compiler does not know."""

_KEPT_MORE = "what is recomputed: there queries, keys and values are kept too"
_OFFLOADED = "what is recomputed: there layers' inputs, queries, keys and values lie in the host's memory"

PUBLISHED = (
    Published("Llama-2-7B 32k all-gather", "v5p:4x4x4", _LLAMA_2_7B, 32768, 64, 242.7, {"fsdp": 4, "context": 16},
              "all-gather", seconds=8.83, guessed="flags"),
    Published("Llama-2-7B 32k Ulysses", "v5p:4x4x4", _LLAMA_2_7B, 32768, 64, 239.4, {"fsdp": 4, "context": 16},
              "ulysses", seconds=8.90, guessed="flags"),
    Published("Llama-2-7B 32k ring", "v5p:4x4x4", _LLAMA_2_7B, 32768, 64, 130.8, {"fsdp": 4, "context": 16},
              "ring", seconds=16.38, guessed="flags"),
    Published("Llama-3.1-8B 64k Ulysses", "v5p:4x4x4", _LLAMA_3_8B, 65536, 32, 243.3, {"fsdp": 16, "context": 4},
              "ulysses", guessed="flags"),
    Published("Llama-2-70B 4k", "v5p:8x8x8", _LLAMA_2_70B, 4096, 2048, 0.654 * 459, {"fsdp": 512},
              counts_lookup=True, flags=_V5P_70B,
              guessed="what is recomputed: there one product of the MLP alone; and how FLOPs are counted"),
    Published("Llama-3.1-405B 8k", "v5p:8x8x8", _LLAMA_3_405B, 8192, 1024, 314.53, {"fsdp": 512}, remat="full",
              seconds=131.474, flags=f"{_VMEM} {_FUSE_ALL_GATHERS} {_OFFLOAD}",
              guessed="what is recomputed: there what attention and the MLP give lies in the host's memory, so two "
              "rows a chip fit at once, here one", accumulate=2),
    Published("Llama-3.1-8B 8k", "v6e:16x16", _LLAMA_3_8B, 8192, 1024, 417.397, {"fsdp": 256}, remat="full",
              seconds=4.546, pairs="all", flags=f"{_V6E_70B} {_SPARSE_CORE_SUMS}", guessed=_OFFLOADED),
    Published("Llama-2-70B 4k", "v6e:16x16", _LLAMA_2_70B, 4096, 512, 402.274, {"fsdp": 256}, remat="full",
              seconds=9.052, pairs="all", flags=f"{_VMEM} {_FUSE_ALL_GATHERS} {_SPARSE_CORE_SUMS}",
              guessed="what is recomputed: there queries, keys and values lie in the host's memory"),
    Published("Llama-3.1-70B 8k", "v6e:16x16", _LLAMA_3_70B, 8192, 1280, 462.297, {"fsdp": 256}, remat="full",
              seconds=42.656, pairs="all", accumulate=5, flags=_V6E_70B,
              guessed=f"{_OFFLOADED}, so five rows a chip fit at once, here one"),
    Published("Llama-3.1-70B 8k", "7x:4x8x8", _LLAMA_3_70B, 8192, 1024, 1199.67, {"fsdp": 512}, seconds=12.27,
              flags=_7X_8K, guessed=_KEPT_MORE),
    Published("Llama-3.1-70B 128k all-gather", "7x:4x8x8", _LLAMA_3_70B, 131072, 64, 897.94,
              {"fsdp": 64, "context": 8}, "all-gather", seconds=34.02, flags=_7X_128K,
              guessed=f"{_KEPT_MORE}, and what the MLP gives"),
    Published("MaxText-32B 2k", "v5e:16x16", _MAXTEXT_32B, 2048, 1024, 132, {"fsdp": 256}, remat="full",
              counts_lookup=True, flags=f"{_DATA_PARALLEL} {_FUSE_ALL_GATHERS}", guessed="how FLOPs are counted"),
    Published("MaxText-32B 2k", "v5e:16x16", _MAXTEXT_32B, 2048, 4 * 1024, 126, {"replica": 4, "fsdp": 256},
              remat="full", slices=4, counts_lookup=True, flags=f"{_DATA_PARALLEL} {_FUSE_ALL_GATHERS}",
              guessed="how FLOPs are counted"),
    Published("Llama-2-70B 4k, axlearn", "v5e:16x16", _LLAMA_2_70B, 4096, 1024, 122.1, {"replica": 4, "fsdp": 256},
              remat="full", slices=4, seconds=14.37, guessed="what is recomputed: axlearn offloads it; and flags"),
)  # fmt: skip
"""As collected in August and November 2026 from the documentation, recipes, configs and pull requests of MaxText, and
one run from comments in axlearn's code, whose number here is derived from its step.

Rows follow from the tokens and seconds in logs. 70B on v6e runs five rows per chip at once there. Llama-2-70B on v5p is
reported at about 692 tokens per second and chip: that differs by 1% from half of the pairs, with or without the lookup,
and by 2% from all.
"""
