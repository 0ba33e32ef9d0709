"""Numbers that describe position schemes, and plots of these numbers.

Before training: how rules decay with distance, how exact their angles are, what weight a scheme gives to each key.
After training, by ``measure``: the rotary anomaly, slack CoCA's absolute share, the entropy of attention.
"""

import importlib

from posjax.diagnostics.anomaly import Anomaly, absolute_share, coca_anomaly, pooled, rotary_anomaly
from posjax.diagnostics.plots import plot_anomaly, plot_decay, plot_entropy, plot_exactness, plot_weights
from posjax.diagnostics.rotation import Exactness, decay_indicator, exactness, incomplete, mean_score, turns
from posjax.diagnostics.weights import Curve, entropy, entropy_curve, receptive_field, weight_curve, weights

__all__ = [
    "Anomaly",
    "Curve",
    "Exactness",
    "Layer",
    "Measurement",
    "absolute_share",
    "capture",
    "coca_anomaly",
    "decay_indicator",
    "entropy",
    "entropy_curve",
    "exactness",
    "incomplete",
    "mean_score",
    "measure",
    "plot_anomaly",
    "plot_decay",
    "plot_entropy",
    "plot_exactness",
    "plot_weights",
    "pooled",
    "receptive_field",
    "rotary_anomaly",
    "turns",
    "weight_curve",
    "weights",
]


def __getattr__(name: str):
    # Functions on Flax modules are imported on first use: the rest needs only jax and numpy.
    if name in ("Layer", "Measurement", "capture", "measure"):
        return getattr(importlib.import_module("posjax.diagnostics.model"), name)
    raise AttributeError(f"module 'posjax.diagnostics' has no attribute {name!r}")
