"""The information of a report besides the numbers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from train.checkpoint.restore import parameters_in_words
from train.config import Config, dump
from train.model.build import model_length
from train.report import About
from train.runtime.machine import own_versions, processor


def about(config: Config, documents: Sequence[np.ndarray], versions: Mapping[str, str]) -> About:
    """Text and model of a run or a comparison in words, its config, the versions."""
    size, data, model = sum(len(document) for document in documents), config.data, config.model
    paths = ", ".join(path for part in data.parts for path in part.paths)
    source = "Python's standard library" if data.source == "stdlib" else paths
    tokens = "as bytes" if data.tokenizer == "bytes" else f"by the tokenizer {Path(data.tokenizer).name}"
    stages = [stage.train for stage in config.every_stage]
    trained = ", then ".join(f"{each.steps:,} steps of {each.batch_tokens:,} tokens" for each in stages)
    trained = f"trained for {trained}" if config.steps else f"as released in {Path(config.init.path).name}"
    which = parameters_in_words(config.stage(config.stage_number(config.scheme.stage)))
    own, longest = model_length(config), config.evaluate.lengths[-1]
    reach = f"beyond the training length of {own} tokens" if longest > own else f"up to {longest} tokens"
    use = "held out" if config.steps else "read"
    return About(
        title=f"{config.name}: perplexity {reach}",
        text=f"Text: {source}, {tokens}; {len(documents):,} documents of {size:,} tokens {use}",
        model=f"Decoder of {model.num_layers} layers of {model.model_dim} with {model.num_heads} heads, {trained}"
        + (f"; {which}" if which else ""),
        config=dump(config),
        versions=versions,
    )


def read_versions(directory: Path) -> dict[str, str]:
    """The versions that a run was trained with, and the processor of this machine, which measures it.

    The versions are those of this machine if nothing was trained.
    """
    location = directory / "versions.json"
    trained = json.loads(location.read_text(encoding="utf-8")) if location.is_file() else own_versions()
    return {**trained, "cpu": processor()}
