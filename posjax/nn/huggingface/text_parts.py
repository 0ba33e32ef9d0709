"""The text part of releases that also see or hear: its keys in ``config.json``, and its tensors among the others.

The text part is a model of a text family. A declaration says which family that is, what its keys mean when they are
left out, and which tensors belong to the other parts.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posjax._checks import check, check_choice, describe
from posjax.nn.huggingface.family import Values
from posjax.nn.huggingface.files import Entry, TensorFolder

_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""How names of the text part's tensors begin in files, and how they begin in a model of text alone."""
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OUTER = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype")
"""Other keys of the text part that many releases have only outside of ``text_config``."""


@dataclasses.dataclass(frozen=True)
class TextPart:
    """The text part of a family of releases.

    Args:
        model_type: of ``config.json``.
        families: the text families, each by the ``model_type`` in ``text_config``; the first is meant if there is none.
        others: the modules of the other parts, whose tensors are left out.
        defaults: values of transformers for keys that ``text_config`` may leave out, where the text family has others.
        flat: whether older releases have no ``text_config``, but the same keys outside.
    """

    model_type: str
    families: Mapping[str, str]
    others: Sequence[str]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    flat: bool = False

    def values(self, values: Values) -> dict[str, Any]:
        """The text part's ``config.json``, as a model of its family would have it.

        Whether embedding and head are tied is read in ``text_config`` first, where transformers 4 has it, and special
        tokens outside first, where releases list all end tokens.

        Raises ValueError without a ``text_config``, and for one of another family.
        """
        inner = values.get("text_config")
        if not inner and self.flat:
            inner = {key: value for key, value in values.items() if key not in ("vision_config", "model_type")}
        name = "config.json: text_config"
        check(isinstance(inner, Mapping), f"{name} of {self.model_type} must be an object, found {describe(inner)}")
        kind = inner.get("model_type", next(iter(self.families)))
        check_choice(f"{name}.model_type", kind, tuple(self.families))
        outer = {key: values[key] for key in _OUTER if values.get(key) is not None}
        tokens = {key: values[key] for key in _TOKENS if values.get(key) is not None}
        return {**self.defaults, **outer, **inner, **tokens, "model_type": self.families[kind]}

    def has(self, tensor: str) -> bool:
        """Whether a tensor of the files does not belong to another part."""
        return tensor.removeprefix("model.").partition(".")[0] not in self.others


def _qwen(model_type: str, family: str, defaults: Values, flat: bool = False) -> TextPart:
    """Positions of text are the same on all axes of M-RoPE (Qwen2-VL, arXiv 2409.12191), which is then RoPE."""
    return TextPart(model_type, {f"{model_type}_text": family}, ("visual",), defaults, flat)


_QWEN2_VL = {
    "num_key_value_heads": 8,
    "intermediate_size": 29568,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
    "rope_theta": 1e6,
}
_GEMMA4_OTHERS = ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
_UNIFIED_OTHERS = ("vision_embedder", "embed_vision", "embed_audio")
_GEMMA4_SIZES = {"vocab_size": 262_144, "hidden_size": 2304, "num_hidden_layers": 30, "num_attention_heads": 8}
_PARTS = (
    TextPart(
        "gemma3",
        {"gemma3_text": "gemma3_text"},
        ("vision_tower", "multi_modal_projector"),
        # Gemma 3 4B says only width, depth, scaling and window; the other sizes are those of Gemma3TextConfig.
        {"vocab_size": 262_208, "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8},
    ),
    TextPart("gemma4", {"gemma4_text": "gemma4_text"}, _GEMMA4_OTHERS, _GEMMA4_SIZES),
    TextPart("gemma4_unified", {"gemma4_unified_text": "gemma4_unified_text"}, _UNIFIED_OTHERS, _GEMMA4_SIZES),
    TextPart(
        "mistral3",
        {"mistral": "mistral", "ministral3": "ministral3"},
        ("vision_tower", "multi_modal_projector"),
    ),
    _qwen("qwen2_vl", "qwen2", _QWEN2_VL, flat=True),
    _qwen("qwen2_5_vl", "qwen2", _QWEN2_VL, flat=True),
    _qwen("qwen3_vl", "qwen3", {"max_position_embeddings": 128_000, "rope_theta": 5e5}),
)
TEXT_PARTS: dict[str, TextPart] = {part.model_type: part for part in _PARTS}
"""Text parts by the ``model_type`` of ``config.json``."""


def part_of(values: Values) -> TextPart | None:
    """The text part that a ``config.json`` has, or None for a model of text alone."""
    name = values.get("model_type")
    return TEXT_PARTS.get(name) if isinstance(name, str) else None


def text_values(values: Values) -> Values:
    """The ``config.json`` of the text part; that of a model of text alone stays as it is.

    Raises ValueError for a model of more than text whose text part cannot be read.
    """
    part = part_of(values)
    if part is not None:
        return part.values(values)
    check(
        not values.get("text_config"),
        f"config.json: {describe(values.get('model_type'))} reads more than text, and its text part cannot be read; "
        f"those of {', '.join(TEXT_PARTS)} can",
    )
    return values


class TextTensors:
    """The tensors of a text part, with the names of its family.

    Args:
        folder: the text part's tensors, as the files name them.

    Raises:
        ValueError: for a tensor that the files hold under two names.
    """

    def __init__(self, folder: TensorFolder):
        self._folder = folder
        self._names: dict[str, str] = {}
        for name in folder.entries:
            other = self._names.setdefault(_own_name(name), name)
            check(other == name, f"the files hold one tensor as {other!r} and as {name!r}")
        self.entries: Mapping[str, Entry] = {ours: folder.entries[name] for ours, name in self._names.items()}

    def tensor(self, name: str) -> np.ndarray:
        """A tensor, memory-mapped if possible."""
        return self._folder.tensor(self._names[name])


def _own_name(name: str) -> str:
    prefix = next((each for each in _PREFIXES if name.startswith(each)), "")
    return _PREFIXES.get(prefix, "") + name.removeprefix(prefix)
