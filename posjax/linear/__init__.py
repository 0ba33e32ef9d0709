"""Linear attention: kernels that are inner products of features, and attention in time linear in the length."""

from posjax.linear.convolution import Recent, empty_recent, short_convolution
from posjax.linear.delta import Memory, empty_memory, gated_delta
from posjax.linear.delta_spec import DeltaState, GatedDelta
from posjax.linear.feature_maps import (
    Cosine,
    Elu,
    Exponential,
    Limit,
    LinearKernel,
    LinearLayer,
    Taylor,
    features,
    limit_features,
    taylor_features,
)
from posjax.linear.forms import LinearState, bidirectional, chunked, empty_state
from posjax.linear.performer import Performer

__all__ = [
    "Cosine",
    "DeltaState",
    "Elu",
    "Exponential",
    "GatedDelta",
    "Limit",
    "LinearKernel",
    "LinearLayer",
    "LinearState",
    "Memory",
    "Performer",
    "Recent",
    "Taylor",
    "bidirectional",
    "chunked",
    "empty_memory",
    "empty_recent",
    "empty_state",
    "features",
    "gated_delta",
    "limit_features",
    "short_convolution",
    "taylor_features",
]
