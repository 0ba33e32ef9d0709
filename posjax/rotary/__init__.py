"""Rotary position embeddings: frequency rules, exact tables, rotation."""

from posjax.angles import Frequencies
from posjax.rotary.feature import Rotary
from posjax.rotary.rotation import apply_rotary, permute_projection
from posjax.rotary.rules import FrequencyRule, Plain, Proportional, frequencies
from posjax.rotary.scalings import DynamicNTK, Linear, NTKAware
from posjax.rotary.tables import RotaryTable, rotary_table

SCALINGS: dict[str, type[FrequencyRule]] = {
    "default": Plain,
    "proportional": Proportional,
    "linear": Linear,
    "ntk": NTKAware,
    "dynamic-ntk": DynamicNTK,
}
"""Frequency rules by the name that configurations use."""

__all__ = [
    "SCALINGS",
    "DynamicNTK",
    "Frequencies",
    "FrequencyRule",
    "Linear",
    "NTKAware",
    "Plain",
    "Proportional",
    "Rotary",
    "RotaryTable",
    "apply_rotary",
    "frequencies",
    "permute_projection",
    "rotary_table",
]
