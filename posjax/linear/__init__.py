"""Linear attention: kernels that are inner products of features, and attention in time linear in the length."""

from posjax.linear.feature_maps import (
    Cosine,
    Elu,
    Exponential,
    Limit,
    LinearKernel,
    Taylor,
    features,
    limit_features,
    taylor_features,
)
from posjax.linear.forms import LinearState, bidirectional, chunked, empty_state
from posjax.linear.performer import Performer

__all__ = [
    "Cosine",
    "Elu",
    "Exponential",
    "Limit",
    "LinearKernel",
    "LinearState",
    "Performer",
    "Taylor",
    "bidirectional",
    "chunked",
    "empty_state",
    "features",
    "limit_features",
    "taylor_features",
]
