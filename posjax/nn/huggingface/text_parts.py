"""The text part of releases that also see or hear: its keys in ``config.json``, and its tensors among the others.

The text part is a model of a text family. A declaration says which family that is, what its keys mean when they are
left out, and which tensors belong to the other parts.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from posjax._checks import check, check_choice, describe
from posjax.nn.huggingface.family import Values
from posjax.nn.huggingface.files import TensorFolder

_PREFIXES = {
    "model.language_model.": "model.",
    "model.text_model.": "model.",
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
        tied_outside: whether ``tie_word_embeddings`` in ``text_config`` means nothing.
    """

    model_type: str
    families: Mapping[str, str]
    others: Sequence[str]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    flat: bool = False
    tied_outside: bool = False

    def values(self, values: Values) -> dict[str, Any]:
        """The text part's ``config.json``, as a model of its family would have it.

        Embedding and head are tied if ``text_config`` says so, where transformers 4 has it, or the keys outside, where
        transformers 5 has it. Special tokens are read outside first, where releases list all end tokens.

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
        if self.tied_outside or outer.get("tie_word_embeddings") is True:
            inner = {key: value for key, value in inner.items() if key != "tie_word_embeddings"}
        return {**self.defaults, **outer, **inner, **tokens, "model_type": self.families[kind]}

    def has(self, tensor: str) -> bool:
        """Whether a tensor of the files does not belong to another part."""
        return tensor.removeprefix("model.").partition(".")[0] not in self.others


def _mrope(model_type: str, family: str, defaults: Values, **options: bool) -> TextPart:
    """Positions of text are the same on all axes of M-RoPE (Qwen2-VL, arXiv 2409.12191), which is then RoPE."""
    return TextPart(model_type, {f"{model_type}_text": family}, ("visual",), defaults, **options)


_QWEN2_VL = {
    "num_key_value_heads": 8,
    "intermediate_size": 29568,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
    "rope_theta": 1e6,
}
_QWEN3_VL = {"max_position_embeddings": 128_000, "rope_theta": 5e5}
_QWEN3_VL_EXPERTS = {
    "num_key_value_heads": 16,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}


def _same(model_type: str, families: Sequence[str], others: Sequence[str], defaults: Values | None = None) -> TextPart:
    """A part whose ``text_config`` is that of a text family."""
    return TextPart(model_type, {name: name for name in families}, others, defaults or {})


_SIZES = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
"""Sizes of transformers for Llama, Mistral and Qwen 2 and 3, which LLaVA leaves out."""
_PROJECTED = ("vision_tower", "multi_modal_projector")
_GLM4V = {"head_dim": None, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0, "max_position_embeddings": 32_768}
_GLM4V_MOE = {"attention_bias": True, "router_aux_loss_coef": 1e-4, "max_position_embeddings": 65_536}
_GEMMA4_OTHERS = ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
_UNIFIED_OTHERS = ("vision_embedder", "embed_vision", "embed_audio")
_GEMMA4_SIZES = {"vocab_size": 262_144, "hidden_size": 2304, "num_hidden_layers": 30, "num_attention_heads": 8}
_PARTS = (
    _same("deepseek_vl", ("llama",), ("vision_model", "aligner"), _SIZES),
    TextPart("exaone4_5", {"exaone4": "exaone4", "exaone4_5_text": "exaone4"}, ("visual", "mtp")),
    _same(
        "gemma3",
        ("gemma3_text",),
        _PROJECTED,
        # Gemma 3 4B says only width, depth, scaling and window; the other sizes are those of Gemma3TextConfig.
        {"vocab_size": 262_208, "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8},
    ),
    _same("gemma4", ("gemma4_text",), _GEMMA4_OTHERS, _GEMMA4_SIZES),
    _same("gemma4_unified", ("gemma4_unified_text",), _UNIFIED_OTHERS, _GEMMA4_SIZES),
    _mrope("glm4v", "glm4", _GLM4V),
    _mrope("glm4v_moe", "glm4_moe", _GLM4V_MOE),
    _same("idefics3", ("llama",), ("vision_model", "connector"), _SIZES),
    _same("internvl", ("qwen2", "qwen3", "qwen3_moe", "llama"), _PROJECTED),
    _same("llama4", ("llama4_text",), ("vision_model", "multi_modal_projector")),
    _same("llava", ("llama", "mistral", "qwen2", "qwen3"), _PROJECTED, _SIZES),
    _same("llava_next", ("llama", "mistral", "qwen2"), (*_PROJECTED, "image_newline"), _SIZES),
    _same("llava_onevision", ("qwen2",), (*_PROJECTED, "image_newline"), _SIZES),
    _same("mistral3", ("mistral", "ministral3", "mistral4"), _PROJECTED),
    _same("ovis2", ("qwen2",), ("vision_tower", "visual_embeddings_table")),
    _mrope("qwen2_vl", "qwen2", _QWEN2_VL, flat=True),
    _mrope("qwen2_5_vl", "qwen2", _QWEN2_VL, flat=True),
    _mrope("qwen3_vl", "qwen3", _QWEN3_VL),
    _mrope("qwen3_vl_moe", "qwen3_moe", _QWEN3_VL | _QWEN3_VL_EXPERTS, tied_outside=True),
    _mrope("qwen3_5", "qwen3_5_text", {}),
    _mrope("qwen3_5_moe", "qwen3_5_moe_text", {}),
    _same("smolvlm", ("llama",), ("vision_model", "connector"), _SIZES),
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


def rename_text(folder: TensorFolder) -> None:
    """Gives the tensors of a text part the names of its family.

    Raises:
        ValueError: for a tensor that the files hold under two names.
    """
    names: dict[str, str] = {}
    for name in folder.entries:
        other = names.setdefault(_own_name(name), name)
        check(other == name, f"the files hold one tensor as {other!r} and as {name!r}")
    folder.entries = {ours: folder.entries[name] for ours, name in names.items()}


def _own_name(name: str) -> str:
    prefix = next((each for each in _PREFIXES if name.startswith(each)), "")
    return _PREFIXES.get(prefix, "") + name.removeprefix(prefix)
