"""Rotary position embeddings: frequency rules, exact tables, rotation."""

from posjax.angles import Frequencies
from posjax.rotary.coordinates import SpanPositions, grid_coordinates, mrope_positions, patch_centres, tie_positions
from posjax.rotary.feature import Rotary
from posjax.rotary.generators import GeneralRotary, commute, decompose
from posjax.rotary.grids import AXIAL_LAYOUTS, Axial, MRoPE, RoPETie, SeveralAxes
from posjax.rotary.huggingface import from_hf
from posjax.rotary.mixed import MixedRotary
from posjax.rotary.rotation import apply_rotary, permute_projection
from posjax.rotary.rules import FrequencyRule, Plain, Proportional, frequencies
from posjax.rotary.scalings import DynamicNTK, Linear, Llama3, LongRoPE, NTKAware, NTKByParts, YaRN
from posjax.rotary.tables import RotaryTable, rotary_table
from posjax.rotary.values import ValueRotary
from posjax.rotary.xpos import XPos

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
    "AXIAL_LAYOUTS",
    "SCALINGS",
    "Axial",
    "DynamicNTK",
    "Frequencies",
    "FrequencyRule",
    "GeneralRotary",
    "Linear",
    "Llama3",
    "LongRoPE",
    "MRoPE",
    "MixedRotary",
    "NTKAware",
    "NTKByParts",
    "Plain",
    "Proportional",
    "RoPETie",
    "Rotary",
    "RotaryTable",
    "SeveralAxes",
    "SpanPositions",
    "ValueRotary",
    "XPos",
    "YaRN",
    "apply_rotary",
    "commute",
    "decompose",
    "frequencies",
    "from_hf",
    "grid_coordinates",
    "mrope_positions",
    "patch_centres",
    "permute_projection",
    "rotary_table",
    "tie_positions",
]
