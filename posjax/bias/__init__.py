"""Additive biases: functions of the two positions, added to the logits after the scale.

A spec (``ALiBi``, ``T5``, ``Kerple``) is a frozen, hashable dataclass of hyper-parameters.
``spec.init(key, num_heads)`` makes its parameters, if it has any; ``spec.bind(params, num_heads=...)`` makes the pytree
that attention takes.
"""

from posjax.bias.alibi import ALiBi, LinearBias, alibi_bias, alibi_slopes
from posjax.bias.base import Bias
from posjax.bias.kerple import Kerple, LogBias, PowerBias
from posjax.bias.t5 import T5, BucketBias, t5_bucket, t5_thresholds

__all__ = [
    "T5",
    "ALiBi",
    "Bias",
    "BucketBias",
    "Kerple",
    "LinearBias",
    "LogBias",
    "PowerBias",
    "alibi_bias",
    "alibi_slopes",
    "t5_bucket",
    "t5_thresholds",
]
