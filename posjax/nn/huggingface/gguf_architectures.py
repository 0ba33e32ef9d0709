"""The architectures of GGUF files: what llama.cpp calls the tensors and options of a family."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from posjax._checks import check
from posjax.nn.huggingface.family import FULL, SLIDING

Get = Callable[[str], Any]
"""The value of a key of a file's metadata, without the architecture before it; None if the file lacks the key."""


def _nothing(get: Get, head_dim: int) -> dict[str, Any]:
    """No values: those of architectures whose metadata say all by their keys."""
    return {}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A family of released models as llama.cpp stores it.

    Args:
        model_type: of ``config.json``.
        activation: the key and the value of ``config.json``, which the file does not say.
        layer: the names of the tensors of a layer, beside those that all architectures have in common.
        keys: keys of the metadata that are keys of ``config.json``, beside those in common.
        read: computes other values of ``config.json`` from the metadata and the number of channels of a head.
        understood: keys beside those that `read` uses, or that change nothing.
        paired: whether the rows of queries and keys are in llama.cpp's order: both channels of a plane side by side.
        norm_offset: what the file adds to the gains of norms.
    """

    model_type: str
    activation: tuple[str, str] = ("hidden_act", "silu")
    layer: Mapping[str, str] = dataclasses.field(default_factory=lambda: _MLP_NORM)
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    read: Callable[[Get, int], dict[str, Any]] = _nothing
    understood: tuple[str, ...] = ("attention.value_length",)
    paired: bool = False
    norm_offset: float = 0.0

    @property
    def all_keys(self) -> dict[str, str]:
        """All keys of the metadata that are keys of ``config.json``."""
        return _KEYS | dict(self.keys)

    def name(self, name: str) -> str:
        """The Hugging Face name of a tensor; the name unchanged if Hugging Face has none."""
        part, _, kind = name.rpartition(".")
        if part in _OUTER:
            return f"{_OUTER[part]}.{kind}"
        block, number, inner = (*part.split("."), "", "")[:3]
        layer = _LAYER | dict(self.layer)
        return f"model.layers.{number}.{layer[inner]}.{kind}" if block == "blk" and inner in layer else name


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
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MLP_NORM = {"ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_GEMMA3_PERIOD = 6  # a full layer after every five with windows, in files that do not say
_GEMMA3_LOCAL_BASE = 10_000.0  # of the layers with windows, in files that do not say
_GEMMA3_27B_LAYERS = 62  # the release whose queries are scaled by another width than the head's


def _gemma3(get: Get, head_dim: int) -> dict[str, Any]:
    """What llama.cpp knows of Gemma 3 without being told: the layers with windows, their base, the scale of queries."""
    layers = get("block_count") or 0
    width = get("embedding_length") // get("attention.head_count") if layers == _GEMMA3_27B_LAYERS else head_dim
    base = get("rope.freq_base_swa") or _GEMMA3_LOCAL_BASE
    values = {"rope_local_base_freq": base, "query_pre_attn_scalar": float(width)}
    pattern = get("attention.sliding_window_pattern")
    if not get("attention.sliding_window"):
        return values | {"layer_types": [FULL] * layers}
    if isinstance(pattern, list):
        return values | {"layer_types": [SLIDING if local else FULL for local in pattern]}
    return values | {"sliding_window_pattern": _GEMMA3_PERIOD if pattern is None else int(pattern)}


ARCHITECTURES = {
    "llama": Architecture("llama", paired=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", layer=_HEAD_NORMS | _MLP_NORM),
    "gemma3": Architecture(
        "gemma3_text",
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        layer=_HEAD_NORMS | _SANDWICH,
        keys={
            "attention.sliding_window": "sliding_window",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        read=_gemma3,
        understood=("attention.value_length", "attention.sliding_window_pattern"),
        norm_offset=1.0,
    ),
}
"""The architectures that can be read, by llama.cpp's names."""


def architecture_of(name: Any, path: Any) -> Architecture:
    """The architecture of a file. Raises ValueError for one that cannot be read, with those that can."""
    readable = ", ".join(ARCHITECTURES)
    check(name in ARCHITECTURES, f"{path} is a GGUF of the architecture {name!r}; those that can be read: {readable}")
    return ARCHITECTURES[name]
