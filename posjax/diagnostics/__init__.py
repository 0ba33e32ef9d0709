"""What a way of telling position does, as numbers, and plots of them.

Before training: how rules decay with distance and how exact their angles are, what weight a scheme gives to which key.
Of a trained model: the rotary anomaly, slack CoCA's absolute share, the entropy of its attention.
"""

from posjax.diagnostics.anomaly import Anomaly, absolute_share, coca_anomaly, pooled, rotary_anomaly
from posjax.diagnostics.plots import plot_anomaly, plot_decay, plot_entropy, plot_exactness, plot_weights
from posjax.diagnostics.rotation import Exactness, decay_indicator, exactness, incomplete, mean_score, turns
from posjax.diagnostics.weights import Curve, entropy, entropy_curve, receptive_field, weight_curve, weights

__all__ = [
    "Anomaly",
    "Curve",
    "Exactness",
    "absolute_share",
    "coca_anomaly",
    "decay_indicator",
    "entropy",
    "entropy_curve",
    "exactness",
    "incomplete",
    "mean_score",
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
