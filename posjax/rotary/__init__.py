"""Rotary position embeddings: frequency rules, exact tables, rotation."""

from posjax.angles import Frequencies
from posjax.rotary.feature import Rotary
from posjax.rotary.huggingface import from_hf
from posjax.rotary.rotation import apply_rotary, permute_projection
from posjax.rotary.rules import FrequencyRule, Plain, Proportional, frequencies
from posjax.rotary.scalings import DynamicNTK, Linear, Llama3, LongRoPE, NTKAware, NTKByParts, YaRN
from posjax.rotary.tables import RotaryTable, rotary_table

SCALINGS: dict[str, type[FrequencyRule]] = {
    "default": Plain,
    "proportional": Proportional,
    "linear": Linear,
    "ntk": NTKAware,
    "ntk-by-parts": NTKByParts,
    "dynamic-ntk": DynamicNTK,
    "yarn": YaRN,
    "longrope": LongRoPE,
    "llama3": Llama3,
}
"""Frequency rules by the name that configurations use."""

__all__ = [
    "SCALINGS",
    "DynamicNTK",
    "Frequencies",
    "FrequencyRule",
    "Linear",
    "Llama3",
    "LongRoPE",
    "NTKAware",
    "NTKByParts",
    "Plain",
    "Proportional",
    "Rotary",
    "RotaryTable",
    "YaRN",
    "apply_rotary",
    "frequencies",
    "from_hf",
    "permute_projection",
    "rotary_table",
]
