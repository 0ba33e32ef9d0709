"""GGUF files of the llama architecture, with the names of Hugging Face; numbers are dequantised to float32."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from posjax._checks import POINTER, check, check_choice, check_no_pointer, describe
from posjax.nn.huggingface.files import Entry
from posjax.nn.huggingface.gguf_tokenizer import tokenizer_files

_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
_ATTENTION = ("head_count", "head_count_kv", "key_length", "value_length", "layer_norm_rms_epsilon")
_SCALINGS = {"linear": "linear", "yarn": "yarn"}
_SCALING_KEYS = ("type", "factor", "original_context_length", "finetuned")
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class GGUF:
    """The tensors and the metadata of a GGUF file.

    Args:
        path: a local file.

    Raises:
        FileNotFoundError: without the file.
        ValueError: for an architecture other than llama, a mixture of experts, frequencies that are not in the
            metadata, or a file that is not a GGUF file.
        ModuleNotFoundError: without the package gguf.
    """

    def __init__(self, path: str | Path):
        check("://" not in str(path), f"{path}: a GGUF file must be local; download it first")
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no {path}")
        self._reader = _reader(path)
        self._fields = self._reader.fields
        architecture = self._get("general.architecture")
        check(
            architecture == "llama",
            f"{path} is a GGUF of the architecture {describe(architecture)}; only llama can be read",
        )
        check(not self._get("llama.expert_count"), f"{path} is a mixture of experts, which Decoder does not have")
        self._tensors = {self._name(tensor.name): tensor for tensor in self._reader.tensors}
        check(
            "rope_freqs.weight" not in self._tensors,
            f"{path} has its own frequencies (rope_freqs.weight), but not their rule; read the model's safetensors",
        )
        self._check_keys()
        check("model.embed_tokens.weight" in self._tensors, f"{path} has no tensor token_embd.weight")
        for key in ("llama.embedding_length", "llama.attention.head_count"):
            check(self._get(key) is not None, f"{path} has no {key}")
        self.entries: Mapping[str, Entry] = {
            name: Entry(str(path), tensor.data_offset, np.dtype(np.float32), tuple(map(int, reversed(tensor.shape))))
            for name, tensor in self._tensors.items()
        }

    def _check_keys(self) -> None:
        """Raises ValueError for metadata that changes the computation in an unsupported way."""
        known = {f"llama.attention.{name}" for name in _ATTENTION}
        scales = ("llama.logit_scale", "llama.embedding_scale", "llama.residual_scale")
        others = [key for key in self._fields if key.startswith(("llama.attention.", *scales)) and key not in known]
        check(not others, f"{others[0] if others else None} changes what the model computes; read its safetensors")

    @property
    def values(self) -> dict[str, Any]:
        """The metadata in the form of a ``config.json``."""
        settings = {theirs: self._get(f"llama.{ours}") for ours, theirs in _KEYS.items()}
        settings = {key: _shortest(value) for key, value in settings.items() if value is not None}
        rotated = self._get("llama.rope.dimension_count")
        size = self._head_dim
        check(
            rotated in (None, size),
            f"llama.rope.dimension_count must be the head's size, {size}, found {describe(rotated)}",
        )
        names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
        ids = {theirs: self._get(f"tokenizer.ggml.{ours}") for ours, theirs in names.items()}
        scaling = self._scaling()
        return {
            "model_type": "llama",
            "vocab_size": self.entries["model.embed_tokens.weight"].shape[0],
            "tie_word_embeddings": "lm_head.weight" not in self.entries,
            "hidden_act": "silu",
            **settings,
            **({"rope_scaling": scaling} if scaling else {}),
            **{key: value for key, value in ids.items() if value is not None},
        }

    def tensor(self, name: str) -> np.ndarray:
        """A tensor in float32, with rows in Hugging Face's order."""
        from gguf.quants import dequantize

        stored = self._tensors[name]
        rows = np.asarray(dequantize(stored.data, stored.tensor_type), np.float32).reshape(self.entries[name].shape)
        heads = {"self_attn.q_proj": "head_count", "self_attn.k_proj": "head_count_kv"}
        count_key = next((key for part, key in heads.items() if f".{part}." in name), None)
        return rows if count_key is None else _halves(rows, self._heads(count_key))

    def tokenizer_files(self) -> dict[str, str]:
        """``tokenizer.json`` and ``tokenizer_config.json`` of the file's own tokenizer; see ``gguf_tokenizer``."""
        return tokenizer_files(self._get)

    def _get(self, key: str) -> Any:
        field = self._fields.get(key)
        return None if field is None else field.contents()

    def _heads(self, key: str) -> int:
        count = self._get(f"llama.attention.{key}")
        return self._get("llama.attention.head_count") if count is None else count

    @property
    def _head_dim(self) -> int:
        size = self._get("llama.attention.key_length")
        return self._get("llama.embedding_length") // self._heads("head_count") if size is None else size

    def _scaling(self) -> dict[str, Any] | None:
        known = [f"llama.rope.scaling.{key}" for key in _SCALING_KEYS]
        others = [key for key in self._fields if key.startswith("llama.rope.scal") and key not in known]
        check(not others, f"{others[0] if others else None} is a part of a rope scaling that is not supported")
        kind = self._get("llama.rope.scaling.type")
        if kind in (None, "none"):
            return None
        check_choice("llama.rope.scaling.type", kind, tuple(_SCALINGS))
        original = self._get("llama.rope.scaling.original_context_length")
        scaling = {"rope_type": _SCALINGS[kind], "factor": self._get("llama.rope.scaling.factor")}
        return scaling | ({"original_max_position_embeddings": original} if original and kind == "yarn" else {})

    @staticmethod
    def _name(name: str) -> str:
        """The Hugging Face name of a tensor; the name unchanged if Hugging Face has none."""
        part, _, kind = name.rpartition(".")
        if part in _OUTER_NAMES:
            return f"{_OUTER_NAMES[part]}.{kind}"
        block, layer, inner = (*part.split("."), "", "")[:3]
        return (
            f"model.layers.{layer}.{_LAYER_NAMES[inner]}.{kind}" if block == "blk" and inner in _LAYER_NAMES else name
        )


def _reader(path: str | Path) -> Any:
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError:
        raise ModuleNotFoundError("a GGUF file needs the package gguf: pip install posjax[hf]") from None
    with open(path, "rb") as file:
        check_no_pointer(file.read(len(POINTER)), path)
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{path} is not a readable GGUF file: {error}") from None


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the channels of every head: llama.cpp has t and t + d/2 side by side, Hugging Face has two halves."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _shortest(value: Any) -> Any:
    """A float32 as the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
