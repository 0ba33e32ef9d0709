"""GGUF files with the names of Hugging Face; numbers are dequantised to float32."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from posjax._checks import check, check_choice, check_count, describe
from posjax.nn.huggingface.files import Entry
from posjax.nn.huggingface.gguf_architectures import architecture_of
from posjax.nn.huggingface.gguf_file import read_header, read_tensor
from posjax.nn.huggingface.gguf_frequencies import scaling_of_divisors
from posjax.nn.huggingface.gguf_tokenizer import tokenizer_files

_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
_SCALINGS = {"linear": "linear", "yarn": "yarn"}
_DIVISORS = "rope_freqs.weight"
_SCALING_KEYS = ("type", "factor", "original_context_length", "finetuned")


class GGUF:
    """The tensors and the metadata of a GGUF file.

    Args:
        path: a local file.

    Raises:
        FileNotFoundError: without the file.
        ValueError: for an architecture that is not in ``gguf_architectures``, a mixture of experts, options that
            change what the model computes in a way that cannot be read, or a file that is not a GGUF file.
        ModuleNotFoundError: without the package gguf.
    """

    def __init__(self, path: str | Path):
        check("://" not in str(path), f"{path}: a GGUF file must be local; download it first")
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no {path}")
        _check_package()
        self._path = path
        self._metadata, tensors = read_header(path)
        self._name = self._get("general.architecture")
        self._architecture = architecture_of(self._name, path)
        folder = "experts are read only from a folder in the layout of Hugging Face"
        check(not self._own("expert_count"), f"{path} is a mixture of experts; {folder}")
        self._tensors = {self._architecture.name(name): tensor for name, tensor in tensors.items()}
        self._divisors = self._tensors.pop(_DIVISORS, None)
        parts = self._get("split.count") or 1
        check(parts == 1, f"{path} is one of {parts} parts of a model; merge them by llama-gguf-split --merge")
        self._check_keys()
        check("model.embed_tokens.weight" in self._tensors, f"{path} has no tensor token_embd.weight")
        for key in ("embedding_length", "attention.head_count"):
            found = self._own(key)
            check(found is not None, f"{path} has no {self._name}.{key}")
            check_count(f"{path}: {self._name}.{key}", found)
        self.entries: Mapping[str, Entry] = {
            name: Entry(str(path), tensor.offset, np.dtype(np.float32), tensor.shape)
            for name, tensor in self._tensors.items()
        }

    def _check_keys(self) -> None:
        """Raises ValueError for metadata that changes the computation in an unsupported way."""
        known = {f"{self._name}.{key}" for key in (*self._architecture.all_keys, *self._architecture.understood)}
        parts = ("attention.", "logit_scale", "embedding_scale", "residual_scale", "final_logit_softcapping")
        changing = tuple(f"{self._name}.{part}" for part in parts)
        others = [key for key in self._metadata if key.startswith(changing) and key not in known]
        check(not others, f"{others[0] if others else None} changes what the model computes; read its safetensors")

    @property
    def values(self) -> dict[str, Any]:
        """The metadata in the form of a ``config.json``."""
        architecture = self._architecture
        settings = {theirs: self._own(ours) for ours, theirs in architecture.all_keys.items()}
        settings = {key: _shortest(value) for key, value in settings.items() if value is not None}
        rotated = self._own("rope.dimension_count")
        size = self._head_dim
        check(
            rotated in (None, size),
            f"{self._name}.rope.dimension_count must be the head's size, {size}, found {describe(rotated)}",
        )
        ids = {theirs: self._get(f"tokenizer.ggml.{ours}_token_id") for ours, theirs in _TOKENS.items()}
        turn = self._get("tokenizer.ggml.eot_token_id")
        if turn not in (None, ids["eos_token_id"]):
            ids["eos_token_id"] = [end for end in (ids["eos_token_id"], turn) if end is not None]
        scaling = self._scaling()
        return {
            "model_type": architecture.model_type,
            "vocab_size": self.entries["model.embed_tokens.weight"].shape[0],
            "tie_word_embeddings": "lm_head.weight" not in self.entries,
            **dict([architecture.activation]),
            **settings,
            "head_dim": size,
            **architecture.read(self._own, size),
            **({"rope_scaling": scaling} if scaling else {}),
            **{key: value for key, value in ids.items() if value is not None},
        }

    def tensor(self, name: str) -> np.ndarray:
        """A tensor in float32, with the rows and the gains of Hugging Face."""
        rows = read_tensor(self._path, self._tensors[name])
        if name.endswith("norm.weight"):
            return rows - np.float32(self._architecture.norm_offset)
        heads = {"self_attn.q_proj": "head_count", "self_attn.k_proj": "head_count_kv"}
        count_key = next((key for part, key in heads.items() if f".{part}." in name), None)
        reordered = self._architecture.paired and count_key is not None
        return _halves(rows, self._heads(count_key)) if reordered else rows

    def tokenizer_files(self) -> dict[str, str]:
        """``tokenizer.json`` and ``tokenizer_config.json`` of the file's own tokenizer; see ``gguf_tokenizer``."""
        return tokenizer_files(self._get)

    def _get(self, key: str) -> Any:
        return self._metadata.get(key)

    def _own(self, key: str) -> Any:
        """The value of a key of the architecture."""
        return self._get(f"{self._name}.{key}")

    def _heads(self, key: str) -> int:
        count = self._own(f"attention.{key}")
        return self._own("attention.head_count") if count is None else count

    @property
    def _head_dim(self) -> int:
        size = self._own("attention.key_length")
        return self._own("embedding_length") // self._heads("head_count") if size is None else size

    def _scaling(self) -> dict[str, Any] | None:
        known = [f"{self._name}.rope.scaling.{key}" for key in _SCALING_KEYS]
        others = [key for key in self._metadata if key.startswith(f"{self._name}.rope.scal") and key not in known]
        check(not others, f"{others[0] if others else None} is a part of a rope scaling that is not supported")
        kind = self._own("rope.scaling.type")
        if kind in (None, "none"):
            return None if self._divisors is None else self._scaling_by_tensor()
        check(self._divisors is None, f"{self._name}.rope.scaling.type {kind!r} beside the tensor {_DIVISORS}")
        check_choice(f"{self._name}.rope.scaling.type", kind, tuple(_SCALINGS))
        original = self._own("rope.scaling.original_context_length")
        scaling = {"rope_type": _SCALINGS[kind], "factor": self._own("rope.scaling.factor")}
        return scaling | ({"original_max_position_embeddings": original} if original and kind == "yarn" else {})

    def _scaling_by_tensor(self) -> dict[str, Any] | None:
        """The scaling of a file that stores what each frequency is divided by, as those of Llama 3.1 and later do."""
        keys = ("rope.freq_base", "rope.scaling.original_context_length", "context_length")
        base, original, length = map(self._own, keys)
        check(None not in (base, length), f"{_DIVISORS} needs {self._name}.rope.freq_base and context_length")
        divisors = read_tensor(self._path, self._divisors).astype(np.float64)
        return scaling_of_divisors(divisors, base, self._head_dim, original, length)


def _check_package() -> None:
    try:
        import gguf  # noqa: F401
    except ModuleNotFoundError:
        raise ModuleNotFoundError('a GGUF file needs the package gguf: pip install -e ".[hf]"') from None


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the channels of every head: llama.cpp has t and t + d/2 side by side, Hugging Face has two halves."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _shortest(value: Any) -> Any:
    """A float32 as the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
