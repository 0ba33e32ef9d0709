"""Additive biases: functions of the two positions, added to the logits after the scale.

A spec (``ALiBi``, ``T5``, ``Kerple``, ...) is a frozen, hashable dataclass of hyper-parameters.
``spec.init(key, num_heads)`` makes its parameters, if it has any; ``spec.bind(params, num_heads=...)`` makes the pytree
that attention takes. A few also multiply the scores (``ScaleInvariant``), read the tokens (``FoX``) or the scores
(``CoPE``); ``BiasSpec`` has the properties of every spec.
"""

from posjax.bias.alibi import ALiBi, LinearBias, alibi_bias, alibi_slopes
from posjax.bias.array import ArrayBias, array_bias
from posjax.bias.base import Bias, BiasSpec, Contextual, distance
from posjax.bias.cope import ContextualBias, CoPE
from posjax.bias.fire import FIRE, InterpolatedBias
from posjax.bias.fox import ForgetBias, FoX, accumulate
from posjax.bias.kerple import Kerple, LogBias, PowerBias, WeightedPowerBias
from posjax.bias.path import PaTH, PathBias
from posjax.bias.relative import Relative, RelativeBias, Shaw
from posjax.bias.sandwich import Sandwich, SinusoidBias
from posjax.bias.scale_invariant import ScaleInvariant, ScaleInvariantBias
from posjax.bias.t5 import T5, BucketBias, t5_bucket, t5_thresholds

__all__ = [
    "FIRE",
    "T5",
    "ALiBi",
    "ArrayBias",
    "Bias",
    "BiasSpec",
    "BucketBias",
    "CoPE",
    "Contextual",
    "ContextualBias",
    "FoX",
    "ForgetBias",
    "InterpolatedBias",
    "Kerple",
    "LinearBias",
    "LogBias",
    "PaTH",
    "PathBias",
    "PowerBias",
    "Relative",
    "RelativeBias",
    "Sandwich",
    "ScaleInvariant",
    "ScaleInvariantBias",
    "Shaw",
    "SinusoidBias",
    "WeightedPowerBias",
    "accumulate",
    "alibi_bias",
    "alibi_slopes",
    "array_bias",
    "distance",
    "t5_bucket",
    "t5_thresholds",
]
