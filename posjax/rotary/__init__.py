"""Rotary position embeddings: frequency rules, exact tables, rotation."""

from posjax._angles import Frequencies
from posjax.rotary.clex import CLEX
from posjax.rotary.context_base import largest_context, smallest_base
from posjax.rotary.coordinates import SpanPositions, grid_coordinates, mrope_positions, patch_centres, tie_positions
from posjax.rotary.dynamic import DynamicLinear, DynamicNTK, DynamicYaRN
from posjax.rotary.feature import Rotary
from posjax.rotary.fourier import FoPE
from posjax.rotary.generators import GeneralRotary, commute, decompose
from posjax.rotary.grids import AXIAL_LAYOUTS, Axial, MRoPE, RoPETie
from posjax.rotary.huggingface import from_hf
from posjax.rotary.imaginary import RoPEPP
from posjax.rotary.longrope import LongRoPE
from posjax.rotary.mixed import MixedRotary
from posjax.rotary.ntk import NTKAware, NTKFixed, NTKMixed, NTKOld
from posjax.rotary.rotation import apply_rotary, permute_projection
from posjax.rotary.rules import FrequencyRule, Plain, Proportional, inverse_frequencies
from posjax.rotary.scalings import Ahead, HoPE, Linear, Llama3, NTKByParts, Resonance, Stretched, YaRN
from posjax.rotary.tables import RotaryTable, rotary_table
from posjax.rotary.values import ValueRotary
from posjax.rotary.xpos import XPos

SCALINGS: dict[str, type[FrequencyRule]] = {
    "default": Plain,
    "proportional": Proportional,
    "hope": HoPE,
    "resonance": Resonance,
    "linear": Linear,
    "ntk": NTKAware,
    "ntk-old": NTKOld,
    "ntk-fixed": NTKFixed,
    "ntk-mixed": NTKMixed,
    "ntk-by-parts": NTKByParts,
    "dynamic-linear": DynamicLinear,
    "dynamic-ntk": DynamicNTK,
    "dynamic-yarn": DynamicYaRN,
    "yarn": YaRN,
    "longrope": LongRoPE,
    "clex": CLEX,
    "llama3": Llama3,
}
"""Frequency rules by the name that configurations use."""

__all__ = [
    "AXIAL_LAYOUTS",
    "CLEX",
    "SCALINGS",
    "Ahead",
    "Axial",
    "DynamicLinear",
    "DynamicNTK",
    "DynamicYaRN",
    "FoPE",
    "Frequencies",
    "FrequencyRule",
    "GeneralRotary",
    "HoPE",
    "Linear",
    "Llama3",
    "LongRoPE",
    "MRoPE",
    "MixedRotary",
    "NTKAware",
    "NTKByParts",
    "NTKFixed",
    "NTKMixed",
    "NTKOld",
    "Plain",
    "Proportional",
    "Resonance",
    "RoPEPP",
    "RoPETie",
    "Rotary",
    "RotaryTable",
    "SpanPositions",
    "Stretched",
    "ValueRotary",
    "XPos",
    "YaRN",
    "apply_rotary",
    "commute",
    "decompose",
    "from_hf",
    "grid_coordinates",
    "inverse_frequencies",
    "largest_context",
    "mrope_positions",
    "patch_centres",
    "permute_projection",
    "rotary_table",
    "smallest_base",
    "tie_positions",
]
