"""A tiny released model with a tokenizer of its own, as a folder."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

import posjax as pj
from posjax import rotary
from posjax.nn import Decoder, DecoderConfig, Norm, save_pretrained

LENGTH, VOCABULARY = 32, 280
GPT2 = {
    "scheme": pj.scheme("learned", max_length=LENGTH),
    "activation": "gelu",
    "mlp_dim": 128,
    "num_kv_heads": 4,
    "norm": Norm("layer", 1e-5, bias=True),
    "biases": ("qkv", "output", "mlp"),
}
"""What makes GPT-2 of the model that `write_released` writes."""


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
    """A random Llama of two layers in ``folder``, with changes of its config; returned as it was written."""
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
    decoder = Decoder(dataclasses.replace(config, **changes), rngs=nnx.Rngs(seed))
    nnx.update(decoder, jax.tree.map(_perturbed, nnx.state(decoder)))
    save_pretrained(decoder, folder)
    write_tokenizer(folder, TEXT, VOCABULARY)
    return decoder


def _perturbed(x: jax.Array) -> jax.Array:
    """Larger matrices, and gains that are not all 1."""
    return x * 3 if x.ndim > 2 else x + 0.1 * jnp.sin(jnp.arange(x.size).reshape(x.shape))


TEXT = "The cat stands on the wall. The river stands on the sand. The old bridge stands on the wall of the river."
