"""Runs whose speed others have published, for comparison with predictions: those of ``runs.yaml``.

MaxText has counted FLOPs in three ways; a log with the time of a step shows which one was used:

    6 N + 6 layers heads size length         a token, since July 2025: half of the pairs
    6 N + 12 layers heads size length        before: all pairs; most numbers for v6e
    6 (N + lookup) + 6 layers heads size length    in its first year: the lookup of the embedding too, half of the pairs

where N is the number of parameters that tokens are multiplied with. All runs are compared by the first count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from train.config import Config, parse
from train.config.typed import section
from train.model.build import Setup
from train.model.flops import maxtext_flops


@dataclass(frozen=True)
class Published:
    """One run."""

    name: str
    topology: str
    model: Mapping
    length: int
    rows: int  # of a step, over all chips
    teraflops: float  # per second and chip, as published
    mesh: Mapping
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


RUNS = yaml.safe_load(Path(__file__).with_name("runs.yaml").read_text(encoding="utf-8"))


def _published() -> Iterator[Published]:
    for run in RUNS["published"]:
        flags = " ".join(RUNS["flags"][name] for name in run.get("flags", ()))
        yield section({**run, "model": RUNS["models"][run["model"]], "flags": flags}, Published, "published")


PUBLISHED = tuple(_published())
