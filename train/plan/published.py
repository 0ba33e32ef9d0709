"""Runs whose speed others have published, for holding predictions against, by MaxText's count of FLOPs.

Shapes, chips, lengths and strategies are as published. What was not published is a guess and says so in `guessed`: rows
on a chip, and what is recomputed, for MaxText keeps or offloads chosen tensors; here it is the least that fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from train.config import Config, parse

_LLAMA_2_7B = {"num_layers": 32, "model_dim": 4096, "num_heads": 32, "mlp_dim": 11008, "vocabulary": 32000}
_LLAMA_2_70B = {
    "num_layers": 80,
    "model_dim": 8192,
    "num_heads": 64,
    "num_kv_heads": 8,
    "mlp_dim": 28672,
    "vocabulary": 32000,
}
_LLAMA_3_8B = {**_LLAMA_2_7B, "num_kv_heads": 8, "mlp_dim": 14336, "vocabulary": 128256}
_LLAMA_3_70B = {**_LLAMA_2_70B, "vocabulary": 128256}
_MAXTEXT_32B = {"num_layers": 32, "model_dim": 8192, "num_heads": 64, "mlp_dim": 28672, "vocabulary": 32000}
_LLAMA_3_405B = {**_LLAMA_3_70B, "num_layers": 126, "model_dim": 16384, "num_heads": 128, "mlp_dim": 53248}


@dataclass(frozen=True)
class Published:
    """One run."""

    name: str
    topology: str
    model: Mapping[str, Any]
    length: int
    rows: int  # of a step, over all chips
    teraflops: float  # a second and chip, by MaxText's count
    mesh: Mapping[str, int]
    strategy: str = "auto"
    remat: str = "attention"
    guessed: str = "rows on a chip, and what is recomputed"
    slices: int = 1

    @property
    def config(self) -> Config:
        """The same run here."""
        fixed = {"tied_head": False, "compute_dtype": "bfloat16", "remat": self.remat}
        train = {"length": self.length, "batch_tokens": self.rows * self.length, "loss_chunks": 4}
        split = {"mesh": {"data": 1, **self.mesh}, "context": {"strategy": self.strategy}}
        return parse({"name": "published", "model": {**self.model, **fixed}, "train": {**train, **split}})


_HEAD_ALONE = 0.992
"""What is left of the 32B model's FLOPs if the embedding's lookup is no product, as it seems to be in MaxText's table.

The table has no date; were all pairs counted in it, and the lookup not, this would be 0.983.
"""

_ONLY_REMAT = "what is recomputed; rows follow from the published step time"

PUBLISHED = (
    Published("Llama-2-7B 32k all-gather", "v5p:4x4x4", _LLAMA_2_7B, 32768, 64, 242.7, {"fsdp": 4, "context": 16},
              "all-gather", guessed=_ONLY_REMAT),
    Published("Llama-2-7B 32k Ulysses", "v5p:4x4x4", _LLAMA_2_7B, 32768, 64, 239.4, {"fsdp": 4, "context": 16},
              "ulysses", guessed=_ONLY_REMAT),
    Published("Llama-2-7B 32k ring", "v5p:4x4x4", _LLAMA_2_7B, 32768, 64, 130.8, {"fsdp": 4, "context": 16},
              "ring", guessed=_ONLY_REMAT),
    Published("Llama-3.1-8B 64k Ulysses", "v5p:4x4x4", _LLAMA_3_8B, 65536, 16, 243.3, {"fsdp": 16, "context": 4},
              "ulysses", "dots"),
    Published("Llama-2-70B 4k", "v5p:8x8x8", _LLAMA_2_70B, 4096, 2048, 0.654 * 459, {"fsdp": 512}),
    Published("Llama-3.1-405B 8k", "v5p:8x8x8", _LLAMA_3_405B, 8192, 512, 314.5, {"fsdp": 512}, remat="full"),
    Published("Llama-3.1-8B 8k", "v6e:16x16", _LLAMA_3_8B, 8192, 768, 417, {"fsdp": 256}),
    Published("Llama-2-70B 4k", "v6e:16x16", _LLAMA_2_70B, 4096, 512, 402, {"fsdp": 256}, remat="full"),
    Published("Llama-3.1-70B 8k", "v6e:16x16", _LLAMA_3_70B, 8192, 256, 462, {"fsdp": 256}, remat="full"),
    Published("Llama-3.1-70B 8k", "7x:4x8x8", _LLAMA_3_70B, 8192, 1024, 1199.7, {"fsdp": 512}),
    Published("Llama-3.1-70B 128k all-gather", "7x:4x8x8", _LLAMA_3_70B, 131072, 64, 897.9, {"fsdp": 64, "context": 8},
              "all-gather", guessed="what is recomputed"),
    Published("MaxText-32B 2k", "v5e:16x16", _MAXTEXT_32B, 2048, 1024, 132 * _HEAD_ALONE, {"fsdp": 256},
              remat="full", guessed="nothing"),
    Published("MaxText-32B 2k", "v5e:16x16", _MAXTEXT_32B, 2048, 4 * 1024, 126 * _HEAD_ALONE,
              {"replica": 4, "fsdp": 256}, remat="full", guessed="nothing", slices=4),
    Published("Llama-2-70B 4k, axlearn", "v5e:16x16", _LLAMA_2_70B, 4096, 1024, 122.1, {"replica": 4, "fsdp": 256},
              remat="full", slices=4,
              guessed="nothing, but axlearn offloads what is recomputed here; from its step of 14.37 s"),
)  # fmt: skip
"""As collected in August and November 2026 from the documentation, recipes, configs and pull requests of MaxText, and
one run from comments in axlearn's."""
