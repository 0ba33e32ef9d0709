"""Writes a tiny released model and its tokenizer into a folder."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import posjax as pj
from posjax import rotary
from posjax.nn import Decoder, DecoderConfig, Norm, save_pretrained
from train.config import Config, parse

LENGTH, VOCABULARY = 32, 280
GPT2 = {
    "scheme": pj.scheme("learned", max_length=LENGTH),
    "activation": "gelu",
    "mlp_dim": 128,
    "num_kv_heads": 4,
    "norm": Norm("layer", 1e-5, bias=True),
    "biases": ("qkv", "output", "mlp"),
}
"""Changes that make the model of `write_released` a GPT-2."""


def write_tokenizer(folder: Path, text: str, size: int) -> None:
    """A byte-level BPE tokenizer with two special tokens, and no mask token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def write_released(folder: Path, seed: int = 0, **changes) -> Decoder:
    """Writes a random Llama of two layers, with ``changes`` of its config, into ``folder`` and returns it."""
    scheme = pj.Scheme(features=rotary.Rotary(rotary.Plain(500.0)))
    config = DecoderConfig(
        vocab_size=VOCABULARY,
        num_layers=2,
        model_dim=32,
        num_heads=4,
        num_kv_heads=2,
        mlp_dim=48,
        norm=Norm(eps=1e-5),
        embedding_scale=1.0,
        trained_length=LENGTH,
        scheme=scheme,
    )
    config = dataclasses.replace(config, **changes)
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    random = np.random.default_rng(seed)
    decoder = nnx.merge(graph, jax.tree_util.tree_map_with_path(partial(_drawn, random), state))
    save_pretrained(decoder, folder)
    write_tokenizer(folder, TEXT, VOCABULARY)
    return decoder


def few_steps(released: Path, folder: Path) -> dict[str, Any]:
    """Config values for a few training steps from a released model. Writes the text for them into ``folder``."""
    for n in range(6):
        (folder / f"{n}.txt").write_text(f"{TEXT} " * 6)
    return {
        "name": "run",
        "init": str(released),
        "output": str(folder / "runs"),
        "data": {"source": "files", "paths": [f"{folder}/*.txt"], "held_out": 0.2},
        "train": {
            "mesh": {"data": 1},
            "length": 16,
            "batch_tokens": 64,
            "steps": 4,
            "warmup_steps": 1,
            "log_every": 1,
            "checkpoint_every": 2,
        },
        "monitor": {"tensorboard": False, "compilation_cache": ""},
        "evaluate": {"lengths": [16, 32, 64], "tokens": 128, "batch_tokens": 128},
    }


def with_changes(values: dict[str, Any], **sections: Any) -> Config:
    """The config of ``values``; a dict in ``sections`` updates that section, any other value replaces it."""
    changed = {
        key: {**values.get(key, {}), **change} if isinstance(change, dict) else change
        for key, change in sections.items()
    }
    return parse({**values, **changed})


def _drawn(random: np.random.Generator, path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Random numbers: large for matrices of layers, smaller for biases and embeddings; gains are around 1."""
    numbers = random.normal(0, 0.4 if leaf.ndim > 2 else 0.1, leaf.shape) + ("gain" in jax.tree_util.keystr(path))
    return jax.device_put(numbers.astype(leaf.dtype))


TEXT = "The cat stands on the wall. The river stands on the sand. The old bridge stands on the wall of the river."
